// What becomes of a tile's sums: left for another block, completed with those of others, activated and stored.
#pragma once
#include "activation.cuh"
#include "products.cuh"

DEVICE float4* piece_sums(const ExpertsParams& p, int phase, int piece) {
  return reinterpret_cast<float4*>(p.partials) +
         (i64)(phase * gridDim.x + piece) * p.max_tile_tokens * (kTileRows / 4) + threadIdx.x;
}

// The sums of a tile's later pieces, left by other blocks, added in order.
template <int kTokens>
DEVICE void add_pieces(const ExpertsParams& p, Schedule& s, const Segment& g, float (&sums)[2][kTokens / 2]) {
  for (int piece = g.piece + 1; piece < (int)gridDim.x; piece++) {
    Position start = s.piece[g.phase][piece], end = s.piece[g.phase][piece + 1];
    if (start.tile > g.tile || start.step == 0) return;
    if (start.tile == end.tile && start.step == end.step) continue;
    if (threadIdx.x == 0) wait_at_least(piece_flag(p, g.phase, piece), 1);
    named_barrier<1, kConsumerThreads>();
    const float4* from = piece_sums(p, g.phase, piece);
#pragma unroll
    for (int r = 0; r < kTokens / 4; r++) {
      float4 v = __ldcg(from + r * kConsumerThreads);
      float* sum = &sums[r / (kTokens / 8)][r % (kTokens / 8) * 4];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
}

template <int kTokens>
DEVICE void leave_piece(const ExpertsParams& p, const Segment& g, float (&sums)[2][kTokens / 2]) {
  float4* to = piece_sums(p, g.phase, g.piece);
#pragma unroll
  for (int r = 0; r < kTokens / 4; r++) {
    const float* sum = &sums[r / (kTokens / 8)][r % (kTokens / 8) * 4];
    __stcg(to + r * kConsumerThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
  }
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(piece_flag(p, g.phase, g.piece), 1);
  }
}

DEVICE i64 output_row(const ExpertsParams& p, Schedule& s, int phase, int expert, int i) {
  int sorted = s.row_start(p.num_experts)[expert] + i;
  if (phase == 0) return sorted;
  return p.sorted ? p.row_ids[sorted] : (i64)expert * p.max_rows + i;
}

// Global scale, bias, activation, transposition to token-major, store: 16 weight rows of a warp.
template <int kTokens, bool kActivate>
DEVICE void store_rows(const ExpertsParams& p, Schedule& s, const Segment& g, int first, int lane, const float* sums) {
  constexpr bool kGate = kActivate && kGated;
  const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
  int width = kGate ? gemm.rows / 2 : gemm.rows;
  int row = lane / 4, low = kGate ? first / 2 + row : first + row / 2 * 4 + row % 2;
  int high = kGate ? width + low : low + 2;
  float alpha[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
  if (gemm.alphas != nullptr) {
    alpha[0] = gemm.alphas[g.expert * gemm.alphas_per_expert];
    alpha[1] = kGate ? gemm.alphas[(g.expert + 1) * gemm.alphas_per_expert - 1] : alpha[0];
  }
  if (gemm.bias != nullptr) {
    bias[0] = to_float(gemm.bias[(i64)g.expert * gemm.rows + low]);
    bias[1] = to_float(gemm.bias[(i64)g.expert * gemm.rows + high]);
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = sums[4 * j + k] * alpha[k / 2] + bias[k / 2];
    u32 out[2];
    if constexpr (kGate) {
      out[0] = transpose_8x8(to_pair(activate(v[0], v[2]), activate(v[1], v[3])));
    } else {
      if constexpr (kActivate) {
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = activate(v[k], 0.0f);
      }
      out[0] = transpose_8x8(to_pair(v[0], v[1]));
      out[1] = transpose_8x8(to_pair(v[2], v[3]));
    }
    int token = 8 * j + lane / 4;
    if (token < g.tokens) {
      u16* to = gemm.output + output_row(p, s, g.phase, g.expert, g.first_token + token) * width;
      if constexpr (kGate) {
        *reinterpret_cast<u32*>(to + first / 2 + lane % 4 * 2) = out[0];
      } else {
        *reinterpret_cast<uint2*>(to + first + lane % 4 * 4) = make_uint2(out[0], out[1]);
      }
    }
  }
}

template <int kTokens, bool kActivate>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const Segment& g, float (&sums)[2][kTokens / 2]) {
  Lane me;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int first = g.row_tile * kTileRows + me.first_row(i);
    if (first < p.gemm[kActivate ? 0 : 1].rows) store_rows<kTokens, kActivate>(p, s, g, first, me.lane, sums[i]);
  }
}

// All that a tile's sums go through once its steps are done here.
template <int kTokens>
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g, float (&sums)[2][kTokens / 2]) {
  if (g.from > 0) {
    leave_piece<kTokens>(p, g, sums);
    return;
  }
  if (g.to < shared.schedule.phase[g.phase].steps) add_pieces<kTokens>(p, shared.schedule, g, sums);
  if (g.phase == 1) {
    store_tile<kTokens, false>(p, shared.schedule, g, sums);
  } else {
    store_tile<kTokens, true>(p, shared.schedule, g, sums);
    named_barrier<1, kConsumerThreads>();
    if (threadIdx.x == 0) {
      __threadfence();
      add_release(ready_flag(p, g.expert), 1);
    }
  }
}
