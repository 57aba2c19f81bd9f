// A tile of experts with 8-bit rows, shared by the kernels for sm_90 and sm_80: pipeline stages, widening of weights,
// promotion of sums, epilogues.
//
// A tile is 256 weight rows (operand A, in registers) x up to kTileTokens tokens (operand B). Each of eight warps
// computes 32 rows, as two halves of 16. Lane 4 g + t holds rows g and g + 8 of the weights, columns 4 t to 4 t + 3,
// then the same 16 columns further on; its accumulators lie as in wgmma.cuh.
// Promotion: the tensor cores accumulate the products of one group of columns, or of several steps where a weight row
// and (in w13) a token have a single scale. The result is multiplied by the scales of its weight row, if there are
// several, and (in w2) of its token, and added to an f32 sum. mxfp4 has one scale a row here, its largest; the
// distances of the others are folded into the operands.
// Epilogue of w13: gate and up rows alternate, so 256 rows make 128 columns of hidden, one scale group of every token.
#pragma once
#include "eight_bit_layout.cuh"
#include "eight_bit_widen.cuh"
#include "epilogue.cuh"
#include "mma.cuh"

static_assert(!kFoldsScales || GROUPS_PER_STEP == 4, "scales are folded into operands of 32 columns");
static_assert(kGated, "a tile of w13 makes 128 columns of hidden where gate and up alternate");

#if ROWS_INT8
using Sum = int;
#else
using Sum = float;
#endif

// ==== A stage ====

constexpr int kTileRows = 256;
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;

constexpr bool kGrouped = GROUPS_PER_STEP > 0;
constexpr int kGroups = kGrouped ? GROUPS_PER_STEP : 1;      // of a step
constexpr bool kPromotesGroups = kGrouped && !kFoldsScales;  // each with its own scale
constexpr int kBlockColumns = 32;                            // of a product of the tensor cores

// e4m3 weights are operands without widening: wgmma reads them from shared memory, where each half of a tile's rows
// lies in blocks of 32 columns.
constexpr bool kFromShared = WEIGHT_TYPE == FLOAT8_E4M3 && !ROWS_INT8;
constexpr int kHalfBlockBytes = kTileRows / 2 * kBlockColumns;

// A stage holds codes of weights (repack.py), codes of tokens (wgmma.cuh), scales and zero points of weights, and
// scales of tokens.
constexpr int kStripBytes = 64 * kGroupColumns * kBits / 8;  // 64 rows x 128 columns
constexpr int kScaleRowBytes = kTileRows * kScaleBytes;
constexpr int kTokensPlace = kTileRows / 64 * kStripBytes;
constexpr int kScalesPlace = kTokensPlace + kTileTokens * kGroupColumns;
constexpr int kZerosPlace = kScalesPlace + (kGrouped ? kGroups * kScaleRowBytes : 0);
constexpr int kTokenScalesPlace = kZerosPlace + (kHasZeros ? kGroups * kScaleRowBytes : 0);
constexpr int kStageBytes = (kTokenScalesPlace + kTileTokens * 4 + 1023) / 1024 * 1024;  // tokens begin at 1024 bytes

struct EightBitParams {
  TensorMap tokens[2];   // codes of the input, codes of hidden; of sm_90 alone
  TensorMap weights[2];  // codes of w13 and w2, where kFromShared
  ExpertsParams experts;
  const float* row_scales;  // [capacity], of the input
  u8* hidden;               // [capacity, columns of w2]
  float* hidden_scales;     // [ceil(columns of w2 / 128), capacity]
  int capacity;             // rows
};

struct TileSlice {
  int phase, expert, first_row, first_token, tokens;  // phase -1: there are no more
};

// Shared memory of the epilogue of w13.
struct Largest {
  float of_warp[kConsumerWarps][kTileTokens];  // magnitudes of a tile's results
  float inverse_scale[kTileTokens];
};

DEVICE int steps_of(const ExpertsParams& p, int phase) {
  return (p.gemm[phase].columns + kGroupColumns - 1) / kGroupColumns;
}
DEVICE int row_tiles_of(const ExpertsParams& p, int phase) { return (p.gemm[phase].rows + kTileRows - 1) / kTileRows; }
DEVICE int tiles_of(const ExpertsParams& p, const Tables& tables, int phase) {
  return tables.tiles[p.num_experts] * row_tiles_of(p, phase);
}

