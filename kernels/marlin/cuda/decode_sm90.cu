// Decode (small-M) expert kernel for Hopper: w13, activation and w2 of all local experts in one persistent launch.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// Layout in:   weights packed as repack.py draws them, scales and zero points [E, groups, rows], x rows of K 16-bit
//              numbers: batched [E, max_rows, K], by reference (row_ids) or as sorted ids (params.cuh).
// Layout out:  `hidden` [all rows, N], one expert after the other; `out` batched or, with sorted ids, at row `id`.
// Warp roles (warp-specialized, 20 warps):
//   0          scheduler (claims work units) and producer of packed weights (bulk copies)
//   1, 2       producers of activations, wherever their rows lie; they wait for w13's tiles before they read `hidden`.
//              Of tiles of 8 tokens, warp 2 prepares what warp 1 has copied (section "Prepare")
//   3          prefetches the first weights into L2 (PEERS: those of this rank's own tokens), publishes finished w13
//              tiles, helps with the activations
//   4 to 19    consumers in split-K groups: dequantize, mma.sync or wgmma, reduce over groups and CTAs, epilogue
// Operands:    weights are A, dequantized from packed codes into registers; tokens are B, N = 8, 16, 24 or 32, so that
//              few rows cost little padding.
// Pipeline:    ring of up to 16 shared-memory stages, each 128 columns of K (codes of 256 weight rows, scales, tokens);
//              full, empty and landed mbarriers per stage. Its depth follows the largest tile, so that few rows leave
//              room for many weights in flight. Weights run ahead of tokens: those of w2 stream in while w13 drains.
// Schedule:    Stream-K, split-K or data-parallel, chosen on the device (section "Schedule"). A tile that spans CTAs is
//              reduced in a fixed order ("fixup"): same input, same bits.
// Hand-over:   partial sums, and `hidden` of tiles of 8 tokens, pass from CTA to CTA as flag-in-data packets (as NCCL's
//              LL128 protocol): the reader polls the data itself, without a flag or a fence before it. Larger tiles of
//              `hidden` have a flag each.
// Example:     3 tiles x 4 steps on 2 CTAs -> units [0, 6) and [6, 12); tile 1 is split; one CTA publishes the partial
//              sum of steps 6-7 first, the other adds it to steps 4-5.
#include "dequant.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "select_kernel.cuh"
#include "wgmma.cuh"

// ==== Schedule ====
//
// A tile is 256 weight rows of one expert x all its tokens; a step is 128 columns of it. An expert of more than 32
// tokens that this kernel computes counts as several of up to 32 each. The tiles of a phase (w13, then w2) form one
// sequence, expert by expert, and the sequence of their steps is partitioned into one work unit per CTA:
//
//   Stream-K        units of equal estimated cost (or length) that may begin and end inside a tile. The CTA that has
//                   the first step of a tile adds up the sums of the units that follow in it.
//   data-parallel   whole tiles, where the longest unit is then little longer than the mean
//   split-K         where w2 has few tiles, as of one expert: every tile is cut into equally many units, all of which
//                   publish their sums; then all CTAs add up a part of a tile each (a "reduction")
//
// A CTA claims units by tickets of an atomic counter: those of w13 first, and of either phase the last unit first. So a
// unit only waits for units of earlier tickets, whose CTAs are running, and no co-residency is required. A CTA draws 3
// tickets (a unit of each phase, and one for which there is no unit, but maybe a reduction). Whoever draws the last one
// also draws the rest up to a round number, so tickets count launches too: flags hold the number of the launch that set
// them and are never cleared.

constexpr int kTileRows = 256;
constexpr int kStepColumns = 128;
constexpr int kMaxBlocks = 256;
constexpr int kStepBits = 22;  // of the number of a phase's steps
constexpr u32 kTicketsPerLaunch = 4 * kMaxBlocks;

#if ROUTED && !PEERS
// Tokens of a launch, at most: a warp routes each.
constexpr int kRoutedTokens = TOP_K < 8 ? 16 : 128 / TOP_K;
#endif

// Tokens that a tile is computed for: its rows, padded to the N of an mma; in a batch-invariant build always as many,
// because instructions and the split over groups of warps follow from them.
DEVICE constexpr int tile_tokens(int rows) { return BATCH_INVARIANT ? kDecodeTileTokens : (rows + 7) / 8 * 8; }

// Idle steps per CTA up to which no tile is split: a fixup takes about as long (measured).
constexpr int kMaxIdleSteps = 5;

// Units per tile from which on split-K tiles are reduced by all CTAs.
constexpr int kMinSplitK = 4;

// Experts of more rows are large: where tiles are few, theirs are cut in half.
constexpr int kSmallTileRows = 8;

// How a phase is partitioned into work units. Positive values are split-K: that many units per tile.
enum class Partition : int {
  kSplitLargeTiles = -3,  // whole tiles, and halves of large ones
  kDataParallel = -2,     // whole tiles
  kStreamKEven = -1,      // units of equally many steps
  kStreamKByCost = 0,     // units of equal estimated cost
};
DEVICE int units_per_tile(Partition partition) { return (int)partition; }
DEVICE bool is_split_k(Partition partition) { return (int)partition > 0; }

// The choices of all tokens.
#if PEERS
using Routes = peers::Rows<NUM_EXPERTS>;
#elif ROUTED
struct Routes {
  u32 tokens[NUM_EXPERTS];  // of each expert, as bits
  u16 ids[kRoutedTokens][TOP_K];
  float weights[kRoutedTokens][TOP_K];
};
#endif

struct Schedule {
#if ROUTED
  Routes routes;
#endif
  int num_active, largest;     // active experts (those with rows here, parts counted), and the most rows of one
  int row_tiles[2], steps[2];  // of an expert, of a tile
  Partition partition[2];
  int list;  // where in shared memory, from here on, the list of active experts is
  struct Active {
    int expert, first_row, output_row;  // first_row: rows of all experts before it; output_row: see output_row_of
    int cost_before;                    // cost of one step, summed over the active experts before it
    u16 rows, cost, large_before;       // its own, and how many of those before it are large
  };
  DEVICE Active* active() { return reinterpret_cast<Active*>(reinterpret_cast<u8*>(this) + list); }
};

// What a CTA computes next: some steps of one tile.
struct TileSlice {
  int number;  // slices that this CTA had before it
  int phase, work_unit;
  int active;  // index of its expert in the list, and what stands there
  int expert, rows, first_row, output_row;
  int row_tile, from, to;  // which tile, and which of its steps; from == to: there are no more slices
  int units_behind;        // of its tile, where it has the first step of it
  int part;                // of a reduction: see find_reduction
#if ROUTED
  int sums;  // part of a layer's outputs that this CTA adds up behind all its slices; below 0: none
#endif
};

