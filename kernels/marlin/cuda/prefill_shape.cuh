// How the experts' tiles are made and cut: their sizes, what takes the least time.
//
// A tile is 256 weight rows, or 192 where those fill the machine better, x up to 64 tokens of one expert where none
// has more, of 384 or 512 rows then (tall) where there are enough; otherwise x up to 64, 80, 96, 112 or 128, by what
// should take the least time; or x up to 176 where there are many, so that every weight that is dequantized serves
// more tokens. A step is 128 columns of it. Costs of a step are in the unit of tile_cost.
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
// Tiles of 384 or 512 rows: where registers have room for their sums, the ring has for their codes, and there may be
// more tiles than blocks, which TALL says. Beside their code all other tiles are 1 % slower.
constexpr bool kHasTall = TALL && kHasLarge;

// Steps that sharing tiles costs a block; the second where all tiles are shared and have unlike sizes: pieces of equal
// estimated cost then end at different times.
constexpr int kSplitSteps = 5, kUnlikeSplitSteps = 20;
// Pieces of a tile from which on all are left and added by several blocks, and the most.
constexpr int kLeastPieces = 4, kMostPieces = 16;

// Tokens a tile is computed for: the least size that there is code for.
constexpr int kLeastTokens = 32, kLeastLarge = 96;
template <int kMost>
DEVICE int tile_tokens(int rows) {
  constexpr int kApart = kMost == kLargeTokens ? 48 : 16, kLeast = kMost == kLargeTokens ? kLeastLarge : kLeastTokens;
  return min(max((rows + kApart - 1) / kApart * kApart, kLeast), kMost);
}

// What a step of a tile of so many tokens takes, in about 235 cycles: 4-bit floats need more instructions.
constexpr int kMoreCost = kBits == 4 && !kIntegers ? 3 : 0;
DEVICE constexpr int tile_cost(int tokens) { return many_tile_cost(tokens) + kMoreCost; }
DEVICE constexpr int large_tile_cost(int tokens) {
  return (tokens > 96 ? 4 + (tokens + 47) / 48 * 3 : 10) + kMoreCost;
}

// An expert's rows in as few tiles of up to `most` tokens as there may be: all have `each`, the last what is left.
// Large tiles are full; others have about equally many tokens, so that none takes much longer.
struct TokenTiles {
  int count, each;
  DEVICE TokenTiles(int rows, int most) : count(quotient(rows + most - 1, most)), each(most) {
    if (most != kLargeTokens && count > 1) each = (quotient(rows + count - 1, count) + 15) / 16 * 16;
  }
  // Of a step of all of them.
  DEVICE int cost(int rows) const {
    int rest = rows - (count - 1) * each;
    if (count == 0) return 0;
    if (each == kLargeTokens) return (count - 1) * large_tile_cost(each) + large_tile_cost(rest);
    return (count - 1) * tile_cost(each) + tile_cost(rest);
  }
};

// What ends a tile, in steps of 256 rows; and what a step of a tall one takes for each 256 rows.
constexpr float kEnd = 3.0f, kTallEnd = 4.0f, kTallStep = 0.94f;

struct PhaseShape {
  int tile_rows, row_tiles, steps, rows;
  int whole_items, pieces;
  int halved_from;      // number of the tile from which on each is two items of 256 rows
  int pieces_per_tile;  // where that is the same for all and additions follow (w2), otherwise 0
  int items;            // whole tiles, then pieces
};

// All token tiles of a launch: how many, what a step of all costs, and of the dearest.
struct AllTiles {
  int count, cost, dearest, most_tokens;
};

// How long a phase takes, in the unit of tile_cost: by whole tiles of 256 rows or of 192, or cut into pieces.
struct PhaseTimes {
  int steps, row_tiles, narrow_tiles;
  float whole, narrow, split;