// Tile number `tile` of a phase. Tiles are ordered by expert, then by weight rows, then by tokens.
DEVICE TileSlice tile_of(const ExpertsParams& p, const Tables& tables, int phase, int tile) {
  TileSlice g;
  g.phase = phase;
  int row_tiles = row_tiles_of(p, g.phase);
  g.expert = find_expert(tables.tiles, p.num_experts, row_tiles, tile);
  int rest = tile - tables.tiles[g.expert] * row_tiles, rows = rows_of(p, g.expert);
  TokenTiles tokens(rows);
  int row_tile = quotient(rest, tokens.count);
  g.first_row = row_tile * kTileRows;
  g.first_token = (rest - row_tile * tokens.count) * tokens.each;
  g.tokens = min(rows - g.first_token, tokens.each);
  return g;
}

// Offsets of a lane's codes and scales in a stage.
struct LanePlace {
  u32 codes, scales;
  DEVICE LanePlace() {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    codes = warp / 2 * kStripBytes + fragment_place(warp % 2 * 2) + lane_place(lane);
    scales = kScalesPlace + (warp * 32 + lane / 4 * 2) * kScaleBytes;
  }
};

// A lane's part of the packed weights of 16 rows x kBlocks blocks of 32 columns: codes, scales, zero points. Scales
// that are folded into the operands are one for each block.
template <int kBlocks>
struct Packed {
  u32 codes[kBlocks][kBits / 2];
  u32 scales[kFoldsScales ? kBlocks : 1], zeros;

  DEVICE void load(u32 codes_from, u32 scales_from) {
#pragma unroll
    for (int n = 0; n < kBlocks && !kFromShared; n++) load_words_at<0>(codes_from + n * 4 * kFragmentBytes, codes[n]);
    if constexpr (kFoldsScales) {
#pragma unroll
      for (int n = 0; n < kBlocks; n++) scales[n] = load_shared_u16(scales_from + n * kScaleRowBytes);
    } else if constexpr (kGrouped) {
      scales[0] = load_shared_u32(scales_from);
    }
    if constexpr (kHasZeros) zeros = load_shared_u32(scales_from + kZerosPlace - kScalesPlace);
  }

  // Loads half `half` (16 rows) of a warp's rows, kBlocks blocks of columns from block `block` on.
  DEVICE void load_part(u32 stage, const LanePlace& own, int half, int block) {
    int group = kGrouped ? block * kGroups / 4 : 0;
    load(stage + own.codes + fragment_place(half) + block * 4 * kFragmentBytes,
         stage + own.scales + half * 16 * kScaleBytes + group * kScaleRowBytes);
  }

  // Turns e8m0 scales into exponents of the operands. Groups beyond the last one have undefined bytes.
  DEVICE void fold_scales(u32 offsets, bool are_there) {
    if constexpr (kFoldsScales) {
#pragma unroll
      for (int n = 0; n < kBlocks; n++) scales[n] = operand_exponents(exponent_pair(scales[n], are_there), offsets);
    }
  }

  // Operand A of block n.
  DEVICE void widen(int n, u32 (&a)[4]) const {
    const u32* w = codes[n];
    Operands of_low(kFoldsScales ? scales[n] & 0xffff : 0), of_high(kFoldsScales ? scales[n] >> 16 : 0);
#pragma unroll
    for (int k = 0; k < kBits / 2; k++) {
      if constexpr (kFoldsScales) {
        widen_e2m1(w[k], of_low, of_high, a[2 * k], a[2 * k + 1]);
      } else if constexpr (kBits == 4) {
        u32 low = kHasZeros ? zero_bytes(zeros & 0xffff) : 0, high = kHasZeros ? zero_bytes(zeros >> 16) : 0;
        widen_four_bits(w[k], low, high, a[2 * k], a[2 * k + 1]);
      } else {
        a[k] = widen_eight_bits(w[k]);
      }
    }
  }

  // Scales of rows g (low) and g + 8.
  DEVICE float low() const { return to_float(scales[0] & 0xffff); }
  DEVICE float high() const { return to_float(scales[0] >> 16); }
};

// ==== Sums ====

// Accumulators of a lane: [half of the warp's 32 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens, typename T = float>
using SumsOf = T[2][kTokens / 2];

template <typename T, int kCount>
DEVICE void clear(T (&sums)[2][kCount]) {
#pragma unroll
  for (int i = 0; i < 2 * kCount; i++) sums[i / kCount][i % kCount] = 0;
}

// Shared address of the first scales of a lane's tokens in a stage of w2; a lane has four of every 16 tokens.
DEVICE u32 token_scales_in(u32 stage) { return stage + kTokenScalesPlace + threadIdx.x % 4 * 16; }

// sums += part times the scales of the lane's rows, if a row has several, and, in w2, of the tokens.
template <int kTokens, int kPhase>
DEVICE void promote(float* sums, const Sum* part, float low, float high, u32 token_scales) {
#pragma unroll
  for (int j = 0; j < kTokens / 16; j++) {
    float token[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kPhase == 1) load_shared(token, token_scales + 64 * j);
#pragma unroll
    for (int i = 8 * j; i < 8 * j + 8; i++) {
      float scale = kPromotesGroups ? (i % 4 < 2 ? low : high) : 1.0f;
      if constexpr (kPhase == 1) scale *= token[i % 8 / 4 * 2 + i % 2];
      sums[i] = fmaf((float)part[i], scale, sums[i]);
    }
  }
}

