// The steps of a tile: codes are dequantized into registers, multiplied with the tokens and added up.
#pragma once
#include "prefill_dequant.cuh"
#include "prefill_stage.cuh"
#include "wgmma.cuh"

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens]. While they are made they
// take the registers of their own tokens only.
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Pieces of 16 neighbouring rows that a consumer warp has of a tile: two, or one in the second half of a narrow tile.
DEVICE int pieces_of(int warp, int tile_rows) { return warp < kConsumerWarps / 2 || tile_rows == kTileRows ? 2 : 1; }

// Their first row.
DEVICE int warp_row(int warp, int pieces) {
  return pieces == 2 ? warp * 32 : kTileRows / 2 + (warp - kConsumerWarps / 2) * 16;
}

// What a lane needs for 64 columns of its warp's rows, a piece for each half of the warpgroup's rows.
constexpr int kScalesPerHalf = SCALES_PER_STEP <= 2 ? 1 : SCALES_PER_STEP / 2;
struct Codes {
  u32 words[2][2][2 * kWords];  // [piece][32 columns]
  Scales scales[2][kScalesPerHalf];
};

struct CodeReader {
  u32 codes, scales;  // where in a stage the lane's are
  bool one_group;
  DEVICE CodeReader(bool one_group, int pieces) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int row = warp_row(thread / 32, pieces), lane = thread % 32;
    codes = row / 64 * kStripBytes + row % 64 / 16 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = kCodeBytes + (row + lane / 4 * 2) * kScaleBytes;
  }

  // `half`: which 64 of the stage's 128 columns.
  template <int kPieces, int kHalf>
  DEVICE void read(Codes& to, const u8* stage) const {
#pragma unroll
    for (int n = 0; n < 2 * kPieces; n++) {
      int i = n % kPieces, block = n / kPieces;
      load_words(to.words[i][block], stage + codes + kHalf * 8 * kPieceBytes + (block * 4 + i) * kPieceBytes);
    }
    constexpr int kScales = SCALES_PER_STEP == 1 && kHalf ? 0 : kPieces * kScalesPerHalf;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kPieces, group = one_group ? 0 : kHalf * SCALES_PER_STEP / 2 + n / kPieces;
      const u8* row = stage + scales + group * kScaleRow + i * 16 * kScaleBytes;
      to.scales[i][n / kPieces] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
    }
  }
};

template <int kPieces>
using Weights = u32[4 * kPieces][4];  // operands of 16 columns, for each piece: [columns][piece][four pairs]

template <int kPieces>
DEVICE void dequantize_codes(const Codes& codes, Weights<kPieces>& weights) {
#pragma unroll
  for (int n = 0; n < 4 * kPieces; n++) {
    int i = n % kPieces, k = n / kPieces;
    dequantize_folded(&codes.words[i][k / 2][k % 2 * kWords], codes.scales[i][k * kScalesPerHalf / 4], weights[n]);
  }
}

// With few tokens dequantizing takes longer than the products. There the warpgroups issue these in turn, so that one
// dequantizes while those of the other run.
DEVICE constexpr bool take_turns(int tokens) { return tokens == 32; }

DEVICE void wait_for_turn(int group) {
  if (group == 0) named_barrier<2, kConsumerThreads>(); else named_barrier<3, kConsumerThreads>();
}

DEVICE void pass_turn(int group) {
  if (group == 0) named_arrive<3, kConsumerThreads>(); else named_arrive<2, kConsumerThreads>();
}

template <int kTokens, int kPieces>
DEVICE void multiply_half(SumsOf<kTokens>& sums, const Weights<kPieces>& weights, u32 tokens, int group) {
  u64 descriptor = kDescriptorHigh << 32 | tokens;
  if (take_turns(kTokens)) wait_for_turn(group);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < 4 * kPieces; n++) {
    wgmma<kTokens>(sums[n % kPieces], weights[n], descriptor + n / kPieces * 2);
  }
  wgmma_commit();
  if (take_turns(kTokens)) pass_turn(group);
}

// All steps of a segment, half a step's columns at a time. While they are multiplied, the next codes are read and,
// where there are registers for it, dequantized. An instruction beside the products costs about 1.7 cycles. Unused sums
// become zero, or the compiler keeps too many registers.
template <int kMost, int kTokens, int kPieces>
DEVICE void multiply_steps(SumsOf<kMost>& result, int steps, bool one_group, bool gathered, Ring& ring) {
  constexpr bool kAhead = kTokens < kTileTokens || kPieces == 1;
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group, kPieces);
  Codes codes;
  SumsOf<kTokens> sums;
  Weights<kPieces> weights[kAhead ? 2 : 1];
  // The compiler sees that they are the same for all lanes.
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  reader.read<kPieces, 0>(codes, ring.codes());
  dequantize_codes<kPieces>(codes, weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // tokens were written by ordinary copies and are read by the tensor cores
    u32 operand = first + ring.stage * (kTokenStage / 16);
    multiply_half<kTokens, kPieces>(sums, weights[0], operand, group);
    reader.read<kPieces, 1>(codes, ring.codes());
    if (kAhead) dequantize_codes<kPieces>(codes, weights[kAhead]);
    wgmma_wait<0>();
    if (!kAhead) dequantize_codes<kPieces>(codes, weights[0]);
    multiply_half<kTokens, kPieces>(sums, weights[kAhead], operand + kTokenHalf / 16, group);
    u64* empty = ring.empty();
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      reader.read<kPieces, 0>(codes, ring.codes());
      if (kAhead) dequantize_codes<kPieces>(codes, weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) barrier_arrive(empty);
    if (!more) break;
    if (!kAhead) dequantize_codes<kPieces>(codes, weights[0]);
  }
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    int half = i / (kMost / 2), j = i % (kMost / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

template <int kMost, int kPieces>
DEVICE void multiply_pieces(SumsOf<kMost>& sums, const Segment& g, bool one_group, bool gathered, Ring& ring) {
  int steps = g.to - g.from, tokens = tile_tokens(g.tokens);
  if (tokens == 32) return multiply_steps<kMost, 32, kPieces>(sums, steps, one_group, gathered, ring);
  if (tokens == 64 || kMost == 64) return multiply_steps<kMost, 64, kPieces>(sums, steps, one_group, gathered, ring);
  if constexpr (kMost > 64) {
    if (tokens == 96) return multiply_steps<kMost, 96, kPieces>(sums, steps, one_group, gathered, ring);
    multiply_steps<kMost, 128, kPieces>(sums, steps, one_group, gathered, ring);
  }
}

template <int kMost>
DEVICE void multiply_segment(SumsOf<kMost>& sums, const Segment& g, bool one_group, bool gathered, Ring& ring) {
  // The compiler sees that it is the same for all lanes, and keeps addresses in registers of the warp.
  if (__shfl_sync(~0u, pieces_of(threadIdx.x / 32, g.tile_rows), 0) == 2) {
    multiply_pieces<kMost, 2>(sums, g, one_group, gathered, ring);
  } else {
    multiply_pieces<kMost, 1>(sums, g, one_group, gathered, ring);
  }
}