// Exclusive prefix sum over the lanes.
template <typename T>
DEVICE T sum_before(T value, int lane) {
  T sum = value;
  for (int d = 1; d < 32; d *= 2) {
    T below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  return sum - value;
}

// Whether whole tiles leave CTAs idle for few steps. `max_cost`: of a step of the most expensive tile; `total`: of all.
DEVICE bool fits_data_parallel(int tiles, int steps, int max_cost, int total) {
  int blocks = gridDim.x, most = tiles > blocks ? 2 : 1;
  return tiles <= 2 * blocks && most * steps * max_cost - quotient(total, blocks) <= kMaxIdleSteps * max_cost;
}

// First step of a unit if all units have equally many.
DEVICE int even_start(int all, int unit) {
  int share = quotient(all, gridDim.x);
  return unit * share + min(unit, all - share * (int)gridDim.x);
}

// Data-parallel if that wastes little. Else, where experts have unlike costs, halves of large tiles beside whole small
// ones if that wastes little, or units of equal cost; of equal length where units are so short that some could get no
// step at all. Else split-K where w2 has few tiles: one CTA would add up many units while the others wait. Always
// data-parallel in a batch-invariant build: where units begin follows from the rows of all experts.
DEVICE Partition choose_partition(int phase, int tiles, int large_tiles, int steps, int max_cost, int total) {
  if (BATCH_INVARIANT || fits_data_parallel(tiles, steps, max_cost, total)) return Partition::kDataParallel;
  if (total < tiles * steps * max_cost) {
    bool fit = tiles + large_tiles <= (int)gridDim.x;
    if (fit && steps * small_m_cost(kSmallTileRows) - quotient(total, gridDim.x) <= kMaxIdleSteps * max_cost) {
      return Partition::kSplitLargeTiles;
    }
    bool is_short = total < 2 * small_m_cost(kDecodeTileTokens) * (int)gridDim.x;
    return is_short ? Partition::kStreamKEven : Partition::kStreamKByCost;
  }
  int split_k = phase == 1 && (!ROUTED || PEERS) ? quotient(gridDim.x, tiles) : 0;
  return split_k >= kMinSplitK ? Partition(min(split_k, steps)) : Partition::kStreamKEven;
}

// Of the list of active experts: their number, how many are large, the cost of a step of each, and the most rows.
struct ListSums {
  int active, large, cost, largest;
};

#if ROUTED
// What precedes an expert in the list, in one word: active experts, rows, large experts, costs.
#if PEERS
using ListWord = u64;
constexpr int kListedRows = 12, kListedLarge = 24, kListedCosts = 36;
#else
using ListWord = int;
constexpr int kListedRows = 8, kListedLarge = 16, kListedCosts = 20;
#endif

// One warp lists the active experts. A lane has neighbouring experts, so that one prefix sum is enough.
DEVICE ListSums list_routed(Schedule& s, int lane) {
  constexpr int kEach = (NUM_EXPERTS + 31) / 32;
  auto field = [](ListWord word, int from, int to) { return (int)(word >> from) & ((1 << to - from) - 1); };
  auto word_of = [](int rows) -> ListWord {
    ListWord large = rows > kSmallTileRows, cost = small_m_cost(rows);
    return rows == 0 ? 0 : 1 | (ListWord)rows << kListedRows | large << kListedLarge | cost << kListedCosts;
  };
  int rows[kEach], largest = 0;
  ListWord own = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    int expert = lane * kEach + i;
    rows[i] = expert < NUM_EXPERTS ? __popc(s.routes.tokens[expert]) : 0;
    own += word_of(rows[i]), largest = max(largest, rows[i]);
  }
  ListWord before = sum_before(own, lane), all = __shfl_sync(~0u, before + own, 31);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    if (rows[i] == 0) continue;
    int first = field(before, kListedRows, kListedLarge);
    s.active()[field(before, 0, kListedRows)] = {lane * kEach + i,
                                                 first,
                                                 first,
                                                 (int)(before >> kListedCosts),
                                                 (u16)rows[i],
                                                 (u16)small_m_cost(rows[i]),
                                                 (u16)field(before, kListedLarge, kListedCosts)};
    before += word_of(rows[i]);
  }
  return {field(all, 0, kListedRows), field(all, kListedLarge, kListedCosts), (int)(all >> kListedCosts),
          (int)__reduce_max_sync(~0u, largest)};
}
#else
// One warp: lists the active experts, unless one of them is large-M or counts as several (`active` is -1 then). A lane
// has neighbouring experts, so that prefix sums over the lanes are enough.
DEVICE ListSums list_at_once(Schedule& s, const ExpertsParams& p, const int* rows_of_expert, int lane) {
  // What precedes an expert, in two words: active and large experts; costs and rows.
  auto counts_of = [](int rows) { return rows == 0 ? 0 : 1 | (rows > kSmallTileRows) << 16; };
  auto sums_of = [](int rows) { return rows == 0 ? 0 : small_m_cost(rows) | rows << 16; };
  int each = (p.num_experts + 31) / 32, first = lane * each, end = min(first + each, p.num_experts);
  int counts = 0, sums = 0, largest = 0;
#pragma unroll 4
  for (int e = first; e < end; e++) {
    int rows = rows_of_expert[e];
    counts += counts_of(rows), sums += sums_of(rows), largest = max(largest, rows);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (largest > min(p.max_small_m, kDecodeTileTokens)) return {-1, 0, 0, 0};
  int counts_before = sum_before(counts, lane), before = sum_before(sums, lane);
  int all_counts = __shfl_sync(~0u, counts_before + counts, 31), cost = __shfl_sync(~0u, before + sums, 31) & 0xffff;
  if ((all_counts & 0xffff) > p.max_tiles) __trap();  // more rows than the launch was told
#pragma unroll 1
  for (int e = first; e < end; e++) {
    int rows = rows_of_expert[e], first_row = before >> 16;
    if (rows == 0) continue;
    s.active()[counts_before & 0xffff] = {e,
                                          first_row,
                                          p.sorted ? first_row : e * p.max_rows,
                                          before & 0xffff,
                                          (u16)rows,
                                          (u16)small_m_cost(rows),
                                          (u16)(counts_before >> 16)};
    counts_before += counts_of(rows), before += sums_of(rows);
  }
  return {all_counts & 0xffff, all_counts >> 16, cost, largest};
}

// The same for any rows.
DEVICE ListSums list_parts(Schedule& s, const ExpertsParams& p, const int* rows_of_expert, int lane) {
  int active, large, cost, largest;
  int max_small_m = p.max_small_m;
  while (true) {
    int all = 0;
    bool more = false;
    active = 0, large = 0, cost = 0, largest = 0;
    for (int base = 0; base < p.num_experts; base += 32) {
      int e = base + lane;
      int rows = e < p.num_experts ? rows_of_expert[e] : 0;
      int own_rows = rows <= max_small_m ? rows : 0;
      more |= rows > max_small_m;
      if (!__any_sync(~0u, own_rows > 0)) {  // none of them is active
        all += __reduce_add_sync(~0u, rows);
        continue;
      }
      int rows_before = all + sum_before(rows, lane), output_row = p.sorted ? rows_before : e * p.max_rows;
      all = __shfl_sync(~0u, rows_before + rows, 31);
      u32 below = (1u << lane) - 1;
      int first = 0;
#pragma unroll 1
      do {  // once, unless an expert counts as several
        int part = min(own_rows - first, kDecodeTileTokens);
        u32 votes = __ballot_sync(~0u, part > 0), large_votes = __ballot_sync(~0u, part > kSmallTileRows);
        if (active + __popc(votes) > p.max_tiles) __trap();  // more rows than the launch was told
        int own = part > 0 ? small_m_cost(part) : 0, before = cost + sum_before(own, lane);
        Schedule::Active mine = {e,
                                 rows_before + first,
                                 output_row + first,
                                 before,
                                 (u16)part,
                                 (u16)own,
                                 (u16)(large + __popc(large_votes & below))};
        if (part > 0) s.active()[active + __popc(votes & below)] = mine;
        active += __popc(votes), large += __popc(large_votes);
        cost = __shfl_sync(~0u, before + own, 31);
        largest = max(largest, part);
        first += kDecodeTileTokens;
      } while (__any_sync(~0u, own_rows > first));
    }
    // Where some experts are small-M and others large-M, one kernel may take all: then the list is made once more.
    if (max_small_m != p.max_small_m || active == 0 || !__any_sync(~0u, more)) break;
    max_small_m = select_kernel(p, lane);
    if (max_small_m == p.max_small_m) break;
  }
  return {active, large, cost, (int)__reduce_max_sync(~0u, largest)};
}
#endif

// One warp lists the active experts and chooses the partition of both phases.
DEVICE void make_tables(Schedule& s, const ExpertsParams& p, const int* rows_of_expert, int lane) {
#if ROUTED
  ListSums all = list_routed(s, lane);
#else
  // Beside e4m3 weights the registers of both would be spilled.
  ListSums all = WEIGHT_TYPE == FLOAT8_E4M3 ? ListSums{-1} : list_at_once(s, p, rows_of_expert, lane);
  if (all.active < 0) all = list_parts(s, p, rows_of_expert, lane);
#endif
  int active = all.active, large = all.large, cost = all.cost, largest = all.largest;
  if (BATCH_INVARIANT && largest > 0) largest = kDecodeTileTokens;  // as tiles are computed
  if (lane < 2 && active > 0) {
    int row_tiles = (p.gemm[lane].rows + kTileRows - 1) / kTileRows;
    int steps = (p.gemm[lane].columns + kStepColumns - 1) / kStepColumns;
    s.row_tiles[lane] = row_tiles, s.steps[lane] = steps;
    s.partition[lane] = choose_partition(lane, active * row_tiles, large * row_tiles, steps, small_m_cost(largest),
                                         cost * row_tiles * steps);
  }
  if (lane == 0) s.num_active = active, s.largest = largest;
}

// First step of a unit; needs the tables.
DEVICE int find_unit_start(Schedule& s, int phase, int unit) {
  int blocks = gridDim.x, tiles = s.num_active * s.row_tiles[phase], steps = s.steps[phase];
  Partition partition = s.partition[phase];
  int split_k = units_per_tile(partition);
  if (split_k > 0) {
    int tile = min(quotient(unit, split_k), tiles);
    return tile * steps + (tile < tiles ? quotient((unit - tile * split_k) * steps, split_k) : 0);
  }
  if (partition == Partition::kDataParallel) return quotient(unit * tiles, blocks) * steps;
  if (partition == Partition::kStreamKEven) return even_start(tiles * steps, unit);
  // Otherwise a binary search over the experts finds the one that the unit begins in.
  bool halves = partition == Partition::kSplitLargeTiles;
  Schedule::Active last = s.active()[s.num_active - 1];
  int row_tiles = s.row_tiles[phase], expert_steps = row_tiles * steps;
  auto before_expert = [&](int e, const Schedule::Active& a) {
    return halves ? (e + a.large_before) * row_tiles : a.cost_before * expert_steps;
  };
  int at = even_start((last.cost_before + last.cost) * expert_steps, unit), expert = 0;
  if (halves) {
    // The first units are empty: they are claimed last.
    int units = (s.num_active + last.large_before + (last.rows > kSmallTileRows)) * row_tiles;
    at = max(unit - (blocks - units), 0);
  }
  if (unit == blocks) return s.num_active * expert_steps;
  for (int stride = 1 << (31 - __clz(s.num_active)); stride > 0; stride /= 2) {
    int next = expert + stride;
    if (next < s.num_active && before_expert(next, s.active()[next]) <= at) expert = next;
  }
  Schedule::Active a = s.active()[expert];
  at -= before_expert(expert, a);
  if (!halves) return expert * expert_steps + quotient(at, a.cost);
  bool is_large = a.rows > kSmallTileRows;
  return expert * expert_steps + (is_large ? at / 2 * steps + at % 2 * ((steps + 1) / 2) : at * steps);
}

#if ROUTED
// CTAs that add up outputs: those with the last tickets. The others make room for the next kernel's.
DEVICE int summing_blocks() { return (gridDim.x + 1) / 2; }
#endif

// What the CTA with this last ticket adds up behind all its slices: part `part` of a split-K tile, or nothing (-1), and
// then a part of the layer's outputs.
DEVICE TileSlice find_reduction(Schedule& s, int ticket) {
  TileSlice g = {};
  int split_k = units_per_tile(s.partition[1]), number = ticket - 2 * (int)gridDim.x, row_tiles = s.row_tiles[1];
#if ROUTED
  g.sums = number - ((int)gridDim.x - summing_blocks());
#endif
  g.part = split_k > 0 && number < split_k * s.num_active * row_tiles ? number : -1;
  if (g.part < 0) return g;
  int tile = quotient(number, split_k);
  g.phase = 1;
  g.work_unit = tile * split_k, g.part -= g.work_unit;
  g.active = quotient(tile, row_tiles);
  g.row_tile = tile - g.active * row_tiles;
  Schedule::Active a = s.active()[g.active];
  g.expert = a.expert, g.rows = a.rows, g.first_row = a.first_row, g.output_row = a.output_row;
  return g;
}

// One warp: calls work(slice) for every tile, or part of one, of a ticket's unit. Needs the tables, not `start`.
template <typename Work>
DEVICE void for_each_slice_of(Schedule& s, int ticket, Work work) {
  TileSlice g;
  g.phase = ticket >= (int)gridDim.x;
  g.work_unit = (int)gridDim.x * (1 + g.phase) - 1 - ticket;
  // A lane has the first step of one unit from this one on.
  int at = 0;
  u32 end = 0, units = 0;
#pragma unroll 1
  for (u32 found = 32; found == 32; units += found) {
    int unit = g.work_unit + units + threadIdx.x % 32, start = find_unit_start(s, g.phase, min(unit, (int)gridDim.x));
    if (units == 0) at = __shfl_sync(~0u, start, 0), end = __shfl_sync(~0u, start, 1);
    // Those that begin before the end of this one's last tile.
    int steps = s.steps[g.phase];
    found = __popc(__ballot_sync(~0u, start < quotient(end + steps - 1, steps) * steps));
  }
  end |= units << kStepBits;  // one register for both: the weight warp has few
  for (; at < (int)(end & (1u << kStepBits) - 1); at += g.to - g.from) {
    // volatile: read again for every slice, not kept
    int steps = const_cast<volatile Schedule&>(s).steps[g.phase];
    int row_tiles = const_cast<volatile Schedule&>(s).row_tiles[g.phase], tile = quotient(at, steps);
    g.active = quotient(tile, row_tiles);
    g.row_tile = tile - g.active * row_tiles;
    g.from = at - tile * steps;
    g.to = min(steps, g.from + (int)(end & (1u << kStepBits) - 1) - at);
    Schedule::Active a = s.active()[g.active];
    g.expert = a.expert, g.rows = a.rows, g.first_row = a.first_row, g.output_row = a.output_row;
    g.units_behind = g.from == 0 && g.to < steps ? (end >> kStepBits) - 1 : 0;
    work(g);
  }
}

// ==== Raw codes ====
//
// For up to 16 tokens, with one scale per 128 columns: codes become operand A without arithmetic. Their bits, read as
// an activation (bf16 or f16), are a tiny number proportional to the code.
//
// Tensor cores take subnormal numbers exactly. Eight bits stay proportional to the code even where the highest one
// falls into the exponent (bf16; f16 allows eleven bits). The missing power of two goes to the other operand: bf16
// tokens are multiplied by 2^64 first, so that products are normal f32 numbers for tokens from 2^-57 to 2^64 (larger
// ones become infinite). The code's offset (zero point, or the code of zero) is taken off with the sum of the tokens,
// and the scale is applied once per 128 columns, both in f32: weights are exact.
//
// A byte of four-bit integers holds the codes of rows g (low) and g + 8 (high). The whole byte is operand of row g + 8,
// whose sum is then 16 times too large and contains that of row g.

constexpr bool kRaw = SCALES_PER_STEP == 1 && (kIntegers || WEIGHT_TYPE == FLOAT8_E4M3);
constexpr bool kNibbles = kIntegers && kBits == 4;
constexpr bool kScaleTokens = kRaw && ACT_BF16;
constexpr bool kSumTokens = kRaw && kIntegers;
constexpr u32 kTokenFactor = 0x5f805f80u;  // 2^64, for both numbers of a pair
// Factor that raw sums are multiplied by at the end: 2^69 and 2^56 in bf16 (integers, e4m3), 2^24 and 2^8 in f16; a
// sixteenth of it for rows g + 8 of four bits.
constexpr float kRawSumScale = ACT_BF16 ? (kIntegers ? 0x1p69f : 0x1p56f) : (kIntegers ? 0x1p24f : 0x1p8f);

// Pairs of codes that tokens are summed with, which gives the initial accumulators of rows g and g + 8: minus the code
// of zero, or minus one if zero points follow.
constexpr u32 kStart[2] = {
    WEIGHT_TYPE == UINT4B8     ? 0x80088008u
    : WEIGHT_TYPE == UINT8B128 ? 0x80808080u
                               : 0x80018001u,
    WEIGHT_TYPE == UINT4B8     ? 0x80888088u
    : WEIGHT_TYPE == UINT8B128 ? 0x80808080u
                               : 0x80018001u,
};

// The four pairs of 16 columns, in the order of dequantize().
DEVICE void raw_pairs(const u32* words, u32* a) {
  if constexpr (kNibbles) {
    a[1] = words[0] & 0x00ff00ffu;
    a[0] = words[0] & 0x000f000fu;
    a[3] = permute_bytes(words[0], 0, 0x4341);
    a[2] = a[3] & 0x000f000fu;
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (WEIGHT_TYPE == UINT8B128) {
        a[j] = permute_bytes(word_of_pair(words, j), 0, j < 2 ? 0x4240 : 0x4341);
      } else {
        a[j] = e4m3_bits_of_pair(words, j);
      }
    }
  }
}

