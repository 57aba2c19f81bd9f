// Tall tiles: 384 or 512 weight rows x up to 64 tokens. What a step takes beside its products, and what follows a tile,
// serve more weights.
#pragma once
#include "prefill_finish.cuh"

// Sums of a lane: those of the tile's first 256 rows, then of the others.
using TallSums = float[4][kSmallTokens / 2];

// 16 or 32 columns at a time; while they are multiplied, the next ones are dequantized.
template <int kTokens, int kPieces>
struct TallTile {
  static constexpr int kDepth = kPieces == 3 ? 2 : 1;           // times 16 columns, as registers allow
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;  // of 32 columns
  float (&sums)[kPieces][kTokens / 2];
  CodeReader reader, third;  // the latter of 384 rows' last 128
  u32 words[kPieces][2 * kWords];
  Scales scales[kPieces][kGroups];
  u32 weights[2][kDepth][kPieces][4];

  DEVICE TallTile(float (&sums)[kPieces][kTokens / 2], bool one_group)
      : sums(sums), reader(one_group, kTileRows), third(one_group, kTileRows / 2, kTileRows) {}

  // 32 columns.
  template <int kQuarter>
  DEVICE void read(const Ring<kSmallTokens>& ring) {
    constexpr int kPlace = kQuarter * 4 * kPieceBytes, kNextStrips = kTileRows / 64 * kStripBytes;
    u32 from = ring.codes_address();
    load_words_at<kPlace>(from + reader.codes, words[0]);
    load_words_at<kPlace + kPieceBytes>(from + reader.codes, words[1]);
    if constexpr (kPieces == 3) {
      load_words_at<kPlace>(from + third.codes, words[2]);
    } else {
      load_words_at<kPlace + kNextStrips>(from + reader.codes, words[2]);
      load_words_at<kPlace + kNextStrips + kPieceBytes>(from + reader.codes, words[3]);
    }
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : kPieces * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kPieces, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / kPieces;
      scales[i][n / kPieces] = kPieces == 3 && i == 2 ? third.load(ring, group, 0)
                                                      : reader.load(ring, group, i / 2 * kTileRows + i % 2 * 16);
    }
  }

  template <int n>
  DEVICE void dequantize() {
#pragma unroll
    for (int i = 0; i < kDepth * kPieces; i++) {
      int piece = i % kPieces, k = (n * kDepth + i / kPieces) % 2;
      dequantize_folded(&words[piece][k * kWords], scales[piece][k * kGroups / 2], weights[n % 2][i / kPieces][piece]);
    }
  }

  template <int n>
  DEVICE void multiply(u32 tokens) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth * kPieces; i++) {
      int k = n * kDepth + i / kPieces;
      u64 descriptor = kDescriptorHigh << 32 | (tokens + k / 4 * (Ring<kSmallTokens>::kTokenHalf / 16) + k % 4 * 2);
      wgmma<kTokens>(sums[i % kPieces], weights[n % 2][i / kPieces][i % kPieces], descriptor);
    }
    wgmma_commit();
  }

  // The products of a step from number n on; meanwhile the next ones' weights, but for the last.
  template <int n = 0>
  DEVICE void run(u32 tokens, const Ring<kSmallTokens>& ring) {
    multiply<n>(tokens);
    if constexpr (n < 8 / kDepth - 1) {
      if constexpr ((n + 1) * kDepth % 2 == 0) read<(n + 1) * kDepth / 2>(ring);
      wgmma_wait<1>();
      dequantize<n + 1>();
      run<n + 1>(tokens, ring);
    }
  }
};

template <int kTokens, int kPieces>
DEVICE void multiply_tall_steps(TallSums& result, int steps, bool one_group, bool gathered, Ring<kSmallTokens>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  float sums[kPieces][kTokens / 2];
  TallTile<kTokens, kPieces> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kPieces * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.template read<0>(ring);
  tile.template dequantize<0>();
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kSmallTokens> / 16);
    tile.run(operand, ring);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      tile.template read<0>(ring);
      wgmma_wait<1>();
      tile.template dequantize<0>();
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
  }
#pragma unroll
  for (int i = 0; i < 2 * kSmallTokens; i++) {
    int piece = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
    result[piece][j] = piece < kPieces && j < kTokens / 2 ? sums[piece % kPieces][j % (kTokens / 2)] : 0.0f;
  }
}

template <int kPieces>
DEVICE void multiply_tall(TallSums& sums, int tokens, int steps, bool one_group, bool gathered,
                          Ring<kSmallTokens>& ring) {
  if (tokens > 48) {
    multiply_tall_steps<64, kPieces>(sums, steps, one_group, gathered, ring);
  } else {
    multiply_tall_steps<48, kPieces>(sums, steps, one_group, gathered, ring);
  }
}

// Its first 256 rows, then the others.
template <bool kActivate>
DEVICE void store_tall(const ExpertsParams& p, Schedule& s, Segment g, TallSums& sums) {
  SumsOf<kSmallTokens> part;
  int end = g.first_row + g.tile_rows;
#pragma unroll 1
  for (; g.first_row < end; g.first_row += kTileRows) {
    g.tile_rows = min(end - g.first_row, kTileRows);
#pragma unroll
    for (int i = 0; i < kSmallTokens; i++) {
      int piece = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
      part[piece][j] = sums[piece][j];
      sums[piece][j] = sums[piece + 2][j];
    }
    store_tile<kActivate, kSmallTokens>(p, s, g, part);
  }
}

DEVICE void run_tall_segment(const ExpertsParams& p, Schedule& s, const Segment& g, Ring<kSmallTokens>& ring) {
  TallSums sums;
  bool one_group = p.gemm[g.phase].groups == 1, gathered = are_gathered(p, g.phase);
  int steps = g.to - g.from;
  if (__shfl_sync(~0u, g.tile_rows, 0) == 2 * kTileRows) {  // the compiler sees that it is the same for all lanes
    multiply_tall<4>(sums, g.tokens, steps, one_group, gathered, ring);
  } else {
    multiply_tall<3>(sums, g.tokens, steps, one_group, gathered, ring);
  }
  if (g.phase == 1) {
    store_tall<false>(p, s, g, sums);
  } else {
    store_tall<true>(p, s, g, sums);
    announce_tile(p, g);
  }
}
