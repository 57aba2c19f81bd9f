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
  u8* to;              // where this lane's outputs of row 0 lie
  const int* ids;      // output rows of this lane's tokens, or null: they follow `row`
  int row, row_bytes;  // output row of this lane's first token
  int tokens, odd;  // how many of the tile's tokens follow that one; of the lane
  bool present, two_pieces;  // whether the weights have the warp's rows
  Affine affine[2];

  DEVICE TileStore(const ExpertsParams& p, Schedule& s, const Segment& g) {
    const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // what follows from it is not kept where sums are made
    int lane = thread % 32, pieces = pieces_of(thread / 32, g.tile_rows);
    int first = g.first_row + warp_row(thread / 32, g.tile_rows), token = g.first_token + lane / 4;
    int rows_before = s.row_start(p.num_experts)[g.expert], width = kGate ? gemm.rows / 2 : gemm.rows;
    present = first < gemm.rows;
    two_pieces = pieces == 2;
    odd = lane % 2;
    row_bytes = 2 * width;
    to = reinterpret_cast<u8*>(gemm.output + (kGate ? first / 2 + odd * 8 + lane % 4 / 2 * 4 : first + lane % 4 * 4));
    ids = !kActivate && p.sorted ? p.row_ids + rows_before + token : nullptr;
    row = kActivate ? rows_before + token : g.expert * p.max_rows + token;
    tokens = kGate && odd && !two_pieces ? 0 : g.tokens - lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) affine[i] = load_affine<kGate>(gemm, g.expert, first + 16 * i, lane / 4);
  }

  // So many groups of eight tokens, of both pieces, side by side: each alone is a chain of some 300 cycles.
  template <int kGroups>
  DEVICE void store(int first_group, const float* low, const float* high) const {
    u32 out[kGroups][2][2];
#pragma unroll
    for (int j = 0; j < kGroups; j++) {
      finish_sums<kActivate>(low + 4 * j, affine[0].alpha, affine[0].bias, out[j][0]);
      finish_sums<kActivate>(high + 4 * j, affine[1].alpha, affine[1].bias, out[j][1]);
    }
#pragma unroll
    for (int j = 0; j < kGroups; j++) {
      int token = 8 * (first_group + j);
      int own = row + token;
      if (!kActivate && ids != nullptr && token < tokens) own = ids[token];
      u8* place = to + (i64)own * row_bytes;
      if constexpr (kGate) {
        // Lanes 2 c and 2 c + 1 swap halves, so that each has four neighbours of one piece.
        u32 other = __shfl_xor_sync(~0u, odd ? out[j][0][0] : out[j][1][0], 1);
        uint2 four = odd ? make_uint2(other, out[j][1][0]) : make_uint2(out[j][0][0], other);
        if (token < tokens) *reinterpret_cast<uint2*>(place) = four;
      } else {
        if (token < tokens) *reinterpret_cast<uint2*>(place) = make_uint2(out[j][0][0], out[j][0][1]);
        if (token < tokens && two_pieces) {
          *reinterpret_cast<uint2*>(place + 32) = make_uint2(out[j][1][0], out[j][1][1]);
        }
      }
    }
  }
};

// A tile from registers, by a loop over 64 tokens: what runs for the first time comes from memory. There are many of
// the large ones.
template <bool kActivate, int kMost>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const Segment& g, SumsOf<kMost>& sums) {
  constexpr int kTogether = kMost == kLargeTokens ? kMost : 64;  // tokens
  constexpr int kGroups = kMost == kLargeTokens ? 2 : 4;
  TileStore<kActivate> tile(p, s, g);
  if (!tile.present) return;
#pragma unroll 1
  for (int first = 0; first < g.tokens; first += kTogether) {
#pragma unroll
    for (int j = 0; j < kTogether / 8; j += kGroups) {
      if (first + 8 * j >= g.tokens) break;
      tile.template store<kGroups>(first / 8 + j, &sums[0][4 * j], &sums[1][4 * j]);
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
  if (threadIdx.x == 0) {
    int rows = min(g.tile_rows, p.gemm[0].rows - g.first_row);
    add_release(ready_flag(p, g.expert), token_groups(g.tokens) * (rows / 32));
  }
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
    if (!tile.present) continue;
#pragma unroll 1
    for (int group = a.first_group; group < a.first_group + a.groups; group++) {
      float sums[2][4];
      sum_pieces(p, a.tile, shape.pieces_per_tile, group, sums);
      tile.template store<1>(group, sums[0], sums[1]);
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