// Scales of rows g and g + 8, not yet divided by 16 where that is needed; `row` points at the first.
DEVICE void load_raw_scales(const u8* row, float* scale) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  scale[0] = to_float(pair & 0xffff), scale[1] = to_float(pair >> 16);
}

// Factors of the tokens' sums if there are zero points.
DEVICE void load_raw_zeros(const u8* row, float* zero) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  zero[0] = to_float(pair & 0xffff), zero[1] = fmaf(16.0f, to_float(pair >> 16), zero[0]);
}

// ==== Pipeline ====
//
// What the warps of a CTA share: the ring of stages, the queue of slices, flags, and their sizes.

constexpr int kStrips = kTileRows / 64;
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // 64 rows of a stage
constexpr int kCodeBytes = kStrips * kStripBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;  // scales of a group
constexpr int kScaleStage = SCALES_PER_STEP * kScaleRow * (kHasZeros ? 2 : 1);
// The swizzle of wgmma repeats every 1024 bytes.
constexpr int kTokenOffset = (kCodeBytes + kScaleStage + 1023) / 1024 * 1024;
constexpr int kMaxStages = 16;
constexpr int kQueuedSlices = 8;  // slices that the scheduler is ahead
// Warps that others wait for have low numbers: hardware schedulers prefer them.
constexpr int kWeightWarp = 0;
constexpr int kTokenWarp = 1, kTokenWarps = 2;
constexpr int kFlagWarp = 3;
constexpr int kFirstConsumer = 4, kConsumerWarps = 16;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kThreads = 32 * kFirstConsumer + kConsumerThreads;
constexpr int kSumsBarrier = 1, kTablesBarrier = 2, kRowsBarrier = 3, kInitBarrier = 4;  // named barriers
constexpr int kReleases = 8;                                                             // arrivals that empty a stage
constexpr int kRawTokens = 16;  // tokens up to which codes are multiplied raw

struct Shared {
  u64 full[kMaxStages], empty[kMaxStages];
  u64 landed[kMaxStages];  // tokens that still must be prepared
  u64 slice_full[kQueuedSlices], slice_done[kQueuedSlices], slice_empty[kQueuedSlices];
  u64 exchange_free;
  __align__(16) float starts[kMaxStages][2 * kRawTokens];  // initial accumulators, see "Prepare"
  TileSlice slice[kQueuedSlices];
  u32 end;     // end, in shared memory, of the ring and of the split-K exchange behind it
  int launch;  // number of this launch
  int issued;  // steps whose weights have been requested
  Schedule schedule;
};

// `sync` holds 64-bit words: the ticket counter, fixup_sums, a flag for each finished tile of w13, and hidden_packets.
// The upper half of a flag or packet is the number of the launch that wrote it, so launches for other weights may
// divide the memory otherwise.
DEVICE int* tile_flag(const ExpertsParams& p, const Schedule& s, int active, int row_tile) {
  int* flags = reinterpret_cast<int*>(p.fixup_sums + 2 * gridDim.x * (kDecodeTileTokens / 8 * kConsumerThreads));
  return flags + 2 * (active * s.row_tiles[0] + row_tile) + 1;
}

// A stage: codes [strip][32 columns][16 rows][lane], scales [group][256] (then zero points), tokens [64
// columns][token][128 bytes], swizzled.
constexpr u32 kRingOffset = (sizeof(Shared) + 1023) / 1024 * 1024;

// Tokens that a stage has room for if the largest tile has `largest`; they are read 8 or 16 at a time. Smaller tiles
// use the same stages.
DEVICE constexpr int token_rows_of(int largest) { return largest <= 8 ? 8 : (largest + 15) / 16 * 16; }

struct Ring {
  u8* memory;
  int num_stages, token_rows;
  int stage = 0, parity = 0, passed = 0;  // passed: steps since the start of the launch
  DEVICE int stage_bytes() const { return kTokenOffset + token_rows * 2 * kStepColumns; }
  DEVICE u8* codes() const { return memory + kRingOffset + stage * stage_bytes(); }
  DEVICE u8* scales() const { return codes() + kCodeBytes; }
  DEVICE u8* tokens() const { return codes() + kTokenOffset; }
  DEVICE void advance(int steps) {
    passed += steps;
    for (stage += steps; stage >= num_stages; stage -= num_stages) parity ^= 1;
  }
  // By at most num_stages steps.
  DEVICE void forward(int steps) {
    passed += steps;
    u32 on = stage + steps, wrapped = on - num_stages;
    stage = min(on, wrapped);  // stage - num_stages is a large number while it is below zero
    if (stage == (int)wrapped) parity ^= 1;
  }
  DEVICE void back(int steps) {
    passed -= steps;
    stage -= steps;
    if (stage < 0) stage += num_stages, parity ^= 1;
  }
};

// Calls work(slice) for the slices of this CTA in their order, in one warp; returns the one that ends the queue, which
// may hold a reduction.
template <bool kComputes, typename Work>
DEVICE const TileSlice& for_each_slice(Shared& shared, Work work) {
  for (int i = 0;;) {
    barrier_wait(&shared.slice_full[i % kQueuedSlices], i / kQueuedSlices & 1);
    const TileSlice& g = shared.slice[i % kQueuedSlices];
    if (g.from == g.to) return g;
    work(g);
    __syncwarp();
    i = g.number;
    if (threadIdx.x % 32 == 0) {
      if (kComputes) barrier_arrive(&shared.slice_done[i % kQueuedSlices]);
      barrier_arrive(&shared.slice_empty[i % kQueuedSlices]);
    }
    i++;
  }
}

#if ROUTED
// ==== Route ====
//
// A build that computes a whole layer of up to kRoutedTokens tokens: every CTA chooses the experts of all tokens from
// the router's logits, a warp each, since that takes less time than a kernel before this one. Results of slots are not
// stored but published as flag-in-data packets, as `hidden` is, and each CTA adds up a part of the outputs:
//
//   p.results    [token][slot][4 columns][2 packets]
//   output[t] = sum over slots k, in their order, of weight[t, k] * result[t, k], in f32 without fused multiply-add
//
// A CTA waits for results only behind its own units, when all units have been claimed by running CTAs.
//
// PEERS: a build for the rows of all ranks that were dispatched to this one (low_latency_layer.cuh). Their experts are
// read, not chosen, their columns are copied from the packets in which they came, and sums return to the tokens' ranks.

// Row i of an expert is its i-th token.
DEVICE int token_of_row(const Routes& routes, int expert, int i) {
  u32 tokens = routes.tokens[expert];
#pragma unroll 1
  for (; i > 0; i--) tokens &= tokens - 1;
  return __ffs(tokens) - 1;
}

#if !PEERS
// One warp: the experts of a token. CTA 0 also writes them down.
DEVICE void route_token(const RouterParams& p, Routes& routes, int token) {
  Choice choice = choose_experts(p, token);
  int slot = threadIdx.x % 32;
  if (slot >= TOP_K) return;
  routes.ids[token][slot] = choice.id, routes.weights[token][slot] = choice.weight;
  atomicOr(&routes.tokens[choice.id], 1u << token);
  if (blockIdx.x == 0) p.ids[token * TOP_K + slot] = choice.id, p.weights[token * TOP_K + slot] = choice.weight;
}
#endif

DEVICE u64* result_packets(const ExpertsParams& p, int slot, int column) {
  return p.results + ((i64)slot * p.gemm[1].rows + column) / 2;
}

#endif

// ==== Fixup ====
//
// How CTAs hand each other the sums of tiles that they share: as flag-in-data packets. A thread stores the inverted
// bits of its sums. No sum has the bits that would become zero (a NaN that arithmetic does not make), so zero means
// "not published yet": the reader polls the data itself, without a flag or a fence before it. It stores zero behind
// itself, so that all is zero between launches.
//   p.fixup_sums  [phase][work unit][8 tokens][consumer thread][4 numbers]

// This consumer's index among the sums of a unit.
DEVICE u32 sums_thread() {
  u32 thread = threadIdx.x - 32 * kFirstConsumer;
  asm volatile("" : "+r"(thread));  // an opaque copy: nothing derived from it is kept in registers across the main loop
  return thread;
}

DEVICE uint4* fixup_sums(const ExpertsParams& p, int phase, int unit, int thread) {
  return p.fixup_sums + (i64)(phase * gridDim.x + unit) * (kDecodeTileTokens / 8 * kConsumerThreads) + thread;
}

