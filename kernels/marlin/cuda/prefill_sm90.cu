// Prefill (large-M) expert kernel for Hopper: w13, activation and w2 of all local experts in one persistent launch.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// Experts of few rows are left to decode_sm90.cu (select_kernel.cuh).
// Layout in:   weights packed as repack.py draws them, scales and zero points [E, groups, rows], x rows of K 16-bit
//              numbers: batched [E, max_rows, K], by reference (row_ids) or as sorted ids (params.cuh).
// Layout out:  `hidden` [all rows, N], one expert after the other; `out` batched or, with sorted ids, at row `id`.
// Warp roles (warp-specialized, 12 warps):
//   0 to 7     consumers: two warpgroups, each 128 weight rows (64 for the second in narrow tiles; 192 or 256 in tall
//              ones) x up to 176 tokens: dequantize, wgmma, fixup, epilogue
//   8          scheduler (claims work items) and producer of packed weights (bulk copies)
//   9 to 11    producers of tokens: one thread by tensor copies, or all by cp.async if the rows are gathered; they wait
//              for w13's tiles before they read `hidden`
// Operands:    weights are A, dequantized from packed codes into registers; tokens are B, in shared memory.
// Pipeline:    ring of 3 or 4 shared-memory stages, each 128 columns of K (codes, scales, tokens), with full and empty
//              mbarriers. Weights run ahead of tokens: those of w2 stream in while w13 drains. Within a stage, the next
//              16 to 64 columns are dequantized while the tensor cores multiply the ones before.
// Schedule:    data-parallel by whole tiles while these fill the GPU, Stream-K for the last waves, or split-K if w2 has
//              few tiles; tile sizes and partition are chosen on the device by an estimate of their time (sections
//              "Tiling" and "Schedule"). Shared tiles are reduced in a fixed order: same input, same bits.
// ARRIVALS:    token producers wait for the rows of each tile, and whoever stores the last results of an expert sets
//              its flag (arrival.cuh). All experts are computed here, and w13's rows are gathered. Some CTAs end before
//              the others, so that the combine has room (section "Leaving").
// Example:     3 tiles x 4 steps on 2 CTAs -> units [0, 6) and [6, 12); tile 1 is split. Unit 1 is claimed first; its
//              CTA publishes the partial sum of steps 6-7, the CTA of unit 0 adds it to steps 4-5.
#include "dequant.cuh"
#include "epilogue.cuh"
#include "select_kernel.cuh"
#include "tile_queue.cuh"
#include "wgmma.cuh"

// ==== Tiling ====
//
// Which tiles the experts' rows are cut into: whatever should take the least time.
//
// A tile is 256 weight rows (192, "narrow", if that fills the GPU better) x up to 64, 80, 96, 112 or 128 tokens of one
// expert. If no expert has more than 64 rows and there are enough tiles, they are 384 or 512 weight rows ("tall"). If
// there are many rows, tiles have up to 176 tokens ("large"), so that every dequantized weight serves more tokens. A
// step is 128 columns of a tile. Costs of a step are in the unit of tile_cost.

constexpr int kTileRows = 256;
constexpr int kTileTokens = kPrefillTileTokens;
constexpr int kSmallTokens = 64;
constexpr int kLargeTokens = 176;
// Large tiles need room for three stages (four bits), and registers (one fma or multiplication per dequantized pair).
constexpr bool kHasLarge = ACT_BF16 && (WEIGHT_TYPE == UINT4B8 || WEIGHT_TYPE >= NVFP4);
constexpr int kStepColumns = 128;
constexpr int kMaxBlocks = 256;

constexpr int kNarrowRows = 192;
// Tall tiles need registers for their sums, room for their codes, and more tiles than CTAs, which TALL says there may
// be. Compiled beside their code, all other tiles are 1 % slower.
constexpr bool kHasTall = TALL && kHasLarge;

// Cost of sharing tiles, in steps per CTA; the second if all tiles are shared and have uneven sizes, since units of
// equal estimated cost then end at different times.
constexpr int kSharingSteps = 5, kUnevenSharingSteps = 20;
// Units per tile from which on split-K tiles are reduced by all CTAs, and the most.
constexpr int kMinSplitK = 4, kMaxSplitK = 16;

// Tokens that a tile is computed for: the least size that there is code for.
constexpr int kMinTokens = 32, kMinLargeTokens = 96;
template <int kMaxTokens>
DEVICE int tile_tokens(int rows) {
  constexpr int kApart = kMaxTokens == kLargeTokens ? 48 : 16,
                kMin = kMaxTokens == kLargeTokens ? kMinLargeTokens : kMinTokens;
  return min(max((rows + kApart - 1) / kApart * kApart, kMin), kMaxTokens);
}

// Cost of a step of a tile, in units of about 235 cycles; 4-bit floats need more instructions.
constexpr int kMoreCost = kBits == 4 && !kIntegers ? 3 : 0;
DEVICE constexpr int tile_cost(int tokens) { return large_m_tile_cost(tokens) + kMoreCost; }
DEVICE constexpr int large_tile_cost(int tokens) { return (tokens > 96 ? 4 + (tokens + 47) / 48 * 3 : 10) + kMoreCost; }

// An expert's rows in as few tiles of up to `most` tokens as possible: all have `each` but the last. Large tiles are
// full; others have about equal sizes, so that none takes much longer.
struct TokenTiles {
  int count, each;
  DEVICE TokenTiles(int rows, int most) : count(quotient(rows + most - 1, most)), each(most) {
    if (most != kLargeTokens && count > 1) each = (quotient(rows + count - 1, count) + 15) / 16 * 16;
  }
  // Cost of one step of all of them.
  DEVICE int cost(int rows) const {
    int rest = rows - (count - 1) * each;
    if (count == 0) return 0;
    if (each == kLargeTokens) return (count - 1) * large_tile_cost(each) + large_tile_cost(rest);
    return (count - 1) * tile_cost(each) + tile_cost(rest);
  }
};

// Cost of the end of a tile, in steps of 256 rows, and of a step of a tall tile per 256 rows.
constexpr float kEnd = 3.0f, kTallEnd = 4.0f, kTallStep = 0.94f;

struct PhaseShape {
  int tile_rows, row_tiles, steps, rows;
  int num_whole_tiles, num_units;
  int halved_from;     // number of the tile from which on each is two items of 256 rows
  int units_per_tile;  // split-K units, if all tiles have equally many and reductions follow (w2); otherwise 0
  int num_items;       // whole tiles, then work units
};

// All token tiles of a launch: their number, the cost of one step of all, and of one of the most expensive.
struct AllTiles {
  int count, cost, max_cost, max_tokens;
};

// Estimated time of a phase in the unit of tile_cost: with whole tiles of 256 or of 192 rows, or with Stream-K units.
struct PhaseTimes {
  int steps, row_tiles, narrow_tiles;
  float whole, narrow, split;

  DEVICE PhaseTimes(const GemmParams& gemm, const AllTiles& all) {
    steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
    row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, narrow_tiles = (gemm.rows + kNarrowRows - 1) / kNarrowRows;
    float mean = __fdividef(all.cost, all.count);
    whole = in_waves(all, row_tiles, mean);
    // One warpgroup has 128 rows of either, and with few tokens it determines the time.
    narrow = in_waves(all, narrow_tiles, mean) * (all.max_cost > tile_cost(32) ? 0.75f : 0.875f);
    bool is_uneven = all.max_cost > mean * 1.06f && all.count * row_tiles < 2 * gridDim.x;
    int sharing = is_uneven ? kUnevenSharingSteps : kSharingSteps;
    split = __fdividef((float)all.cost * row_tiles * steps, gridDim.x) + sharing * mean;
  }

  // The last of several waves may end with the most expensive tile, or with any.
  DEVICE float in_waves(const AllTiles& all, int row_tiles, float mean) const {
    int before = quotient(all.count * row_tiles - 1, gridDim.x);
    return (before ? before * mean + 0.5f * (mean + all.max_cost) : all.max_cost) * steps;
  }
};

// A phase with tall tiles, the last wave in whole ones or in halves, and its estimated time including epilogues.
struct TallTiles {
  int row_tiles, num_items, halved_from;
  float time;

  DEVICE TallTiles(const GemmParams& gemm, const AllTiles& all, int steps, int rows, bool halved) {
    float mean = __fdividef(all.cost, all.count), last = 0.5f * (mean + all.max_cost);
    float tile = steps * rows * (kTallStep / kTileRows) + kTallEnd;
    row_tiles = (gemm.rows + rows - 1) / rows;
    int blocks = gridDim.x, tiles = all.count * row_tiles;
    int waves = quotient(tiles - !halved, blocks), rest = tiles - waves * blocks;
    time = waves * mean * tile + last * (halved ? quotient(2 * rest + blocks - 1, blocks) * (steps + kEnd) : tile);
    halved_from = halved ? waves * blocks : tiles;
    num_items = tiles + (halved ? rest : 0);
  }
};

