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
template <int kMost>
DEVICE void add_pieces(const ExpertsParams& p, Schedule& s, const Segment& g, SumsOf<kMost>& sums) {
  constexpr int kTogether = 8;  // of 8 tokens each, whose loads are under way at once
  for (int piece = g.piece + 1; piece < (int)gridDim.x; piece++) {
    Position start = s.piece[g.phase][piece], end = s.piece[g.phase][piece + 1];
    if (start.tile > g.tile || start.step == 0) return;
    if (start.tile == end.tile && start.step == end.step) continue;
    if (threadIdx.x == 0) wait_at_least(piece_flag(p, g.phase, piece), 1);
    named_barrier<1, kConsumerThreads>();
    const float4* from = piece_sums(p, g.phase, piece);
#pragma unroll
    for (int first = 0; first < kMost / 8; first += kTogether) {
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

template <int kMost>
DEVICE void leave_piece(const ExpertsParams& p, const Segment& g, SumsOf<kMost>& sums) {
  wait_for_previous_kernels();  // `partials` is theirs, too
  float4* to = piece_sums(p, g.phase, g.piece);
#pragma unroll
  for (int j = 0; j < kMost / 8; j++) {
    if (8 * j >= g.tokens) break;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* sum = &sums[i][4 * j];
      __stcg(to + (2 * j + i) * kConsumerThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release(piece_flag(p, g.phase, g.piece), 1);
}

// The sums of eight tokens of a tile all of whose pieces are left, added in order.
DEVICE void sum_pieces(const ExpertsParams& p, const Segment& g, int pieces, int group, float (&sums)[2][4]) {
  constexpr int kTogether = 8;  // whose loads are under way at once
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < pieces; first += kTogether) {
    float4 v[kTogether][2];
#pragma unroll
    for (int n = 0; n < 2 * kTogether; n++) {
      const float4* from = piece_sums(p, g.phase, g.piece + min(first + n / 2, pieces - 1));
      v[n / 2][n % 2] = __ldcg(from + (2 * group + n % 2) * kConsumerThreads);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTogether; n++) {
      float* sum = sums[n % 2];
      const float4& more = v[n / 2][n % 2];
      if (first + n / 2 < pieces) sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
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

// Stores what a warp has of a tile: 16 outputs (gated) or 32 for every token, half as many where it has one piece.
template <bool kActivate>
struct TileStore {
  static constexpr bool kGate = kActivate && kGated;
  const ExpertsParams& p;
  const Segment& g;
  const GemmParams& gemm;
  int width, rows_before, first;  // of an output row; rows of all experts before; the warp's first packed row
  bool two_pieces;
  Affine affine[2];

  DEVICE TileStore(const ExpertsParams& p, Schedule& s, const Segment& g)
      : p(p), g(g), gemm(p.gemm[kActivate ? 0 : 1]), width(kGate ? gemm.rows / 2 : gemm.rows),
        rows_before(s.row_start(p.num_experts)[g.expert]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int pieces = pieces_of(warp, g.tile_rows);
    first = g.first_row + warp_row(warp, pieces);
    two_pieces = pieces == 2;
#pragma unroll
    for (int i = 0; i < 2; i++) affine[i] = load_affine<kGate>(gemm, g.expert, first + 16 * i, lane / 4);
  }

  // Whether the weights have these rows.
  DEVICE bool present() const { return first < gemm.rows; }

  // Eight tokens, of both pieces, scaled, activated and transposed to token-major.
  DEVICE void store(int group, const float* low, const float* high) const {
    int lane = threadIdx.x % 32;
    u32 out[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* sums = i ? high : low;
      float v[4];
#pragma unroll
      for (int k = 0; k < 4; k++) v[k] = sums[k] * affine[i].alpha[k / 2] + affine[i].bias[k / 2];
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
    bool odd = lane % 2;
    if constexpr (kGate) {
      // Lanes 2 c and 2 c + 1 swap halves, so that each has four neighbours of one piece.
      u32 other = __shfl_xor_sync(~0u, odd ? out[0][0] : out[1][0], 1);
      out[0][1] = odd ? out[1][0] : other;
      if (odd) out[0][0] = other;
    }
    int token = 8 * group + lane / 4;
    if (token >= g.tokens) return;
    u16* to = gemm.output + output_row(p, g.phase, g.expert, rows_before, g.first_token + token) * width;
    if constexpr (kGate) {
      to += first / 2 + lane % 2 * 8 + lane % 4 / 2 * 4;
      if (two_pieces || !odd) *reinterpret_cast<uint2*>(to) = make_uint2(out[0][0], out[0][1]);
    } else {
      to += first + lane % 4 * 4;
      *reinterpret_cast<uint2*>(to) = make_uint2(out[0][0], out[0][1]);
      if (two_pieces) *reinterpret_cast<uint2*>(to + 16) = make_uint2(out[1][0], out[1][1]);
    }
  }
};

// A tile from registers, by a loop over 64 tokens: what runs for the first time comes from memory. There are many of the
// large ones.
template <bool kActivate, int kMost>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const Segment& g, SumsOf<kMost>& sums) {
  constexpr int kTogether = kMost == kLargeTokens ? kMost : 64;  // tokens
  TileStore<kActivate> tile(p, s, g);
  if (!tile.present()) return;
#pragma unroll 1
  for (int first = 0; first < g.tokens; first += kTogether) {
#pragma unroll
    for (int j = 0; j < kTogether / 8; j++) {
      if (first + 8 * j >= g.tokens) break;
      tile.store(first / 8 + j, &sums[0][4 * j], &sums[1][4 * j]);
    }
#pragma unroll
    for (int i = 0; i < kMost / 2 - kTogether / 2; i++) {
      sums[0][i] = sums[0][i + kTogether / 2];
      sums[1][i] = sums[1][i + kTogether / 2];
    }
  }
}

// Tells those who wait for `hidden` that a tile of it is stored.
DEVICE void announce_tile(const ExpertsParams& p, const Segment& g) {
  fence_proxy_async_global();
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release(ready_flag(p, g.expert), token_groups(g.tokens));
}

// Additions of w2's pieces, every gridDim.x-th.
DEVICE void run_additions(const ExpertsParams& p, Schedule& s, int number) {
  const PhaseShape& shape = s.phase[1];
  for (; shape.pieces_per_tile > 0 && number < shape.pieces; number += gridDim.x) {
    Addition a = addition_of(s, p.num_experts, number);
    if (a.groups <= 0) continue;
    if (threadIdx.x < shape.pieces_per_tile) wait_at_least(piece_flag(p, 1, a.tile.piece + threadIdx.x), 1);
    named_barrier<1, kConsumerThreads>();
    TileStore<false> tile(p, s, a.tile);
    if (!tile.present()) continue;
#pragma unroll 1
    for (int group = a.first_group; group < a.first_group + a.groups; group++) {
      float sums[2][4];
      sum_pieces(p, a.tile, shape.pieces_per_tile, group, sums);
      tile.store(group, sums[0], sums[1]);
    }
  }
}

// All that a tile's sums go through once its steps are done here.
template <int kMost>
DEVICE void finish_segment(const ExpertsParams& p, Schedule& s, const Segment& g, SumsOf<kMost>& sums) {
  if constexpr (kMost != kLargeTokens) {  // whose tiles are whole
    if (g.from > 0 || s.phase[g.phase].pieces_per_tile > 0) {
      leave_piece<kMost>(p, g, sums);
      return;
    }
    if (g.to < s.phase[g.phase].steps) add_pieces<kMost>(p, s, g, sums);
  }
  if (g.phase == 1) {
    store_tile<false, kMost>(p, s, g, sums);
  } else {
    store_tile<true, kMost>(p, s, g, sums);
    announce_tile(p, g);
  }
}