DEVICE void store_fixup(uint4* to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

DEVICE uint4 load_fixup(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

DEVICE bool is_published(const uint4& v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

DEVICE void add_fixup(float* sums, const uint4& v) {
  sums[0] += __uint_as_float(~v.x), sums[1] += __uint_as_float(~v.y);
  sums[2] += __uint_as_float(~v.z), sums[3] += __uint_as_float(~v.w);
}

// Reads the sums of kAtOnce units at a time, kGroups x 8 tokens each, and adds them up. `from` is the address of the
// first unit's.
template <int kAtOnce, int kGroups>
struct FixupReader {
  uint4 v[kAtOnce][kGroups];
  static DEVICE uint4* address_of(uint4* from, int unit, int group) {
    return from + (u32)unit * (kDecodeTileTokens / 8 * kConsumerThreads) + group * kConsumerThreads;
  }
  DEVICE void load(uint4* from, int first, int count) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int j = 0; j < kGroups; j++) v[i][j] = load_fixup(address_of(from, min(first + i, count - 1), j));
    }
  }
  DEVICE bool are_published() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kAtOnce * kGroups; i++) all &= is_published(v[i / kGroups][i % kGroups]);
    return __all_sync(~0u, all);
  }
  // Adds all units in order; the first ones have been loaded.
  DEVICE void add(uint4* from, int count, float* sums) {
#pragma unroll 1
    for (int first = 0; true; load(from, first, count)) {
      if (!are_published()) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; i++, first++) {
        if (first == count) return;
#pragma unroll
        for (int j = 0; j < kGroups; j++) {
          add_fixup(sums + 4 * j, v[i][j]);
          store_fixup(address_of(from, first, j), 0, 0, 0, 0);
        }
      }
      if (first == count) return;
    }
  }
};

// ==== Prepare ====
//
// Tokens of a stage are made ready for raw codes: rows are multiplied by a power of two in place, and each row's sum
// over the stage's columns becomes the initial accumulator.

// One producer warp prepares tiles of 8 tokens. It could not keep up with 16, so the consumers prepare those
// themselves. With more tokens, dequantizing codes costs less than preparing tokens and scaling sums.
DEVICE constexpr bool is_raw(int tokens) { return kRaw && tokens <= kRawTokens; }
DEVICE constexpr bool takes_raw(int tokens) { return kRaw && tokens == 8; }
DEVICE constexpr bool prepares_itself(int tokens) { return kRaw && tokens == kRawTokens; }

// Offset of a lane's first chunk of eight tokens in a stage: a quarter of the warp has 8 rows x 8 columns.
DEVICE u32 prepared_offset(int first_token) {
  int lane = threadIdx.x % 32, row = lane % 8;
  return (first_token + row) * 128 + (lane / 8 ^ row) * 16;
}

// One warp, 8 tokens; `mine` is prepared_offset(). Operand A is 8 tokens x 32 columns: its rows g and g + 8 are the
// same token, and the sums come out multiplied by the even and by the odd columns of operand B.
template <int kTokens>
DEVICE void prepare_tokens(const Ring& ring, float* starts, u32 mine, int first_token) {
  u32 first = shared_address(ring.tokens()) + mine, pairs[4][4];
  auto address_of = [&](int i) { return (first ^ i % 2 * 64) + i / 2 * token_rows_of(kTokens) * 128; };
#pragma unroll
  for (int i = 0; i < 4; i++) load_matrices(pairs[i], address_of(i));
#pragma unroll
  for (int i = 0; i < 4 && kScaleTokens; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[i][j] = mul_pair(pairs[i][j], kTokenFactor);
    store_matrices(address_of(i), pairs[i]);
  }
  if constexpr (kSumTokens) {
    u32 lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // opaque, so that nothing derived from it is kept between stages
    u32 code = lane & 4 ? kStart[1] : kStart[0], same = code;
    asm volatile("" : "+r"(same));  // one pair of registers for all products
    float sums[4], parts[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) mma_from_zero(parts[i], pairs[i], code, same);  // independent of each other
#pragma unroll
    for (int m = 0; m < 4; m++) sums[m] = parts[0][m] + parts[1][m] + (parts[2][m] + parts[3][m]);
    // In the order of accumulators, lanes 4 r + c: rows g of tokens 2 c and 2 c + 1, then rows g + 8.
    u32 token = first_token + lane / 4, high = lane % 4;
    if (high < 2) starts[token / 2 * 4 + high * 2 + token % 2] = high ? sums[1] + sums[3] : sums[0] + sums[2];
  }
}

// ==== Hidden packets ====
//
// How CTAs hand each other `hidden` of tiles of 8 tokens: as 64-bit flag-in-data packets, of which one half is a pair
// of results and the other the number of the launch that wrote it. The reader polls the packet until the number is
// right. That takes one trip through memory; store, fence, flag, poll and copy take five. Larger tiles would move too
// many bytes twice.
//
// Packets lie behind the tile flags, are written at most once a launch and never cleared:
//   p.hidden_packets  [expert][step of w2][8 columns][token][2 columns]; an expert has one such tile at most

DEVICE constexpr bool uses_packets(int tokens) { return tokens == 8; }

constexpr int kHiddenPackets = 8 * kStepColumns / 2;  // per step

DEVICE u64* hidden_packets(const ExpertsParams& p, const Schedule& s, int expert, int step) {
  return p.hidden_packets + (i64)(expert * s.steps[1] + step) * kHiddenPackets;
}

DEVICE u64 make_packet(u32 value, int launch) { return (u64)(u32)launch << 32 | value; }

DEVICE void store_packet(u64* to, u32 value, int launch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(make_packet(value, launch)) : "memory");
}

// Two neighbouring packets; each is atomic by itself.
struct TwoPackets {
  u64 packet[2];
  DEVICE u32 value(int i) const { return (u32)packet[i]; }
  DEVICE bool is_of(int launch) const { return (int)(packet[0] >> 32) == launch && (int)(packet[1] >> 32) == launch; }
};

DEVICE void store_two_packets(u64* to, u32 first, u32 second, int launch) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(make_packet(first, launch)),
               "l"(make_packet(second, launch))
               : "memory");
}

DEVICE TwoPackets load_two_packets(const u64* from) {
  TwoPackets v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.packet[0]), "=l"(v.packet[1])
               : "l"(from)
               : "memory");
  return v;
}

// 16 weight rows of a warp, as finish_rows passes them.
DEVICE void store_hidden(const ExpertsParams& p, const Schedule& s, const TileSlice& g, int launch, int first,
                         const float* sums, SumScale sum_scale) {
  int lane = threadIdx.x % 32, column = kGated ? first / 2 : first;
  asm volatile("" : "+r"(lane));  // opaque, see sums_thread
  u64* to = hidden_packets(p, s, g.expert, column / kStepColumns) + column % kStepColumns / 8 * 32;
  finish_rows<8, true>(p, g.expert, g.rows, first, sums, 0, sum_scale, [&](int token, const u32* pairs) {
    if constexpr (kGated) {
      store_packet(to + token * 4 + lane % 4, pairs[0], launch);
    } else {
      store_two_packets(to + lane % 4 / 2 * 32 + token * 4 + lane % 2 * 2, pairs[0], pairs[1], launch);
    }
  });
}

// The token and flag warps take the steps of a slice of w2 by turns and copy each one's tokens into its stage. Lanes 2
// t and 2 t + 1 of half a warp have token t of every other 8 columns.
DEVICE void load_hidden_packets(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring& ring) {
  constexpr int kLoads = kHiddenPackets / 64, kCopyingWarps = kTokenWarps + 1;
  int lane = threadIdx.x % 32, token = lane / 2 % 8, step = g.from + threadIdx.x / 32 - kTokenWarp, end = g.to;
  ring.forward(min(step, end) - g.from);
#pragma unroll 1
  while (step < end) {
    const u64* from = hidden_packets(p, shared.schedule, g.expert, step) + lane * 2;
    asm volatile("" : "+l"(from));  // one register pair, not one per load
    int columns = token < g.rows ? p.gemm[1].columns - step * kStepColumns - lane / 16 * 8 : 0;
    TwoPackets packets[kLoads];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kLoads; i++) packets[i] = i * 16 < columns ? load_two_packets(from + i * 64) : TwoPackets{};
#pragma unroll
      for (int i = 0; i < kLoads; i++) all &= i * 16 >= columns || packets[i].is_of(shared.launch);
    } while (!__all_sync(~0u, all));
    // This warp skips stages, so the parity of `empty` alone does not tell which filling it is.
    while (read_shared(&shared.issued) <= ring.passed) {
    }
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    u32 row = shared_address(ring.tokens()) + token * 128 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      u32 to = row + i / 4 * token_rows_of(8) * 128 + (i % 4 * 2 + lane / 16 ^ token) * 16;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(packets[i].value(0)), "r"(packets[i].value(1))
                   : "memory");
    }
    if constexpr (takes_raw(8)) {
      __syncwarp();
      prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_offset(0), 0);
    }
    barrier_arrive(&shared.landed[ring.stage], kTokenWarps);  // as in every filling of a stage
    barrier_arrive(&shared.full[ring.stage], kTokenWarps);
    ring.forward(min(kCopyingWarps, end - step));
    step += kCopyingWarps;
  }
}

#if ROUTED
// 16 weight rows of a warp, as finish_rows passes them.
template <int kTokens>
DEVICE void store_results(const ExpertsParams& p, const Shared& shared, const TileSlice& g, int first,
                          const float* sums, int first_token, SumScale sum_scale) {
  finish_rows<kTokens, false>(p, g.expert, g.rows, first, sums, first_token, sum_scale, [&](int i, const u32* pairs) {
    const Routes& routes = shared.schedule.routes;
    int token = token_of_row(routes, g.expert, i);
#if PEERS
    u32 slots = peers::slots_of(routes, token, g.expert);
#else
    u32 slots = 1;
#pragma unroll
    for (int k = 1; k < TOP_K; k++) slots = routes.ids[token][k] == g.expert ? 1u << k : slots;
#endif
#pragma unroll 1
    for (; slots; slots &= slots - 1) {  // one, unless a token has an expert twice
      u64* to = result_packets(p, token * TOP_K + __ffs(slots) - 1, first + threadIdx.x % 4 * 4);
      store_two_packets(to, pairs[0], pairs[1], shared.launch);
    }
  });
}

#if PEERS
// Results of slots, eight columns at a time.
struct SlotResults {
  struct Loaded {
    TwoPackets packets[2];
  };
  const ExpertsParams& p;
  int launch;
  DEVICE Loaded load(int slot, int vector) const {
    const u64* from = result_packets(p, slot, 8 * vector);
    return {load_two_packets(from), load_two_packets(from + 2)};
  }
  DEVICE bool is_here(const Loaded& v) const { return v.packets[0].is_of(launch) && v.packets[1].is_of(launch); }
  DEVICE peers::Vec vector(const Loaded& v) const {
    return {v.packets[0].value(0), v.packets[0].value(1), v.packets[1].value(0), v.packets[1].value(1)};
  }
};

