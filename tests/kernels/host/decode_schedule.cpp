// The decode kernel's schedule on a CPU: every row of every expert is computed once, by one of the two kernels, and
// every step of every tile by one CTA. In a batch-invariant build one CTA computes all of a tile, always as one of 16
// tokens. Usage: decode_schedule SEED CASES
#include "warp.h"

#include "schedule.cuh"

namespace {

struct {
  Schedule schedule;
  u8 list[kMaxExperts * sizeof(Schedule::Active)];
} shared;

int one_of(std::initializer_list<int> values) { return values.begin()[rand() % values.size()]; }

enum Launch { kBoth, kForced, kAlone };

// K, N and the launch overhead with them (hopper.py).
constexpr int kShapes[][3] = {{2048, 768, 184}, {4096, 1536, 46}, {2880, 2880, 33},
                              {7168, 2048, 20}, {4096, 14336, 5}, {544, 1088, 500}};

struct Case {
  ExpertsParams p = {};
  std::vector<int> counts, before = {0};
  Launch launch;

  Case() {
    const int* shape = kShapes[rand() % 6];
    int n = one_of({1, 2, 8, 16, 31, 32, 33, 64, 128, 257}), most = one_of({4, 16, 32, 40, 64, 200, 2000});
    bool even = rand() % 4 == 0, rare = rand() % 4 == 0;
    p.max_rows = one_of({20, 33, 64, 100, 128, 512, 1024});
    if (BATCH_INVARIANT) p.max_rows = min(p.max_rows, 512 / n * kDecodeTileTokens);  // what one launch has room for
    for (int e = 0; e < n; e++) {
      int rows = rand() % 3 == 0 ? 0 : even ? most : rand() % (most + 1);
      counts.push_back(rare && rand() % 8 ? rand() % 12 : rows);
      before.push_back(before.back() + rows_of(e));
    }
    p.gemm[0].rows = 2 * shape[1], p.gemm[0].columns = shape[0];
    p.gemm[1].rows = shape[0], p.gemm[1].columns = shape[1];
    p.num_tokens = counts.data(), p.num_experts = p.max_tiles = n, p.sorted = rand() % 2;
    p.max_small_m = kDecodeTileTokens;
    int tiles = n * ((p.max_rows + kDecodeTileTokens - 1) / kDecodeTileTokens);
    if (rand() % 2) tiles = min(tiles, n + before.back() / kDecodeTileTokens);
    launch = BATCH_INVARIANT ? kAlone : tiles <= 512 ? (Launch)(rand() % 3) : (Launch)(rand() % 2);
    if (launch == kBoth) p.launch_overhead = shape[2], p.max_tiles = max(n, min(tiles, rand() % 300));
    if (launch == kForced) p.max_small_m = one_of({0, 8, 16, 24, 32});
    if (launch == kAlone) p.max_small_m = max(p.max_rows, kDecodeTileTokens), p.max_tiles = max(tiles, n);
  }

  int rows_of(int e) const { return min(counts[e], p.max_rows); }