// One warp; even and odd lanes have a phase each. Chooses tall tiles if they are faster than `time` plus the epilogues
// of waves of up to `tiles` tiles of 256 rows.
DEVICE void evaluate_tall(const GemmParams& gemm, const AllTiles& all, float time, int tiles, PhaseShape& phase) {
  bool worth = all.cost * 4 >= all.count * (4 * tile_cost(48) - 1) && tiles > gridDim.x;
  if (!kHasTall || all.max_tokens != kSmallTokens || !__any_sync(~0u, worth)) return;
  int lane = threadIdx.x % 32, tiling = min(lane / 2, 2), rows = tiling == 0 ? 3 * kTileRows / 2 : 2 * kTileRows;
  TallTiles tall(gemm, all, phase.steps, rows, tiling == 2);
  u32 key = (__float_as_uint(tall.time) & ~3u) | tiling;  // times are not negative, so their bits compare like them
  for (int d = 2; d < 8; d *= 2) key = min(key, __shfl_xor_sync(~0u, key, d));
  int from = lane % 2 + 2 * (key & 3);
  int row_tiles = __shfl_sync(~0u, tall.row_tiles, from), num_items = __shfl_sync(~0u, tall.num_items, from);
  int halved_from = __shfl_sync(~0u, tall.halved_from, from);
  float ends = quotient(tiles + gridDim.x - 1, gridDim.x) * kEnd * __fdividef(all.cost, all.count);
  if (!worth || __uint_as_float(key & ~3u) >= time + ends) return;
  phase.tile_rows = (key & 3) == 0 ? 3 * kTileRows / 2 : 2 * kTileRows;
  phase.row_tiles = row_tiles;
  phase.num_whole_tiles = num_items;
  phase.halved_from = halved_from;
}

// One warp; even and odd lanes have a phase each: the tiles of a phase and how they are partitioned.
DEVICE PhaseShape shape_phase(const GemmParams& gemm, bool last, const AllTiles& all, const PhaseTimes& times) {
  PhaseShape phase;
  int blocks = gridDim.x, tiles = all.count * times.row_tiles;
  phase.tile_rows = kTileRows;
  phase.row_tiles = times.row_tiles;
  phase.steps = times.steps;
  phase.rows = gemm.rows;
  phase.num_whole_tiles = phase.halved_from = tiles;
  phase.num_units = phase.units_per_tile = 0;
  evaluate_tall(gemm, all, fminf(fminf(times.whole, times.narrow), times.split), tiles, phase);
  if (all.max_tokens == kLargeTokens) {
    // Large tiles stay whole: there are many.
  } else if (phase.tile_rows > kTileRows) {
    // Tall tiles, as chosen above.
  } else if (times.narrow < fminf(times.whole, times.split)) {
    phase.tile_rows = kNarrowRows;
    phase.row_tiles = times.narrow_tiles;
    phase.num_whole_tiles = phase.halved_from = all.count * times.narrow_tiles;
  } else if (times.split < times.whole) {
    // A unit has at least two steps.
    int per_tile = min(min(quotient(blocks, tiles), phase.steps / 2), kMaxSplitK);
    if (last && per_tile >= kMinSplitK && all.count * all.max_cost * 7 <= all.cost * 8) {
      phase.num_whole_tiles = 0;
      phase.units_per_tile = per_tile;
      phase.num_units = tiles * per_tile;
    } else {
      phase.num_whole_tiles = max(quotient(tiles, blocks) - 1, 0) * blocks;
      int most = quotient(all.cost * phase.row_tiles * phase.steps, 2 * all.max_cost);
      phase.num_units = phase.num_whole_tiles ? blocks : min(most, blocks);
    }
  }
  phase.num_items = phase.num_whole_tiles + phase.num_units;
  return phase;
}

// One warp: rows of the largest expert, and whether there is a small-M one.
DEVICE int largest_expert(const ExpertsParams& p, bool& any_small_m) {
  int most = 0;
  any_small_m = false;
#pragma unroll 1
  for (int e = threadIdx.x % 32; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e);
    most = max(most, rows);
    any_small_m |= rows > 0 && rows <= p.max_small_m;
  }
  any_small_m = __any_sync(~0u, any_small_m);
  return __reduce_max_sync(~0u, most);
}

// A way to cut all rows into tiles, the resulting shape of both phases, and its estimated time.
struct Tiling {
  PhaseShape phase[2];
  AllTiles tiles;
  float time;
};
constexpr int kTilings = 6;  // up to 64, 80, 96, 112 and 128 tokens, and large

// One warp: evaluates tiling number `tiling`. Code for small tiles is faster; the sizes between make more tiles to
// store and are chosen if they win a tenth.
DEVICE void evaluate(const ExpertsParams& p, int max_small_m, int largest, int tiling, int lane, Tiling& to) {
  bool large = tiling == kTilings - 1;
  AllTiles all = {0, 0, 0, large ? kLargeTokens : kSmallTokens + 16 * tiling};
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e);
    if (rows <= max_small_m) continue;
    TokenTiles tiles(rows, all.max_tokens);
    all.count += tiles.count;
    all.cost += tiles.cost(rows);
    int most = min(rows, tiles.each);
    all.max_cost = max(all.max_cost, large ? large_tile_cost(most) : tile_cost(most));
  }
  all.count = __reduce_add_sync(~0u, all.count);
  all.cost = __reduce_add_sync(~0u, all.cost);
  all.max_cost = __reduce_max_sync(~0u, all.max_cost);
  const GemmParams& gemm = p.gemm[lane % 2];
  PhaseTimes times(gemm, all);
  float time = large ? times.whole : fminf(fminf(times.whole, times.narrow), times.split);
  time += __shfl_xor_sync(~0u, time, 1);
  if (large) {
    time = kHasLarge && largest > kTileTokens ? time : 1e30f;
  } else if (all.max_tokens != kTileTokens) {
    time *= tiling == 0 ? 0.97f : 1.1f;
  }
  PhaseShape phase = shape_phase(gemm, lane % 2 == 1, all, times);
  if (lane < 2) to.phase[lane] = phase;
  if (lane == 0) to.tiles = all, to.time = time;
}

// ==== Schedule ====
//
// Tiles are numbered expert by expert, then by weight rows, then by tokens, so that CTAs that run together share
// weights and tokens. A work item is what a CTA claims at once, by a ticket of an atomic counter: first the items of
// w13, then those of w2. So an item only waits for items of earlier tickets, whose CTAs are running, and no
// co-residency is required.
//
// Data-parallel: items are whole tiles while these fill the GPU. Stream-K: if the last wave would leave too many CTAs
// idle, the last one to two waves are partitioned into one work unit per CTA, of equal cost. A unit may begin and end
// inside a tile. The CTA that has the first step of a tile adds up the sums of the following units, in order (fixup).
// The last unit is claimed first, so those that are waited for have earlier tickets.
//
// Split-K: if w2 has few tiles, one CTA would add up many units while the others wait. So every tile is cut into
// equally many units, all of which publish their sums; reductions follow, each over all units of one tile for some of
// its tokens. A CTA's last ticket, for which there is no item, tells which reductions are its: they, too, only wait for
// earlier tickets.

struct Position {
  int tile, step;
};

struct Schedule {
  PhaseShape phase[2];
  Position unit[2][kMaxBlocks + 1];  // where each unit starts; the end of one is the start of the next
  int max_tokens;                    // of a tile
  Tiling tilings[kTilings];          // candidates
  // Behind this struct: four tables of num_experts + 1 numbers.
  DEVICE int* rows() { return reinterpret_cast<int*>(this + 1); }  // rows of each large-M expert
  DEVICE int* row_start(int n) { return rows() + (n + 1); }        // rows of all experts before, small-M ones too
  DEVICE int* tile_start(int n) { return rows() + 2 * (n + 1); }   // token tiles of all experts before
  DEVICE int* cost_start(int n) { return rows() + 3 * (n + 1); }   // cost of one step of these
};

struct TileSlice {
  int phase, expert, first_row, first_token, tokens;  // which tile; phase -1: no more slices
  int tile_rows;                                      // 192, 256, 384 or 512
  int tile, from, to;                                 // its number, and which of its steps
  int work_unit;                                      // -1 for a whole tile
};

// One warp: the tiling with the least time, for all lanes.
DEVICE const Tiling& best_tiling(const Schedule& s, int num_tilings, int lane) {
  u32 time = lane < num_tilings ? (__float_as_uint(s.tilings[lane].time) & ~7u) | lane : ~0u;  // times are not negative
  return s.tilings[__reduce_min_sync(~0u, time) & 7];
}

DEVICE void apply_tiling(Schedule& s, const Tiling& tiling, int lane) {
  constexpr int kWords = sizeof(s.phase) / sizeof(int);
  if (lane < kWords) reinterpret_cast<int*>(s.phase)[lane] = reinterpret_cast<const int*>(tiling.phase)[lane];
  if (lane == 0) s.max_tokens = tiling.tiles.max_tokens;
}

// One warp: tables of prefix sums over the experts, 32 at a time.
DEVICE void make_tables(Schedule& s, const ExpertsParams& p, int max_small_m, int max_tokens, int lane) {
  int n = p.num_experts, sums[3] = {0, 0, 0};
#pragma unroll 1
  for (int base = 0; base < n; base += 32) {
    int e = base + lane;
    int any = e < n ? rows_of(p, e) : 0;
    int rows = any > max_small_m ? any : 0;
    TokenTiles tiles(rows, max_tokens);
    int own[3] = {any, tiles.count, tiles.cost(rows)};
    if (e < n) s.rows()[e] = rows;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      int sum = sum_of_lanes(own[i], lane);
      int* table = s.rows() + (i + 1) * (n + 1);
      if (e < n) table[e] = sums[i] + sum - own[i];
      sums[i] += __shfl_sync(~0u, sum, 31);
    }
  }
  if (lane < 3) s.rows()[(lane + 1) * (n + 1) + n] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
}