// The consumers of a CTA: part `part` of the sums of all rows; then, on the last CTAs, of this rank's outputs: as few
// as have a warp for every task, since they may wait for other ranks, which may share the GPU.
DEVICE void sum_results(const ExpertsParams& p, const Shared& shared, int part, bool has_rows) {
  const Routes& routes = shared.schedule.routes;
  int blocks = summing_blocks(), warp = sums_thread() / 32;
  if (has_rows) {
    SlotResults results{p, shared.launch};
    peers::return_sums(p.batch, routes, part + blocks * warp, blocks * kConsumerWarps, results);
  }
  int tasks = p.batch.common.num_tokens * peers::kWarpsPerResult;
  int receivers = min(blocks, (tasks + kConsumerWarps - 1) / kConsumerWarps), index = part - (blocks - receivers);
  if (index >= 0) peers::receive_sums(p.batch, routes, index + receivers * warp, receivers * kConsumerWarps);
}
#else
// The consumers of every CTA: part `part` of the outputs, four columns a thread.
DEVICE void sum_results(const ExpertsParams& p, const Shared& shared, int part) {
  constexpr int kAtOnce = TOP_K < 8 ? TOP_K : 8;
  int columns = p.gemm[1].rows, quads = columns / 4, all = p.router.num_tokens * quads;
  int blocks = summing_blocks(), end = quotient((part + 1) * all, blocks);
  for (int i = quotient(part * all, blocks) + sums_thread(); i < end; i += kConsumerThreads) {
    int token = quotient(i, quads), column = (i - token * quads) * 4;
    const float* weights = shared.schedule.routes.weights[token];
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < TOP_K; first += kAtOnce) {
      TwoPackets packets[kAtOnce];
      bool all_here;
      do {
        all_here = true;
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
          packets[k] = load_two_packets(result_packets(p, token * TOP_K + min(first + k, TOP_K - 1), column));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) all_here &= packets[k].is_of(shared.launch);
      } while (!all_here);
#pragma unroll
      for (int k = 0; k < kAtOnce; k++) {
        if (first + k == TOP_K) break;
        float weight = weights[first + k];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          u16 value = packets[k].value(j / 2) >> j % 2 * 16;
          sums[j] = __fadd_rn(sums[j], __fmul_rn(to_float(value), weight));
        }
      }
    }
    u16* to = p.gemm[1].output + (i64)token * columns + column;
    *reinterpret_cast<uint2*>(to) = make_uint2(to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]));
  }
}
#endif
#endif

// ==== Producers ====
//
// ---- weights ----

// Codes of a stage if the tile has fewer than 256 rows.
DEVICE void load_partial_codes(u32 to, const u8* from, u32 strip_bytes, int rows, int step, u32 column_bytes, u64* full,
                               u64 policy) {
#pragma unroll 1
  for (int i = 0; i < rows / 64; i++, to += kStripBytes, from += strip_bytes) {
    bulk_copy(to, from, 64 * column_bytes, full, policy);
  }
  if (rows % 64 == 0) return;
  // Half a strip: its fragments lie closer than in a stage.
  from -= (i64)step * (kStripBytes / 2);
#pragma unroll 1
  for (u32 bytes = 0; bytes < column_bytes;
       bytes += 32 * kBits / 8, to += 4 * kFragmentBytes, from += 2 * kFragmentBytes) {
    bulk_copy(to, from, 2 * kFragmentBytes, full, policy);
  }
}

constexpr int kFirstStages = 4;

// All stages of a slice; one lane. Beside busy warps an instruction takes seven cycles, so the loop must be short:
// memory bandwidth is lost otherwise.
DEVICE void load_weights(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring& ring, u64 policy) {
  const GemmParams& gemm = p.gemm[g.phase];
  bool grouped = SCALES_PER_STEP > 1 || gemm.groups > 1;
  int step = g.from, to_step = g.to, tile_row = g.row_tile * kTileRows, rows = min(gemm.rows - tile_row, kTileRows);
  int columns_left = gemm.columns - step * kStepColumns, group = grouped ? step * SCALES_PER_STEP : 0;
  int groups_left = gemm.groups - group;
  u32 strip_bytes = gemm.columns * (64 * kBits / 8), scale_bytes = rows * kScaleBytes;
  i64 group_bytes = grouped ? gemm.rows * kScaleBytes : 0;
  i64 offset = (((i64)g.expert * gemm.groups + group) * gemm.rows + tile_row) * kScaleBytes;
  const u8 *scales = gemm.scales + offset, *zeros = gemm.zeros + offset;
  const u8* codes = gemm.weights + ((i64)g.expert * gemm.rows + tile_row) * gemm.columns * kBits / 8;
  codes += (i64)step * kStripBytes;
#pragma unroll 1
  for (; step < to_step; step++, codes += kStripBytes) {
    u32 column_bytes = min(columns_left, kStepColumns) * kBits / 8;
    int groups = SCALES_PER_STEP == 1 ? 1 : min(groups_left, SCALES_PER_STEP);
    u64* full = &shared.full[ring.stage];
    u32 to = shared_address(ring.codes());
    // At the start only as many requests as keep memory busy: tokens, and CTAs that start later, would wait behind
    // more.
    if (g.phase == 0 && ring.passed >= kFirstStages && ring.passed < ring.num_stages) {
      barrier_wait(&shared.full[ring.stage - kFirstStages], 0);
    }
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_arrive_expecting(full, rows * column_bytes + groups * scale_bytes * (kHasZeros ? 2 : 1));
    if (rows == kTileRows) {
#pragma unroll
      for (int i = 0; i < kStrips; i++) {
        bulk_copy(to + i * kStripBytes, codes + i * strip_bytes, 64 * column_bytes, full, policy);
      }
    } else {
      load_partial_codes(to, codes, strip_bytes, rows, step, column_bytes, full, policy);
    }
    to += kCodeBytes;
#pragma unroll
    for (int i = 0; i < SCALES_PER_STEP; i++) {
      if (i >= groups) break;
      bulk_copy(to + i * kScaleRow, scales, scale_bytes, full, policy);
      scales += group_bytes;
      if constexpr (kHasZeros) {
        bulk_copy(to + (SCALES_PER_STEP + i) * kScaleRow, zeros, scale_bytes, full, policy);
        zeros += group_bytes;
      }
    }
    columns_left -= kStepColumns, groups_left -= SCALES_PER_STEP;
    ring.forward(1);
    count_shared(&shared.issued);
  }
}

// The last step may have fewer columns; its products with the scales behind them are discarded, but must not be NaN.
DEVICE void clear_scales(const ExpertsParams& p, Ring ring) {
  if (SCALES_PER_STEP == 1 || (p.gemm[0].columns % kStepColumns == 0 && p.gemm[1].columns % kStepColumns == 0)) return;
  for (int stage = 0; stage < ring.num_stages; stage++, ring.stage++) {
    uint4* words = reinterpret_cast<uint4*>(ring.scales());
    for (int i = threadIdx.x % 32; i < kScaleStage / 16; i += 32) words[i] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();
  __syncwarp();
}

DEVICE u64 draw_tickets(const ExpertsParams& p, u32 count) {
  return atomicAdd(reinterpret_cast<u64*>(p.sync), (u64)count);
}

// Number, within its launch, of the first of the tickets drawn.
DEVICE int ticket_number(const ExpertsParams& p, u64 ticket, u32 count) {
  u32 number = (u32)ticket % kTicketsPerLaunch, all = 3 * gridDim.x;
  if (number + count == all) draw_tickets(p, kTicketsPerLaunch - all);
  return (int)number;
}

// `ticket` is the first one, drawn already; lane 0 has it.
DEVICE void run_weight_warp(const ExpertsParams& p, Shared& shared, Ring ring, int ticket) {
  int lane = threadIdx.x % 32, published = 0;
  u64 policy = policy_evict_first();
  auto publish = [&](const TileSlice& g) {
    int i = published % kQueuedSlices;
    barrier_wait(&shared.slice_empty[i], published / kQueuedSlices & 1 ^ 1);
    if (lane == 0) {
      shared.slice[i] = g;
      shared.slice[i].number = published;
      barrier_arrive(&shared.slice_full[i]);
    }
    published++;
  };
  clear_scales(p, ring);
  for (ticket = __shfl_sync(~0u, ticket, 0); ticket < 2 * (int)gridDim.x;) {
    Ring first = ring;
    int loaded = 0;
    for_each_slice_of(shared.schedule, ticket, [&](const TileSlice& g) {
      loaded += g.to - g.from;
      publish(g);
      if (elected()) load_weights(p, shared, g, ring, policy);
      __syncwarp();
    });
    // A CTA may take a second unit of w2 only once `hidden` has arrived for its first: by then every other running CTA
    // has requested its weights of w13 and has got a unit of w2. Units of more than a ring of steps wait anyway.
    bool waits = ticket >= (int)gridDim.x && loaded > 0 && loaded <= ring.num_stages;
    if (waits && elected()) barrier_wait(&shared.empty[first.stage], first.parity);
    __syncwarp();
    if (lane == 0) ticket = ticket_number(p, draw_tickets(p, 1), 1);
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  publish(find_reduction(shared.schedule, ticket));
}

// ---- activations ----

DEVICE i64 input_row(const ExpertsParams& p, const Schedule& s, const TileSlice& g, int i) {
  if (g.phase == 1) return g.first_row + i;
#if PEERS
  return peers::packet_row(p.batch.common, token_of_row(s.routes, g.expert, i));
#elif ROUTED
  return token_of_row(s.routes, g.expert, i);
#endif
  return p.row_ids == nullptr ? g.output_row + i : p.row_ids[g.output_row + i] / p.ids_divisor;
}

// The step up to which columns of `hidden` have been published, at least one beyond `step`: a tile of w13 makes 128 of
// them, or 256 without a gate.
DEVICE int wait_for_hidden(const ExpertsParams& p, Shared& shared, const TileSlice& g, int step) {
  int mine = step + threadIdx.x % 32;
  const int* flag = tile_flag(p, shared.schedule, g.active, mine / (kGated ? 1 : 2));
  u32 missing;
  do {
    missing = __ballot_sync(~0u, mine < g.to && load_acquire_gpu(flag) != shared.launch);
  } while (missing & 1);
  __syncwarp();
  return step + (missing ? __ffs(missing) - 1 : 32);
}

// Whether the CTA that computes a slice also completes the sums of its tile.
DEVICE bool is_completed(const Schedule& s, const TileSlice& g) {
  return g.from == 0 && (g.phase == 0 || !is_split_k(s.partition[1]));
}

// By kWarps warps, `thread` counted over them: each thread copies the same 16-byte chunk of every second or fourth of
// at most kRows rows. `raw`: the copies arrive at `landed`, since tokens still must be prepared; otherwise at `full`.
template <int kWarps, int kRows>
DEVICE void copy_tokens(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring& ring, u32 thread, bool raw) {
  constexpr int kChunks = kStepColumns / 8, kRowsAtOnce = kWarps * 32 / kChunks;
  const GemmParams& gemm = p.gemm[g.phase];
  int lane = thread % 32, chunk = thread % kChunks, first = thread / kChunks, num_rows = g.rows - first;
  int stage_rows = BATCH_INVARIANT ? kDecodeTileTokens : g.rows;
  u32 offset = chunk / 8 * token_rows_of(stage_rows) * 128 + first * 128 + (chunk ^ first) % 8 * 16;
  // Each lane finds where one row begins, in units of 16 bytes, which 32 bits can count.
#if PEERS
  // Seven of eight vectors of a packet are columns.
  bool packed = g.phase == 0;
  u32 row_vectors = packed ? peers::kRowPackets * peers::kPacketThreads : gemm.columns / 8;
#else
  constexpr bool packed = false;
  u32 row_vectors = gemm.columns / 8;
#endif
  u32 start = lane < g.rows ? (u32)input_row(p, shared.schedule, g, lane) * row_vectors : 0;
  u32 from[kRows / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; i++) from[i] = __shfl_sync(~0u, start, first + i * kRowsAtOnce);
  int ready = g.phase == 0 ? g.to : g.from, end = g.to, columns_left = gemm.columns - g.from * kStepColumns - chunk * 8;
  const uint4* input = reinterpret_cast<const uint4*>(gemm.input) + g.from * (kStepColumns / 8) + chunk;
#pragma unroll 1
  for (int step = g.from; step < end; step++) {
    if (step >= ready) ready = wait_for_hidden(p, shared, g, step);
    int packets = packed ? (step * kChunks + chunk) / 7 : 0;  // before this vector
    u32 to = shared_address(ring.tokens()) + offset, valid = columns_left > 0 ? 16 : 0;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; i++) {
      int row = i * kRowsAtOnce;
      if (row >= num_rows) break;
      copy_async_16((to ^ row % 8 * 16) + row * 128, input + packets + from[i], valid);
    }
    if (kRaw && !raw && lane == 0) barrier_arrive(&shared.landed[ring.stage], 32);  // as in every filling of a stage
    barrier_arrive_on_copies(raw ? &shared.landed[ring.stage] : &shared.full[ring.stage]);
    columns_left -= kStepColumns;
    input += kStepColumns / 8;
    asm volatile("" : "+l"(input));  // opaque: addresses are computed when needed, there are many
    ring.forward(1);
  }
}

// Waits until a tile of w13 is stored, then sets its flag, so that no consumer waits for its stores to land.
DEVICE void publish_tile(const ExpertsParams& p, Shared& shared, const TileSlice& g) {
  if (g.from > 0 || g.phase == 1 || uses_packets(tile_tokens(g.rows))) return;
  barrier_wait(&shared.slice_done[g.number % kQueuedSlices], g.number / kQueuedSlices & 1);
  if (threadIdx.x % 32 == 0) {
    store_release_gpu(tile_flag(p, shared.schedule, g.active, g.row_tile), shared.launch);
  }
}

// Two token warps: both copy; with raw codes and 8 tokens, one copies and the other prepares what has landed. The third
// warp sets flags, or helps with the hidden packets, which need none.
DEVICE void run_token_warps(const ExpertsParams& p, Shared& shared, Ring ring) {
  for_each_slice<false>(shared, [&](const TileSlice& g) {
    u32 thread = threadIdx.x - 32 * kTokenWarp;
    asm volatile("" : "+r"(thread));  // opaque: derived values are recomputed for every slice, not kept
    if (uses_packets(tile_tokens(g.rows)) && g.phase == 1) {
      load_hidden_packets(p, shared, g, ring);
    } else if (thread >= 32 * kTokenWarps) {
      ring.advance(g.to - g.from);
      publish_tile(p, shared, g);
    } else if (!takes_raw(tile_tokens(g.rows))) {
      copy_tokens<kTokenWarps, kDecodeTileTokens>(p, shared, g, ring, thread, is_raw(tile_tokens(g.rows)));
    } else if (thread < 32) {
      copy_tokens<1, 8>(p, shared, g, ring, thread, true);
    } else {
      for (int step = g.from, end = g.to; step < end; step++, ring.forward(1)) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);  // the previous filling has been read
        barrier_arrive(&shared.landed[ring.stage]);
        barrier_wait(&shared.landed[ring.stage], ring.parity);
        prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_offset(0), 0);
        barrier_arrive(&shared.full[ring.stage], kTokenWarps);
      }
    }
  });
}

