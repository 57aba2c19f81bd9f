// The steps of a tile whose sums leave few registers: of more than 112 tokens.
#pragma once
#include "prefill_codes.cuh"
#include "wgmma.cuh"

// What a lane needs for 32 columns: a quarter of a step. Up to 128 tokens one is dequantized beside the products of the
// one before it; of more, while the other warpgroup's products run.
struct QuarterCodes {
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;
  u32 words[2][2 * kWords];  // [piece]
  Scales scales[2][kGroups];

  template <int kQuarter, int kMost>
  DEVICE void read(const CodeReader& reader, const Ring<kMost>& ring) {
    u32 from = ring.codes_address() + reader.codes;
    load_words_at<kQuarter * 4 * kPieceBytes>(from, words[0]);
    load_words_at<(kQuarter * 4 + 1) * kPieceBytes>(from, words[1]);
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : 2 * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % 2, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / 2;
      scales[i][n / 2] = reader.load(ring, group, i * 16);
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
  static constexpr int kBuffers = kTokens > kTileTokens ? 1 : 2;
  SumsOf<kTokens>& sums;
  CodeReader reader;
  QuarterCodes codes;
  u32 weights[kBuffers][4][4];

  DEVICE LargeTile(SumsOf<kTokens>& sums, bool one_group) : sums(sums), reader(one_group, kTileRows) {}

  template <int kQuarter>
  DEVICE void multiply(u32 tokens) {
    constexpr u32 kPlace = kQuarter / 2 * (Ring<kMost>::kTokenHalf / 16) + kQuarter % 2 * 4;
    u64 descriptor = kDescriptorHigh << 32 | (tokens + kPlace);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; n++) wgmma<kTokens>(sums[n % 2], weights[kQuarter % kBuffers][n], descriptor + n / 2 * 2);
    wgmma_commit();
  }

  // Products of one quarter, and meanwhile the next one's codes.
  template <int kQuarter>
  DEVICE void run_quarter(u32 tokens, const Ring<kMost>& ring) {
    multiply<kQuarter>(tokens);
    codes.template read<kQuarter + 1>(reader, ring);
    wgmma_wait<kBuffers - 1>();
    codes.dequantize(weights[(kQuarter + 1) % kBuffers]);
  }
};

template <int kMost, int kTokens>
DEVICE void multiply_large_steps(SumsOf<kMost>& result, int steps, bool one_group, bool gathered, Ring<kMost>& ring) {
  constexpr bool kTwo = LargeTile<kMost, kTokens>::kBuffers == 2;
  bool leader = threadIdx.x % 32 == 0;
  SumsOf<kTokens> sums;
  LargeTile<kMost, kTokens> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.codes.template read<0>(tile.reader, ring);
  tile.codes.dequantize(tile.weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kMost> / 16);
    tile.template run_quarter<0>(operand, ring);
    tile.template run_quarter<1>(operand, ring);
    tile.template run_quarter<2>(operand, ring);
    tile.template multiply<3>(operand);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      tile.codes.template read<0>(tile.reader, ring);
    }
    if (kTwo && more) {
      wgmma_wait<1>();
      tile.codes.dequantize(tile.weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
    if (!kTwo) tile.codes.dequantize(tile.weights[0]);
  }
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    int half = i / (kMost / 2), j = i % (kMost / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}
