// The steps of a tile: codes are dequantized into registers, multiplied with the tokens and added up.
#pragma once
#include "prefill_dequant.cuh"
#include "prefill_stage.cuh"
#include "wgmma.cuh"

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens>
using Sums = float[2][kTokens / 2];

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

// All steps of a segment, half a step's columns at a time. While they are multiplied, the next codes are read and the
// next tokens waited for; the two warpgroups have the tensor cores in turn, as they come. Few instructions beside
// dequantization matter: they take issue slots that the products leave little of.
template <int kTokens>
DEVICE void multiply_steps(Sums<kTokens>& sums, int steps, bool one_group, bool gathered, Ring& ring, Ring& tokens) {
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group);
  Codes codes;
  u32 operand;
  auto begin_step = [&] {
    ring.wait_full();
    reader.read<0>(codes, ring.data());
    tokens.wait_full();
    if (gathered) fence_proxy_async();  // they were written by ordinary copies and are read by the tensor cores
    operand = __shfl_sync(~0u, shared_address(tokens.data()), 0);  // the compiler sees that it is the same for all
  };
  auto multiply = [&](u32 from) {
    Weights weights;
    dequantize_codes(codes, weights);
    u64 descriptor = wgmma_descriptor(from);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 8; n++) wgmma<kTokens>(sums[n % 2], weights[n], descriptor + n / 2 * 2);
    wgmma_commit();
  };
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  begin_step();
  for (int step = 0; step < steps; step++) {
    multiply(operand);
    reader.read<1>(codes, ring.data());
    wgmma_wait<0>();
    multiply(operand + kTokenHalf);
    __syncwarp();
    if (leader) barrier_arrive(ring.empty());
    ring.advance();
    int done = tokens.stage;
    tokens.advance();
    if (step + 1 < steps) begin_step();
    wgmma_wait<0>();
    if (leader) barrier_arrive(&tokens.barriers->empty[done]);
  }
}