// ==== Start ====
//
// What precedes the first copy of a launch: barriers, weights prefetched into L2, the first ticket, the schedule's
// tables.

constexpr int kPrefetchSteps = 3;

// One thread of each consumer warp: one takes half a microsecond for all, and lanes of a warp diverge.
static_assert(kMaxStages <= kConsumerWarps && kQueuedSlices <= kConsumerWarps, "a warp has a stage and a slice");
DEVICE void init_barriers(Shared& shared, int i) {
  if (i < kMaxStages) {
    barrier_init(&shared.full[i], 1 + 32 * kTokenWarps);
    barrier_init(&shared.empty[i], kReleases);
    barrier_init(&shared.landed[i], 32 * kTokenWarps);
  }
  if (i < kQueuedSlices) {
    barrier_init(&shared.slice_full[i], 1);
    barrier_init(&shared.slice_done[i], kConsumerWarps);
    barrier_init(&shared.slice_empty[i], kTokenWarps + 1 + kConsumerWarps);
  }
  if (i == 0) barrier_init(&shared.exchange_free, kConsumerWarps);
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// Where in shared memory the list of experts lies.
DEVICE u32 list_offset(int max_tiles) {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return (bytes - max_tiles * sizeof(Schedule::Active)) / 16 * 16;
}

// The rows of all experts, where the split-K groups exchange sums later.
DEVICE int* rows_in_shared(u8* memory, int max_tiles) {
  return reinterpret_cast<int*>(memory + list_offset(max_tiles)) - kMaxExperts;
}

// One thread: where the list of experts and the ring lie.
DEVICE void place_schedule(Shared& shared, int max_tiles) {
  shared.end = list_offset(max_tiles);
  shared.schedule.list = shared.end - (u32)(reinterpret_cast<u8*>(&shared.schedule) - reinterpret_cast<u8*>(&shared));
  shared.issued = 0;
}

// One warp, before the row counts are known: prefetches the first steps of a unit of w13, as if all experts had equally
// many rows. It does not matter which CTA will get that unit, and memory is idle.
DEVICE void prefetch_weights(const ExpertsParams& p, int lane) {
  const GemmParams& gemm = p.gemm[0];
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int tiles = p.num_experts * row_tiles, all = tiles * steps;
  bool whole = fits_data_parallel(tiles, steps, 1, all);
  int at = whole ? quotient(blockIdx.x * tiles, gridDim.x) * steps : even_start(all, blockIdx.x);
  int tile = quotient(at, steps), step = at - tile * steps, expert = quotient(tile, row_tiles);
  int first = (tile - expert * row_tiles) * kTileRows + lane * 64;
  int columns = min(gemm.columns - step * kStepColumns, kPrefetchSteps * kStepColumns);
  if (tile >= tiles || lane >= kStrips || first + 64 > gemm.rows) return;
  const u8* strip = gemm.weights + ((i64)expert * gemm.rows + first) * gemm.columns * kBits / 8;
  bulk_prefetch(strip + (i64)step * kStripBytes, columns * 64 * kBits / 8);
}

#if PEERS
// One warp, while the dispatch still waits for other ranks: prefetches weights of the experts of this rank's own
// tokens, w13's and then w2's. The CTAs share them.
DEVICE void prefetch_own(const ExpertsParams& p, int lane) {
  constexpr i64 kMostBytes = 12 << 20;
  constexpr u32 kAtOnce = 8192;
  const peers::Vec line = peers::own_locals(p.batch);
  const u32 locals[4] = {line.x & 0xffff, line.x >> 16, line.z & 0xffff, line.z >> 16};
  u32 have[4];
  int experts = 0;  // one of several tokens counts for each
#pragma unroll
  for (int i = 0; i < 4; i++) {
    have[i] = __ballot_sync(~0u, locals[i] != peers::kNotHere);
    experts += __popc(have[i]);
  }
  if (experts == 0) return;
  i64 left = kMostBytes / experts;  // of each
  for (const GemmParams& gemm : p.gemm) {
    i64 bytes = (i64)gemm.rows * gemm.columns * kBits / 8;
    int parts = (int)(min(bytes, left) / kAtOnce), all = experts * parts;
    left -= min(bytes, left);
    for (int first = 0; first < all; first += 32 * gridDim.x) {
      int at = first + lane * gridDim.x + blockIdx.x, number = at / max(parts, 1);
      const u8* from = gemm.weights + (i64)(at - number * parts) * kAtOnce;
      u32 expert = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 rest = have[i];
        for (int n = number; n > 0 && rest; n--) rest &= rest - 1;
        u32 found = __shfl_sync(~0u, locals[i], max(__ffs(rest) - 1, 0));
        if (number >= 0 && number < __popc(have[i])) expert = found;
        number -= __popc(have[i]);
      }
      if (at < all) bulk_prefetch(from + expert * bytes, kAtOnce);
    }
  }
}
#endif

// Draws the first ticket, in lane 0, and lists the experts.
DEVICE int begin_launch(const ExpertsParams& p, Shared& shared, const int* rows_of_expert, int lane) {
  u64 ticket = lane == 0 ? draw_tickets(p, 1) : 0;
  named_barrier<kRowsBarrier, kConsumerThreads + 32>();
  make_tables(shared.schedule, p, rows_of_expert, lane);
  __syncwarp();
  if (lane != 0) return 0;
  if (shared.schedule.largest == 0) {
    // All CTAs see that there is no work. They still draw their other tickets, without waiting for the numbers.
    draw_tickets(p, 2 + (blockIdx.x == 0 ? kTicketsPerLaunch - 3 * gridDim.x : 0));
    return 0;
  }
  shared.launch = (int)(ticket / kTicketsPerLaunch) + 1;
  return ticket_number(p, ticket, 1);
}

// ==== Multiply ====
//
// One stage of weights, dequantized or raw, times the tokens, added to a tile's sums by one split-K group of warps.
//
// The consumer warps form kSplitK groups that take the steps of a tile by turns. A warp has kSplitK blocks of 16 rows,
// so that each group covers the tile. With more groups, tokens are read less often and a group has more time for a
// stage.

// Measured: with four groups, the sums of more tokens leave too few registers.
DEVICE constexpr int split_k_of(int tokens) { return tokens == 8 ? 4 : 2; }

