// The steps of a tile: codes are dequantized into registers, multiplied with the tokens and added up.
#pragma once
#include "prefill_dequant.cuh"
#include "prefill_stage.cuh"
#include "wgmma.cuh"

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens]. While they are made they
// take the registers of their own tokens only.
template <int kTokens>
using SumsOf = float[2][kTokens / 2];
typedef SumsOf<kTileTokens> Sums;

// What a lane needs for 64 columns of its warp's rows: two pieces of 16 rows, one for each half of the warpgroup's
// rows, so that a warp's outputs are neighbours.
constexpr int kScalesPerHalf = SCALES_PER_STEP <= 2 ? 1 : SCALES_PER_STEP / 2;
struct Codes {
  u32 words[2][2][2 * kWords];  // [piece][32 columns]
  Scales scales[2][kScalesPerHalf];
};

struct CodeReader {
  u32 codes, scales;  // where in a stage the lane's are
  bool one_group;
  DEVICE explicit CodeReader(bool one_group) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int warp = thread / 32, lane = thread % 32;
    codes = warp / 2 * kStripBytes + warp % 2 * 2 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = kCodeBytes + (warp * 32 + lane / 4 * 2) * kScaleBytes;
  }

  // `half`: which 64 of the stage's 128 columns.
  template <int kHalf>
  DEVICE void read(Codes& to, const u8* stage) const {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      int i = n % 2, block = n / 2;
      load_words(to.words[i][block], stage + codes + kHalf * 8 * kPieceBytes + (block * 4 + i) * kPieceBytes);
    }
    constexpr int kScales = SCALES_PER_STEP == 1 && kHalf ? 0 : 2 * kScalesPerHalf;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % 2, group = one_group ? 0 : kHalf * SCALES_PER_STEP / 2 + n / 2;
      const u8* row = stage + scales + group * kScaleRow + i * 16 * kScaleBytes;
      to.scales[i][n / 2] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
    }
  }
};

typedef u32 Weights[8][4];  // operands of 16 columns, for either half of the rows: [columns][half][four pairs]

DEVICE void dequantize_codes(const Codes& codes, Weights& weights) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    int i = n % 2, k = n / 2;
    dequantize_folded(&codes.words[i][k / 2][k % 2 * kWords], codes.scales[i][k * kScalesPerHalf / 4], weights[n]);
  }
}

template <int kTokens>
DEVICE void multiply_half(SumsOf<kTokens>& sums, const Weights& weights, u32 tokens) {
  u64 descriptor = kDescriptorHigh << 32 | tokens;
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < 8; n++) wgmma<kTokens>(sums[n % 2], weights[n], descriptor + n / 2 * 2);
  wgmma_commit();
}

// All steps of a segment, half a step's columns at a time. While they are multiplied, the next codes are read and,
// where there are registers for it, dequantized; the two warpgroups have the tensor cores in turn, as they come. An
// instruction beside the products costs about 1.7 cycles. Unused sums become zero, or the compiler keeps too many
// registers.
template <int kTokens>
DEVICE void multiply_steps(Sums& result, int steps, bool one_group, bool gathered, Ring& ring) {
  constexpr bool kAhead = kTokens < kTileTokens;
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group);
  Codes codes;
  SumsOf<kTokens> sums;
  Weights weights[kAhead ? 2 : 1];
  // The compiler sees that it is the same for all lanes.
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  reader.read<0>(codes, ring.codes());
  dequantize_codes(codes, weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // tokens were written by ordinary copies and are read by the tensor cores
    u32 operand = first + ring.stage * (kTokenStage / 16);
    multiply_half<kTokens>(sums, weights[0], operand);
    reader.read<1>(codes, ring.codes());
    if (kAhead) dequantize_codes(codes, weights[kAhead]);
    wgmma_wait<0>();
    if (!kAhead) dequantize_codes(codes, weights[0]);
    multiply_half<kTokens>(sums, weights[kAhead], operand + kTokenHalf / 16);
    u64* empty = ring.empty();
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      reader.read<0>(codes, ring.codes());
      if (kAhead) dequantize_codes(codes, weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) barrier_arrive(empty);
    if (!more) break;
    if (!kAhead) dequantize_codes(codes, weights[0]);
  }
#pragma unroll
  for (int i = 0; i < kTileTokens; i++) {
    int half = i / (kTileTokens / 2), j = i % (kTileTokens / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

DEVICE void multiply_segment(Sums& sums, const Segment& g, bool one_group, bool gathered, Ring& ring) {
  switch (tile_tokens(g.tokens)) {
    case 32: return multiply_steps<32>(sums, g.to - g.from, one_group, gathered, ring);
    case 64: return multiply_steps<64>(sums, g.to - g.from, one_group, gathered, ring);
    case 96: return multiply_steps<96>(sums, g.to - g.from, one_group, gathered, ring);
    default: return multiply_steps<128>(sums, g.to - g.from, one_group, gathered, ring);
  }
}