  DEVICE PhaseTimes(const GemmParams& gemm, const AllTiles& all) {
    steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
    row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, narrow_tiles = (gemm.rows + kNarrowRows - 1) / kNarrowRows;
    float mean = __fdividef(all.cost, all.count);
    whole = in_waves(all, row_tiles, mean);
    // One warpgroup has 128 rows of either, and with few tokens that is what takes the time.
    narrow = in_waves(all, narrow_tiles, mean) * (all.dearest > tile_cost(32) ? 0.75f : 0.875f);
    bool unlike = all.dearest > mean * 1.06f && all.count * row_tiles < 2 * gridDim.x;
    int sharing = unlike ? kUnlikeSplitSteps : kSplitSteps;
    split = __fdividef((float)all.cost * row_tiles * steps, gridDim.x) + sharing * mean;
  }

  // Of several waves the last may end with the dearest tile, or with any.
  DEVICE float in_waves(const AllTiles& all, int row_tiles, float mean) const {
    int before = quotient(all.count * row_tiles - 1, gridDim.x);
    return (before ? before * mean + 0.5f * (mean + all.dearest) : all.dearest) * steps;
  }
};

// A phase by tall tiles, the last wave by whole ones or by their halves, and about how long it takes with what follows.
struct TallTiles {
  int row_tiles, items, halved_from;
  float time;

  DEVICE TallTiles(const GemmParams& gemm, const AllTiles& all, int steps, int rows, bool halved) {
    float mean = __fdividef(all.cost, all.count), last = 0.5f * (mean + all.dearest);
    float tile = steps * rows * (kTallStep / kTileRows) + kTallEnd;
    row_tiles = (gemm.rows + rows - 1) / rows;
    int blocks = gridDim.x, tiles = all.count * row_tiles;
    int waves = quotient(tiles - !halved, blocks), rest = tiles - waves * blocks;
    time = waves * mean * tile + last * (halved ? quotient(2 * rest + blocks - 1, blocks) * (steps + kEnd) : tile);
    halved_from = halved ? waves * blocks : tiles;
    items = tiles + (halved ? rest : 0);
  }
};

// One warp, whose even and odd lanes have a phase each: whether tall tiles are faster than what takes `time` for waves
// of up to `tiles` tiles of 256 rows, and how they are made then.
DEVICE void consider_tall(const GemmParams& gemm, const AllTiles& all, float time, int tiles, PhaseShape& phase) {
  bool worth = all.cost * 4 >= all.count * (4 * tile_cost(48) - 1) && tiles > gridDim.x;
  if (!kHasTall || all.most_tokens != kSmallTokens || !__any_sync(~0u, worth)) return;
  int lane = threadIdx.x % 32, choice = min(lane / 2, 2), rows = choice == 0 ? 3 * kTileRows / 2 : 2 * kTileRows;
  TallTiles tall(gemm, all, phase.steps, rows, choice == 2);
  u32 key = (__float_as_uint(tall.time) & ~3u) | choice;  // none is negative
  for (int d = 2; d < 8; d *= 2) key = min(key, __shfl_xor_sync(~0u, key, d));
  int from = lane % 2 + 2 * (key & 3);
  int row_tiles = __shfl_sync(~0u, tall.row_tiles, from), items = __shfl_sync(~0u, tall.items, from);
  int halved_from = __shfl_sync(~0u, tall.halved_from, from);
  float ends = quotient(tiles + gridDim.x - 1, gridDim.x) * kEnd * __fdividef(all.cost, all.count);
  if (!worth || __uint_as_float(key & ~3u) >= time + ends) return;
  phase.tile_rows = (key & 3) == 0 ? 3 * kTileRows / 2 : 2 * kTileRows;
  phase.row_tiles = row_tiles;
  phase.whole_items = items;
  phase.halved_from = halved_from;
}