// The first of a lane's two rows of a half, counted within the expert.
DEVICE int lane_row(const TileSlice& g, int half) {
  return g.first_row + threadIdx.x / 32 * 32 + half * 16 + threadIdx.x % 32 / 4 * 2;
}

// The largest scales of rows g (low byte) and g + 8 (high byte), as e8m0.
DEVICE u32 largest_scales_of(const EightBitParams& params, const TileSlice& g, int half) {
  const GemmParams& gemm = params.experts.gemm[g.phase];
  int row = lane_row(g, half);
  if (row >= gemm.rows) return 0;
  return *reinterpret_cast<const u16*>(gemm.zeros + g.expert * (i64)gemm.rows + row);
}

// The epilogue's factors for rows g and g + 8: the unit of codes, and the scale of a row that has only one.
DEVICE SumScale sum_scale_of(const EightBitParams& params, const TileSlice& g, int half) {
  SumScale unit = {kCodeUnit, kCodeUnit};
  if constexpr (kFoldsScales) {
    u32 largest = largest_scales_of(params, g, half);
    unit.low *= exponent_value(largest & 0xff), unit.high *= exponent_value(largest >> 8);
  } else if constexpr (!kGrouped) {
    const GemmParams& gemm = params.experts.gemm[g.phase];
    int row = lane_row(g, half);
    if (row < gemm.rows) {
      u32 pair = *reinterpret_cast<const u32*>(gemm.scales + (g.expert * (i64)gemm.rows + row) * 2);
      unit.low *= to_float(pair & 0xffff), unit.high *= to_float(pair >> 16);
    }
  }
  return unit;
}

// factors *= the global scales of an expert's gate and up rows, if it has any; w2 has one.
DEVICE void multiply_by_alphas(const GemmParams& gemm, int expert, float (&factors)[2]) {
  if (gemm.alphas == nullptr) return;
  factors[0] *= gemm.alphas[expert * gemm.alphas_per_expert];
  factors[1] *= gemm.alphas[(expert + 1) * gemm.alphas_per_expert - 1];
}

// ==== Epilogue of w13: activation, scales, codes ====

// Replaces the sums of gate rows by activated results [half][8 tokens][row g][two tokens], zero beyond the last row.
template <int kTokens>
DEVICE void activate_sums(const EightBitParams& params, const TileSlice& g, const u32* row_scales,
                          SumsOf<kTokens>& sums) {
  const GemmParams& gemm = params.experts.gemm[0];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float2* scales = reinterpret_cast<const float2*>(row_scales) + lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int first = g.first_row + warp * 32 + half * 16, column = first / 2 + lane / 4;
    bool valid = first < gemm.rows;
    SumScale unit = sum_scale_of(params, g, half);
    float alpha[2] = {unit.low, unit.high}, bias[2] = {0.0f, 0.0f};
    multiply_by_alphas(gemm, g.expert, alpha);
    if (gemm.bias != nullptr && valid) {
      const u16* biases = gemm.bias + (i64)g.expert * gemm.rows;
      bias[0] = to_float(biases[column]), bias[1] = to_float(biases[gemm.rows / 2 + column]);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float2 scale = scales[4 * j];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float token = i ? scale.y : scale.x;
        float gate = sums[half][4 * j + i] * (token * alpha[0]) + bias[0];
        float up = sums[half][4 * j + 2 + i] * (token * alpha[1]) + bias[1];
        sums[half][4 * j + i] = valid ? activate(gate, up) : 0.0f;
      }
    }
  }
}

// One step of a butterfly reduction of 2 x kCount maxima: a lane hands one half to the lane at kDistance and keeps the
// other. Returns the index at which the kept half begins.
template <int kCount, int kDistance>
DEVICE int share_maxima(float* largest) {
  bool upper = threadIdx.x & kDistance;
#pragma unroll
  for (int n = 0; n < kCount; n++) {
    float given = upper ? largest[n] : largest[n + kCount], kept = upper ? largest[n + kCount] : largest[n];
    largest[n] = max_or_nan(kept, __shfl_xor_sync(~0u, given, kDistance));
  }
  return upper ? kCount : 0;
}

// Computes the scale of each token's 128 columns of hidden in this tile: the inverse goes to shared memory, the scale
// to hidden_scales.
template <int kTokens>
DEVICE void find_scales(const EightBitParams& params, Largest& largest_of, const TileSlice& g, int row,
                        SumsOf<kTokens>& sums) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Eight lanes share the same tokens. Each step of the reduction halves the tokens that a lane handles.
  float largest[kTokens / 4];