// Cost of all steps before a tile, counted along experts, their row tiles, their token tiles, steps.
DEVICE int cost_before_tile(Schedule& s, int n, int phase, int tile) {
  int row_tiles = s.phase[phase].row_tiles, steps = s.phase[phase].steps;
  int e = find_expert(s.tile_start(n), n, row_tiles, tile);
  TokenTiles tiles(s.rows()[e], s.max_tokens);
  int rest = tile - s.tile_start(n)[e] * row_tiles, row_tile = quotient(rest, tiles.count);
  int cost = s.cost_start(n)[e + 1] - s.cost_start(n)[e];
  int own = row_tile * cost + (rest - row_tile * tiles.count) * tile_cost(tiles.each);
  return (s.cost_start(n)[e] * row_tiles + own) * steps;
}

DEVICE Position position_of_cost(Schedule& s, int n, int phase, int cost) {
  int row_tiles = s.phase[phase].row_tiles, steps = s.phase[phase].steps;
  if (cost >= s.cost_start(n)[n] * row_tiles * steps) return {s.tile_start(n)[n] * row_tiles, 0};
  int e = find_expert(s.cost_start(n), n, row_tiles * steps, cost);
  int rest = cost - s.cost_start(n)[e] * row_tiles * steps;
  int row_cost = (s.cost_start(n)[e + 1] - s.cost_start(n)[e]) * steps;
  TokenTiles tiles(s.rows()[e], s.max_tokens);
  int full_cost = tile_cost(tiles.each) * steps, row_tile = quotient(rest, row_cost);
  rest -= row_tile * row_cost;
  int token_tile = min(quotient(rest, full_cost), tiles.count - 1);
  int tokens = min(s.rows()[e] - token_tile * tiles.each, tiles.each);
  int step = quotient(rest - token_tile * full_cost, tile_cost(tokens));
  return {s.tile_start(n)[e] * row_tiles + row_tile * tiles.count + token_tile, step};
}

// All threads, half of them for either phase, after make_tables: the starts of the Stream-K units.
DEVICE void partition_units(Schedule& s, int n) {
  int threads = blockDim.x / 2, phase = threadIdx.x >= threads;
  const PhaseShape shape = s.phase[phase];
  if (shape.num_units == 0 || shape.units_per_tile) return;
  int total = s.cost_start(n)[n] * shape.row_tiles * shape.steps;
  int start = shape.num_whole_tiles ? cost_before_tile(s, n, phase, shape.num_whole_tiles) : 0;
  int share = quotient(total - start, shape.num_units), longer = total - start - share * shape.num_units;
  for (int unit = threadIdx.x - phase * threads; unit <= shape.num_units; unit += threads) {
    s.unit[phase][unit] = position_of_cost(s, n, phase, start + unit * share + min(unit, longer));
  }
}

// Fills in which tile g.tile is; its steps are the caller's.
DEVICE void locate_tile(Schedule& s, int n, TileSlice& g) {
  const PhaseShape& shape = s.phase[g.phase];
  int row_tiles = shape.row_tiles, tile = g.tile, half = kHasTall ? tile - shape.halved_from : -1;
  if (half >= 0) tile = shape.halved_from + half / 2;
  g.expert = find_expert(s.tile_start(n), n, row_tiles, tile);
  int rows = s.rows()[g.expert];
  TokenTiles tiles(rows, s.max_tokens);
  int rest = tile - s.tile_start(n)[g.expert] * row_tiles, row_tile = quotient(rest, tiles.count);
  g.tile_rows = shape.tile_rows;
  g.first_row = row_tile * g.tile_rows;
  if (half >= 0) {
    g.tile_rows = kTileRows;
    g.first_row += half % 2 * kTileRows;
  }
  g.first_token = (rest - row_tile * tiles.count) * tiles.each;
  g.tokens = min(rows - g.first_token, tiles.each);
}

DEVICE TileSlice whole_tile(Schedule& s, int n, int ticket) {
  TileSlice g;
  g.phase = ticket >= s.phase[0].num_items;
  g.tile = ticket - (g.phase ? s.phase[0].num_items : 0);
  g.from = 0, g.to = s.phase[g.phase].steps;
  g.work_unit = -1;
  locate_tile(s, n, g);
  return g;
}

// Where a unit starts.
DEVICE Position unit_start(Schedule& s, int phase, int unit) {
  const PhaseShape& shape = s.phase[phase];
  if (shape.units_per_tile == 0) return s.unit[phase][unit];
  int tile = quotient(unit, shape.units_per_tile);
  return {tile, quotient((unit - tile * shape.units_per_tile) * shape.steps, shape.units_per_tile)};
}

// A reduction: which tile, its first unit, and which groups of eight tokens.
struct Reduction {
  TileSlice tile;
  int first_group, groups;
};

// Reduction number `number`, of as many as there are units: one part of every tile, then the next part.
DEVICE Reduction reduction_of(Schedule& s, int n, int number) {
  const PhaseShape& shape = s.phase[1];
  int tiles = quotient(shape.num_units, shape.units_per_tile), part = quotient(number, tiles);
  Reduction a;
  a.tile.phase = 1;
  a.tile.tile = number - part * tiles;
  a.tile.work_unit = a.tile.tile * shape.units_per_tile;
  locate_tile(s, n, a.tile);
  int groups = (a.tile.tokens + 7) / 8, each = quotient(groups + shape.units_per_tile - 1, shape.units_per_tile);
  a.first_group = part * each;
  a.groups = min(each, groups - a.first_group);
  return a;
}

// Calls work(slice) for every tile, or part of one, of a ticket's item.
template <typename Work>
DEVICE void for_each_slice_of(Schedule& s, int n, int ticket, Work work) {
  TileSlice g;
  g.phase = ticket >= s.phase[0].num_items;
  const PhaseShape shape = s.phase[g.phase];
  int item = ticket - (g.phase ? s.phase[0].num_items : 0), number = item - shape.num_whole_tiles;
  Position from = {item, 0}, to = {item + 1, 0};
  g.work_unit = -1;
  if (number >= 0) {
    g.work_unit = shape.num_units - 1 - number;
    from = unit_start(s, g.phase, g.work_unit);
    to = unit_start(s, g.phase, g.work_unit + 1);
  }
  for (g.tile = from.tile; g.tile <= to.tile; g.tile++) {
    g.from = g.tile == from.tile ? from.step : 0;
    g.to = g.tile == to.tile ? to.step : shape.steps;
    if (g.from >= g.to) continue;
    locate_tile(s, n, g);
    if (!kHasTall || g.first_row < shape.rows) work(g);
  }
}

// ==== Pipeline ====
//
// What the warps of a CTA share: the ring of stages, the queue of slices, flags, and their sizes; launch parameters.

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps;
constexpr int kTokenWarps = 3;
constexpr int kThreads = 32 * (kWeightWarp + 1 + kTokenWarps);

constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // codes of 64 rows

// Of a stage if tiles have up to kMaxTokens tokens: weight rows, bytes of codes, of one group's scales, of all of
// these.
template <int kMaxTokens>
constexpr int kMaxRows = kHasTall && kMaxTokens == kSmallTokens ? 2 * kTileRows : kTileRows;
template <int kMaxTokens>
constexpr int kCodeBytes = kMaxRows<kMaxTokens> / 64 * kStripBytes;
template <int kMaxTokens>
constexpr int kScaleRow = kMaxRows<kMaxTokens> * kScaleBytes;
template <int kMaxTokens>
constexpr int kCodeStage =
    kCodeBytes<kMaxTokens> + (SCALES_PER_STEP * kScaleRow<kMaxTokens> * (kHasZeros ? 2 : 1) + 127) / 128 * 128;

constexpr int kHalfColumns = kStepColumns / 2;
constexpr int kBoxTokens = 32;  // rows of one tensor copy
constexpr int kBoxBytes = kBoxTokens * kHalfColumns * 2;

// Stages of the ring if tiles have up to kMaxTokens tokens.
template <int kMaxTokens>
constexpr int kStages = kBits == 8 || kMaxTokens > kTileTokens ? 3 : 4;
template <int kMaxTokens>
constexpr int kTokenStage = (kMaxTokens > kTileTokens || (kHasTall && kMaxTokens == kSmallTokens)
                                 ? (kMaxTokens + kBoxTokens - 1) / kBoxTokens * kBoxTokens
                                 : kTileTokens) *
                            kStepColumns * 2;
template <int kMaxTokens>
constexpr int kRingOf = kStages<kMaxTokens> * (kTokenStage<kMaxTokens> + kCodeStage<kMaxTokens>);
constexpr int kRingBytes = kHasTall ? kRingOf<kSmallTokens> : kRingOf<kTileTokens>;
static_assert(kRingOf<kTileTokens> <= kRingBytes && kRingOf<kSmallTokens> <= kRingBytes, "no room for a ring");
static_assert(!kHasLarge || kRingOf<kLargeTokens> <= kRingBytes, "no room for large tiles");

struct PrefillParams {
  TensorMap tokens[2];  // of w13's input, unless its rows are gathered, and of w2's
  ExpertsParams experts;
};

// Whether a phase's tokens are gathered by id; otherwise those of an expert are contiguous.
DEVICE bool are_gathered(const ExpertsParams& p, int phase) { return phase == 0 && p.row_ids != nullptr; }

// Tokens are stored in groups of eight.
DEVICE int token_groups(int tokens) { return (tokens + 7) / 8; }

// sync: tickets, CTAs done, per expert the groups of tokens stored by w13's tiles, per phase and unit whether its sums
// are published in `partials`. ARRIVALS: behind these, per expert what w2's tiles have stored.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
DEVICE int* unit_flag(const ExpertsParams& p, int phase, int unit) {
  return p.sync + 2 + p.num_experts + phase * kMaxBlocks + unit;
}
#if ARRIVALS
DEVICE int* stored_counter(const ExpertsParams& p, int expert) {
  return p.sync + 2 + p.num_experts + 2 * kMaxBlocks + expert;
}
#endif

