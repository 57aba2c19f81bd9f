// How the experts' tiles are made and cut: their sizes, what takes the least time.
//
// A tile is 256 weight rows, or 192 where those fill the machine better, x up to 128 tokens of one expert; or up to 64
// where no expert has more or that takes about as long; or up to 176 where there are many, so that every weight that is
// dequantized serves more tokens. A step is 128 columns of it. Costs of a step are in the unit of many_tile_cost.
#pragma once
#include "dequant.cuh"
#include "threshold.cuh"

constexpr int kTileRows = 256;
constexpr int kTileTokens = kManyTileTokens;
constexpr int kSmallTokens = 64;
constexpr int kLargeTokens = 176;
// Where there is room: for three stages of 4 bits, and for the registers of one fma or multiplication a pair.
constexpr bool kHasLarge = ACT_BF16 && (WEIGHT_TYPE == UINT4B8 || WEIGHT_TYPE == NVFP4 || WEIGHT_TYPE == MXFP4);
constexpr int kStepColumns = 128;
constexpr int kMaxBlocks = 256;

constexpr int kNarrowRows = 192;

// Steps that a tile takes longer where blocks share it.
constexpr int kSplitSteps = 5;
// Pieces of a tile from which on all are left and added by several blocks, and the most.
constexpr int kLeastPieces = 4, kMostPieces = 16;
// What a step of a tile of 192 rows takes, in sixteenths of one of 256: one warpgroup has 128 rows of either, and with
// few tokens that is what takes the time.
DEVICE constexpr int narrow_cost(int tokens) { return tokens > 32 ? 12 : 14; }

// Tokens a tile is computed for: the least size that there is code for.
constexpr int kLeastTokens = 32, kLeastLarge = 96;
template <int kMost>
DEVICE int tile_tokens(int rows) {
  constexpr int kApart = kMost == kLargeTokens ? 48 : 16, kLeast = kMost == kLargeTokens ? kLeastLarge : kLeastTokens;
  return min(max((rows + kApart - 1) / kApart * kApart, kLeast), kMost);
}

// What a step of a large tile takes, in the unit of many_tile_cost.
DEVICE constexpr int large_tile_cost(int tokens) { return tokens > 96 ? 4 + (tokens + 47) / 48 * 3 : 10; }
DEVICE int large_cost(int rows) {
  int rest = rows % kLargeTokens;
  return rows / kLargeTokens * large_tile_cost(kLargeTokens) + (rest ? large_tile_cost(rest) : 0);
}

struct PhaseShape {
  int tile_rows, row_tiles, steps;
  int whole_items, pieces;
  int pieces_per_tile;  // where that is the same for all and additions follow (w2), otherwise 0
  int items;            // whole tiles, then pieces
};

// How the tiles of a phase are made and cut: what takes the least time. `cost` is that of all token tiles.
DEVICE PhaseShape shape_phase(const GemmParams& gemm, bool last, int most_tokens, int largest, int token_tiles,
                              int cost) {
  PhaseShape phase;
  int blocks = gridDim.x, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, tiles = token_tiles * row_tiles;
  int narrow_tiles = token_tiles * ((gemm.rows + kNarrowRows - 1) / kNarrowRows);
  // Steps of all blocks, idle ones too.
  int whole = quotient(tiles + blocks - 1, blocks) * steps * blocks;
  int narrow = quotient(narrow_tiles + blocks - 1, blocks) * steps * blocks;
  int split = tiles * steps + kSplitSteps * blocks;
  phase.tile_rows = kTileRows;
  phase.row_tiles = row_tiles;
  phase.steps = steps;
  phase.whole_items = tiles;
  phase.pieces = phase.pieces_per_tile = 0;
  if (most_tokens == kLargeTokens) {
    // Whole tiles alone: there are many.
  } else if (narrow / 16 * narrow_cost(min(largest, most_tokens)) < min(whole, split)) {
    phase.tile_rows = kNarrowRows;
    phase.row_tiles = (gemm.rows + kNarrowRows - 1) / kNarrowRows;
    phase.whole_items = narrow_tiles;
  } else if (split < whole) {
    // A piece has two steps at least.
    int per_tile = min(min(quotient(blocks, tiles), steps / 2), kMostPieces);
    bool alike = token_tiles * many_tile_cost(min(largest, most_tokens)) * 7 <= cost * 8;
    if (last && per_tile >= kLeastPieces && alike) {
      phase.whole_items = 0;
      phase.pieces_per_tile = per_tile;
      phase.pieces = tiles * per_tile;
    } else {
      phase.whole_items = max(quotient(tiles, blocks) - 1, 0) * blocks;
      int most = cost * row_tiles * steps / (2 * many_tile_cost(most_tokens));
      phase.pieces = phase.whole_items ? blocks : min(most, blocks);
    }
  }
  phase.items = phase.whole_items + phase.pieces;
  return phase;
}