  // Rows up to which an expert is not the prefill kernel's, as that kernel finds it.
  int prefill_max_small_m() {
    int largest = 0, max_small_m = p.max_small_m;
    bool any_small_m = false;
    for (int e = 0; e < p.num_experts; e++) {
      largest = max(largest, rows_of(e)), any_small_m |= rows_of(e) > 0 && rows_of(e) <= p.max_small_m;
    }
    if (launch == kAlone || largest <= p.max_small_m || !any_small_m) return launch == kAlone ? largest : max_small_m;
    warp::run([&](int lane) {
      int agreed = select_kernel(p, lane);
      if (lane == 0) max_small_m = agreed;
    });
    return max_small_m;
  }
};

// The list: parts of experts in order, each with its output row and the cost of those before it.
void check_list(const Case& c, Schedule& s, int prefill_max_small_m) {
  std::vector<int> times(c.before.back(), 0);
  int cost = 0, large = 0, largest = 0;
  if (s.num_active > c.p.max_tiles) fail("more parts than the list has room for", s.num_active, c.p.max_tiles);
  for (int i = 0; i < s.num_active; i++) {
    Schedule::Active a = s.active()[i];
    if (a.expert < 0 || a.expert >= c.p.num_experts || a.rows < 1 || a.rows > kDecodeTileTokens)
      fail("a part", a.expert, a.rows);
    int first = a.first_row - c.before[a.expert];
    if (first < 0 || first + a.rows > c.rows_of(a.expert)) fail("rows of a part", a.expert, first, a.rows);
    int output_row = c.p.sorted ? a.first_row : a.expert * c.p.max_rows + first;
    if (a.output_row != output_row) fail("output row of a part", a.expert, a.output_row, output_row);
    if (a.cost_before != cost || a.large_before != large || a.cost != small_m_cost(a.rows)) fail("cost of a part", i);
    cost += a.cost, large += a.rows > kSmallTileRows, largest = max(largest, a.rows);
    for (int r = 0; r < a.rows; r++) times[a.first_row + r]++;
  }
  if (BATCH_INVARIANT && largest > 0) largest = kDecodeTileTokens;
  if (s.largest != largest) fail("the largest part", s.largest, largest);
  for (int e = 0; e < c.p.num_experts; e++) {
    bool others = c.rows_of(e) > prefill_max_small_m;
    for (int r = c.before[e]; r < c.before[e + 1]; r++) {
      if (times[r] + others != 1) fail("kernels that compute a row", e, r - c.before[e], times[r] + others);
    }
  }
}

// The work units of both phases, as CTAs draw them, and the reductions behind them.
void check_units(Schedule& s) {
  int blocks = gridDim.x;
  std::vector<int> times[2], following[2],
      parts(s.num_active * s.row_tiles[1] * max(units_per_tile(s.partition[1]), 0), 0);
  for (int phase = 0; phase < 2; phase++) {
    int all = s.num_active * s.row_tiles[phase] * s.steps[phase];
    times[phase].assign(all, 0), following[phase].assign(s.num_active * s.row_tiles[phase], 0);
  }
  for (int ticket = 0; ticket < 2 * blocks; ticket++) {
    warp::run([&](int lane) {
      for_each_slice_of(s, ticket, [&](const TileSlice& g) {
        if (lane != 0) return;
        int tile = g.active * s.row_tiles[g.phase] + g.row_tile;
        if (g.rows != s.active()[g.active].rows || g.output_row != s.active()[g.active].output_row)
          fail("a slice", ticket);
        if (BATCH_INVARIANT && (g.from != 0 || g.to != s.steps[g.phase] || tile_tokens(g.rows) != 16))
          fail("a tile that is not whole", ticket, g.from, g.to);
        // Units without a step inside of a tile would be waited for.
        following[g.phase][tile] += g.from == 0 ? -g.units_behind : 1;
        for (int step = g.from; step < g.to; step++) times[g.phase][tile * s.steps[g.phase] + step]++;
      });
    });
  }
  for (int phase = 0; phase < 2; phase++) {
    for (int i = 0; i < (int)following[phase].size(); i++) {
      if (following[phase][i] != 0) fail("units that a tile's first one waits for", phase, i, following[phase][i]);
    }
    for (int i = 0; i < (int)times[phase].size(); i++) {
      if (times[phase][i] != 1) fail("CTAs that compute a step", phase, i, times[phase][i]);
    }
  }
  for (int ticket = 2 * blocks; ticket < 3 * blocks; ticket++) {
    TileSlice g = find_reduction(s, ticket);
    if (g.part >= 0) parts[(g.active * s.row_tiles[1] + g.row_tile) * units_per_tile(s.partition[1]) + g.part]++;
  }
  for (int i = 0; i < (int)parts.size(); i++) {
    if (parts[i] != 1) fail("CTAs that add up a part", i, parts[i]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  srand(atoi(argv[1]));
  int launches[3] = {}, mixed = 0, several = 0;
  for (int i = 0; i < atoi(argv[2]); i++) {
    Case c;
    reciprocal_error = rand() % 3 - 1;
    Schedule& s = shared.schedule;
    memset(&shared, 0xff, sizeof shared);
    s.list = sizeof(Schedule);
    std::vector<int> rows;
    for (int e = 0; e < c.p.num_experts; e++) rows.push_back(c.rows_of(e));
    warp::run([&](int lane) { make_tables(s, c.p, rows.data(), lane); });
    int prefill_max_small_m = c.prefill_max_small_m();
    check_list(c, s, prefill_max_small_m);
    if (s.num_active > 0) check_units(s);
    launches[c.launch]++;
    for (int e = 0; e < c.p.num_experts; e++) {
      bool some = s.num_active > 0 && c.rows_of(e) > kDecodeTileTokens;
      if (some) {
        (c.rows_of(e) > prefill_max_small_m ? mixed : several)++;
        break;
      }
    }
  }
  printf("%d %d %d launches, %d with both kernels at work, %d with experts of several parts\n", launches[0],
         launches[1], launches[2], mixed, several);
}
