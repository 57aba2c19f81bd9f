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
#pragma once
#include "prefill_shape.cuh"

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