template <int kTokens, int kSplitK>
struct Lane {
  static constexpr int kGroupWarps = kConsumerWarps / kSplitK;
  int group, warp, lane;
  u32 codes, tokens, scales;  // offsets of this lane's first ones in a stage
  DEVICE Lane() {
    u32 thread = threadIdx.x - 32 * kFirstConsumer;
    asm volatile("" : "+r"(thread));  // opaque: derived values are recomputed for every slice, not kept
    int consumer = thread / 32;
    group = consumer / kGroupWarps, warp = consumer % kGroupWarps, lane = thread % 32;
    int block = warp * kSplitK, row = lane % 8;
    codes = block / 4 * kStripBytes + fragment_place(block % 4) + lane_place(lane);
    // A quarter of the warp gives the addresses of 8 rows: of 8 tokens x 32 columns, or of 16 tokens x 16 columns.
    tokens = kTokens == 8 ? row * 128 + (lane / 8 ^ row) * 16 : (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
    scales = (block * 16 + lane / 4 * 2) * kScaleBytes;
    // Computed once per slice, where all number types have registers left.
    asm volatile("" : "+r"(group));
    if (kBits == 4) asm volatile("" : "+r"(codes));
  }
  DEVICE int first_row(int i) const { return (warp * kSplitK + i) * 16; }  // of the tile
  DEVICE int first_row_of_warpgroup() const { return warp / 4 * 4 * kSplitK * 16; }
};

// A lane's part of 64 columns of the tokens. One ldmatrix reads 16 tokens x 16 columns, or 8 tokens x 32 columns.
template <int kTokens>
using Tokens = u32[4][kTokens == 8 ? 1 : (kTokens + 8) / 16 * 2][2];  // [16 columns][8 tokens]

// Measured: with fewer tokens mma.sync is faster.
DEVICE constexpr bool uses_wgmma(int tokens) { return tokens > 16; }

template <int kTokens, int kSplitK>
DEVICE void multiply_stage(const Lane<kTokens, kSplitK>& me, float (&sums)[kSplitK][kTokens / 2], const Ring& ring) {
  constexpr bool kOneGroup = SCALES_PER_STEP == 1;
  constexpr int kEvery = kOneGroup ? 4 : 8 / SCALES_PER_STEP;  // products of 16 columns between two scales
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  Scales s[kSplitK];
  auto load = [&](int group, int i) {
    const u8* row = scales + group * kScaleRow + i * 16 * kScaleBytes;
    s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
  };
#pragma unroll
  for (int i = 0; i < kSplitK && kOneGroup; i++) load(0, i);
#pragma unroll 1
  for (int half = 0; half < 2; half++) {  // 64 columns; a loop, to spare instruction cache
    u32 words[2][kSplitK][2 * kWords];
    Tokens<kTokens> b;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int i = 0; i < kSplitK && k % 2 == 0; i++) {
        load_words(words[k / 2][i], codes + (half * 8 + k / 2 * 4) * kFragmentBytes + fragment_place(i));
      }
#pragma unroll
      for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
        load_matrices(b[k][2 * j], (tokens ^ k * 32) + half * token_rows_of(kTokens) * 128 + j * 2048);
      }
#pragma unroll
      for (int i = 0; i < kSplitK; i++) {
        if (!kOneGroup && k % kEvery == 0) load(half * (SCALES_PER_STEP / 2) + k / kEvery, i);
        u32 a[4];
        dequantize_folded(&words[k / 2][i][k % 2 * kWords], s[i], a);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j++) mma(&sums[i][4 * j], a, b[k][j][0], b[k][j][1]);
      }
    }
  }
}

// Number k of a lane's codes of 16 columns; of four bits, together with the next.
DEVICE void read_words(u32* words, const u8* fragment, int k) {
  if (kBits == 4 && k % 2 == 1) return;
  const u8* from = fragment + k / 2 * 4 * kFragmentBytes;
  if constexpr (kBits == 4) {
    load_words(words, from);
  } else {
    load_two_matrices(words, shared_address(from + k % 2 * kNextColumnsPlace));
  }
}

// Initial accumulators of a stage for 16 rows; `scales` are those of the rows.
template <int kTokens>
DEVICE void load_starts(float (&sums)[kTokens / 2], u32 starts, const u8* scales) {
  float zero[2] = {1.0f, 1.0f};
  if constexpr (kHasZeros) load_raw_zeros(scales + kScaleRow, zero);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float* v = &sums[4 * j];
    if constexpr (kSumTokens) {
      load_shared(v, starts + j * 64);
#pragma unroll
      for (int m = 0; m < 4 && kHasZeros; m++) v[m] *= zero[m / 2];
    } else {
#pragma unroll
      for (int m = 0; m < 4; m++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(v[m]));
    }
  }
}

// Adds a stage's sums of 16 rows, scaled, to those of the tile.
template <int kTokens>
DEVICE void add_scaled(float (&sums)[kTokens / 2], const float (&stage_sums)[kTokens / 2], const u8* scales) {
  float scale[2];
  load_raw_scales(scales, scale);
#pragma unroll
  for (int m = 0; m < kTokens / 2; m++) {
    float v = stage_sums[m];
    if (kNibbles && m % 4 >= 2) v -= stage_sums[m - 2];
    sums[m] = fmaf(scale[m / 2 % 2], v, sums[m]);
  }
}

// As multiply_stage, with raw codes: the sums of a stage are made apart and then scaled.
template <int kTokens, int kSplitK>
DEVICE void multiply_raw(const Lane<kTokens, kSplitK>& me, float (&sums)[kSplitK][kTokens / 2], const Ring& ring,
                         const float* starts) {
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 start = shared_address(starts) + me.lane % 4 * 16;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  float stage_sums[kSplitK][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kSplitK; i++) load_starts<kTokens>(stage_sums[i], start, scales + i * 16 * kScaleBytes);
  u32 words[kSplitK][2];
  Tokens<kTokens> b;
#pragma unroll
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int i = 0; i < kSplitK; i++) read_words(words[i], codes + fragment_place(i), k);
    u32 from = (tokens ^ k % 4 * 32) + k / 4 * token_rows_of(kTokens) * 128;
#pragma unroll
    for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
      load_matrices(b[k % 4][2 * j], from + j * 2048);
    }
#pragma unroll
    for (int i = 0; i < kSplitK; i++) {
      u32 a[4];
      raw_pairs(&words[i][k * kWords % 2], a);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) mma(&stage_sums[i][4 * j], a, b[k % 4][j][0], b[k % 4][j][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kSplitK; i++) add_scaled<kTokens>(sums[i], stage_sums[i], scales + i * 16 * kScaleBytes);
}

// Dequantized, with wgmma, which reads the tokens from shared memory. 32 columns are dequantized while the 32 before
// them are multiplied.
template <int kTokens, int kSplitK>
DEVICE void multiply_wgmma(const Lane<kTokens, kSplitK>& me, float (&sums)[kSplitK][kTokens / 2], const Ring& ring) {
  constexpr int kEvery = 8 / SCALES_PER_STEP;                   // products of 16 columns between two scales
  constexpr bool kAhead = kFolded && WEIGHT_TYPE != UINT8B128;  // others have no registers left for the next codes
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  // shfl: the compiler then knows that the value is warp-uniform.
  u64 tokens = kDescriptorHigh << 32 | __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.tokens())), 0);
  Scales s[kSplitK];
  u32 words[kSplitK][2 * kWords];
  u32 a[2][2][kSplitK][4];
  auto read = [&](int quarter) {
#pragma unroll
    for (int i = 0; i < kSplitK; i++) load_words(words[i], codes + quarter * 4 * kFragmentBytes + fragment_place(i));
  };
  fence_proxy_async();  // tokens were written by cp.async or st.shared, wgmma reads through the async proxy
  if (kAhead) read(0);
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++) {
    if (!kAhead) read(quarter);
#pragma unroll
    for (int n = 0; n < 2 * kSplitK; n++) {
      int k = quarter * 2 + n / kSplitK, i = n % kSplitK;
      if (k % kEvery == 0) {
        const u8* row = scales + k / kEvery * kScaleRow + i * 16 * kScaleBytes;
        s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
      }
      dequantize_folded(&words[i][k % 2 * kWords], s[i], a[quarter % 2][k % 2][i]);
    }
    if (kAhead && quarter < 3) read(quarter + 1);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 2 * kSplitK; n++) {
      int k = quarter * 2 + n / kSplitK, i = n % kSplitK;
      wgmma<kTokens>(sums[i], a[quarter % 2][k % 2][i], tokens + (k % 4 * 2 + k / 4 * token_rows_of(kTokens) * 8));
    }
    wgmma_commit();
    if (quarter < 3) wgmma_wait<1>();
  }
  wgmma_wait<0>();
}

// ==== Epilogue ====
//
// A tile's sums are added over the split-K groups, published or completed with those of other CTAs, then stored. From
// here on a warp has one block of 16 rows.

// Bytes of shared memory, in front of `end`, for the sums that split-K groups exchange.
DEVICE constexpr int exchange_bytes(int tokens, int split_k) {
  return (split_k - 1) * kConsumerThreads * tokens / 2 * 4;
}

// Each group hands over the row blocks that other groups finish; `total` is the sum of row block `group`. The exchange
// may be overwritten once every warp has arrived at `exchange_free`.
template <int kTokens, int kSplitK>
DEVICE void reduce_split_k(const Lane<kTokens, kSplitK>& me, Shared& shared, const TileSlice& g,
                           const float (&sums)[kSplitK][kTokens / 2], float (&total)[kTokens / 2]) {
  u8* exchange = reinterpret_cast<u8*>(&shared) + shared.end - exchange_bytes(kTokens, kSplitK);
  float4* mine = reinterpret_cast<float4*>(exchange) + me.warp * (kSplitK * (kSplitK - 1) * kTokens / 8 * 32) + me.lane;
  auto slot = [&](int block, int group, int j) {
    return mine + ((block * (kSplitK - 1) + (group - block & kSplitK - 1) - 1) * (kTokens / 8) + j) * 32;
  };
  barrier_wait(&shared.exchange_free, g.number & 1 ^ 1);
#pragma unroll
  for (int i = 0; i < kSplitK; i++) {
    if (i == me.group) {
#pragma unroll
      for (int m = 0; m < kTokens / 2; m++) total[m] = sums[i][m];
    } else {
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        const float* v = &sums[i][4 * j];
        *slot(i, me.group, j) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
  named_barrier<kSumsBarrier, kConsumerThreads>();
#pragma unroll
  for (int t = 1; t < kSplitK; t++) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float4 v = mine[((me.group * (kSplitK - 1) + t - 1) * (kTokens / 8) + j) * 32];
      total[4 * j] += v.x, total[4 * j + 1] += v.y, total[4 * j + 2] += v.z, total[4 * j + 3] += v.w;
    }
  }
  __syncwarp();
  if (me.lane == 0) barrier_arrive(&shared.exchange_free);
}

// Sums a tile over the split-K groups, and over all CTAs if this one has its first step. Returns false if another CTA
// has it, for which the sums are published.
template <int kTokens, int kSplitK>
DEVICE bool complete_sums(const Lane<kTokens, kSplitK>& me, const ExpertsParams& p, Shared& shared, const TileSlice& g,
                          const float (&sums)[kSplitK][kTokens / 2], float (&total)[kTokens / 2]) {
  const Schedule& s = shared.schedule;
  bool completed = is_completed(s, g);
  if (completed && g.to < s.steps[g.phase]) {
    // Other CTAs' sums are loaded while the groups still add.
    int others = g.units_behind;
    uint4* from = fixup_sums(p, g.phase, g.work_unit + 1, sums_thread());
    FixupReader<kTokens == 8 ? 2 : 1, kTokens / 8> reader;
    reader.load(from, 0, others);
    reduce_split_k<kTokens, kSplitK>(me, shared, g, sums, total);
    reader.add(from, others, total);
    return true;
  }
  reduce_split_k<kTokens, kSplitK>(me, shared, g, sums, total);
  if (!completed) {
    uint4* to = fixup_sums(p, g.phase, g.work_unit, sums_thread());
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      const u32* v = reinterpret_cast<const u32*>(&total[4 * j]);
      store_fixup(to + j * kConsumerThreads, ~v[0], ~v[1], ~v[2], ~v[3]);
    }
  }
  return completed;
}

DEVICE constexpr SumScale sum_scale_of(int tokens) {
  return is_raw(tokens) ? SumScale{kRawSumScale, kNibbles ? kRawSumScale / 16.0f : kRawSumScale}
                        : SumScale{kUnfold, kUnfold};
}

