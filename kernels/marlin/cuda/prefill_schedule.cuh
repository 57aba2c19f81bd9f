// Who computes what among the experts with many rows, decided on the device from their row counts.
//
// A tile is 256 weight rows, or 192 where those fill the machine better, x up to 128 tokens of one expert, or up to 64
// where no expert has more or that takes about as long; a step is 128 columns of it. Tiles are numbered expert by
// expert, then by weight rows, then by tokens, so that blocks at work together share weights and tokens. An item is
// what a block claims at once, by a ticket: first the items of w13, then those of w2, so an item only waits for earlier
// tickets, whose blocks are running; nothing depends on how many blocks are resident.
//
// Whole tiles are items while they fill the machine. Where the last wave would leave too many blocks idle, the last
// one to two waves are cut into one piece a block, of equal cost (split). A piece may begin and end inside a tile: the
// block that has a tile's first step adds up the pieces that follow, in order. Pieces are claimed last one first, so
// the pieces waited for have earlier tickets, and are computed at the start of their item.
//
// Example: 3 tiles of 4 steps on 2 blocks: the pieces are steps 0..5 and 6..11, tile 1 is shared. Block A claims steps
// 6..11 and leaves the sum of tile 1's steps 2, 3 for block B, which has tile 0 and adds it to tile 1's steps 0, 1.
#pragma once
#include "threshold.cuh"

constexpr int kTileRows = 256;
constexpr int kTileTokens = kManyTileTokens;
constexpr int kSmallTokens = 64;
constexpr int kStepColumns = 128;
constexpr int kMaxBlocks = 256;

constexpr int kNarrowRows = 192;

// Steps that a tile takes longer where blocks share it.
constexpr int kSplitSteps = 5;
// What a step of a tile of 192 rows takes, in sixteenths of one of 256: one warpgroup has 128 rows of either, and with
// few tokens that is what takes the time.
DEVICE constexpr int narrow_cost(int tokens) { return tokens > 32 ? 12 : 14; }

// Tokens a tile is computed for: the least size that there is a matrix product for.
DEVICE int tile_tokens(int rows) { return min((rows + 31) / 32, kTileTokens / 32) * 32; }

struct Position {
  int tile, step;
};

struct PhaseShape {
  int tile_rows, row_tiles, steps;
  int whole_items, items;
};

struct Schedule {
  PhaseShape phase[2];
  Position piece[2][kMaxBlocks + 1];  // where each piece starts; the end of one is the start of the next
  int largest;                        // rows of the largest expert here
  int most_tokens;                    // of a tile: kSmallTokens or kTileTokens
  // Behind this struct: four tables of num_experts + 1 numbers.
  DEVICE int* rows() { return reinterpret_cast<int*>(this + 1); }     // rows of every expert computed here
  DEVICE int* row_start(int n) { return rows() + (n + 1); }       // rows of all experts before, of any size
  DEVICE int* tile_start(int n) { return rows() + 2 * (n + 1); }  // token tiles of all experts before
  DEVICE int* cost_start(int n) { return rows() + 3 * (n + 1); }  // their cost, of one step each
};

struct Segment {
  int phase, expert, first_row, first_token, tokens;  // which tile; phase -1: there are no more
  int tile_rows;                                      // 256 or 192
  int tile, from, to;                                 // its number, and which of its steps
  int piece;                                          // number of the piece it is in, -1 for a whole tile
};

// How the tiles of a phase are made and cut: what takes the least time. `cost` is that of all token tiles.
DEVICE PhaseShape shape_phase(const GemmParams& gemm, int most_tokens, int largest, int token_tiles, int cost) {
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
  int pieces = 0;
  if (narrow / 16 * narrow_cost(min(largest, most_tokens)) < min(whole, split)) {
    phase.tile_rows = kNarrowRows;
    phase.row_tiles = (gemm.rows + kNarrowRows - 1) / kNarrowRows;
    phase.whole_items = narrow_tiles;
  } else if (split < whole) {
    phase.whole_items = max(quotient(tiles, blocks) - 1, 0) * blocks;
    // A piece has two steps at least.
    pieces = phase.whole_items ? blocks : min(cost * row_tiles * steps / (2 * many_tile_cost(most_tokens)), blocks);
  }
  phase.items = phase.whole_items + pieces;
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

// One warp: the most tokens of a tile, where an expert has up to `largest` rows. Small tiles, unless the others take a
// thirteenth less: the sums of blocks that share tiles cost more than is counted here.
DEVICE int choose_tokens(const ExpertsParams& p, int few_rows, int largest, int lane) {
  if (largest <= kSmallTokens) return kSmallTokens;
  int tiles[2] = {0, 0}, cost[2] = {0, 0};
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e) > few_rows ? rows_of(p, e) : 0;
    tiles[0] += (rows + kSmallTokens - 1) / kSmallTokens, cost[0] += many_cost<kSmallTokens>(rows);
    tiles[1] += (rows + kTileTokens - 1) / kTileTokens, cost[1] += many_cost<kTileTokens>(rows);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    tiles[i] = __reduce_add_sync(~0u, tiles[i]);
    cost[i] = __reduce_add_sync(~0u, cost[i]);
  }
  int large = lane % 2, tokens = min(largest, large ? kTileTokens : kSmallTokens);
  float time = phase_time(p.gemm[lane / 2 % 2], large ? tiles[1] : tiles[0], large ? cost[1] : cost[0], tokens);
  time += __shfl_xor_sync(~0u, time, 2);
  float small_time = __shfl_sync(~0u, time, 0), large_time = __shfl_sync(~0u, time, 1);
  return small_time * (12.0f / 13) < large_time ? kSmallTokens : kTileTokens;
}

