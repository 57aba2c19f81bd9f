// Both GEMMs of the experts with many rows and the activation between them in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// Experts of few rows are left to decode_sm90.cu (threshold.cuh). Weights are operand A of the tensor cores,
// dequantized in registers, tokens operand B in shared memory. The warps of a block:
//   0 to 7     two warpgroups of 128 weight rows (the second: 64 of narrow tiles; 192 or 256 of tall ones) x up to 176
//              tokens: dequantize, multiply, apply bias and activation
//   8          claims items (prefill_schedule.cuh) and streams codes and scales with bulk copies
//   9 to 11    load the tokens' rows, and wait for w13's tiles before they read `hidden`: one thread by tensor copies,
//              or all of them chunk by chunk where the rows are gathered
// Shared memory holds a ring of stages of 128 columns, each with codes, scales and tokens. Codes run ahead: those of w2
// stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Ring`.
#include "dequant.cuh"
#include "epilogue.cuh"
#include "select_kernel.cuh"
#include "tile_queue.cuh"
#include "wgmma.cuh"

// ==== Shape ====

// How the experts' tiles are made and cut: their sizes, what takes the least time.
//
// A tile is 256 weight rows, or 192 where those fill the machine better, x up to 64 tokens of one expert where none
// has more, of 384 or 512 rows then (tall) where there are enough; otherwise x up to 64, 80, 96, 112 or 128, by what
// should take the least time; or x up to 176 where there are many, so that every weight that is dequantized serves
// more tokens. A step is 128 columns of it. Costs of a step are in the unit of tile_cost.

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

// ==== Schedule ====

// Who computes what among the experts with many rows, decided on the device from their row counts.
//
// Tiles (prefill_shape.cuh) are numbered expert by expert, then by weight rows, then by tokens, so that blocks at work
// together share weights and tokens. An item is what a block claims at once, by a ticket: first the items of w13, then
// those of w2, so an item only waits for earlier tickets, whose blocks are running; nothing depends on how many blocks
// are resident.
//
// Whole tiles are items while they fill the machine. Where the last wave would leave too many blocks idle, the last
// one to two waves are cut into one piece a block, of equal cost (split). A piece may begin and end inside a tile: the
// block that has a tile's first step adds up the pieces that follow, in order. Pieces are claimed last one first, so
// the pieces waited for have earlier tickets, and are computed at the start of their item.
//
// Where w2 has few tiles, one block would add up many pieces while the others wait. There every tile is cut into
// equally many, all of which are left; additions follow, each of all pieces of one tile for some of its tokens. Whose
// they are tells a block's last ticket, for which there is no item: so they, too, wait for earlier tickets alone.
//
// Example: 3 tiles of 4 steps on 2 blocks: the pieces are steps 0..5 and 6..11, tile 1 is shared. Block A claims steps
// 6..11 and leaves the sum of tile 1's steps 2, 3 for block B, which has tile 0 and adds it to tile 1's steps 0, 1.

struct Position {
  int tile, step;
};

struct Schedule {
  PhaseShape phase[2];
  Position piece[2][kMaxBlocks + 1];  // where each piece starts; the end of one is the start of the next
  int most_tokens;                    // of a tile
  Choice choices[kChoices];           // ways to cut the rows into tiles
  // Behind this struct: four tables of num_experts + 1 numbers.
  DEVICE int* rows() { return reinterpret_cast<int*>(this + 1); }     // rows of every expert computed here
  DEVICE int* row_start(int n) { return rows() + (n + 1); }       // rows of all experts before, of any size
  DEVICE int* tile_start(int n) { return rows() + 2 * (n + 1); }  // token tiles of all experts before
  DEVICE int* cost_start(int n) { return rows() + 3 * (n + 1); }  // their cost, of one step each
};

struct Segment {
  int phase, expert, first_row, first_token, tokens;  // which tile; phase -1: there are no more
  int tile_rows;                                      // 192, 256, 384 or 512
  int tile, from, to;                                 // its number, and which of its steps
  int piece;                                          // number of the piece it is in, -1 for a whole tile
};

// One warp: the number of the best choice, and what it makes of the phases, for all.
DEVICE const Choice& best_choice(const Schedule& s, int num_choices, int lane) {
  u32 time = lane < num_choices ? (__float_as_uint(s.choices[lane].time) & ~7u) | lane : ~0u;  // none is negative
  return s.choices[__reduce_min_sync(~0u, time) & 7];
}

DEVICE void take_choice(Schedule& s, const Choice& choice, int lane) {
  constexpr int kWords = sizeof(s.phase) / sizeof(int);
  if (lane < kWords) reinterpret_cast<int*>(s.phase)[lane] = reinterpret_cast<const int*>(choice.phase)[lane];
  if (lane == 0) s.most_tokens = choice.tiles.most_tokens;
}

