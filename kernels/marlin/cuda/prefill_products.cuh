// The steps of a tile: codes are dequantized into registers, multiplied with the tokens and added up.
#pragma once
#include "prefill_large.cuh"

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

// All steps of a segment, half a step's columns at a time. While they are multiplied, the next codes are read and
// dequantized. An instruction beside the products costs about 1.7 cycles. Unused sums become zero, or the compiler
// keeps too many registers.
template <int kMost, int kTokens, int kPieces>
DEVICE void multiply_steps(SumsOf<kMost>& result, int steps, bool one_group, bool gathered, Ring<kMost>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group, kPieces == 2 ? kTileRows : kNarrowRows);
  Codes codes;
  SumsOf<kTokens> sums;
  Weights<kPieces> weights[2];
  // The compiler sees that they are the same for all lanes.
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  reader.read<kPieces, 0>(codes, ring);
  dequantize_codes<kPieces>(codes, weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // tokens were written by ordinary copies and are read by the tensor cores
    u32 operand = first + ring.stage * (kTokenStage<kMost> / 16);
    multiply_half<kTokens, kPieces>(sums, weights[0], operand, group);
    reader.read<kPieces, 1>(codes, ring);
    dequantize_codes<kPieces>(codes, weights[1]);
    wgmma_wait<0>();
    multiply_half<kTokens, kPieces>(sums, weights[1], operand + Ring<kMost>::kTokenHalf / 16, group);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      reader.read<kPieces, 0>(codes, ring);
      dequantize_codes<kPieces>(codes, weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
  }
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    int half = i / (kMost / 2), j = i % (kMost / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

// All steps by the code for so many tokens, at least kTokens. Narrow tiles have code for every second size.
template <int kMost, int kTokens, int kPieces>
DEVICE void multiply_tokens(SumsOf<kMost>& sums, int tokens, int steps, bool one_group, bool gathered,
                            Ring<kMost>& ring) {
  constexpr int kNext = kMost == kLargeTokens ? kTokens + 48 : kTokens + (kPieces == 2 ? 16 : 32);
  if constexpr (kTokens < kMost) {
    if (tokens > kTokens) {
      constexpr int kMore = kNext < kMost ? kNext : kMost;
      return multiply_tokens<kMost, kMore, kPieces>(sums, tokens, steps, one_group, gathered, ring);
    }
  }
  if constexpr (kMost == kLargeTokens || (kTokens == kTileTokens && kPieces == 2)) {
    multiply_large_steps<kMost, kTokens>(sums, steps, one_group, gathered, ring);
  } else {
    multiply_steps<kMost, kTokens, kPieces>(sums, steps, one_group, gathered, ring);
  }
}

template <int kMost>
DEVICE void multiply_segment(SumsOf<kMost>& sums, const Segment& g, bool one_group, bool gathered, Ring<kMost>& ring) {
  constexpr int kLeast = kMost == kLargeTokens ? kLeastLarge : kLeastTokens;
  int steps = g.to - g.from, tokens = tile_tokens<kMost>(g.tokens);
  // The compiler sees that it is the same for all lanes, and keeps addresses in registers of the warp.
  if (kMost == kLargeTokens || __shfl_sync(~0u, pieces_of(threadIdx.x / 32, g.tile_rows), 0) == 2) {
    multiply_tokens<kMost, kLeast, 2>(sums, tokens, steps, one_group, gathered, ring);
  } else {
    multiply_tokens<kMost, kLeast, 1>(sums, tokens, steps, one_group, gathered, ring);
  }
}