struct Shared {
  // These come first, one behind the other: Ring relies on it.
  u64 full[kStages<kTileTokens>], empty[kStages<kTileTokens>];
  u64 slice_full[kQueuedSlices], slice_empty[kQueuedSlices];
  TileSlice slice[kQueuedSlices];
  int first_reduction;                // number of this CTA's first
  const u16* gathered[kLargeTokens];  // addresses of the rows of a tile
  Schedule schedule;
};

static_assert(kRingBytes + sizeof(Shared) + 4 * (kMaxExperts + 1) * sizeof(int) <= kSharedBytes,
              "no room for experts' tables");

// Behind the ring.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }

// A warp's position in the ring. A stage has 128 columns of codes [strip][32 columns][16 rows][lane], then scales
// [group][256], then zero points likewise; and apart from them tokens: 64 columns, then the next 64, swizzled as
// wgmma.cuh describes.
template <int kMaxTokens>
struct Ring {
  static constexpr int kTokenHalf = kTokenStage<kMaxTokens> / 2;
  static constexpr int kCodesOffset = kStages<kMaxTokens> * kTokenStage<kMaxTokens>;
  Shared& shared;
  u8* memory;   // the tokens of all stages, then the codes of all stages
  u32 address;  // of `memory`, in shared memory
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : shared(shared_of(memory)), memory(memory), address(shared_address(memory)) {}
  DEVICE u8* tokens() { return memory + stage * kTokenStage<kMaxTokens>; }
  DEVICE u8* codes() const { return memory + kCodesOffset + stage * kCodeStage<kMaxTokens>; }
  DEVICE u32 codes_address() const { return address + kCodesOffset + stage * kCodeStage<kMaxTokens>; }
  DEVICE u64* full() { return &shared.full[stage]; }
  DEVICE u64* empty() { return &shared.empty[stage]; }
  DEVICE void wait_full() { barrier_wait_at<kRingBytes>(address + 8 * stage, parity); }
  // A consumer warp has read this stage.
  DEVICE void release(u32 stage) { barrier_arrive_at<kRingBytes + sizeof(Shared::full)>(address + 8 * stage); }
  DEVICE void wait_empty() { barrier_wait(empty(), parity ^ 1); }
  DEVICE void advance() {
    if (++stage == kStages<kMaxTokens>) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ==== Scheduler and producers ====

// ---- codes and scales, by bulk copies of one thread ----

struct CodeSource {
  const u8 *codes, *scales, *zeros;  // of the tile's first row
  u32 strip_bytes, group_bytes;      // from one strip to the next, from one group to the next
  int rows, columns, groups;
  DEVICE CodeSource(const GemmParams& gemm, const TileSlice& g) : columns(gemm.columns), groups(gemm.groups) {
    i64 first = g.first_row;
    rows = min(gemm.rows - g.first_row, g.tile_rows);
    codes = gemm.weights + (g.expert * (i64)gemm.rows + first) * columns * kBits / 8;
    strip_bytes = 64 * columns * kBits / 8;
    group_bytes = gemm.rows * kScaleBytes;
    i64 scale = (g.expert * (i64)groups * gemm.rows + first) * kScaleBytes;
    scales = gemm.scales + scale;
    zeros = gemm.zeros + scale;
  }
};

template <int kMaxTokens>
DEVICE void load_codes(const CodeSource& source, int step, Ring<kMaxTokens>& ring, u64 policy) {
  int columns = min(source.columns - step * kStepColumns, kStepColumns);
  int first_group = source.groups > 1 ? step * SCALES_PER_STEP : 0;
  int groups = source.groups > 1 ? min(source.groups - first_group, SCALES_PER_STEP) : 1;
  int scale_bytes = source.rows * kScaleBytes;
  u64* full = ring.full();
  barrier_arrive_expecting(full, source.rows * columns * kBits / 8 + groups * scale_bytes * (kHasZeros ? 2 : 1));
  u32 to = shared_address(ring.codes());
  const u8* from = source.codes + step * kStripBytes;
  int whole = source.rows / 64;
#pragma unroll
  for (int i = 0; i < kMaxRows<kMaxTokens> / 64; i++) {
    if (i >= whole) break;
    bulk_copy(to + i * kStripBytes, from + i * source.strip_bytes, 64 * columns * kBits / 8, full, policy);
  }
  if (source.rows % 64) {
    from = source.codes + whole * source.strip_bytes + step * (kStripBytes / 2);
    for (int c = 0; c < columns / 32; c++) {
      u32 block = to + whole * kStripBytes + c * 4 * kFragmentBytes;
      bulk_copy(block, from + c * 2 * kFragmentBytes, 2 * kFragmentBytes, full, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < SCALES_PER_STEP; i++) {
    if (i >= groups) break;
    u32 offset = (first_group + i) * source.group_bytes;
    u32 row = to + kCodeBytes<kMaxTokens> + i * kScaleRow<kMaxTokens>;
    bulk_copy(row, source.scales + offset, scale_bytes, full, policy);
    if constexpr (kHasZeros) {
      bulk_copy(row + SCALES_PER_STEP * kScaleRow<kMaxTokens>, source.zeros + offset, scale_bytes, full, policy);
    }
  }
}

#if ARRIVALS
// ---- Leaving ----
//
// Results leave from SMs of their own, which must be there while the last tiles are computed. Of as many CTAs as the
// combine uses, each claims no more items from the ticket on from which the others need as long for the rest of w2 as
// these SMs need to read all slots. Only whole tiles may be left to others.

constexpr int kSlotBytesPerCycle = 48;  // that an SM adds up, twice over: half of the rows leave behind the last tile
constexpr int kCyclesPerCost = 235;     // of tile_cost

DEVICE int leaving_ticket(const ExpertsParams& p, Schedule& s, int total) {
  int leaving = p.arrival.leaving, staying = gridDim.x - leaving;
  if ((int)blockIdx.x >= leaving || staying <= 0 || s.phase[1].num_units > 0) return total;
  bool large = s.max_tokens == kLargeTokens;
  float cost = large ? large_tile_cost(kLargeTokens) : tile_cost(s.max_tokens);
  float item_cycles = cost * kCyclesPerCost * s.phase[1].steps;
  float slot_cycles = 2.0f * p.gemm[1].rows / kSlotBytesPerCycle;
  float returning = slot_cycles * s.row_start(p.num_experts)[p.num_experts] / leaving;
  int items = (int)(returning / item_cycles * staying);
  return max(total - items, s.phase[0].num_items);
}
#endif

// One thread claims items and pushes their slices to the other warps as it begins to load them.
template <int kMaxTokens>
DEVICE void run_weight_thread(const ExpertsParams& p, Shared& shared, Ring<kMaxTokens>& ring, int ticket) {
  int total = shared.schedule.phase[0].num_items + shared.schedule.phase[1].num_items;
  // CTAs that run together read the same codes at about the same time, so these need not stay in L2; tokens and
  // `hidden` should. Not tried with large tiles.
  u64 policy = kMaxTokens == kLargeTokens ? policy_evict_normal() : policy_evict_first();
  int index = 0, parity = 1;
#if ARRIVALS
  const int last = leaving_ticket(p, shared.schedule, total);
#endif
  auto push = [&](const TileSlice& g) { push_slice(shared, g, index, parity); };
  while (ticket < total) {
    if constexpr (kMaxTokens == kLargeTokens) {
      const TileSlice& g = shared.slice[index];  // registers are short: all of it is read again every step
      push(whole_tile(shared.schedule, p.num_experts, ticket));
      for (int step = 0; step < g.to; step++) {
        ring.wait_empty();
        load_codes(CodeSource(p.gemm[g.phase], g), step, ring, policy);
        ring.advance();
      }
    } else {
      for_each_slice_of(shared.schedule, p.num_experts, ticket, [&](const TileSlice& g) {
        push(g);
        CodeSource source(p.gemm[g.phase], g);
        for (int step = g.from; step < g.to; step++) {
          ring.wait_empty();
          load_codes(source, step, ring, policy);
          ring.advance();
        }
      });
    }
#if ARRIVALS
    if (ticket >= last) {
      ticket = 1 << 30;  // no reduction either
      break;
    }
#endif
    ticket = atomicAdd(p.sync, 1);
  }
  shared.first_reduction = ticket - total;
  TileSlice none;
  none.phase = -1;
  push(none);
}

// ---- tokens ----

DEVICE void wait_for_hidden(const ExpertsParams& p, Shared& shared, int expert) {
  Schedule& s = shared.schedule;
  wait_at_least(ready_flag(p, expert), token_groups(s.rows()[expert]) * (p.gemm[0].rows / 32));
}

// Contiguous tokens, by tensor copies of one thread. The last rows of a box may belong to other experts or to none.
template <int kMaxTokens>
DEVICE void load_tokens(const PrefillParams& params, Shared& shared, const TileSlice& g, Ring<kMaxTokens>& ring) {
  const ExpertsParams& p = params.experts;
  int row = g.first_token;
  if (g.phase == 1) {
    wait_for_hidden(p, shared, g.expert);
    fence_proxy_async_global();
    row += shared.schedule.row_start(p.num_experts)[g.expert];
  } else {
    row += g.expert * p.max_rows;
  }
  int boxes = (tile_tokens<kMaxTokens>(g.tokens) + kBoxTokens - 1) / kBoxTokens;
  for (int step = g.from; step < g.to; step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(), 2 * boxes * kBoxBytes);
    barrier_arrive(ring.full(), kTokenWarps * 32 - 1);
    for (int i = 0; i < 2 * boxes; i++) {
      u32 to = shared_address(ring.tokens()) + i % 2 * Ring<kMaxTokens>::kTokenHalf + i / 2 * kBoxBytes;
      int column = step * kStepColumns + i % 2 * kHalfColumns;
      tensor_copy(to, &params.tokens[g.phase], column, row + i / 2 * kBoxTokens, ring.full());
    }
    ring.advance();
  }
}

DEVICE i64 gathered_row(const ExpertsParams& p, Schedule& s, int expert, int i) {
  i64 position = p.sorted ? s.row_start(p.num_experts)[expert] + i : (i64)expert * p.max_rows + i;
  return p.row_ids[position] / p.ids_divisor;
}

#if ARRIVALS
// Waits for the rows that this warp copies: four neighbouring ones of every twelve.
DEVICE void await_tokens(const ExpertsParams& p, Schedule& s, const TileSlice& g, ArrivingRows& arriving) {
  constexpr int kApart = 4 * kTokenWarps;
  int first = (threadIdx.x / 32 - kWeightWarp - 1) * 4;
  int whole = g.tokens / kApart, rest = min(max(g.tokens - whole * kApart - first, 0), 4);
  arriving.await(4 * whole + rest, [&](int i) {
    return (int)gathered_row(p, s, g.expert, g.first_token + i / 4 * kApart + first + i % 4);
  });
}
#endif

// A thread copies the same 16-byte chunk of every twelfth row; the addresses of the rows are found once per tile.
template <int kMaxTokens>
DEVICE void gather_tokens(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring<kMaxTokens>& ring) {
  constexpr int kApart = 4 * kTokenWarps;
  int lane = threadIdx.x % 32, first = (threadIdx.x / 32 - kWeightWarp - 1) * 4 + lane / 8, chunk = lane % 8;
  int columns = p.gemm[0].columns;
  __syncwarp();
  for (int row = first; row < g.tokens && chunk == 0; row += kApart) {
    shared.gathered[row] = p.gemm[0].input + gathered_row(p, shared.schedule, g.expert, g.first_token + row) * columns;
  }
  __syncwarp();
  for (int step = g.from; step < g.to; step++) {
    ring.wait_empty();
    for (int half = 0; half < 2; half++) {
      int column = step * kStepColumns + half * kHalfColumns + chunk * 8;
      u32 valid = column < columns ? 16 : 0, to = shared_address(ring.tokens()) + half * Ring<kMaxTokens>::kTokenHalf;
#pragma unroll 4
      for (int row = first; row < g.tokens; row += kApart) {
        copy_async_16(to + row * 128 + (chunk ^ row % 8) * 16, shared.gathered[row] + (valid ? column : 0), valid);
      }
    }
    barrier_arrive_on_copies(ring.full());
    ring.advance();
  }
}

template <int kMaxTokens>
DEVICE void run_token_warps(const PrefillParams& params, Shared& shared, Ring<kMaxTokens>& ring) {
  const ExpertsParams& p = params.experts;
#if ARRIVALS
  ArrivingRows arriving(p.arrival);
#endif
  for_each_slice(shared, [&](const TileSlice g) {
#if ARRIVALS
    if (g.phase == 0) await_tokens(p, shared.schedule, g, arriving);
#endif
    if (are_gathered(p, g.phase)) {
      gather_tokens(p, shared, g, ring);
    } else if (threadIdx.x / 32 == kWeightWarp + 1 && elected()) {
      load_tokens(params, shared, g, ring);
    } else {
      for (int step = g.from; step < g.to; step++) ring.advance();
    }
    __syncwarp();
  });
}

// ==== Operands ====
//
// Sums, codes and scales of a lane.

// A lane's sums: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Row blocks (16 neighbouring rows) of a consumer warp in a tile of 128, 192 or 256 rows: two, or one if the tile has
// 128 rows and for the second warpgroup of a narrow tile.
DEVICE int row_blocks_of(int warp, int rows) {
  return rows == kTileRows || (rows == kNarrowRows && warp < kConsumerWarps / 2) ? 2 : 1;
}

// The first of these rows.
DEVICE int warp_row(int warp, int rows) {
  if (row_blocks_of(warp, rows) == 2) return warp * 32;
  return warp * 16 + (rows == kNarrowRows ? kTileRows / 4 : 0);
}

// A lane's codes and scales of 64 columns of its warp's row blocks.
constexpr int kScalesPerHalf = SCALES_PER_STEP <= 2 ? 1 : SCALES_PER_STEP / 2;
struct Codes {
  u32 words[2][2][2 * kWords];  // [row block][32 columns]
  Scales scales[2][kScalesPerHalf];
};

struct CodeReader {
  u32 codes, scales;  // offsets of the lane's in a stage
  bool one_group;
  // For `rows` weight rows of a stage, from row `first` on.
  DEVICE CodeReader(bool one_group, int rows, int first = 0) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int row = first + warp_row(thread / 32, rows), lane = thread % 32;
    codes = row / 64 * kStripBytes + fragment_place(row % 64 / 16) + lane_place(lane);
    scales = (row + lane / 4 * 2) * kScaleBytes;
  }

  template <int kMaxTokens>
  DEVICE Scales load(const Ring<kMaxTokens>& ring, int group, int first_row) const {
    const u8* row =
        ring.codes() + kCodeBytes<kMaxTokens> + scales + group * kScaleRow<kMaxTokens> + first_row * kScaleBytes;
    return load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow<kMaxTokens>);
  }

  // kHalf: which 64 of the stage's 128 columns.
  template <int kRowBlocks, int kHalf, int kMaxTokens>
  DEVICE void read(Codes& to, const Ring<kMaxTokens>& ring) const {
    constexpr int kOffset = kHalf * 8 * kFragmentBytes;
    u32 from = ring.codes_address() + codes;
    load_words_at<kOffset>(from, to.words[0][0]);
    if constexpr (kRowBlocks == 2) load_words_at<kOffset + fragment_place(1)>(from, to.words[1][0]);
    load_words_at<kOffset + 4 * kFragmentBytes>(from, to.words[0][1]);
    if constexpr (kRowBlocks == 2)
      load_words_at<kOffset + 4 * kFragmentBytes + fragment_place(1)>(from, to.words[1][1]);
    constexpr int kScales = SCALES_PER_STEP == 1 && kHalf ? 0 : kRowBlocks * kScalesPerHalf;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kRowBlocks, group = one_group ? 0 : kHalf * SCALES_PER_STEP / 2 + n / kRowBlocks;
      to.scales[i][n / kRowBlocks] = load(ring, group, i * 16);
    }
  }
};