// One warp fills the tables: prefix sums over the experts, 32 at a time.
DEVICE void make_tables(Schedule& s, const ExpertsParams& p, int few_rows, int largest, int lane) {
  int n = p.num_experts, sums[3] = {0, 0, 0};
  int most_tokens = choose_tokens(p, few_rows, largest, lane);
  bool small = most_tokens == kSmallTokens;
  for (int base = 0; base < n; base += 32) {
    int e = base + lane;
    int all = e < n ? rows_of(p, e) : 0;
    int rows = all > few_rows ? all : 0;
    int tiles = small ? (rows + kSmallTokens - 1) / kSmallTokens : (rows + kTileTokens - 1) / kTileTokens;
    int own[3] = {all, tiles, small ? many_cost<kSmallTokens>(rows) : many_cost<kTileTokens>(rows)};
    if (e < n) s.rows()[e] = rows;
#pragma unroll
    for (int i = 0; i < 3; i++) {
      int sum = own[i];
      for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += below;
      }
      int* table = s.rows() + (i + 1) * (n + 1);
      if (e < n) table[e] = sums[i] + sum - own[i];
      sums[i] += __shfl_sync(~0u, sum, 31);
    }
  }
  if (lane < 3) s.rows()[(lane + 1) * (n + 1) + n] = lane == 0 ? sums[0] : lane == 1 ? sums[1] : sums[2];
  if (lane < 2) {
    s.phase[lane] = shape_phase(p.gemm[lane], most_tokens, largest, sums[1], sums[2]);
  }
  if (lane == 0) s.largest = largest, s.most_tokens = most_tokens;
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
  int token_tiles = s.tile_start(n)[e + 1] - s.tile_start(n)[e], rest = tile - s.tile_start(n)[e] * row_tiles;
  int cost = s.cost_start(n)[e + 1] - s.cost_start(n)[e], row_tile = quotient(rest, token_tiles);
  int own = row_tile * cost + (rest - row_tile * token_tiles) * many_tile_cost(s.most_tokens);
  return (s.cost_start(n)[e] * row_tiles + own) * steps;
}

DEVICE Position position_of_cost(Schedule& s, int n, int phase, int cost) {
  int row_tiles = s.phase[phase].row_tiles, steps = s.phase[phase].steps;
  if (cost >= s.cost_start(n)[n] * row_tiles * steps) return {s.tile_start(n)[n] * row_tiles, 0};
  int e = find_expert(s.cost_start(n), n, row_tiles * steps, cost);
  int rest = cost - s.cost_start(n)[e] * row_tiles * steps;
  int row_cost = (s.cost_start(n)[e + 1] - s.cost_start(n)[e]) * steps;
  int full_cost = many_tile_cost(s.most_tokens) * steps;
  int token_tiles = s.tile_start(n)[e + 1] - s.tile_start(n)[e], row_tile = quotient(rest, row_cost);
  rest -= row_tile * row_cost;
  int token_tile = min(quotient(rest, full_cost), token_tiles - 1);
  int tokens = min(s.rows()[e] - token_tile * s.most_tokens, s.most_tokens);
  int step = quotient(rest - token_tile * full_cost, many_tile_cost(tokens));
  return {s.tile_start(n)[e] * row_tiles + row_tile * token_tiles + token_tile, step};
}

// All threads, after make_tables: the starts of the pieces of both phases.
DEVICE void make_pieces(Schedule& s, int n) {
  for (int phase = 0; phase < 2; phase++) {
    const PhaseShape& shape = s.phase[phase];
    int pieces = shape.items - shape.whole_items;
    if (pieces == 0) continue;
    int total = s.cost_start(n)[n] * shape.row_tiles * shape.steps;
    for (int piece = threadIdx.x; piece <= pieces; piece += blockDim.x) {
      int start = shape.whole_items ? cost_before_tile(s, n, phase, shape.whole_items) : 0;
      int share = quotient(total - start, pieces), longer = total - start - share * pieces;
      s.piece[phase][piece] = position_of_cost(s, n, phase, start + piece * share + min(piece, longer));
    }
  }
}

// Which tile, and whose; the steps are the caller's.
DEVICE void locate_tile(Schedule& s, int n, Segment& g) {
  int row_tiles = s.phase[g.phase].row_tiles;
  g.expert = find_expert(s.tile_start(n), n, row_tiles, g.tile);
  int token_tiles = s.tile_start(n)[g.expert + 1] - s.tile_start(n)[g.expert];
  int rest = g.tile - s.tile_start(n)[g.expert] * row_tiles, row_tile = quotient(rest, token_tiles);
  g.tile_rows = s.phase[g.phase].tile_rows;
  g.first_row = row_tile * g.tile_rows;
  g.first_token = (rest - row_tile * token_tiles) * s.most_tokens;
  g.tokens = min(s.rows()[g.expert] - g.first_token, s.most_tokens);
}

// Calls work(segment) for every tile, or part of one, of a ticket's item.
template <typename Work>
DEVICE void cut_item(Schedule& s, int n, int ticket, Work work) {
  Segment g;
  g.phase = ticket >= s.phase[0].items;
  const PhaseShape shape = s.phase[g.phase];
  int item = ticket - (g.phase ? s.phase[0].items : 0);
  Position from = {item, 0}, to = {item + 1, 0};
  g.piece = -1;
  if (item >= shape.whole_items) {
    g.piece = shape.items - 1 - item;
    from = s.piece[g.phase][g.piece];
    to = s.piece[g.phase][g.piece + 1];
  }
  for (g.tile = from.tile; g.tile <= to.tile; g.tile++) {
    g.from = g.tile == from.tile ? from.step : 0;
    g.to = g.tile == to.tile ? to.step : shape.steps;
    if (g.from >= g.to) continue;
    locate_tile(s, n, g);
    work(g);
  }
}