// Everything after a slice's last step.
template <int kTokens, int kSplitK>
DEVICE void finish_slice(const ExpertsParams& p, Shared& shared, const TileSlice& g,
                         const float (&sums)[kSplitK][kTokens / 2]) {
  constexpr SumScale kSumScale = sum_scale_of(kTokens);
  Lane<kTokens, kSplitK> me;
  float total[kTokens / 2];
  if (!complete_sums<kTokens, kSplitK>(me, p, shared, g, sums, total)) return;
  int first = g.row_tile * kTileRows + me.first_row(me.group);
  if (first >= p.gemm[g.phase].rows) return;
  if (g.phase == 1) {
#if ROUTED
    store_results<kTokens>(p, shared, g, first, total, 0, kSumScale);
#else
    store_rows<kTokens, false>(p, g.expert, g.first_row, g.output_row, g.rows, first, total, 0, kSumScale);
#endif
  } else if constexpr (uses_packets(kTokens)) {
    store_hidden(p, shared.schedule, g, shared.launch, first, total, kSumScale);
  } else {
    store_rows<kTokens, true>(p, g.expert, g.first_row, g.output_row, g.rows, first, total, 0, kSumScale);
  }
}

// A part of a split-K tile all of whose units are published: a warp adds up 16 rows x 8 tokens at a time.
DEVICE void reduce_part(const ExpertsParams& p, Shared& shared, const TileSlice& g) {
  u32 thread = sums_thread();
  int units = units_per_tile(shared.schedule.partition[1]), lane = thread % 32;
  int tokens = tile_tokens(g.rows), split_k = split_k_of(tokens);
  int groups = tokens / 8, tasks = groups * kConsumerWarps, end = quotient((g.part + 1) * tasks, units);
  for (int task = quotient(g.part * tasks, units) + thread / 32; task < end; task += kConsumerWarps) {
    int warp = quotient(task, groups), group = task - warp * groups, group_warps = kConsumerWarps / split_k;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint4* from = fixup_sums(p, 1, g.work_unit, warp * 32 + lane) + group * kConsumerThreads;
    FixupReader<4, 1> reader;
    reader.load(from, 0, units);
    reader.add(from, units, sums);
    int first = g.row_tile * kTileRows + (warp % group_warps * split_k + warp / group_warps) * 16;
    if (first >= p.gemm[1].rows) continue;
#if ROUTED
    store_results<8>(p, shared, g, first, sums, 8 * group, sum_scale_of(tokens));
#else
    store_rows<8, false>(p, g.expert, g.first_row, g.output_row, g.rows, first, sums, 8 * group, sum_scale_of(tokens));
#endif
  }
}

// ==== Kernel ====

// Prepares raw tokens one stage ahead of the products: a warp has half of the tokens of every eighth stage, one of its
// group's.
struct TokenPrefetch {
  static constexpr int kUnits = kRawTokens / 8, kEvery = kConsumerWarps / kUnits;
  int step;  // of the slice: the next one that this warp prepares
  DEVICE TokenPrefetch(int group, int warp, int split_k) : step(warp / kUnits * split_k + group) {}
  DEVICE void prepare(Shared& shared, const Ring& ring) {
    int first_token = threadIdx.x / 32 % kUnits * 8;
    step += kEvery;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_wait(&shared.landed[ring.stage], ring.parity);
    prepare_tokens<kRawTokens>(ring, shared.starts[ring.stage], prepared_offset(first_token), first_token);
    barrier_arrive(&shared.full[ring.stage], kTokenWarps / kUnits);
  }
};

template <int kTokens>
DEVICE void compute_slice(const ExpertsParams& p, Shared& shared, const TileSlice& g, Ring& ring) {
  constexpr int kSplitK = split_k_of(kTokens);
  Lane<kTokens, kSplitK> me;
  int first = g.row_tile * kTileRows + (uses_wgmma(kTokens) ? me.first_row_of_warpgroup() : me.first_row(0));
  bool present = first < p.gemm[g.phase].rows;
  float sums[kSplitK][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kSplitK * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  // The same value as before, recomputed rather than kept in a register.
  ring.token_rows = kTokens > 16 ? kDecodeTileTokens : token_rows_of(shared.schedule.largest);
  // A stage is prepared beside the products of the group's previous one; the loop starts one stage early for that.
  constexpr int kStagesAhead = prepares_itself(kTokens) ? kSplitK : 0;
  TokenPrefetch prefetch(me.group, me.warp, kSplitK);
  int steps = g.to - g.from, step = me.group - kStagesAhead;
  ring.forward(me.group);
  ring.back(kStagesAhead);
  for (; step < steps; step += kSplitK, ring.forward(kSplitK)) {
    if (kStagesAhead > 0 && step + kStagesAhead == prefetch.step && prefetch.step < steps) {
      Ring next = ring;
      next.forward(kStagesAhead);
      prefetch.prepare(shared, next);
    }
    if (step >= 0) {
      // The other groups may still be waiting for the previous filling of this stage, which must end before the next.
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      if (present) {
        if constexpr (uses_wgmma(kTokens)) {
          multiply_wgmma<kTokens, kSplitK>(me, sums, ring);
        } else if constexpr (is_raw(kTokens)) {
          multiply_raw<kTokens, kSplitK>(me, sums, ring, shared.starts[ring.stage]);
        } else {
          multiply_stage<kTokens, kSplitK>(me, sums, ring);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[ring.stage], kReleases / me.kGroupWarps);
    }
  }
  ring.back(step - steps);
  finish_slice<kTokens, kSplitK>(p, shared, g, sums);
}

DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, Ring ring) {
  const TileSlice& last = for_each_slice<true>(shared, [&](const TileSlice& g) {
    switch (tile_tokens(g.rows)) {
      case 8: compute_slice<8>(p, shared, g, ring); break;
#if ROUTED && !PEERS
      default: compute_slice<16>(p, shared, g, ring);
#else
      case 16: compute_slice<16>(p, shared, g, ring); break;
      case 24: compute_slice<24>(p, shared, g, ring); break;
      default: compute_slice<kDecodeTileTokens>(p, shared, g, ring);
#endif
    }
  });
  if (last.part >= 0) reduce_part(p, shared, last);
#if PEERS
  if (last.sums >= 0) sum_results(p, shared, last.sums, true);
#elif ROUTED
  if (last.sums >= 0) sum_results(p, shared, last.sums);
#endif
}

// A thread that waits by parity must not miss two fillings of a stage. Split-K groups see every fourth step, so there
// must be at least four stages.
static_assert(kRingOffset + exchange_bytes(kDecodeTileTokens, split_k_of(kDecodeTileTokens)) +
                      4 * (kTokenOffset + kDecodeTileTokens * 2 * kStepColumns) +
                      kMaxExperts * sizeof(Schedule::Active) <=
                  kSharedBytes,
              "no room for four stages");

// Tiles of tokens of a batch-invariant launch, at most.
constexpr int kMostInvariantTiles = 1536;
static_assert(!BATCH_INVARIANT || kRingOffset + exchange_bytes(kDecodeTileTokens, split_k_of(kDecodeTileTokens)) +
                                          4 * (kTokenOffset + kDecodeTileTokens * 2 * kStepColumns) +
                                          kMostInvariantTiles * sizeof(Schedule::Active) <=
                                      kSharedBytes,
              "no room for four stages beside so many tiles");

// Stages that fit in front of the exchange if the largest tile has kTokens tokens; it may have tiles of 8 beside it.
template <int kTokens>
DEVICE int stages_before(u32 end) {
  constexpr u32 kSmall = exchange_bytes(8, split_k_of(8)), kLarge = exchange_bytes(kTokens, split_k_of(kTokens));
  constexpr u32 kStageBytes = kTokenOffset + token_rows_of(kTokens) * 2 * kStepColumns;
  return min((end - kRingOffset - (kSmall > kLarge ? kSmall : kLarge)) / kStageBytes, kMaxStages);
}

DEVICE Ring make_ring(u8* memory, u32 end, int largest) {
  Ring ring;
  ring.memory = memory;
  ring.token_rows = token_rows_of(largest);
  ring.num_stages = largest <= 8    ? stages_before<8>(end)
                    : largest <= 16 ? stages_before<16>(end)
                                    : stages_before<kDecodeTileTokens>(end);
  return ring;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(const __grid_constant__ ExpertsParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int warp = threadIdx.x / 32, ticket = 0;
  if (threadIdx.x == 0) {
    place_schedule(shared, p.max_tiles);
  } else if (warp == kFlagWarp && !ROUTED) {  // which experts are active is unknown before
    prefetch_weights(p, threadIdx.x % 32);
  } else if (warp >= kFirstConsumer) {
    if (threadIdx.x % 32 == 0) init_barriers(shared, warp - kFirstConsumer);
    __syncwarp();
    named_arrive<kInitBarrier, kConsumerThreads + 32>();
  }
#if ROUTED
  for (int e = threadIdx.x; e < NUM_EXPERTS; e += kThreads) shared.schedule.routes.tokens[e] = 0;
  __syncthreads();
#endif
#if PEERS
  if (warp == kFlagWarp) prefetch_own(p, threadIdx.x % 32);
#endif
  __syncwarp();
  grid_dependency_wait();
#if PEERS
  if (blockIdx.x > 0) {
    grid_dependency_launch();
  } else if (threadIdx.x == 32 * kFlagWarp) {
    peers::hand_over(p.batch);
  }
#else
  grid_dependency_launch();
#endif
  int* rows_of_expert = rows_in_shared(memory, p.max_tiles);
  if (warp >= kFirstConsumer) {
#if PEERS
    auto sync = [] { named_barrier<kSumsBarrier, kConsumerThreads>(); };
    peers::read_rows<kConsumerWarps>(p.batch, shared.schedule.routes, warp - kFirstConsumer, sync);
#elif ROUTED
    int token = warp - kFirstConsumer;
    if (token < p.router.num_tokens) route_token(p.router, shared.schedule.routes, token);
#else
    for (int e = threadIdx.x - 32 * kFirstConsumer; e < p.num_experts; e += kConsumerThreads) {
      rows_of_expert[e] = rows_of(p, e);
    }
#endif
    named_arrive<kRowsBarrier, kConsumerThreads + 32>();
#if PEERS
    for (int i = warp - kFirstConsumer; i < RANKS * p.batch.common.most_tokens; i += kConsumerWarps) {
      peers::read_ranks(p.batch, shared.schedule.routes, i);
    }
#endif
  }
  // The weight warp requests its first weights as soon as the tables exist; the others wait, so that it runs alone.
  if (warp == kWeightWarp) {
    ticket = begin_launch(p, shared, rows_of_expert, threadIdx.x);
    named_arrive<kTablesBarrier, kThreads>();
    named_barrier<kInitBarrier, kConsumerThreads + 32>();
  } else {
    named_barrier<kTablesBarrier, kThreads>();
  }
  if (shared.schedule.largest == 0) {  // all experts are large-M or empty
#if PEERS
    if (warp >= kFirstConsumer && (int)blockIdx.x < summing_blocks()) sum_results(p, shared, blockIdx.x, false);
#endif
    return;
  }
  Ring ring = make_ring(memory, shared.end, shared.schedule.largest);
  if (warp >= kFirstConsumer) {
    registers_grow<104>();
    run_consumers(p, shared, ring);
  } else {
    registers_shrink<64>();
    if (warp == kWeightWarp) {
      run_weight_warp(p, shared, ring, ticket);
    } else {
      run_token_warps(p, shared, ring);
    }
  }
}
