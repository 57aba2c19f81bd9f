// The steps of a large tile, whose sums leave few registers.
#pragma once
#include "prefill_codes.cuh"
#include "wgmma.cuh"

// What a lane needs for 32 columns. Large tiles leave few registers: their steps are made a quarter at a time, which is
// dequantized while the other warpgroup's products run.
struct QuarterCodes {
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;
  u32 words[2][2 * kWords];  // [piece]
  Scales scales[2][kGroups];

  template <int kQuarter>
  DEVICE void read(const CodeReader& reader, const u8* stage) {
#pragma unroll
    for (int i = 0; i < 2; i++) load_words(words[i], stage + reader.codes + (kQuarter * 4 + i) * kPieceBytes);
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : 2 * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % 2, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / 2;
      const u8* row = stage + reader.scales + group * kScaleRow + i * 16 * kScaleBytes;
      scales[i][n / 2] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
    }
  }

  DEVICE void dequantize(u32 (&weights)[4][4]) const {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      int i = n % 2, k = n / 2;
      dequantize_folded(&words[i][k * kWords], scales[i][k * kGroups / 2], weights[n]);
    }
  }
};

template <int kMost, int kTokens>
struct LargeTile {
  SumsOf<kTokens>& sums;
  CodeReader reader;
  QuarterCodes codes;
  u32 weights[4][4];

  DEVICE LargeTile(SumsOf<kTokens>& sums, bool one_group) : sums(sums), reader(one_group, 2) {}

  template <int kQuarter>
  DEVICE void multiply(u32 tokens) {
    constexpr u32 kPlace = kQuarter / 2 * (Ring<kMost>::kTokenHalf / 16) + kQuarter % 2 * 4;
    u64 descriptor = kDescriptorHigh << 32 | (tokens + kPlace);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; n++) wgmma<kTokens>(sums[n % 2], weights[n], descriptor + n / 2 * 2);
    wgmma_commit();
  }

  // Products of one quarter, and meanwhile the next one's codes.
  template <int kQuarter>
  DEVICE void run_quarter(u32 tokens, const u8* stage) {
    multiply<kQuarter>(tokens);
    codes.template read<kQuarter + 1>(reader, stage);
    wgmma_wait<0>();
    codes.dequantize(weights);
  }
};

template <int kMost, int kTokens>
DEVICE void multiply_large_steps(SumsOf<kMost>& result, int steps, bool one_group, bool gathered, Ring<kMost>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  SumsOf<kTokens> sums;
  LargeTile<kMost, kTokens> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.codes.template read<0>(tile.reader, ring.codes());
  tile.codes.dequantize(tile.weights);
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kMost> / 16);
    tile.template run_quarter<0>(operand, ring.codes());
    tile.template run_quarter<1>(operand, ring.codes());
    tile.template run_quarter<2>(operand, ring.codes());
    tile.template multiply<3>(operand);
    u64* empty = ring.empty();
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      tile.codes.template read<0>(tile.reader, ring.codes());
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) barrier_arrive(empty);
    if (!more) break;
    tile.codes.dequantize(tile.weights);
  }
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    int half = i / (kMost / 2), j = i % (kMost / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}
