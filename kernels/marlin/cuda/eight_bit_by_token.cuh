// Tiles of e4m3 weights and many tokens on Hopper. Tokens are operand A of the tensor cores here; all other tiles of
// packed experts have weights as A ("swap AB").
//
// e4m3 weights are not widened, so either operand can be A. With tokens as A, a lane's accumulators belong to two
// tokens and many weight rows. Promotion then needs two token scales, and two weight scales if these are constant in
// blocks of 128 rows; the 128 columns of hidden that share a scale lie in four lanes. With weights as A, a lane would
// read the scales of 32 tokens for every product and multiply each by the scale of its row. But a warpgroup computes at
// least 64 rows of A, so tiles of few tokens keep weights as A (eight_bit_sm90.cu).
//
// A warpgroup computes 64 tokens x 256 weight rows, in two halves of 128 rows. Packed rows form quads of two fragments
// f, in the order of their core matrices (repack.py): 8 rows h = 0 (gate) of each fragment, then 8 rows h = 1 (up). For
// every 8 packed rows, lane 4 g + t holds the sums of token g with rows 2 t and 2 t + 1, then those of token g + 8. So
// a lane holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a quad's 16 columns of hidden, or rows 4 t to 4 t + 3 of
// each fragment of w2.
//
// Example: lane 5 of warp 4 holds tokens 65 and 73, and columns 2, 3, 10 and 11 of every 16 of hidden.
#pragma once
#include "eight_bit_wgmma.cuh"

// Whether this build has such tiles. Weights with one scale a row need less promotion and gain nothing from them.
constexpr bool kMayBeByToken = kFromShared && kGrouped;

// Whether a tile of this many tokens has tokens as operand A.
DEVICE constexpr bool is_by_token(int tokens) { return kMayBeByToken && tokens > 96; }

constexpr int kHalfRows = kTileRows / 2;
constexpr int kQuads = kHalfRows / 32;  // of a half

using ByToken = float[2][64];

DEVICE constexpr int sum_place(int quad, int h, int f, int token, int row) {
  return quad * 16 + h * 8 + f * 4 + token * 2 + row;
}

// A lane's first token in the tile; the second is 8 further on.
DEVICE int first_token_of_lane() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

// ==== Scales of weights ====

// Shared address of the scales of half of a tile's rows, for one group of columns of a stage.
DEVICE u32 row_scales_in(u32 stage, int group, int half) {
  return stage + kScalesPlace + group * kScaleRowBytes + half * kHalfRows * kScaleBytes;
}

// Returns a bit for each half of each group of a stage, set if all rows h = 0 have one scale, and all rows h = 1.
// One warp calls this; each lane compares eight scales.
DEVICE u32 find_blocks(u32 stage) {
  int lane = threadIdx.x % 32;
  u32 found = 0;
  for (int group = 0; group < kGroups; group++) {
    u32 first = load_shared_u32(row_scales_in(stage, group, lane / 16)), pairs[4];
    load_shared_pair(row_scales_in(stage, group, 0) + lane * 16, pairs);
    load_shared_pair(row_scales_in(stage, group, 0) + lane * 16 + 8, pairs + 2);
    bool same = pairs[0] == first && pairs[1] == first && pairs[2] == first && pairs[3] == first;
    u32 votes = __ballot_sync(~0u, same);
    found |= ((votes & 0xffff) == 0xffff ? 1u : 0u) << 2 * group | (votes >> 16 == 0xffff ? 2u : 0u) << 2 * group;
  }
  return found;
}

// ==== Products ====

// Promotion: sums += part times the scales of weight rows and, in w2, of tokens. With kBlock, `pair` holds the scales
// of all rows h = 0 and of all rows h = 1; otherwise the scales of the rows lie at `rows`.
template <int kPhase, bool kBlock>
DEVICE void promote_by_token(float* sums, const Sum* part, u32 rows, u32 pair, const float (&tokens)[2]) {
  float scales[2][2][2];  // h, row, token
#pragma unroll
  for (int n = 0; n < 2 * kQuads; n++) {
    if (n == 0 || !kBlock) {
      u32 pairs[2] = {pair, pair};
      if constexpr (!kBlock) load_shared_pair(rows + (n * 16 + threadIdx.x % 4 * 4) * kScaleBytes, pairs);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        u32 of_row = pairs[i / 2 % 2];
        float scale = to_float(i / 4 ? of_row >> 16 : of_row & 0xffff);
        scales[i / 4][i / 2 % 2][i % 2] = kPhase == 1 ? scale * tokens[i % 2] : scale;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int h = i / 4, token = i / 2 % 2, row = i % 2, at = sum_place(n / 2, h, n % 2, token, row);
      sums[at] = fmaf((float)part[at], scales[h][row][token], sums[at]);
    }
  }
}