// ==== Products: tiles of more than 112 tokens ====
//
// Their sums leave few registers, so 32 columns are dequantized at a time.

// A lane's codes and scales of 32 columns, a quarter of a step. Up to 128 tokens, a quarter is dequantized beside the
// products of the one before it; with more, while the other warpgroup's products run.
struct QuarterCodes {
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;
  u32 words[2][2 * kWords];  // [row block]
  Scales scales[2][kGroups];

  template <int kQuarter, int kMaxTokens>
  DEVICE void read(const CodeReader& reader, const Ring<kMaxTokens>& ring) {
    u32 from = ring.codes_address() + reader.codes;
    load_words_at<kQuarter * 4 * kFragmentBytes>(from, words[0]);
    load_words_at<kQuarter * 4 * kFragmentBytes + fragment_place(1)>(from, words[1]);
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : 2 * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % 2, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / 2;
      scales[i][n / 2] = reader.load(ring, group, i * 16);
    }
  }

  DEVICE void dequantize(u32 (&weights)[4][4]) const {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      int i = n % 2, k = n / 2;
      dequantize_folded(&words[i][k * kWords], scales[i][k * kGroups / 2], weights[n]);
    }
  }
};

template <int kMaxTokens, int kTokens>
struct LargeTile {
  static constexpr int kBuffers = kTokens > kTileTokens ? 1 : 2;
  SumsOf<kTokens>& sums;
  CodeReader reader;
  QuarterCodes codes;
  u32 weights[kBuffers][4][4];

  DEVICE LargeTile(SumsOf<kTokens>& sums, bool one_group) : sums(sums), reader(one_group, kTileRows) {}

  template <int kQuarter>
  DEVICE void multiply(u32 tokens) {
    constexpr u32 kOffset = kQuarter / 2 * (Ring<kMaxTokens>::kTokenHalf / 16) + kQuarter % 2 * 4;
    u64 descriptor = kDescriptorHigh << 32 | (tokens + kOffset);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; n++) wgmma<kTokens>(sums[n % 2], weights[kQuarter % kBuffers][n], descriptor + n / 2 * 2);
    wgmma_commit();
  }

  // Products of one quarter; meanwhile the next one's codes are read and dequantized.
  template <int kQuarter>
  DEVICE void run_quarter(u32 tokens, const Ring<kMaxTokens>& ring) {
    multiply<kQuarter>(tokens);
    codes.template read<kQuarter + 1>(reader, ring);
    wgmma_wait<kBuffers - 1>();
    codes.dequantize(weights[(kQuarter + 1) % kBuffers]);
  }
};