#pragma unroll
  for (int n = 0; n < kTokens / 4; n++) {
    int at = n / 2 * 4 + n % 2;
    largest[n] = max_or_nan(fabsf(sums[0][at]), fabsf(sums[1][at]));
  }
  int first = share_maxima<kTokens / 8, 4>(largest) + share_maxima<kTokens / 16, 8>(largest) +
              share_maxima<kTokens / 32, 16>(largest);
#pragma unroll
  for (int n = 0; n < kTokens / 32; n++) {
    int at = first + n;
    largest_of.of_warp[warp][at / 2 * 8 + lane % 4 * 2 + at % 2] = largest[n];
  }
  named_barrier<1, kConsumerThreads>();
  int token = threadIdx.x;
  if (token < kTokens) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) largest = max_or_nan(largest, largest_of.of_warp[w][token]);
    float scale = max_or_nan(largest / kLargestCode, kLeastScale);
    largest_of.inverse_scale[token] = 1.0f / scale;
    int group = g.first_row / kTileRows;
    if (token < g.tokens) params.hidden_scales[(i64)group * params.capacity + row + scale_place(token)] = scale;
  }
  named_barrier<1, kConsumerThreads>();
}

// Activates, quantizes and stores a tile of hidden; row_scales are those of its input rows.
template <int kTokens>
DEVICE void store_hidden(const EightBitParams& params, const Tables& tables, Largest& largest_of, const TileSlice& g,
                         const u32* row_scales, SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tables.starts[g.expert] + g.first_token;
  activate_sums<kTokens>(params, g, row_scales, sums);
  find_scales<kTokens>(params, largest_of, g, row, sums);
  int column = g.first_row / 2 + warp * 16, width = p.gemm[1].columns;
  u8* to = params.hidden + (row + lane / 4) * (i64)width + column + lane % 4 * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2*>(&largest_of.inverse_scale[8 * j + lane % 4 * 2]);
    // Columns g and g + 8 of either token side by side; after the transpose a lane has columns 2 t, 2 t + 8, 2 t + 1
    // and 2 t + 9 of one token.
    u32 first = code_pair(sums[0][4 * j] * inverse.x, sums[1][4 * j] * inverse.x);
    u32 second = code_pair(sums[0][4 * j + 1] * inverse.y, sums[1][4 * j + 1] * inverse.y);
    u32 codes = transpose_8x8(first | second << 16);
    if (8 * j + lane / 4 < g.tokens && column < width) *reinterpret_cast<u32*>(to + 8 * j * (i64)width) = codes;
  }
}

// ==== Epilogue of w2 ====

// Stores a tile of outputs. A lane holds four neighbouring columns of a token in each half of its warp's 32. Lanes 2 i
// and 2 i + 1 swap one half, so that each stores eight neighbouring columns.
template <int kTokens>
DEVICE void store_output(const EightBitParams& params, const TileSlice& g, const u32* output_rows,
                         SumsOf<kTokens>& sums) {
  const GemmParams& gemm = params.experts.gemm[1];
  int lane = threadIdx.x % 32, first = g.first_row + threadIdx.x / 32 * 32, odd = lane % 2;
  if (first >= gemm.rows) return;
  float alpha[2][2], bias[2][2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    SumScale unit = sum_scale_of(params, g, half);
    float global = gemm.alphas == nullptr ? 1.0f : gemm.alphas[g.expert * gemm.alphas_per_expert];
    alpha[half][0] = unit.low * global, alpha[half][1] = unit.high * global;
    if (gemm.bias != nullptr) {
      const u16* biases = gemm.bias + (i64)g.expert * gemm.rows + first + half * 16 + lane / 8 * 4 + lane / 4 % 2;
      bias[half][0] = to_float(biases[0]), bias[half][1] = to_float(biases[2]);
    }
  }
  u16* to = gemm.output + first + (odd ? 16 : 0) + lane % 4 / 2 * 8;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    u32 out[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) finish_sums<false>(&sums[half][4 * j], alpha[half], bias[half], out[half]);
    u32 swapped[2];
#pragma unroll
    for (int i = 0; i < 2; i++) swapped[i] = __shfl_xor_sync(~0u, odd ? out[0][i] : out[1][i], 1);
    int token = 8 * j + lane / 4;
    uint4 eight = odd ? make_uint4(swapped[0], swapped[1], out[1][0], out[1][1])
                      : make_uint4(out[0][0], out[0][1], swapped[0], swapped[1]);
    if (token < g.tokens) *reinterpret_cast<uint4*>(to + (i64)output_rows[token] * gemm.rows) = eight;
  }
}