// Multiplies all steps of a tile. blocks_of(ring) waits for the result of find_blocks for the current stage. Every
// branch here is warp-uniform to the compiler; otherwise each lane would build its own descriptors (8 % slower).
template <int kPhase, typename Ring, typename BlocksOf>
DEVICE void multiply_by_token(ByToken& sums, int steps, int groups, Ring& ring, BlocksOf blocks_of) {
  constexpr int kBlocks = 4 / kGroups;
  clear(sums);
  u32 own_tokens = ring.address + kTokensPlace + threadIdx.x / 128 * 64 * kGroupColumns;
  u32 first = __shfl_sync(~0u, wgmma_descriptor(own_tokens), 0);
  u32 first_weights = __shfl_sync(~0u, plain_descriptor(ring.address), 0);
  ring.wait_full();
  for (; steps > 0; steps--, groups -= kGroups) {
    u64 tokens = kDescriptorHigh << 32 | (first + ring.stage * (kStageBytes / 16));
    u64 weights = plain_descriptor_high(256) | (first_weights + ring.stage * (kStageBytes / 16));
    u32 place = ring.place(), blocks = 0;
    int stage = ring.stage;
    float token_scales[2];
#pragma unroll
    for (int n = 0; n < 2 * kGroups; n++) {
      int group = n / 2, half = n % 2;
      Sum part[64];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlocks; i++) {
        int block = group * kBlocks + i;
        u64 from = weights + (half * 2 * kStripBytes + block * kHalfRows * kBlockColumns) / 16;
        wgmma_eight_bit<kHalfRows>(part, tokens + 2 * block, from, i > 0);
      }
      wgmma_commit();
      if (n == 0) {
        blocks = __shfl_sync(~0u, blocks_of(ring), 0);
#pragma unroll
        for (int i = 0; i < 2 && kPhase == 1; i++) {
          u32 scale = load_shared_u32(place + kTokenScalesPlace + 4 * scale_place(first_token_of_lane() + 8 * i));
          token_scales[i] = __uint_as_float(scale);
        }
      }
      u32 rows = row_scales_in(place, group, half), pair = load_shared_u32(rows);
      if (n == 2 * kGroups - 1) {
        ring.advance();
        if (steps > 1) ring.wait_full();
      }
      wgmma_wait<0>();
      // Columns beyond the last group are zeros, but the scales in their place are undefined.
      if (kGroups > 1 && group >= groups) continue;
      if (blocks >> n & 1) {
        promote_by_token<kPhase, true>(sums[half], part, rows, pair, token_scales);
      } else {
        promote_by_token<kPhase, false>(sums[half], part, rows, pair, token_scales);
      }
    }
    ring.release(stage);
  }
}

// ==== Epilogues ====

// Loads the biases of a lane's rows of the fragment that begins at row `first`: [h][row].
template <int kPhase>
DEVICE void load_biases(const GemmParams& gemm, int expert, int first, float (&bias)[2][2]) {
  int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int h = i / 2, row = i % 2;
    int column = kPhase == 0 ? h * gemm.rows / 2 + first / 2 + 2 * lane + row : first + 4 * lane + 2 * h + row;
    bias[h][row] = gemm.bias == nullptr ? 0.0f : to_float(gemm.bias[(i64)expert * gemm.rows + column]);
  }
}