template <int kMaxTokens, int kTokens>
DEVICE void multiply_large_steps(SumsOf<kMaxTokens>& result, int steps, bool one_group, bool gathered,
                                 Ring<kMaxTokens>& ring) {
  constexpr bool kTwo = LargeTile<kMaxTokens, kTokens>::kBuffers == 2;
  bool leader = threadIdx.x % 32 == 0;
  SumsOf<kTokens> sums;
  LargeTile<kMaxTokens, kTokens> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.codes.template read<0>(tile.reader, ring);
  tile.codes.dequantize(tile.weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kMaxTokens> / 16);
    tile.template run_quarter<0>(operand, ring);
    tile.template run_quarter<1>(operand, ring);
    tile.template run_quarter<2>(operand, ring);
    tile.template multiply<3>(operand);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      tile.codes.template read<0>(tile.reader, ring);
    }
    if (kTwo && more) {
      wgmma_wait<1>();
      tile.codes.dequantize(tile.weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
    if (!kTwo) tile.codes.dequantize(tile.weights[0]);
  }
#pragma unroll
  for (int i = 0; i < kMaxTokens; i++) {
    int half = i / (kMaxTokens / 2), j = i % (kMaxTokens / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

// ==== Products: all other tiles of up to 256 rows ====
//
// 64 columns are dequantized while the 64 before them are multiplied.

template <int kRowBlocks>
using Weights = u32[4 * kRowBlocks][4];  // operands of 16 columns: [columns][row block][four pairs]

template <int kRowBlocks>
DEVICE void dequantize_codes(const Codes& codes, Weights<kRowBlocks>& weights) {
#pragma unroll
  for (int n = 0; n < 4 * kRowBlocks; n++) {
    int i = n % kRowBlocks, k = n / kRowBlocks;
    dequantize_folded(&codes.words[i][k / 2][k % 2 * kWords], codes.scales[i][k * kScalesPerHalf / 4], weights[n]);
  }
}

// With few tokens, dequantizing takes longer than the products. Then the warpgroups work in ping-pong: one dequantizes
// while the tensor cores multiply for the other.
DEVICE constexpr bool is_ping_pong(int tokens) { return tokens == 32; }

DEVICE void acquire_tensor_cores(int group) {
  if (group == 0) {
    named_barrier<2, kConsumerThreads>();
  } else {
    named_barrier<3, kConsumerThreads>();
  }
}

DEVICE void release_tensor_cores(int group) {
  if (group == 0) {
    named_arrive<3, kConsumerThreads>();
  } else {
    named_arrive<2, kConsumerThreads>();
  }
}

template <int kTokens, int kRowBlocks>
DEVICE void multiply_half(SumsOf<kTokens>& sums, const Weights<kRowBlocks>& weights, u32 tokens, int group) {
  u64 descriptor = kDescriptorHigh << 32 | tokens;
  if (is_ping_pong(kTokens)) acquire_tensor_cores(group);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < 4 * kRowBlocks; n++) {
    wgmma<kTokens>(sums[n % kRowBlocks], weights[n], descriptor + n / kRowBlocks * 2);
  }
  wgmma_commit();
  if (is_ping_pong(kTokens)) release_tensor_cores(group);
}

// All steps of a slice, half a step at a time. An instruction beside the products costs about 1.7 cycles. Unused sums
// are zeroed, or the compiler keeps too many registers.
template <int kMaxTokens, int kTokens, int kRowBlocks>
DEVICE void multiply_steps(SumsOf<kMaxTokens>& result, int steps, bool one_group, bool gathered,
                           Ring<kMaxTokens>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  CodeReader reader(one_group, kRowBlocks == 2 ? kTileRows : kNarrowRows);
  Codes codes;
  SumsOf<kTokens> sums;
  Weights<kRowBlocks> weights[2];
  // shfl: the compiler then knows that they are warp-uniform.
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  reader.read<kRowBlocks, 0>(codes, ring);
  dequantize_codes<kRowBlocks>(codes, weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // tokens were written by cp.async, wgmma reads through the async proxy
    u32 operand = first + ring.stage * (kTokenStage<kMaxTokens> / 16);
    multiply_half<kTokens, kRowBlocks>(sums, weights[0], operand, group);
    reader.read<kRowBlocks, 1>(codes, ring);
    dequantize_codes<kRowBlocks>(codes, weights[1]);
    wgmma_wait<0>();
    multiply_half<kTokens, kRowBlocks>(sums, weights[1], operand + Ring<kMaxTokens>::kTokenHalf / 16, group);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      reader.read<kRowBlocks, 0>(codes, ring);
      dequantize_codes<kRowBlocks>(codes, weights[0]);
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
  }
#pragma unroll
  for (int i = 0; i < kMaxTokens; i++) {
    int half = i / (kMaxTokens / 2), j = i % (kMaxTokens / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

// Dispatches to the code for the least size of tile that suffices, at least kTokens. Narrow tiles have every second
// size.
template <int kMaxTokens, int kTokens, int kRowBlocks>
DEVICE void multiply_tokens(SumsOf<kMaxTokens>& sums, int tokens, int steps, bool one_group, bool gathered,
                            Ring<kMaxTokens>& ring) {
  constexpr int kNext = kMaxTokens == kLargeTokens ? kTokens + 48 : kTokens + (kRowBlocks == 2 ? 16 : 32);
  if constexpr (kTokens < kMaxTokens) {
    if (tokens > kTokens) {
      constexpr int kMore = kNext < kMaxTokens ? kNext : kMaxTokens;
      return multiply_tokens<kMaxTokens, kMore, kRowBlocks>(sums, tokens, steps, one_group, gathered, ring);
    }
  }
  if constexpr (kMaxTokens == kLargeTokens || (kTokens == kTileTokens && kRowBlocks == 2)) {
    multiply_large_steps<kMaxTokens, kTokens>(sums, steps, one_group, gathered, ring);
  } else {
    multiply_steps<kMaxTokens, kTokens, kRowBlocks>(sums, steps, one_group, gathered, ring);
  }
}

template <int kMaxTokens>
DEVICE void multiply_slice(SumsOf<kMaxTokens>& sums, const TileSlice& g, bool one_group, bool gathered,
                           Ring<kMaxTokens>& ring) {
  constexpr int kMin = kMaxTokens == kLargeTokens ? kMinLargeTokens : kMinTokens;
  int steps = g.to - g.from, tokens = tile_tokens<kMaxTokens>(g.tokens);
  // shfl: the compiler then knows that it is warp-uniform and keeps addresses in uniform registers.
  if (kMaxTokens == kLargeTokens || __shfl_sync(~0u, row_blocks_of(threadIdx.x / 32, g.tile_rows), 0) == 2) {
    multiply_tokens<kMaxTokens, kMin, 2>(sums, tokens, steps, one_group, gathered, ring);
  } else {
    multiply_tokens<kMaxTokens, kMin, 1>(sums, tokens, steps, one_group, gathered, ring);
  }
}

// ==== Epilogue ====
//
// A tile's sums are published for another CTA, or completed with those of others, activated and stored.

DEVICE float4* unit_sums(const ExpertsParams& p, int phase, int unit) {
  return reinterpret_cast<float4*>(p.partials) + (i64)(phase * gridDim.x + unit) * p.max_tile_tokens * (kTileRows / 4) +
         threadIdx.x;
}

// Adds, in order, the sums of the tile's later units, which other CTAs have published.
template <int kMaxTokens>
DEVICE void fixup_tile(const ExpertsParams& p, Schedule& s, const TileSlice& g, SumsOf<kMaxTokens>& sums) {
  constexpr int kTogether = 8;  // groups of 8 tokens that are loaded together
  for (int unit = g.work_unit + 1; unit < (int)gridDim.x; unit++) {
    Position start = s.unit[g.phase][unit], end = s.unit[g.phase][unit + 1];
    if (start.tile > g.tile || start.step == 0) return;
    if (start.tile == end.tile && start.step == end.step) continue;
    if (threadIdx.x == 0) wait_at_least(unit_flag(p, g.phase, unit), 1);
    named_barrier<1, kConsumerThreads>();
    const float4* from = unit_sums(p, g.phase, unit);
#pragma unroll
    for (int first = 0; first < kMaxTokens / 8; first += kTogether) {
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

template <int kMaxTokens>
DEVICE void publish_unit(const ExpertsParams& p, const TileSlice& g, SumsOf<kMaxTokens>& sums) {
  grid_dependency_wait();  // earlier kernels use `partials`, too
  float4* to = unit_sums(p, g.phase, g.work_unit);
#pragma unroll
  for (int j = 0; j < kMaxTokens / 8; j++) {
    if (8 * j >= g.tokens) break;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* sum = &sums[i][4 * j];
      __stcg(to + (2 * j + i) * kConsumerThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release_gpu(unit_flag(p, g.phase, g.work_unit), 1);
}

// Sums of eight tokens of a split-K tile all of whose units are published, added in order.
DEVICE void sum_units(const ExpertsParams& p, const TileSlice& g, int units, int group, float (&sums)[2][4]) {
  constexpr int kTogether = 8;  // units that are loaded together
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < units; first += kTogether) {
    float4 v[kTogether][2];
#pragma unroll
    for (int n = 0; n < 2 * kTogether; n++) {
      const float4* from = unit_sums(p, g.phase, g.work_unit + min(first + n / 2, units - 1));
      v[n / 2][n % 2] = __ldcg(from + (2 * group + n % 2) * kConsumerThreads);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTogether; n++) {
      float* sum = sums[n % 2];
      const float4& more = v[n / 2][n % 2];
      if (first + n / 2 < units) sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
  }
}

// Global scale and bias of the packed rows g and g + 8 of one row block.
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

// Stores a warp's part of a tile: for every token 16 outputs (gated) or 32, half as many if it has one row block.
template <bool kActivate>
struct TileStore {
  static constexpr bool kGate = kActivate && kGated;
  u8* to;                        // address of this lane's outputs of row 0
  const int* ids;                // output rows of this lane's tokens, or null: consecutive from `row`
  int row, row_bytes;            // output row of this lane's first token
  int tokens, odd;               // tokens of the tile from that one on; lane % 2
  bool present, two_row_blocks;  // present: the weights have the warp's rows
  Affine affine[2];

  DEVICE TileStore(const ExpertsParams& p, Schedule& s, const TileSlice& g) {
    const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;"
                 : "=r"(thread));  // opaque: nothing derived from it is kept across the main loop
    int lane = thread % 32, row_blocks = row_blocks_of(thread / 32, g.tile_rows);
    int first = g.first_row + warp_row(thread / 32, g.tile_rows), token = g.first_token + lane / 4;
    int rows_before = s.row_start(p.num_experts)[g.expert], width = kGate ? gemm.rows / 2 : gemm.rows;
    present = first < gemm.rows;
    two_row_blocks = row_blocks == 2;
    odd = lane % 2;
    row_bytes = 2 * width;
    to = reinterpret_cast<u8*>(gemm.output + (kGate ? first / 2 + odd * 8 + lane % 4 / 2 * 4 : first + lane % 4 * 4));
    ids = !kActivate && p.sorted ? p.row_ids + rows_before + token : nullptr;
    row = kActivate ? rows_before + token : g.expert * p.max_rows + token;
    tokens = kGate && odd && !two_row_blocks ? 0 : g.tokens - lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) affine[i] = load_affine<kGate>(gemm, g.expert, first + 16 * i, lane / 4);
  }

  // kGroups groups of eight tokens, both row blocks, side by side: each alone is a dependency chain of some 300 cycles.
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
      u8* address = to + (i64)own * row_bytes;
      if constexpr (kGate) {
        // Lanes 2 c and 2 c + 1 swap halves, so that each has four neighbouring outputs of one row block.
        u32 other = __shfl_xor_sync(~0u, odd ? out[j][0][0] : out[j][1][0], 1);
        uint2 four = odd ? make_uint2(other, out[j][1][0]) : make_uint2(out[j][0][0], other);
        if (token < tokens) *reinterpret_cast<uint2*>(address) = four;
      } else {
        if (token < tokens) *reinterpret_cast<uint2*>(address) = make_uint2(out[j][0][0], out[j][0][1]);
        if (token < tokens && two_row_blocks) {
          *reinterpret_cast<uint2*>(address + 32) = make_uint2(out[j][1][0], out[j][1][1]);
        }
      }
    }
  }
};

// Stores a tile by a loop over 64 tokens, which keeps code small: instructions that run for the first time come from
// memory. Large tiles are unrolled; there are many of them.
template <bool kActivate, int kMaxTokens>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const TileSlice& g, SumsOf<kMaxTokens>& sums) {
  constexpr int kTogether = kMaxTokens == kLargeTokens ? kMaxTokens : 64;  // tokens
  constexpr int kGroups = kMaxTokens == kLargeTokens ? 2 : 4;
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
    for (int i = 0; i < kMaxTokens / 2 - kTogether / 2; i++) {
      sums[0][i] = sums[0][i + kTogether / 2];
      sums[1][i] = sums[1][i + kTogether / 2];
    }
  }
}

// Adds to the flag that readers of `hidden` wait for.
DEVICE void publish_tile(const ExpertsParams& p, const TileSlice& g) {
  fence_proxy_async_global();
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) {
    int rows = min(g.tile_rows, p.gemm[0].rows - g.first_row);
    add_release_gpu(ready_flag(p, g.expert), token_groups(g.tokens) * (rows / 32));
  }
}

// Counts what a warpgroup has stored of an expert's results, as much as the tile for either; the last one sets the
// expert's flag. The warpgroups do not wait for each other: one stores while the tensor cores work for the other.
DEVICE void publish_results(const ExpertsParams& p, Schedule& s, const TileSlice& g, int groups) {
#if ARRIVALS  // without, it is not called
  if (threadIdx.x < kConsumerThreads / 2) {
    named_barrier<4, kConsumerThreads / 2>();
  } else {
    named_barrier<5, kConsumerThreads / 2>();
  }
  if (threadIdx.x % (kConsumerThreads / 2) == 0) {
    int rows = min(g.tile_rows, p.gemm[1].rows - g.first_row);
    count_results(p.arrival, g.expert, stored_counter(p, g.expert), groups * (rows / 32),
                  2 * token_groups(s.rows()[g.expert]) * (p.gemm[1].rows / 32));
  }
#endif
}

// Reductions of w2's split-K units, every gridDim.x-th.
DEVICE void run_reductions(const ExpertsParams& p, Schedule& s, int number) {
  const PhaseShape& shape = s.phase[1];
  for (; shape.units_per_tile > 0 && number < shape.num_units; number += gridDim.x) {
    Reduction a = reduction_of(s, p.num_experts, number);
    if (a.groups <= 0) continue;
    if (threadIdx.x < shape.units_per_tile) wait_at_least(unit_flag(p, 1, a.tile.work_unit + threadIdx.x), 1);
    named_barrier<1, kConsumerThreads>();
    TileStore<false> tile(p, s, a.tile);
    if (!ARRIVALS && !tile.present) continue;
#pragma unroll 1
    for (int group = a.first_group; group < a.first_group + a.groups; group++) {
      if (ARRIVALS && !tile.present) break;
      float sums[2][4];
      sum_units(p, a.tile, shape.units_per_tile, group, sums);
      tile.template store<1>(group, sums[0], sums[1]);
    }
    if constexpr (ARRIVALS) publish_results(p, s, a.tile, a.groups);
  }
}

// Everything after a slice's last step.
template <int kMaxTokens>
DEVICE void finish_slice(const ExpertsParams& p, Schedule& s, const TileSlice& g, SumsOf<kMaxTokens>& sums) {
  if constexpr (kMaxTokens != kLargeTokens) {  // large tiles are whole
    if (g.from > 0 || s.phase[g.phase].units_per_tile > 0) {
      publish_unit<kMaxTokens>(p, g, sums);
      return;
    }
    if (g.to < s.phase[g.phase].steps) fixup_tile<kMaxTokens>(p, s, g, sums);
  }
  if (g.phase == 1) {
    store_tile<false, kMaxTokens>(p, s, g, sums);
    if constexpr (ARRIVALS) publish_results(p, s, g, token_groups(g.tokens));
  } else {
    store_tile<true, kMaxTokens>(p, s, g, sums);
    publish_tile(p, g);
  }
}

// ==== Tall tiles ====
//
// 384 or 512 weight rows x up to 64 tokens: the fixed costs of a step and of a tile are shared by more weights.

// A lane's sums: those of the tile's first 256 rows, then of the others.
using TallSums = float[4][kSmallTokens / 2];

// 16 or 32 columns at a time; while they are multiplied, the next ones are dequantized.
template <int kTokens, int kRowBlocks>
struct TallTile {
  static constexpr int kDepth = kRowBlocks == 3 ? 2 : 1;        // x 16 columns, as registers allow
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;  // of 32 columns
  float (&sums)[kRowBlocks][kTokens / 2];
  CodeReader reader, third;  // third: of the last 128 of 384 rows
  u32 words[kRowBlocks][2 * kWords];
  Scales scales[kRowBlocks][kGroups];
  u32 weights[2][kDepth][kRowBlocks][4];

  DEVICE TallTile(float (&sums)[kRowBlocks][kTokens / 2], bool one_group)
      : sums(sums), reader(one_group, kTileRows), third(one_group, kTileRows / 2, kTileRows) {}

  // 32 columns.
  template <int kQuarter>
  DEVICE void read(const Ring<kSmallTokens>& ring) {
    constexpr int kOffset = kQuarter * 4 * kFragmentBytes, kNextStrips = kTileRows / 64 * kStripBytes;
    u32 from = ring.codes_address();
    load_words_at<kOffset>(from + reader.codes, words[0]);
    load_words_at<kOffset + fragment_place(1)>(from + reader.codes, words[1]);
    if constexpr (kRowBlocks == 3) {
      load_words_at<kOffset>(from + third.codes, words[2]);
    } else {
      load_words_at<kOffset + kNextStrips>(from + reader.codes, words[2]);
      load_words_at<kOffset + kNextStrips + fragment_place(1)>(from + reader.codes, words[3]);
    }
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : kRowBlocks * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kRowBlocks, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / kRowBlocks;
      scales[i][n / kRowBlocks] = kRowBlocks == 3 && i == 2 ? third.load(ring, group, 0)
                                                            : reader.load(ring, group, i / 2 * kTileRows + i % 2 * 16);
    }
  }

  template <int n>
  DEVICE void dequantize() {
#pragma unroll
    for (int i = 0; i < kDepth * kRowBlocks; i++) {
      int block = i % kRowBlocks, k = (n * kDepth + i / kRowBlocks) % 2;
      dequantize_folded(&words[block][k * kWords], scales[block][k * kGroups / 2],
                        weights[n % 2][i / kRowBlocks][block]);
    }
  }

  template <int n>
  DEVICE void multiply(u32 tokens) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth * kRowBlocks; i++) {
      int k = n * kDepth + i / kRowBlocks;
      u64 descriptor = kDescriptorHigh << 32 | (tokens + k / 4 * (Ring<kSmallTokens>::kTokenHalf / 16) + k % 4 * 2);
      wgmma<kTokens>(sums[i % kRowBlocks], weights[n % 2][i / kRowBlocks][i % kRowBlocks], descriptor);
    }
    wgmma_commit();
  }

  // The products of a step from number n on; meanwhile the next ones are dequantized, except after the last.
  template <int n = 0>
  DEVICE void run(u32 tokens, const Ring<kSmallTokens>& ring) {
    multiply<n>(tokens);
    if constexpr (n < 8 / kDepth - 1) {
      if constexpr ((n + 1) * kDepth % 2 == 0) read<(n + 1) * kDepth / 2>(ring);
      wgmma_wait<1>();
      dequantize<n + 1>();
      run<n + 1>(tokens, ring);
    }
  }
};

