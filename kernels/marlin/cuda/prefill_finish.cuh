// What becomes of a tile's sums: left for another block, completed with those of others, activated and stored.
#pragma once
#include "handover.cuh"
#include "prefill_products.cuh"
#include "store.cuh"

DEVICE float4* piece_sums(const ExpertsParams& p, int phase, int piece) {
  return reinterpret_cast<float4*>(p.partials) +
         (i64)(phase * gridDim.x + piece) * p.max_tile_tokens * (kTileRows / 4) + threadIdx.x;
}

// The sums of a tile's later pieces, left by other blocks, added in order.
DEVICE void add_pieces(const ExpertsParams& p, Schedule& s, const Segment& g, Sums& sums) {
  constexpr int kTogether = 8;  // of 8 tokens each, whose loads are under way at once
  for (int piece = g.piece + 1; piece < (int)gridDim.x; piece++) {
    Position start = s.piece[g.phase][piece], end = s.piece[g.phase][piece + 1];
    if (start.tile > g.tile || start.step == 0) return;
    if (start.tile == end.tile && start.step == end.step) continue;
    if (threadIdx.x == 0) wait_at_least(piece_flag(p, g.phase, piece), 1);
    named_barrier<1, kConsumerThreads>();
    const float4* from = piece_sums(p, g.phase, piece);
#pragma unroll
    for (int first = 0; first < kTileTokens / 8; first += kTogether) {
      if (8 * first >= g.tokens) break;
      float4 v[kTogether][2];
#pragma unroll
      for (int n = 0; n < 2 * kTogether; n++) v[n / 2][n % 2] = __ldcg(from + (2 * first + n) * kConsumerThreads);
#pragma unroll
      for (int n = 0; n < 2 * kTogether; n++) {
        float* sum = &sums[n % 2][4 * (first + n / 2)];
        const float4& more = v[n / 2][n % 2];
        sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
      }
    }
  }
}

DEVICE void leave_piece(const ExpertsParams& p, const Segment& g, Sums& sums) {
  wait_for_previous_kernels();  // `partials` is theirs, too
  float4* to = piece_sums(p, g.phase, g.piece);
#pragma unroll
  for (int j = 0; j < kTileTokens / 8; j++) {
    if (8 * j >= g.tokens) break;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* sum = &sums[i][4 * j];
      __stcg(to + (2 * j + i) * kConsumerThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(piece_flag(p, g.phase, g.piece), 1);
  }
}

// Global scale and bias of the packed rows g and g + 8 of one piece.
struct Affine {
  float alpha[2] = {kUnfold, kUnfold}, bias[2] = {0.0f, 0.0f};
};

template <bool kGate>
DEVICE Affine load_affine(const GemmParams& gemm, int expert, int first, int g) {
  Affine affine;
  int low = kGate ? first / 2 + g : first + g / 2 * 4 + g % 2;
  int high = kGate ? gemm.rows / 2 + low : low + 2;
  if (first >= gemm.rows) return affine;
  if (gemm.alphas != nullptr) {
    const float* alphas = gemm.alphas + expert * gemm.alphas_per_expert;
    affine.alpha[0] *= alphas[0];
    affine.alpha[1] *= alphas[kGate ? gemm.alphas_per_expert - 1 : 0];
  }
  if (gemm.bias != nullptr) {
    affine.bias[0] = to_float(gemm.bias[(i64)expert * gemm.rows + low]);
    affine.bias[1] = to_float(gemm.bias[(i64)expert * gemm.rows + high]);
  }
  return affine;
}

// 16 outputs (gated) or 32 of a warp for every token: scaled, activated, transposed to token-major, stored.
template <bool kActivate>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const Segment& g, Sums& sums) {
  constexpr bool kGate = kActivate && kGated;
  const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
  int width = kGate ? gemm.rows / 2 : gemm.rows, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first_row = s.row_start(p.num_experts)[g.expert];
  int first = g.row_tile * kTileRows + warp * 32;  // packed row of the first of the warp's two pieces
  if (first >= gemm.rows) return;
  Affine affine[2] = {load_affine<kGate>(gemm, g.expert, first, lane / 4),
                      load_affine<kGate>(gemm, g.expert, first + 16, lane / 4)};
#pragma unroll
  for (int j = 0; j < kTileTokens / 8; j++) {
    if (8 * j >= g.tokens) break;
    u32 out[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float v[4];
#pragma unroll
      for (int k = 0; k < 4; k++) v[k] = sums[i][4 * j + k] * affine[i].alpha[k / 2] + affine[i].bias[k / 2];
      if constexpr (kGate) {
        out[i][0] = transpose_8x8(to_pair(activate(v[0], v[2]), activate(v[1], v[3])));
      } else {
        if constexpr (kActivate) {
#pragma unroll
          for (int k = 0; k < 4; k++) v[k] = activate(v[k], 0.0f);
        }
        out[i][0] = transpose_8x8(to_pair(v[0], v[1]));
        out[i][1] = transpose_8x8(to_pair(v[2], v[3]));
      }
    }
    if constexpr (kGate) {
      // Lanes 2 c and 2 c + 1 swap halves, so that each has four neighbours of one piece.
      bool odd = lane % 2;
      u32 other = __shfl_xor_sync(~0u, odd ? out[0][0] : out[1][0], 1);
      out[0][1] = odd ? out[1][0] : other;
      if (odd) out[0][0] = other;
    }
    int token = 8 * j + lane / 4;
    if (token < g.tokens) {
      u16* to = gemm.output + output_row(p, g.phase, g.expert, first_row, g.first_token + token) * width;
      if constexpr (kGate) {
        *reinterpret_cast<uint2*>(to + first / 2 + lane % 2 * 8 + lane % 4 / 2 * 4) = make_uint2(out[0][0], out[0][1]);
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          *reinterpret_cast<uint2*>(to + first + 16 * i + lane % 4 * 4) = make_uint2(out[i][0], out[i][1]);
        }
      }
    }
  }
}

// All that a tile's sums go through once its steps are done here.
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g, Sums& sums) {
  if (g.from > 0) {
    leave_piece(p, g, sums);
    return;
  }
  if (g.to < shared.schedule.phase[g.phase].steps) add_pieces(p, shared.schedule, g, sums);
  if (g.phase == 1) {
    store_tile<false>(p, shared.schedule, g, sums);
  } else {
    store_tile<true>(p, shared.schedule, g, sums);
    fence_proxy_async_global();
    named_barrier<1, kConsumerThreads>();
    if (threadIdx.x == 0) {
      __threadfence();
      add_release(ready_flag(p, g.expert), 1);
    }
  }
}