// One warp, whose even and odd lanes have a phase each: how its tiles are made and cut.
DEVICE PhaseShape shape_phase(const GemmParams& gemm, bool last, const AllTiles& all, const PhaseTimes& times) {
  PhaseShape phase;
  int blocks = gridDim.x, tiles = all.count * times.row_tiles;
  phase.tile_rows = kTileRows;
  phase.row_tiles = times.row_tiles;
  phase.steps = times.steps;
  phase.rows = gemm.rows;
  phase.whole_items = phase.halved_from = tiles;
  phase.pieces = phase.pieces_per_tile = 0;
  consider_tall(gemm, all, fminf(fminf(times.whole, times.narrow), times.split), tiles, phase);
  if (all.most_tokens == kLargeTokens) {
    // Whole tiles alone: there are many.
  } else if (phase.tile_rows > kTileRows) {
    // Tall ones.
  } else if (times.narrow < fminf(times.whole, times.split)) {
    phase.tile_rows = kNarrowRows;
    phase.row_tiles = times.narrow_tiles;
    phase.whole_items = phase.halved_from = all.count * times.narrow_tiles;
  } else if (times.split < times.whole) {
    // A piece has two steps at least.
    int per_tile = min(min(quotient(blocks, tiles), phase.steps / 2), kMostPieces);
    if (last && per_tile >= kLeastPieces && all.count * all.dearest * 7 <= all.cost * 8) {
      phase.whole_items = 0;
      phase.pieces_per_tile = per_tile;
      phase.pieces = tiles * per_tile;
    } else {
      phase.whole_items = max(quotient(tiles, blocks) - 1, 0) * blocks;
      int most = quotient(all.cost * phase.row_tiles * phase.steps, 2 * all.dearest);
      phase.pieces = phase.whole_items ? blocks : min(most, blocks);
    }
  }
  phase.items = phase.whole_items + phase.pieces;
  return phase;
}

DEVICE int rows_of(const ExpertsParams& p, int e) { return min(max(p.num_tokens[e], 0), p.max_rows); }

// One warp: rows of the largest expert, and whether there is one of few rows.
DEVICE int most_rows(const ExpertsParams& p, bool& few) {
  int most = 0;
  few = false;
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e);
    most = max(most, rows);
    few |= rows > 0 && rows <= p.few_rows;
  }
  few = __any_sync(~0u, few);
  return __reduce_max_sync(~0u, most);
}

// A way to cut all rows into tiles, what it makes of either phase, and about how long it takes.
struct Choice {
  PhaseShape phase[2];
  AllTiles tiles;
  float time;
};
constexpr int kChoices = 6;  // up to 64, 80, 96, 112 and 128 tokens, and large ones

// One warp: what choice number `choice` gives. Code for small tiles is faster; sizes between make more tiles, each of
// which has to be stored, and are taken where they win a tenth.
DEVICE void consider(const ExpertsParams& p, int few_rows, int largest, int choice, int lane, Choice& to) {
  bool large = choice == kChoices - 1;
  AllTiles all = {0, 0, 0, large ? kLargeTokens : kSmallTokens + 16 * choice};
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e);
    if (rows <= few_rows) continue;
    TokenTiles tiles(rows, all.most_tokens);
    all.count += tiles.count;
    all.cost += tiles.cost(rows);
    int most = min(rows, tiles.each);
    all.dearest = max(all.dearest, large ? large_tile_cost(most) : tile_cost(most));
  }
  all.count = __reduce_add_sync(~0u, all.count);
  all.cost = __reduce_add_sync(~0u, all.cost);
  all.dearest = __reduce_max_sync(~0u, all.dearest);
  const GemmParams& gemm = p.gemm[lane % 2];
  PhaseTimes times(gemm, all);
  float time = large ? times.whole : fminf(fminf(times.whole, times.narrow), times.split);
  time += __shfl_xor_sync(~0u, time, 1);
  if (large) {
    time = kHasLarge && largest > kTileTokens ? time : 1e30f;
  } else if (all.most_tokens != kTileTokens) {
    time *= choice == 0 ? 0.97f : 1.1f;
  }
  PhaseShape phase = shape_phase(gemm, lane % 2 == 1, all, times);
  if (lane < 2) to.phase[lane] = phase;
  if (lane == 0) to.tiles = all, to.time = time;
}
