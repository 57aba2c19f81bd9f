// Who computes what among the experts of a few rows, decided on the device from their row counts.
//
// A tile is 256 weight rows of one expert, all its tokens; a step is 128 columns of it. An expert of more than 32 tokens,
// where this kernel computes it, counts as several of up to 32 each. The tiles of a phase (w13, then w2) lie one after
// the other, expert by expert, and their steps are cut into one piece a block, all of equal cost. A piece may begin and
// end inside a tile: the block that has a tile's first step adds up the pieces that follow. Pieces of few tiles are cut
// between tiles, where the longest one is then little longer than the mean. Where w2 has but few tiles, as of one expert,
// each of them is cut into equally many pieces, which all blocks add up.
//
// A block claims pieces by tickets, those of w13 first and the last piece of either phase first, so a piece only waits
// for pieces of earlier tickets, whose blocks are running: nothing depends on how many blocks are resident. Blocks draw
// 3 tickets each (pieces of both phases, and one each for which there is no piece, but maybe an addition); whoever
// draws the last one also draws what is missing to a round number, so tickets count launches too: flags hold the number
// of the launch that set them and are never cleared.
//
// Example: 3 tiles of 4 steps on 2 blocks: the pieces are steps 0..5 and 6..11, tile 1 is shared. The block that draws
// steps 6..11 leaves the sum of tile 1's steps 2, 3 first thing; the other adds it to tile 1's steps 0, 1.
#pragma once
#include "threshold.cuh"

constexpr int kTileRows = 256;
constexpr int kStepColumns = 128;
constexpr int kMaxBlocks = 256;
constexpr u32 kTicketsPerLaunch = 4 * kMaxBlocks;

// Tokens a tile is computed for.
DEVICE constexpr int tile_tokens(int rows) { return (rows + 7) / 8 * 8; }

// Steps that blocks may idle so that no tile is shared: what adding up over blocks takes, as measured.
constexpr int kMostIdle = 5;

// Pieces of each of w2's tiles from which on they are added up by several blocks.
constexpr int kLeastParts = 4;

struct Schedule {
  int num_active, largest;         // experts that have rows here, parts of them counted, and the most rows of one
  int row_tiles[2], steps[2];      // of an expert, of a tile
  int start[2][kMaxBlocks + 1];    // first step of every piece, and behind the last one
  int parts[2];                    // how a phase is cut, see way_to_cut
  int list;                        // where in shared memory, from here on, an Active for every expert there may be is
  struct Active {
    int expert, first_row, place;  // first_row: rows of all experts before it, of any number; place: see store.cuh
    int cost_before;               // of a step, the sum over the active experts before it
    u16 rows, cost, dear_before;   // its own, and how many of those before it have more than kCheapRows rows
  };
  DEVICE Active* active() { return reinterpret_cast<Active*>(reinterpret_cast<u8*>(this) + list); }
  DEVICE int piece_start(int phase, int piece) const { return start[phase][piece]; }
};

struct Segment {
  int number;                           // segments that this block had before it
  int phase, piece;
  int active;                           // whose: its number in the list of active experts, and what stands there
  int expert, rows, first_row, place;
  int row_tile, from, to;               // which tile, and which of its steps
  int part;                             // of an addition: see find_addition
};

// An expert of more rows is dear: where tiles are few, its own are cut in half.
constexpr int kCheapRows = 8;