// About how long a phase takes whose token tiles cost that much in all; the largest has `tokens`.
DEVICE float phase_time(const GemmParams& gemm, int token_tiles, int cost, int tokens) {
  int blocks = gridDim.x, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, narrow = (gemm.rows + kNarrowRows - 1) / kNarrowRows;
  float mean = __fdividef(cost, token_tiles), dearest = many_tile_cost(tokens);
  float whole_time = quotient(token_tiles * row_tiles - 1, blocks) * mean + dearest;
  float narrow_time = (quotient(token_tiles * narrow - 1, blocks) * mean + dearest) * (narrow_cost(tokens) / 16.0f);
  float split_time = __fdividef((float)cost * row_tiles, blocks) + __fdividef(kSplitSteps * mean, steps);
  return fminf(fminf(whole_time, narrow_time), split_time) * steps;
}

DEVICE int rows_of(const ExpertsParams& p, int e) { return min(max(p.num_tokens[e], 0), p.max_rows); }

// One warp: rows of the largest expert.
DEVICE int most_rows(const ExpertsParams& p) {
  int most = 0;
  for (int e = threadIdx.x % 32; e < p.num_experts; e += 32) most = max(most, rows_of(p, e));
  return __reduce_max_sync(~0u, most);
}

// The same where all tiles are large and whole.
DEVICE float large_phase_time(const GemmParams& gemm, int token_tiles, int cost) {
  int blocks = gridDim.x, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int tiles = token_tiles * ((gemm.rows + kTileRows - 1) / kTileRows);
  return (quotient(tiles - 1, blocks) * __fdividef(cost, token_tiles) + large_tile_cost(kLargeTokens)) * steps;
}

// One warp: the most tokens of a tile, where an expert has up to `largest` rows. Small tiles, unless the others take a
// thirteenth less: the sums of blocks that share tiles cost more than is counted here.
DEVICE int choose_tokens(const ExpertsParams& p, int few_rows, int largest, int lane) {
  if (largest <= kSmallTokens) return kSmallTokens;
  int tiles[3] = {0, 0, 0}, cost[3] = {0, 0, 0};  // small, medium, large
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e) > few_rows ? rows_of(p, e) : 0;
    tiles[0] += (rows + kSmallTokens - 1) / kSmallTokens, cost[0] += many_cost<kSmallTokens>(rows);
    tiles[1] += (rows + kTileTokens - 1) / kTileTokens, cost[1] += many_cost<kTileTokens>(rows);
    tiles[2] += (rows + kLargeTokens - 1) / kLargeTokens, cost[2] += large_cost(rows);
  }
#pragma unroll
  for (int i = 0; i < 3; i++) {
    tiles[i] = __reduce_add_sync(~0u, tiles[i]);
    cost[i] = __reduce_add_sync(~0u, cost[i]);
  }
  int medium = lane % 2, tokens = min(largest, medium ? kTileTokens : kSmallTokens);
  float time = phase_time(p.gemm[lane / 2 % 2], medium ? tiles[1] : tiles[0], medium ? cost[1] : cost[0], tokens);
  time += __shfl_xor_sync(~0u, time, 2);
  float small_time = __shfl_sync(~0u, time, 0) * (12.0f / 13), medium_time = __shfl_sync(~0u, time, 1);
  if (kHasLarge && largest > kTileTokens) {
    float large_time = 0.0f;
    for (int phase = 0; phase < 2; phase++) large_time += large_phase_time(p.gemm[phase], tiles[2], cost[2]);
    if (large_time < fminf(small_time, medium_time)) return kLargeTokens;
  }
  return small_time < medium_time ? kSmallTokens : kTileTokens;
}