// Activates, quantizes and stores a tile of hidden; row_scales are those of its input rows. Four lanes share a token's
// 128 columns.
DEVICE void store_hidden_by_token(const EightBitParams& params, const Tables& tables, const TileSlice& g,
                                  const u32* row_scales, ByToken& sums) {
  const GemmParams& gemm = params.experts.gemm[0];
  int own = first_token_of_lane(), lane = threadIdx.x % 4, width = params.experts.gemm[1].columns;
  float alphas[2] = {1.0f, 1.0f}, largest[2] = {0.0f, 0.0f}, scale[2], inverse[2];
  multiply_by_alphas(gemm, g.expert, alphas);
#pragma unroll
  for (int i = 0; i < 2; i++) scale[i] = __uint_as_float(row_scales[own + 8 * i]);
#pragma unroll
  for (int n = 0; n < 4 * kQuads; n++) {
    int half = n / (2 * kQuads), quad = n / 2 % kQuads, f = n % 2;
    int first = g.first_row + half * kHalfRows + quad * 32 + f * 16;
    if (first >= gemm.rows) continue;
    float bias[2][2];
    load_biases<0>(gemm, g.expert, first, bias);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = i / 2, row = i % 2;
      float& gate = sums[half][sum_place(quad, 0, f, token, row)];
      float up = sums[half][sum_place(quad, 1, f, token, row)];
      up = up * (scale[token] * alphas[1]) + bias[1][row];
      gate = activate(gate * (scale[token] * alphas[0]) + bias[0][row], up);
      largest[token] = max_or_nan(largest[token], fabsf(gate));
    }
  }
  i64 row = tables.starts[g.expert] + g.first_token + own;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    for (int d = 1; d < 4; d *= 2) largest[i] = max_or_nan(largest[i], __shfl_xor_sync(~0u, largest[i], d));
    float unit = max_or_nan(largest[i] / kLargestCode, kLeastScale);
    inverse[i] = 1.0f / unit;
    if (lane == 0 && own + 8 * i < g.tokens) {
      i64 group = g.first_row / kTileRows * (i64)params.capacity + tables.starts[g.expert] + g.first_token;
      params.hidden_scales[group + scale_place(own + 8 * i)] = unit;
    }
  }
#pragma unroll
  for (int n = 0; n < 4 * kQuads; n++) {
    int half = n / (2 * kQuads), quad = n / 2 % kQuads, token = n % 2;
    int column = g.first_row / 2 + half * kHalfRows / 2 + quad * 16;
    auto of = [&](int f, int row) { return sums[half][sum_place(quad, 0, f, token, row)] * inverse[token]; };
    u32 codes = code_pair(of(0, 0), of(1, 0)) | code_pair(of(0, 1), of(1, 1)) << 16;
    if (own + 8 * token < g.tokens && column < width) {
      *reinterpret_cast<u32*>(params.hidden + (row + 8 * token) * width + column + 4 * lane) = codes;
    }
  }
}

// Stores a tile of outputs. A lane holds four neighbouring columns of two tokens in each fragment. Lanes 2 i and
// 2 i + 1 swap one fragment, so that each stores eight neighbouring columns.
DEVICE void store_output_by_token(const EightBitParams& params, const TileSlice& g, const u32* output_rows,
                                  ByToken& sums) {
  const GemmParams& gemm = params.experts.gemm[1];
  int own = first_token_of_lane(), lane = threadIdx.x % 4, odd = lane % 2;
  float alphas[2] = {1.0f, 1.0f};
  multiply_by_alphas(gemm, g.expert, alphas);
#pragma unroll
  for (int n = 0; n < 2 * kQuads; n++) {
    int half = n / kQuads, quad = n % kQuads, first = g.first_row + half * kHalfRows + quad * 32;
    if (first >= gemm.rows) continue;
    float bias[2][2][2];
#pragma unroll
    for (int f = 0; f < 2; f++) load_biases<1>(gemm, g.expert, first + 16 * f, bias[f]);
#pragma unroll
    for (int token = 0; token < 2; token++) {
      u32 out[2][2], swapped[2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int f = i / 2, h = i % 2;
        float v[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
          v[row] = sums[half][sum_place(quad, h, f, token, row)] * alphas[0] + bias[f][h][row];
        }
        out[f][h] = to_pair(v[0], v[1]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) swapped[h] = __shfl_xor_sync(~0u, odd ? out[0][h] : out[1][h], 1);
      uint4 eight = odd ? make_uint4(swapped[0], swapped[1], out[1][0], out[1][1])
                        : make_uint4(out[0][0], out[0][1], swapped[0], swapped[1]);
      if (own + 8 * token < g.tokens) {
        u16* to = gemm.output + (i64)output_rows[own + 8 * token] * gemm.rows + first + odd * 16 + lane / 2 * 8;
        *reinterpret_cast<uint4*>(to) = eight;
      }
    }
  }
}