template <int kTokens, int kRowBlocks>
DEVICE void multiply_tall_steps(TallSums& result, int steps, bool one_group, bool gathered, Ring<kSmallTokens>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  float sums[kRowBlocks][kTokens / 2];
  TallTile<kTokens, kRowBlocks> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kRowBlocks * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.template read<0>(ring);
  tile.template dequantize<0>();
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kSmallTokens> / 16);
    tile.run(operand, ring);
    u32 stage = ring.stage;
    ring.advance();
    bool more = --steps > 0;
    if (more) {
      ring.wait_full();
      tile.template read<0>(ring);
      wgmma_wait<1>();
      tile.template dequantize<0>();
    }
    wgmma_wait<0>();
    __syncwarp();
    if (leader) ring.release(stage);
    if (!more) break;
  }
#pragma unroll
  for (int i = 0; i < 2 * kSmallTokens; i++) {
    int block = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
    result[block][j] = block < kRowBlocks && j < kTokens / 2 ? sums[block % kRowBlocks][j % (kTokens / 2)] : 0.0f;
  }
}

template <int kRowBlocks>
DEVICE void multiply_tall(TallSums& sums, int tokens, int steps, bool one_group, bool gathered,
                          Ring<kSmallTokens>& ring) {
  if (tokens > 48) {
    multiply_tall_steps<64, kRowBlocks>(sums, steps, one_group, gathered, ring);
  } else {
    multiply_tall_steps<48, kRowBlocks>(sums, steps, one_group, gathered, ring);
  }
}