// One warp: tables by prefix sums over the experts, 32 at a time.
DEVICE void make_tables(Schedule& s, const ExpertsParams& p, int few_rows, int most_tokens, int lane) {
  int n = p.num_experts, sums[3] = {0, 0, 0};
#pragma unroll 1
  for (int base = 0; base < n; base += 32) {
    int e = base + lane;
    int any = e < n ? rows_of(p, e) : 0;
    int rows = any > few_rows ? any : 0;
    TokenTiles tiles(rows, most_tokens);
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

// The expert whose table entry holds `value`: table[e] <= value < table[e + 1], the entries scaled.
DEVICE int find_expert(const int* table, int n, int scale, int value) {
  int low = 0, high = n;  // table[low] <= value < table[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (table[middle] * scale <= value) low = middle; else high = middle;
  }
  return low;
}

// Costs are counted along the tiles: experts, their row tiles, their token tiles, steps.
DEVICE int cost_before_tile(Schedule& s, int n, int phase, int tile) {
  int row_tiles = s.phase[phase].row_tiles, steps = s.phase[phase].steps;
  int e = find_expert(s.tile_start(n), n, row_tiles, tile);
  TokenTiles tiles(s.rows()[e], s.most_tokens);
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
  TokenTiles tiles(s.rows()[e], s.most_tokens);
  int full_cost = tile_cost(tiles.each) * steps, row_tile = quotient(rest, row_cost);
  rest -= row_tile * row_cost;
  int token_tile = min(quotient(rest, full_cost), tiles.count - 1);
  int tokens = min(s.rows()[e] - token_tile * tiles.each, tiles.each);
  int step = quotient(rest - token_tile * full_cost, tile_cost(tokens));
  return {s.tile_start(n)[e] * row_tiles + row_tile * tiles.count + token_tile, step};
}

// All threads, half of them for either phase, after make_tables: the starts of the pieces.
DEVICE void make_pieces(Schedule& s, int n) {
  int threads = blockDim.x / 2, phase = threadIdx.x >= threads;
  const PhaseShape shape = s.phase[phase];
  if (shape.pieces == 0 || shape.pieces_per_tile) return;
  int total = s.cost_start(n)[n] * shape.row_tiles * shape.steps;
  int start = shape.whole_items ? cost_before_tile(s, n, phase, shape.whole_items) : 0;
  int share = quotient(total - start, shape.pieces), longer = total - start - share * shape.pieces;
  for (int piece = threadIdx.x - phase * threads; piece <= shape.pieces; piece += threads) {
    s.piece[phase][piece] = position_of_cost(s, n, phase, start + piece * share + min(piece, longer));
  }
}

// Which tile, and whose; the steps are the caller's.
DEVICE void locate_tile(Schedule& s, int n, Segment& g) {
  const PhaseShape& shape = s.phase[g.phase];
  int row_tiles = shape.row_tiles, tile = g.tile, half = kHasTall ? tile - shape.halved_from : -1;
  if (half >= 0) tile = shape.halved_from + half / 2;
  g.expert = find_expert(s.tile_start(n), n, row_tiles, tile);
  int rows = s.rows()[g.expert];
  TokenTiles tiles(rows, s.most_tokens);
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

DEVICE Segment whole_tile(Schedule& s, int n, int ticket) {
  Segment g;
  g.phase = ticket >= s.phase[0].items;
  g.tile = ticket - (g.phase ? s.phase[0].items : 0);
  g.from = 0, g.to = s.phase[g.phase].steps;
  g.piece = -1;
  locate_tile(s, n, g);
  return g;
}

// Where a piece starts.
DEVICE Position piece_start(Schedule& s, int phase, int piece) {
  const PhaseShape& shape = s.phase[phase];
  if (shape.pieces_per_tile == 0) return s.piece[phase][piece];
  int tile = quotient(piece, shape.pieces_per_tile);
  return {tile, quotient((piece - tile * shape.pieces_per_tile) * shape.steps, shape.pieces_per_tile)};
}

// An addition: which tile, its first piece, and which groups of eight tokens.
struct Addition {
  Segment tile;
  int first_group, groups;
};

// The one of that number, of as many as there are pieces: a part of every tile, then the next part.
DEVICE Addition addition_of(Schedule& s, int n, int number) {
  const PhaseShape& shape = s.phase[1];
  int tiles = quotient(shape.pieces, shape.pieces_per_tile), part = quotient(number, tiles);
  Addition a;
  a.tile.phase = 1;
  a.tile.tile = number - part * tiles;
  a.tile.piece = a.tile.tile * shape.pieces_per_tile;
  locate_tile(s, n, a.tile);
  int groups = (a.tile.tokens + 7) / 8, each = quotient(groups + shape.pieces_per_tile - 1, shape.pieces_per_tile);
  a.first_group = part * each;
  a.groups = min(each, groups - a.first_group);
  return a;
}

// Calls work(segment) for every tile, or part of one, of a ticket's item.
template <typename Work>
DEVICE void cut_item(Schedule& s, int n, int ticket, Work work) {
  Segment g;
  g.phase = ticket >= s.phase[0].items;
  const PhaseShape shape = s.phase[g.phase];
  int item = ticket - (g.phase ? s.phase[0].items : 0), number = item - shape.whole_items;
  Position from = {item, 0}, to = {item + 1, 0};
  g.piece = -1;
  if (number >= 0) {
    g.piece = shape.pieces - 1 - number;
    from = piece_start(s, g.phase, g.piece);
    to = piece_start(s, g.phase, g.piece + 1);
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

// What the warps of a block share: a ring of stages, the segments, the flags, and their sizes; and the parameters.

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps;
constexpr int kTokenWarps = 3;
constexpr int kThreads = 32 * (kWeightWarp + 1 + kTokenWarps);

constexpr int kPieceBytes = 512 * kBits / 8;                // codes of 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // codes of 64 rows

// Of a stage where tiles have up to so many tokens: weight rows, codes, a group's scales, all of them.
template <int kMost>
constexpr int kMostRows = kHasTall && kMost == kSmallTokens ? 2 * kTileRows : kTileRows;
template <int kMost>
constexpr int kCodeBytes = kMostRows<kMost> / 64 * kStripBytes;
template <int kMost>
constexpr int kScaleRow = kMostRows<kMost> * kScaleBytes;
template <int kMost>
constexpr int kCodeStage =
    kCodeBytes<kMost> + (SCALES_PER_STEP * kScaleRow<kMost> * (kHasZeros ? 2 : 1) + 127) / 128 * 128;

constexpr int kHalfColumns = kStepColumns / 2;
constexpr int kBoxTokens = 32;  // rows of one tensor copy
constexpr int kBoxBytes = kBoxTokens * kHalfColumns * 2;

// Stages of the ring where tiles have up to so many tokens: there is room for more of fewer.
template <int kMost>
constexpr int kStages = kBits == 8 || kMost > kTileTokens ? 3 : 4;
template <int kMost>
constexpr int kTokenStage = (kMost > kTileTokens || (kHasTall && kMost == kSmallTokens)
                                 ? (kMost + kBoxTokens - 1) / kBoxTokens * kBoxTokens
                                 : kTileTokens) *
                            kStepColumns * 2;
template <int kMost>
constexpr int kRingOf = kStages<kMost> * (kTokenStage<kMost> + kCodeStage<kMost>);
constexpr int kRingBytes = kHasTall ? kRingOf<kSmallTokens> : kRingOf<kTileTokens>;
static_assert(kRingOf<kTileTokens> <= kRingBytes && kRingOf<kSmallTokens> <= kRingBytes, "no room for a ring");
static_assert(!kHasLarge || kRingOf<kLargeTokens> <= kRingBytes, "no room for large tiles");

// What the tensor copies know about the tokens: hopper.py encodes it.
struct alignas(64) TokensMap {
  u8 bytes[128];
};

struct PrefillParams {
  TokensMap tokens[2];  // of w13's input, unless its rows are gathered, and of w2's
  ExpertsParams experts;
};

// Whether the tokens of a phase lie anywhere; otherwise those of an expert lie one after the other.
DEVICE bool are_gathered(const ExpertsParams& p, int phase) { return phase == 0 && p.row_ids != nullptr; }

// Tokens are stored eight at a time.
DEVICE int token_groups(int tokens) { return (tokens + 7) / 8; }

// sync: tickets, blocks done, groups of tokens that w13's tiles of every expert have stored, pieces left in `partials`
// for either phase.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
DEVICE int* piece_flag(const ExpertsParams& p, int phase, int piece) {
  return p.sync + 2 + p.num_experts + phase * kMaxBlocks + piece;
}

struct Shared {
  // First of all, one behind the other: Ring counts on it.
  u64 full[kStages<kTileTokens>], empty[kStages<kTileTokens>];
  u64 segment_full[kSegments], segment_empty[kSegments];
  Segment segment[kSegments];
  int first_addition;  // number of this block's first
  const u16* gathered[kLargeTokens];  // where the rows of a tile start
  Schedule schedule;
};

static_assert(kRingBytes + sizeof(Shared) + 4 * (kMostExperts + 1) * sizeof(int) <= kSharedBytes,
              "no room for experts' tables");

// Behind the ring.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }

// Where a warp is in the ring of stages, 128 columns each. Codes: [strip][32 columns][16 rows][lane], then scales
// [group][256], then zero points alike. Tokens, which lie apart: 64 columns, then the next 64, as the tensor cores read
// them: 128 bytes a row, 16-byte chunk c of row r at place c ^ (r % 8).
template <int kMost>
struct Ring {
  static constexpr int kTokenHalf = kTokenStage<kMost> / 2;
  static constexpr int kCodesPlace = kStages<kMost> * kTokenStage<kMost>;
  Shared& shared;
  u8* memory;  // the tokens of all stages, then the codes of all stages
  u32 address;  // its own
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : shared(shared_of(memory)), memory(memory), address(shared_address(memory)) {}
  DEVICE u8* tokens() { return memory + stage * kTokenStage<kMost>; }
  DEVICE u8* codes() const { return memory + kCodesPlace + stage * kCodeStage<kMost>; }
  DEVICE u32 codes_address() const { return address + kCodesPlace + stage * kCodeStage<kMost>; }
  DEVICE u64* full() { return &shared.full[stage]; }
  DEVICE u64* empty() { return &shared.empty[stage]; }
  DEVICE void wait_full() { barrier_wait_at<kRingBytes>(address + 8 * stage, parity); }
  // One of the warps that have a stage has read it.
  DEVICE void release(u32 stage) { barrier_arrive_at<kRingBytes + sizeof(Shared::full)>(address + 8 * stage); }
  DEVICE void wait_empty() { barrier_wait(empty(), parity ^ 1); }
  DEVICE void advance() {
    if (++stage == kStages<kMost>) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ==== Producers ====

// The warps that fill the rings: one streams codes, three copy the tokens' rows.

// ---- codes and scales, by bulk copies of one thread ----

struct CodeSource {
  const u8 *codes, *scales, *zeros;  // of the tile's first row
  u32 strip_bytes, group_bytes;      // from one strip to the next, from one group to the next
  int rows, columns, groups;
  DEVICE CodeSource(const GemmParams& gemm, const Segment& g) : columns(gemm.columns), groups(gemm.groups) {
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

template <int kMost>
DEVICE void load_codes(const CodeSource& source, int step, Ring<kMost>& ring, u64 policy) {
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
  for (int i = 0; i < kMostRows<kMost> / 64; i++) {
    if (i >= whole) break;
    bulk_copy(to + i * kStripBytes, from + i * source.strip_bytes, 64 * columns * kBits / 8, full, policy);
  }
  if (source.rows % 64) {
    from = source.codes + whole * source.strip_bytes + step * (kStripBytes / 2);
    for (int c = 0; c < columns / 32; c++) {
      u32 block = to + whole * kStripBytes + c * 4 * kPieceBytes;
      bulk_copy(block, from + c * 2 * kPieceBytes, 2 * kPieceBytes, full, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < SCALES_PER_STEP; i++) {
    if (i >= groups) break;
    u32 offset = (first_group + i) * source.group_bytes;
    u32 row = to + kCodeBytes<kMost> + i * kScaleRow<kMost>;
    bulk_copy(row, source.scales + offset, scale_bytes, full, policy);
    if constexpr (kHasZeros) {
      bulk_copy(row + SCALES_PER_STEP * kScaleRow<kMost>, source.zeros + offset, scale_bytes, full, policy);
    }
  }
}

// One thread claims items and tells the other warps their segments, one after the other, as it begins to load them.
template <int kMost>
DEVICE void run_weight_thread(const ExpertsParams& p, Shared& shared, Ring<kMost>& ring, int ticket) {
  int total = shared.schedule.phase[0].items + shared.schedule.phase[1].items;
  // Blocks at work together read the same codes at about the same time: these need not stay in L2, tokens and `hidden`
  // should. Not tried for large tiles.
  u64 policy = kMost == kLargeTokens ? policy_evict_normal() : policy_evict_first();
  int place = 0, parity = 1;
  auto announce = [&](const Segment& g) { announce_segment(shared, g, place, parity); };
  while (ticket < total) {
    if constexpr (kMost == kLargeTokens) {
      const Segment& g = shared.segment[place];  // few registers are left: all is read again every step
      announce(whole_tile(shared.schedule, p.num_experts, ticket));
      for (int step = 0; step < g.to; step++) {
        ring.wait_empty();
        load_codes(CodeSource(p.gemm[g.phase], g), step, ring, policy);
        ring.advance();
      }
    } else {
      cut_item(shared.schedule, p.num_experts, ticket, [&](const Segment& g) {
        announce(g);
        CodeSource source(p.gemm[g.phase], g);
        for (int step = g.from; step < g.to; step++) {
          ring.wait_empty();
          load_codes(source, step, ring, policy);
          ring.advance();
        }
      });
    }
    ticket = atomicAdd(p.sync, 1);
  }
  shared.first_addition = ticket - total;
  Segment none;
  none.phase = -1;
  announce(none);
}

// ---- tokens ----

DEVICE void wait_for_hidden(const ExpertsParams& p, Shared& shared, int expert) {
  Schedule& s = shared.schedule;
  wait_at_least(ready_flag(p, expert), token_groups(s.rows()[expert]) * (p.gemm[0].rows / 32));
}

// Tokens that lie one after the other, by tensor copies of one thread. The last may be other experts', or nobody's.
template <int kMost>
DEVICE void load_tokens(const PrefillParams& params, Shared& shared, const Segment& g, Ring<kMost>& ring) {
  const ExpertsParams& p = params.experts;
  int row = g.first_token;
  if (g.phase == 1) {
    wait_for_hidden(p, shared, g.expert);
    fence_proxy_async_global();
    row += shared.schedule.row_start(p.num_experts)[g.expert];
  } else {
    row += g.expert * p.max_rows;
  }
  int boxes = (tile_tokens<kMost>(g.tokens) + kBoxTokens - 1) / kBoxTokens;
  for (int step = g.from; step < g.to; step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(), 2 * boxes * kBoxBytes);
    barrier_arrive(ring.full(), kTokenWarps * 32 - 1);
    for (int i = 0; i < 2 * boxes; i++) {
      u32 to = shared_address(ring.tokens()) + i % 2 * Ring<kMost>::kTokenHalf + i / 2 * kBoxBytes;
      int column = step * kStepColumns + i % 2 * kHalfColumns;
      tensor_copy(to, &params.tokens[g.phase], column, row + i / 2 * kBoxTokens, ring.full());
    }
    ring.advance();
  }
}

DEVICE i64 gathered_row(const ExpertsParams& p, Schedule& s, int expert, int i) {
  i64 place = p.sorted ? s.row_start(p.num_experts)[expert] + i : (i64)expert * p.max_rows + i;
  return p.row_ids[place] / p.ids_divisor;
}

// A thread copies the same 16-byte chunk of every twelfth row; where those rows start is found once a tile.
template <int kMost>
DEVICE void gather_tokens(const ExpertsParams& p, Shared& shared, const Segment& g, Ring<kMost>& ring) {
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
      u32 valid = column < columns ? 16 : 0, to = shared_address(ring.tokens()) + half * Ring<kMost>::kTokenHalf;
#pragma unroll 4
      for (int row = first; row < g.tokens; row += kApart) {
        copy_async_16(to + row * 128 + (chunk ^ row % 8) * 16, shared.gathered[row] + (valid ? column : 0), valid);
      }
    }
    barrier_arrive_on_copies(ring.full());
    ring.advance();
  }
}

template <int kMost>
DEVICE void run_token_warps(const PrefillParams& params, Shared& shared, Ring<kMost>& ring) {
  const ExpertsParams& p = params.experts;
  for_each_segment(shared, [&](const Segment g) {
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

// ==== Codes ====

// What the tensor cores are given: sums, codes and scales of a lane.

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens]. While they are made they
// take the registers of their own tokens only.
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Pieces of 16 neighbouring rows that a consumer warp has of 128, 192 or 256 rows: two, or one of 128 rows and in the
// second half of a narrow tile.
DEVICE int pieces_of(int warp, int rows) {
  return rows == kTileRows || (rows == kNarrowRows && warp < kConsumerWarps / 2) ? 2 : 1;
}

// Their first row.
DEVICE int warp_row(int warp, int rows) {
  if (pieces_of(warp, rows) == 2) return warp * 32;
  return warp * 16 + (rows == kNarrowRows ? kTileRows / 4 : 0);
}

// What a lane needs for 64 columns of its warp's rows, a piece for each half of the warpgroup's rows.
constexpr int kScalesPerHalf = SCALES_PER_STEP <= 2 ? 1 : SCALES_PER_STEP / 2;
struct Codes {
  u32 words[2][2][2 * kWords];  // [piece][32 columns]
  Scales scales[2][kScalesPerHalf];
};

struct CodeReader {
  u32 codes, scales;  // where in a stage the lane's are
  bool one_group;
  // Of `rows` weight rows of a stage, the first of them `first`.
  DEVICE CodeReader(bool one_group, int rows, int first = 0) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int row = first + warp_row(thread / 32, rows), lane = thread % 32;
    codes = row / 64 * kStripBytes + row % 64 / 16 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = (row + lane / 4 * 2) * kScaleBytes;
  }

  template <int kMost>
  DEVICE Scales load(const Ring<kMost>& ring, int group, int first_row) const {
    const u8* row = ring.codes() + kCodeBytes<kMost> + scales + group * kScaleRow<kMost> + first_row * kScaleBytes;
    return load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow<kMost>);
  }

  // `kHalf`: which 64 of the 128 columns of the ring's stage.
  template <int kPieces, int kHalf, int kMost>
  DEVICE void read(Codes& to, const Ring<kMost>& ring) const {
    constexpr int kPlace = kHalf * 8 * kPieceBytes;
    u32 from = ring.codes_address() + codes;
    load_words_at<kPlace>(from, to.words[0][0]);
    if constexpr (kPieces == 2) load_words_at<kPlace + kPieceBytes>(from, to.words[1][0]);
    load_words_at<kPlace + 4 * kPieceBytes>(from, to.words[0][1]);
    if constexpr (kPieces == 2) load_words_at<kPlace + 5 * kPieceBytes>(from, to.words[1][1]);
    constexpr int kScales = SCALES_PER_STEP == 1 && kHalf ? 0 : kPieces * kScalesPerHalf;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kPieces, group = one_group ? 0 : kHalf * SCALES_PER_STEP / 2 + n / kPieces;
      to.scales[i][n / kPieces] = load(ring, group, i * 16);
    }
  }
};

// ==== Large ====

// The steps of a tile whose sums leave few registers: of more than 112 tokens.

// What a lane needs for 32 columns: a quarter of a step. Up to 128 tokens one is dequantized beside the products of the
// one before it; of more, while the other warpgroup's products run.
struct QuarterCodes {
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;
  u32 words[2][2 * kWords];  // [piece]
  Scales scales[2][kGroups];

  template <int kQuarter, int kMost>
  DEVICE void read(const CodeReader& reader, const Ring<kMost>& ring) {
    u32 from = ring.codes_address() + reader.codes;
    load_words_at<kQuarter * 4 * kPieceBytes>(from, words[0]);
    load_words_at<(kQuarter * 4 + 1) * kPieceBytes>(from, words[1]);
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

template <int kMost, int kTokens>
struct LargeTile {
  static constexpr int kBuffers = kTokens > kTileTokens ? 1 : 2;
  SumsOf<kTokens>& sums;
  CodeReader reader;
  QuarterCodes codes;
  u32 weights[kBuffers][4][4];

  DEVICE LargeTile(SumsOf<kTokens>& sums, bool one_group) : sums(sums), reader(one_group, kTileRows) {}

  template <int kQuarter>
  DEVICE void multiply(u32 tokens) {
    constexpr u32 kPlace = kQuarter / 2 * (Ring<kMost>::kTokenHalf / 16) + kQuarter % 2 * 4;
    u64 descriptor = kDescriptorHigh << 32 | (tokens + kPlace);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4; n++) wgmma<kTokens>(sums[n % 2], weights[kQuarter % kBuffers][n], descriptor + n / 2 * 2);
    wgmma_commit();
  }

  // Products of one quarter, and meanwhile the next one's codes.
  template <int kQuarter>
  DEVICE void run_quarter(u32 tokens, const Ring<kMost>& ring) {
    multiply<kQuarter>(tokens);
    codes.template read<kQuarter + 1>(reader, ring);
    wgmma_wait<kBuffers - 1>();
    codes.dequantize(weights[(kQuarter + 1) % kBuffers]);
  }
};

template <int kMost, int kTokens>
DEVICE void multiply_large_steps(SumsOf<kMost>& result, int steps, bool one_group, bool gathered, Ring<kMost>& ring) {
  constexpr bool kTwo = LargeTile<kMost, kTokens>::kBuffers == 2;
  bool leader = threadIdx.x % 32 == 0;
  SumsOf<kTokens> sums;
  LargeTile<kMost, kTokens> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.wait_full();
  tile.codes.template read<0>(tile.reader, ring);
  tile.codes.dequantize(tile.weights[0]);
  while (true) {
    if (gathered) fence_proxy_async();  // as in multiply_steps
    u32 operand = first + ring.stage * (kTokenStage<kMost> / 16);
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
  for (int i = 0; i < kMost; i++) {
    int half = i / (kMost / 2), j = i % (kMost / 2);
    result[half][j] = j < kTokens / 2 ? sums[half][j % (kTokens / 2)] : 0.0f;
  }
}

// ==== Products ====

// The steps of a tile: codes are dequantized into registers, multiplied with the tokens and added up.

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

// ==== Finish ====

// What becomes of a tile's sums: left for another block, completed with those of others, activated and stored.

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
  grid_dependency_wait();  // `partials` is theirs, too
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
  if (threadIdx.x == 0) add_release_gpu(piece_flag(p, g.phase, g.piece), 1);
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
    add_release_gpu(ready_flag(p, g.expert), token_groups(g.tokens) * (rows / 32));
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

// ==== Tall ====

// Tall tiles: 384 or 512 weight rows x up to 64 tokens. What a step takes beside its products, and what follows a tile,
// serve more weights.

// Sums of a lane: those of the tile's first 256 rows, then of the others.
using TallSums = float[4][kSmallTokens / 2];

// 16 or 32 columns at a time; while they are multiplied, the next ones are dequantized.
template <int kTokens, int kPieces>
struct TallTile {
  static constexpr int kDepth = kPieces == 3 ? 2 : 1;           // times 16 columns, as registers allow
  static constexpr int kGroups = SCALES_PER_STEP == 8 ? 2 : 1;  // of 32 columns
  float (&sums)[kPieces][kTokens / 2];
  CodeReader reader, third;  // the latter of 384 rows' last 128
  u32 words[kPieces][2 * kWords];
  Scales scales[kPieces][kGroups];
  u32 weights[2][kDepth][kPieces][4];

  DEVICE TallTile(float (&sums)[kPieces][kTokens / 2], bool one_group)
      : sums(sums), reader(one_group, kTileRows), third(one_group, kTileRows / 2, kTileRows) {}

  // 32 columns.
  template <int kQuarter>
  DEVICE void read(const Ring<kSmallTokens>& ring) {
    constexpr int kPlace = kQuarter * 4 * kPieceBytes, kNextStrips = kTileRows / 64 * kStripBytes;
    u32 from = ring.codes_address();
    load_words_at<kPlace>(from + reader.codes, words[0]);
    load_words_at<kPlace + kPieceBytes>(from + reader.codes, words[1]);
    if constexpr (kPieces == 3) {
      load_words_at<kPlace>(from + third.codes, words[2]);
    } else {
      load_words_at<kPlace + kNextStrips>(from + reader.codes, words[2]);
      load_words_at<kPlace + kNextStrips + kPieceBytes>(from + reader.codes, words[3]);
    }
    constexpr int kScales = kQuarter * SCALES_PER_STEP % 4 ? 0 : kPieces * kGroups;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kPieces, group = reader.one_group ? 0 : kQuarter * SCALES_PER_STEP / 4 + n / kPieces;
      scales[i][n / kPieces] = kPieces == 3 && i == 2 ? third.load(ring, group, 0)
                                                      : reader.load(ring, group, i / 2 * kTileRows + i % 2 * 16);
    }
  }

  template <int n>
  DEVICE void dequantize() {
#pragma unroll
    for (int i = 0; i < kDepth * kPieces; i++) {
      int piece = i % kPieces, k = (n * kDepth + i / kPieces) % 2;
      dequantize_folded(&words[piece][k * kWords], scales[piece][k * kGroups / 2], weights[n % 2][i / kPieces][piece]);
    }
  }

  template <int n>
  DEVICE void multiply(u32 tokens) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDepth * kPieces; i++) {
      int k = n * kDepth + i / kPieces;
      u64 descriptor = kDescriptorHigh << 32 | (tokens + k / 4 * (Ring<kSmallTokens>::kTokenHalf / 16) + k % 4 * 2);
      wgmma<kTokens>(sums[i % kPieces], weights[n % 2][i / kPieces][i % kPieces], descriptor);
    }
    wgmma_commit();
  }

  // The products of a step from number n on; meanwhile the next ones' weights, but for the last.
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

template <int kTokens, int kPieces>
DEVICE void multiply_tall_steps(TallSums& result, int steps, bool one_group, bool gathered, Ring<kSmallTokens>& ring) {
  bool leader = threadIdx.x % 32 == 0;
  float sums[kPieces][kTokens / 2];
  TallTile<kTokens, kPieces> tile(sums, one_group);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.memory)), 0);
#pragma unroll
  for (int i = 0; i < kPieces * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
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
    int piece = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
    result[piece][j] = piece < kPieces && j < kTokens / 2 ? sums[piece % kPieces][j % (kTokens / 2)] : 0.0f;
  }
}

template <int kPieces>
DEVICE void multiply_tall(TallSums& sums, int tokens, int steps, bool one_group, bool gathered,
                          Ring<kSmallTokens>& ring) {
  if (tokens > 48) {
    multiply_tall_steps<64, kPieces>(sums, steps, one_group, gathered, ring);
  } else {
    multiply_tall_steps<48, kPieces>(sums, steps, one_group, gathered, ring);
  }
}

// Its first 256 rows, then the others.
template <bool kActivate>
DEVICE void store_tall(const ExpertsParams& p, Schedule& s, Segment g, TallSums& sums) {
  SumsOf<kSmallTokens> part;
  int end = g.first_row + g.tile_rows;
#pragma unroll 1
  for (; g.first_row < end; g.first_row += kTileRows) {
    g.tile_rows = min(end - g.first_row, kTileRows);
#pragma unroll
    for (int i = 0; i < kSmallTokens; i++) {
      int piece = i / (kSmallTokens / 2), j = i % (kSmallTokens / 2);
      part[piece][j] = sums[piece][j];
      sums[piece][j] = sums[piece + 2][j];
    }
    store_tile<kActivate, kSmallTokens>(p, s, g, part);
  }
}

DEVICE void run_tall_segment(const ExpertsParams& p, Schedule& s, const Segment& g, Ring<kSmallTokens>& ring) {
  TallSums sums;
  bool one_group = p.gemm[g.phase].groups == 1, gathered = are_gathered(p, g.phase);
  int steps = g.to - g.from;
  if (__shfl_sync(~0u, g.tile_rows, 0) == 2 * kTileRows) {  // the compiler sees that it is the same for all lanes
    multiply_tall<4>(sums, g.tokens, steps, one_group, gathered, ring);
  } else {
    multiply_tall<3>(sums, g.tokens, steps, one_group, gathered, ring);
  }
  if (g.phase == 1) {
    store_tall<false>(p, s, g, sums);
  } else {
    store_tall<true>(p, s, g, sums);
    announce_tile(p, g);
  }
}

// ==== Kernel ====

template <int kMost>
DEVICE void run_segment(const ExpertsParams& p, Shared& shared, const Segment& g, Ring<kMost>& ring) {
  if constexpr (kHasTall && kMost == kSmallTokens) {
    if (g.tile_rows > kTileRows) return run_tall_segment(p, shared.schedule, g, ring);
  }
  SumsOf<kMost> sums;
  multiply_segment<kMost>(sums, g, p.gemm[g.phase].groups == 1, are_gathered(p, g.phase), ring);
  finish_segment<kMost>(p, shared.schedule, g, sums);
}

template <int kMost>
DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, u8* memory) {
  Ring<kMost> ring(memory);
  if (threadIdx.x >= kConsumerThreads / 2) pass_turn(1);  // the first turn is the other warpgroup's
  for_each_segment(shared, [&](const Segment& in_shared) {
    if constexpr (kMost == kLargeTokens) {
      run_segment<kMost>(p, shared, in_shared, ring);  // the sums leave no registers for a copy
    } else {
      run_segment<kMost>(p, shared, Segment(in_shared), ring);
    }
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages<kTileTokens>; i++) {
    barrier_init(&shared.full[i], 1 + kTokenWarps * 32);
    barrier_init(&shared.empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kSegments; i++) {
    barrier_init(&shared.segment_full[i], 1);
    barrier_init(&shared.segment_empty[i], kConsumerWarps + kTokenWarps);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

template <int kMost>
DEVICE void run_producers(const PrefillParams& params, Shared& shared, u8* memory, int ticket) {
  Ring<kMost> ring(memory);
  if (threadIdx.x / 32 == kWeightWarp) {
    ticket = __shfl_sync(~0u, ticket, 0);
    if (elected()) run_weight_thread(params.experts, shared, ring, ticket);
    __syncwarp();
  } else {
    run_token_warps(params, shared, ring);
  }
}

// A last step of fewer columns multiplies what lies behind them by zero: it must be a number.
template <int kMost>
DEVICE void clear_codes(u8* memory) {
  uint4* words = reinterpret_cast<uint4*>(Ring<kMost>(memory).codes());
  constexpr int kWordsOfAll = kStages<kMost> * kCodeStage<kMost> / 16;
  for (int i = threadIdx.x; i < kWordsOfAll; i += kThreads) words[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Nothing is to be done: one block keeps the order of kernels. Every call of few rows waits for this way out, so it is
// short and comes first in the kernel.
DEVICE void leave_at_once() {
  if (blockIdx.x == 0) grid_dependency_wait();
  asm volatile("exit;");
}

// The last block to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = false;
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // not kept since the start
  if (thread == 0) {
    grid_dependency_wait();  // keeps the order of kernels
    is_last = add_acquire_release_gpu(p.sync + 1, 1) == (int)gridDim.x - 1;
  }
  if (!__syncthreads_or(is_last)) return;
  for (int i = thread; i < 2 + p.num_experts + 2 * kMaxBlocks; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill(const __grid_constant__ PrefillParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  grid_dependency_launch();
  bool few;
  int largest = most_rows(p, few), few_rows = p.few_rows;
  if (largest <= few_rows) return leave_at_once();
  if (few) few_rows = agreed_few_rows(p, threadIdx.x % 32);
  if (largest <= few_rows) return leave_at_once();
  Shared& shared = shared_of(memory);
  int ticket = threadIdx.x == kWeightWarp * 32 ? atomicAdd(p.sync, 1) : 0;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32 * kChoices) init_barriers(shared);
  // One warp makes the tables while another decides how they are cut, where it is known what tiles there are.
  Schedule& s = shared.schedule;
  int num_choices = largest > kSmallTokens ? kChoices : 1;
  if (warp < num_choices) consider(p, few_rows, largest, warp, lane, s.choices[warp]);
  if (num_choices > 1) __syncthreads();
  if (warp == 0) {
    __syncwarp();
    take_choice(s, best_choice(s, num_choices, lane), lane);
  } else if (warp == 1) {
    int most_tokens = num_choices > 1 ? best_choice(s, num_choices, lane).tiles.most_tokens : kSmallTokens;
    make_tables(s, p, few_rows, most_tokens, lane);
  }
  __syncthreads();
  make_pieces(s, p.num_experts);
  // The compiler sees that it is the same for all lanes.
  int most_tokens = __shfl_sync(~0u, shared.schedule.most_tokens, 0);
  bool large = kHasLarge && most_tokens == kLargeTokens;
  bool clears = p.gemm[0].columns % kStepColumns || p.gemm[1].columns % kStepColumns;
  if (clears) {
    if (large) {
      clear_codes<kLargeTokens>(memory);
    } else if (kHasTall && most_tokens == kSmallTokens) {
      clear_codes<kSmallTokens>(memory);
    } else {
      clear_codes<kTileTokens>(memory);
    }
  }
  if (clears || s.phase[0].pieces + s.phase[1].pieces > 0) __syncthreads();
  // Code of its own for each size of tiles: fewer registers for sums leave the compiler more to order products by.
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
    if (most_tokens == kSmallTokens) {
      run_consumers<kSmallTokens>(p, shared, memory);
    } else {
      run_consumers<kTileTokens>(p, shared, memory);
    }
    run_additions(p, shared.schedule, shared.first_addition);
  } else {
    registers_shrink<72>();
    if (kHasTall && most_tokens == kSmallTokens) {
      run_producers<kSmallTokens>(params, shared, memory, ticket);
    } else {
      run_producers<kTileTokens>(params, shared, memory, ticket);
    }
  }
  leave(p);
}
