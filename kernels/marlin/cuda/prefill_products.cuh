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
  DEVICE void read(Codes& to, const u8* stage, int half) const {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      int i = n % 2, block = n / 2;
      load_words(to.words[i][block], stage + codes + half * 8 * kPieceBytes + (block * 4 + i) * kPieceBytes);
    }
    if (SCALES_PER_STEP == 1 && half) return;
#pragma unroll
    for (int n = 0; n < 2 * kScalesPerHalf; n++) {
      int i = n % 2, group = one_group ? 0 : half * SCALES_PER_STEP / 2 + n / 2;
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

// All steps of a segment, 64 columns at a time. While they are multiplied, the next codes are read and the next tokens
// waited for; the two warpgroups have the tensor cores in turn, as they come.
template <int kTokens>
DEVICE void multiply_halves(Sums<kTokens>& sums, int halves, bool one_group, bool gathered, Ring& ring,
                            Ring& tokens) {
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group);
  Codes codes;
  Weights weights;
  auto prepare = [&](int half) {
    if (half % 2 == 0) ring.wait_full();
    reader.read(codes, ring.data(), half % 2);
    if (half % 2 || half + 1 == halves) {
      __syncwarp();
      if (leader) barrier_arrive(ring.empty());
      ring.advance();
    }
    tokens.wait_full();
    if (gathered) fence_proxy_async();  // they were written by ordinary copies and are read by the tensor cores
  };
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  prepare(0);
  for (int half = 0; half < halves; half++) {
    u64 operand = wgmma_descriptor(shared_address(tokens.data()));
    dequantize_codes(codes, weights);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 8; n++) wgmma<kTokens>(sums[n % 2], weights[n], operand + n / 2 * 2);
    wgmma_commit();
    u64* done = tokens.empty();
    tokens.advance();
    if (half + 1 < halves) prepare(half + 1);
    wgmma_wait<0>();
    if (leader) barrier_arrive(done);
  }
}