// Sum over the lanes before this one.
DEVICE int sum_before(int value, int lane) {
  int sum = value;
  for (int d = 1; d < 32; d *= 2) {
    int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  return sum - value;
}

// Whether pieces are whole tiles, since that leaves blocks idle for few steps; `dearest` is what a step of the dearest
// tile costs, `total` all steps of all.
DEVICE bool are_whole(int tiles, int steps, int dearest, int total) {
  int blocks = gridDim.x, most = tiles > blocks ? 2 : 1;
  return tiles <= 2 * blocks && most * steps * dearest - quotient(total, blocks) <= kMostIdle * dearest;
}

// Where a piece begins if all are equally long.
DEVICE int even_start(int all, int piece) {
  int share = quotient(all, gridDim.x);
  return piece * share + min(piece, all - share * (int)gridDim.x);
}

// How a phase is cut into pieces: of so many for each tile, or one of these.
constexpr int kByCost = 0, kEvenly = -1, kWhole = -2, kHalves = -3;

// Pieces are whole tiles, or halves of dear ones beside them, of equal cost, or of equal length where all experts are
// alike or pieces so short that some could get no step at all. Where w2 has few tiles, one block would add up many
// pieces while the others wait: there every tile is cut into equally many, all of which are left, and a block adds up
// those of one tile for some rows.
DEVICE int way_to_cut(int phase, int tiles, int dear_tiles, int steps, int dearest, int total) {
  if (are_whole(tiles, steps, dearest, total)) return kWhole;
  if (total < tiles * steps * dearest) {
    bool fit = tiles + dear_tiles <= (int)gridDim.x;
    if (fit && steps * few_cost(kCheapRows) - quotient(total, gridDim.x) <= kMostIdle * dearest) return kHalves;
    return total < 2 * few_cost(kFewRows) * (int)gridDim.x ? kEvenly : kByCost;
  }
  int parts = phase == 1 ? quotient(gridDim.x, tiles) : 0;
  return parts >= kLeastParts ? min(parts, steps) : kEvenly;
}

// One warp lists the experts.
DEVICE void make_tables(Schedule& s, const ExpertsParams& p, int lane) {
  int few_rows = p.few_rows, active, dear, cost, largest;
  while (true) {
    int all = 0;
    bool more = false;
    active = 0, dear = 0, cost = 0, largest = 0;
    for (int base = 0; base < p.num_experts; base += 32) {
      int e = base + lane;
      int rows = e < p.num_experts ? min(max(p.num_tokens[e], 0), p.max_rows) : 0;
      int few = rows <= few_rows ? rows : 0;
      more |= rows > few_rows;
      if (!__any_sync(~0u, few > 0)) {  // no place among the active ones, no cost
        all += __reduce_add_sync(~0u, rows);
        continue;
      }
      int rows_before = all + sum_before(rows, lane), place = p.sorted ? rows_before : e * p.max_rows;
      all = __shfl_sync(~0u, rows_before + rows, 31);
      u32 below = (1u << lane) - 1;
      int first = 0;
#pragma unroll 1
      do {  // once, unless an expert counts as several
        int part = min(few - first, kFewRows);
        u32 votes = __ballot_sync(~0u, part > 0), dear_votes = __ballot_sync(~0u, part > kCheapRows);
        if (active + __popc(votes) > p.most_tiles) __trap();  // more rows than the launch was told
        int own = part > 0 ? few_cost(part) : 0, before = cost + sum_before(own, lane);
        Schedule::Active mine = {e, rows_before + first, place + first, before,
                                 (u16)part, (u16)own, (u16)(dear + __popc(dear_votes & below))};
        if (part > 0) s.active()[active + __popc(votes & below)] = mine;
        active += __popc(votes), dear += __popc(dear_votes);
        cost = __shfl_sync(~0u, before + own, 31);
        largest = max(largest, part);
        first += kFewRows;
      } while (__any_sync(~0u, few > first));
    }
    // Where rows lie on both sides, it is decided whose all are, and they may be listed once more.
    if (few_rows != p.few_rows || active == 0 || !__any_sync(~0u, more)) break;
    few_rows = agreed_few_rows(p, lane);
    if (few_rows == p.few_rows) break;
  }
  largest = __reduce_max_sync(~0u, largest);
  if (lane < 2 && active > 0) {
    int row_tiles = (p.gemm[lane].rows + kTileRows - 1) / kTileRows;
    int steps = (p.gemm[lane].columns + kStepColumns - 1) / kStepColumns;
    s.row_tiles[lane] = row_tiles, s.steps[lane] = steps;
    s.parts[lane] =
        way_to_cut(lane, active * row_tiles, dear * row_tiles, steps, few_cost(largest), cost * row_tiles * steps);
  }
  if (lane == 0) s.num_active = active, s.largest = largest;
}

// Where a piece begins, once there are tables.
DEVICE int find_start(Schedule& s, int phase, int piece) {
  int blocks = gridDim.x, tiles = s.num_active * s.row_tiles[phase], steps = s.steps[phase], parts = s.parts[phase];
  if (parts > 0) {
    int tile = min(quotient(piece, parts), tiles);
    return tile * steps + (tile < tiles ? quotient((piece - tile * parts) * steps, parts) : 0);
  }
  if (parts == kWhole) return quotient(piece * tiles, blocks) * steps;
  if (parts == kEvenly) return even_start(tiles * steps, piece);
  // Otherwise it is looked up whose the piece is, by what comes before every expert.
  bool halves = parts == kHalves;
  Schedule::Active last = s.active()[s.num_active - 1];
  int row_tiles = s.row_tiles[phase], expert_steps = row_tiles * steps;
  auto before_expert = [&](int e, const Schedule::Active& a) {
    return halves ? (e + a.dear_before) * row_tiles : a.cost_before * expert_steps;
  };
  int at = even_start((last.cost_before + last.cost) * expert_steps, piece), expert = 0;
  if (halves) {
    // The first pieces are empty: they are claimed last.
    int pieces = (s.num_active + last.dear_before + (last.rows > kCheapRows)) * row_tiles;
    at = max(piece - (blocks - pieces), 0);
  }
  if (piece == blocks) return s.num_active * expert_steps;
  for (int stride = 1 << (31 - __clz(s.num_active)); stride > 0; stride /= 2) {
    int next = expert + stride;
    if (next < s.num_active && before_expert(next, s.active()[next]) <= at) expert = next;
  }
  Schedule::Active a = s.active()[expert];
  at -= before_expert(expert, a);
  if (!halves) return expert * expert_steps + quotient(at, a.cost);
  bool dear = a.rows > kCheapRows;
  return expert * expert_steps + (dear ? at / 2 * steps + at % 2 * ((steps + 1) / 2) : at * steps);
}

// By num_threads threads: where all pieces begin.
DEVICE void cut_phases(Schedule& s, int thread, int num_threads) {
  int pieces = gridDim.x + 1;
  for (int i = thread; i < 2 * pieces; i += num_threads) {
    int phase = i >= pieces, piece = i - phase * pieces;
    s.start[phase][piece] = find_start(s, phase, piece);
  }
}

// What a block with that last ticket adds up, behind all its segments: a part of a tile, or nothing.
DEVICE Segment find_addition(Schedule& s, int ticket) {
  Segment g = {};
  int parts = s.parts[1], number = ticket - 2 * (int)gridDim.x, row_tiles = s.row_tiles[1];
  g.part = parts > 0 && number < parts * s.num_active * row_tiles ? number : -1;
  if (g.part < 0) return g;
  int tile = quotient(number, parts);
  g.phase = 1;
  g.piece = tile * parts, g.part -= g.piece;
  g.active = quotient(tile, row_tiles);
  g.row_tile = tile - g.active * row_tiles;
  Schedule::Active a = s.active()[g.active];
  g.expert = a.expert, g.rows = a.rows, g.first_row = a.first_row, g.place = a.place;
  return g;
}

// One warp: calls work(segment) for every tile, or part of one, of a ticket's piece. Needs the tables, not `start`.
template <typename Work>
DEVICE void cut_piece(Schedule& s, int ticket, Work work) {
  Segment g;
  g.phase = ticket >= (int)gridDim.x;
  g.piece = (int)gridDim.x * (1 + g.phase) - 1 - ticket;
  int mine = find_start(s, g.phase, g.piece + threadIdx.x % 2);
  int at = __shfl_sync(~0u, mine, 0), end = __shfl_sync(~0u, mine, 1);
  int steps = s.steps[g.phase], row_tiles = s.row_tiles[g.phase];
  for (; at < end; at += g.to - g.from) {
    int tile = quotient(at, steps);
    g.active = quotient(tile, row_tiles);
    g.row_tile = tile - g.active * row_tiles;
    g.from = at - tile * steps;
    g.to = min(steps, g.from + end - at);
    Schedule::Active a = s.active()[g.active];
    g.expert = a.expert, g.rows = a.rows, g.first_row = a.first_row, g.place = a.place;
    work(g);
  }
}