// Stores the tile's first 256 rows, then the others.
template <bool kActivate>
DEVICE void store_tall(const ExpertsParams& p, Schedule& s, TileSlice g, TallSums& sums) {
  SumsOf<kSmallTokens> part;
  int end = g.first_row + g.tile_rows;
#pragma unroll 1
  for (; g.first_row < end; g.first_row += kTileRows) {
    g.tile_rows = min(end - g.first_row, kTileRows);
#pragma unroll
    for (int i = 0; i < kSmallTokens; i++) {
      int block = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
      part[block][j] = sums[block][j];
      sums[block][j] = sums[block + 2][j];
    }
    store_tile<kActivate, kSmallTokens>(p, s, g, part);
  }
}

DEVICE void run_tall_slice(const ExpertsParams& p, Schedule& s, const TileSlice& g, Ring<kSmallTokens>& ring) {
  TallSums sums;
  bool one_group = p.gemm[g.phase].groups == 1, gathered = are_gathered(p, g.phase);
  int steps = g.to - g.from;
  if (__shfl_sync(~0u, g.tile_rows, 0) == 2 * kTileRows) {  // shfl: warp-uniform
    multiply_tall<4>(sums, g.tokens, steps, one_group, gathered, ring);
  } else {
    multiply_tall<3>(sums, g.tokens, steps, one_group, gathered, ring);
  }
  if (g.phase == 1) {
    store_tall<false>(p, s, g, sums);
    if constexpr (ARRIVALS) publish_results(p, s, g, token_groups(g.tokens));
  } else {
    store_tall<true>(p, s, g, sums);
    publish_tile(p, g);
  }
}

// ==== Kernel ====

template <int kMaxTokens>
DEVICE void run_slice(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring<kMaxTokens>& ring) {
  if constexpr (kHasTall && kMaxTokens == kSmallTokens) {
    if (g.tile_rows > kTileRows) return run_tall_slice(p, shared.schedule, g, ring);
  }
  SumsOf<kMaxTokens> sums;
  multiply_slice<kMaxTokens>(sums, g, p.gemm[g.phase].groups == 1, are_gathered(p, g.phase), ring);
  finish_slice<kMaxTokens>(p, shared.schedule, g, sums);
}

template <int kMaxTokens>
DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, u8* memory) {
  Ring<kMaxTokens> ring(memory);
  if (threadIdx.x >= kConsumerThreads / 2) release_tensor_cores(1);  // the other warpgroup goes first
  for_each_slice(shared, [&](const TileSlice& in_shared) {
    if constexpr (kMaxTokens == kLargeTokens) {
      run_slice<kMaxTokens>(p, shared, in_shared, ring);  // a reference: the sums leave no registers for a copy
    } else {
      run_slice<kMaxTokens>(p, shared, TileSlice(in_shared), ring);
    }
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages<kTileTokens>; i++) {
    barrier_init(&shared.full[i], 1 + kTokenWarps * 32);
    barrier_init(&shared.empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kQueuedSlices; i++) {
    barrier_init(&shared.slice_full[i], 1);
    barrier_init(&shared.slice_empty[i], kConsumerWarps + kTokenWarps);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

template <int kMaxTokens>
DEVICE void run_producers(const PrefillParams& params, Shared& shared, u8* memory, int ticket) {
  Ring<kMaxTokens> ring(memory);
  if (threadIdx.x / 32 == kWeightWarp) {
    ticket = __shfl_sync(~0u, ticket, 0);
    if (elected()) run_weight_thread(params.experts, shared, ring, ticket);
    __syncwarp();
  } else {
    run_token_warps(params, shared, ring);
  }
}

// The last step may have fewer columns; the products behind them are multiplied by zero tokens, so codes must not be
// NaN.
template <int kMaxTokens>
DEVICE void clear_codes(u8* memory) {
  uint4* words = reinterpret_cast<uint4*>(Ring<kMaxTokens>(memory).codes());
  constexpr int kWordsOfAll = kStages<kMaxTokens> * kCodeStage<kMaxTokens> / 16;
  for (int i = threadIdx.x; i < kWordsOfAll; i += kThreads) words[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Nothing to do: one CTA keeps the order of kernels. Every decode-only call pays for this exit, so it comes first.
DEVICE void exit_early() {
  if (blockIdx.x == 0) grid_dependency_wait();
  asm volatile("exit;");
}

// The last CTA to finish resets all flags for the next launch.
DEVICE void reset_flags(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = false;
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // opaque: not kept since the start
  if (thread == 0) {
    grid_dependency_wait();  // keeps the order of kernels
    is_last = add_acquire_release_gpu(p.sync + 1, 1) == (int)gridDim.x - 1;
  }
  if (!__syncthreads_or(is_last)) return;
  for (int i = thread; i < 2 + (1 + ARRIVALS) * p.num_experts + 2 * kMaxBlocks; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill(const __grid_constant__ PrefillParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  grid_dependency_launch();
  bool any_small_m;
  int largest = largest_expert(p, any_small_m), max_small_m = p.max_small_m;
  if (largest <= max_small_m) return exit_early();
  if (any_small_m) max_small_m = select_kernel(p, threadIdx.x % 32);
  if (largest <= max_small_m) return exit_early();
  Shared& shared = shared_of(memory);
  int ticket = threadIdx.x == kWeightWarp * 32 ? atomicAdd(p.sync, 1) : 0;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32 * kTilings) init_barriers(shared);
  // If the tile size is known, one warp makes the tables while another evaluates the partition.
  Schedule& s = shared.schedule;
  int num_tilings = largest > kSmallTokens ? kTilings : 1;
  if (warp < num_tilings) evaluate(p, max_small_m, largest, warp, lane, s.tilings[warp]);
  if (num_tilings > 1) __syncthreads();
  if (warp == 0) {
    __syncwarp();
    apply_tiling(s, best_tiling(s, num_tilings, lane), lane);
  } else if (warp == 1) {
    int max_tokens = num_tilings > 1 ? best_tiling(s, num_tilings, lane).tiles.max_tokens : kSmallTokens;
    make_tables(s, p, max_small_m, max_tokens, lane);
  }
  __syncthreads();
  partition_units(s, p.num_experts);
  // shfl: the compiler then knows that it is warp-uniform.
  int max_tokens = __shfl_sync(~0u, shared.schedule.max_tokens, 0);
  bool large = kHasLarge && max_tokens == kLargeTokens;
  bool clears = p.gemm[0].columns % kStepColumns || p.gemm[1].columns % kStepColumns;
  if (clears) {
    if (large) {
      clear_codes<kLargeTokens>(memory);
    } else if (kHasTall && max_tokens == kSmallTokens) {
      clear_codes<kSmallTokens>(memory);
    } else {
      clear_codes<kTileTokens>(memory);
    }
  }
  if (clears || s.phase[0].num_units + s.phase[1].num_units > 0) __syncthreads();
  // Each class of tiles has its own copy of the code: fewer sums leave the compiler more registers to schedule products
  // with.
  if (large) {
    if constexpr (kHasLarge) {
      if (threadIdx.x < kConsumerThreads) {
        registers_grow<224>();
        run_consumers<kLargeTokens>(p, shared, memory);
      } else {
        registers_shrink<56>();
        run_producers<kLargeTokens>(params, shared, memory, ticket);
      }
    }
  } else if (threadIdx.x < kConsumerThreads) {
    registers_grow<216>();
    if (max_tokens == kSmallTokens) {
      run_consumers<kSmallTokens>(p, shared, memory);
    } else {
      run_consumers<kTileTokens>(p, shared, memory);
    }
    run_reductions(p, shared.schedule, shared.first_reduction);
  } else {
    registers_shrink<72>();
    if (kHasTall && max_tokens == kSmallTokens) {
      run_producers<kSmallTokens>(params, shared, memory, ticket);
    } else {
      run_producers<kTileTokens>(params, shared, memory, ticket);
    }
  }
  reset_flags(p);
}
