// Both GEMMs of the experts of a few rows, and the activation between them, in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// The weights are operand A (from packed codes, in registers), the tokens operand B (8, 16, 24 or 32 of them), so that
// a few rows cost little padding. The warps of a block:
//   0          starts (decode_start.cuh), claims pieces (decode_schedule.cuh), streams weights by bulk copies
//   1, 2       copy the tokens' rows, wherever they are, and wait for w13's tiles before they read `hidden`; of 8 tokens
//              one prepares them (decode_prepare.cuh)
//   3          calls the first weights into L2, tells other blocks what is stored, and helps with the tokens
//   4 to 19    in teams: prepare more tokens, multiply, add up over teams and blocks, apply bias and activation
// Shared memory is a ring of stages of 128 columns: codes of 256 rows, their scales, the tokens. Its depth follows the
// largest tile there is, so that a few rows leave room for many weights in flight. Weights run ahead of the tokens:
// those of w2 stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
#include "dequant.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "select_kernel.cuh"
#include "wgmma.cuh"

// ==== Schedule ====

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

// ==== Raw codes ====

// Codes as operand A without arithmetic: their bits, read as an activation, are a tiny number proportional to them.
//
// Tensor cores take subnormal numbers exactly, and eight bits are proportional to what they stand for even where the
// highest is the exponent's (in bf16; f16 allows eleven). What the bits lack is made up for on the other side: bf16
// tokens are multiplied by 2^64 before, so that products are ordinary f32 numbers for tokens from 2^-57 up to 2^64
// (larger ones become infinite). Sums get their offset (the code of zero, or the zero point) from the tokens' sum, and
// their scale once a group of 128 columns, both in f32: weights are exact.
//
// Of four-bit integers a byte holds those of rows g (low) and g + 8. As it is, it serves as operand of row g + 8, whose
// sum is then 16 times too large and more by that of row g.

constexpr bool kRaw = SCALES_PER_STEP == 1 && (kIntegers || WEIGHT_TYPE == FLOAT8_E4M3);
constexpr bool kNibbles = kIntegers && kBits == 4;
constexpr bool kScaleTokens = kRaw && ACT_BF16;
constexpr bool kSumTokens = kRaw && kIntegers;
constexpr u32 kTokenFactor = 0x5f805f80u;  // 2^64, for both of a pair
// What raw sums are multiplied by at last: 2^69 and 2^56 in bf16 (integers, e4m3), 2^24 and 2^8 in f16; rows g + 8 of
// four bits by a sixteenth of it.
constexpr float kRawUnit = ACT_BF16 ? (kIntegers ? 0x1p69f : 0x1p56f) : (kIntegers ? 0x1p24f : 0x1p8f);

// Pairs of codes that tokens are summed with, as starting values for rows g and rows g + 8: minus the code of zero, or
// minus one where zero points follow.
constexpr u32 kStart[2] = {
    WEIGHT_TYPE == UINT4B8 ? 0x80088008u : WEIGHT_TYPE == UINT8B128 ? 0x80808080u : 0x80018001u,
    WEIGHT_TYPE == UINT4B8 ? 0x80888088u : WEIGHT_TYPE == UINT8B128 ? 0x80808080u : 0x80018001u,
};

// The four pairs of 16 columns, as dequantize() orders them.
DEVICE void raw_pairs(const u32* words, u32* a) {
  if constexpr (kNibbles) {
    a[1] = words[0] & 0x00ff00ffu;
    a[0] = words[0] & 0x000f000fu;
    a[3] = permute_bytes(words[0], 0, 0x4341);
    a[2] = a[3] & 0x000f000fu;
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 word = words[(j >> 1) % kWords];
      if constexpr (WEIGHT_TYPE == UINT8B128) {
        a[j] = permute_bytes(word, 0, j & 1 ? 0x4342 : 0x4140);
      } else {
        a[j] = e4m3_bits(word, j & 1);
      }
    }
  }
}

// Scales of rows g and g + 8, not divided by 16 where that must be; `row` points at the first.
DEVICE void load_raw_scales(const u8* row, float* scale) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  scale[0] = to_float(pair & 0xffff), scale[1] = to_float(pair >> 16);
}

// What the tokens' sums are multiplied by where there are zero points.
DEVICE void load_raw_zeros(const u8* row, float* zero) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  zero[0] = to_float(pair & 0xffff), zero[1] = fmaf(16.0f, to_float(pair >> 16), zero[0]);
}

// ==== Pipeline ====

// What the warps of a block share: the ring of stages, the tickets, the flags, and their sizes.

constexpr int kStrips = kTileRows / 64;
constexpr int kPieceBytes = 512 * kBits / 8;                // 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // of a stage
constexpr int kCodeBytes = kStrips * kStripBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;          // a group's scales
constexpr int kScaleStage = SCALES_PER_STEP * kScaleRow * (kHasZeros ? 2 : 1);
constexpr int kTokenPlace = (kCodeBytes + kScaleStage + 1023) / 1024 * 1024;  // wgmma wants it so
constexpr int kMaxStages = 16;
constexpr int kSegments = 8;                                // known ahead
// Warps, those that others wait for first: schedulers prefer them.
constexpr int kWeightWarp = 0;
constexpr int kTokenWarp = 1, kTokenWarps = 2;
constexpr int kFlagWarp = 3;
constexpr int kFirstConsumer = 4, kConsumerWarps = 16;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kThreads = 32 * kFirstConsumer + kConsumerThreads;
constexpr int kSumsBarrier = 1, kTablesBarrier = 2, kCutBarrier = 3, kInitBarrier = 4;  // named ones
constexpr int kReleases = 8;                                // arrivals that empty a stage
constexpr int kRawTokens = 16;                              // that raw codes are multiplied with

struct Shared {
  u64 full[kMaxStages], empty[kMaxStages];
  u64 landed[kMaxStages];         // tokens that must be prepared
  u64 segment_full[kSegments], segment_done[kSegments], segment_empty[kSegments];
  u64 exchange_free;
  __align__(16) float starts[kMaxStages][2 * kRawTokens];  // see raw_codes.cuh
  Segment segment[kSegments];
  u32 end;         // where in shared memory the ring and the exchange of sums behind it end
  int launch;      // number of this launch
  int issued;      // steps whose weights are asked for
  Schedule schedule;
};

// sync holds words of 64 bits: the ticket counter, the sums of decode_sums.cuh, a flag for each finished tile of w13, and
// the results of decode_words.cuh. The upper half of each of the last two is the number of the launch that wrote it, so
// it does not matter that launches for other weights divide them otherwise.
DEVICE int* tile_flag(const ExpertsParams& p, const Schedule& s, int active, int row_tile) {
  int* flags = reinterpret_cast<int*>(p.left_sums + 2 * gridDim.x * (kFewRows / 8 * kConsumerThreads));
  return flags + 2 * (active * s.row_tiles[0] + row_tile) + 1;
}

// One stage: codes [strip][32 columns][16 rows][lane], scales [group][256] (then zeros), tokens [64 columns][token][128
// bytes].
constexpr u32 kRingPlace = (sizeof(Shared) + 1023) / 1024 * 1024;

// Tokens that a stage has room for, where the largest tile has so many; they are read 8 or 16 at a time. A tile's own
// lie as if it were the largest.
DEVICE constexpr int token_rows_of(int largest) { return largest <= 8 ? 8 : (largest + 15) / 16 * 16; }

struct Ring {
  u8* memory;
  int num_stages, token_rows;
  int stage = 0, parity = 0, passed = 0;  // passed: steps since the launch began
  DEVICE int stage_bytes() const { return kTokenPlace + token_rows * 2 * kStepColumns; }
  DEVICE u8* codes() const { return memory + kRingPlace + stage * stage_bytes(); }
  DEVICE u8* scales() const { return codes() + kCodeBytes; }
  DEVICE u8* tokens() const { return codes() + kTokenPlace; }
  DEVICE void advance(int steps) {
    passed += steps;
    for (stage += steps; stage >= num_stages; stage -= num_stages) parity ^= 1;
  }
  // By at most as many steps as there are stages.
  DEVICE void forward(int steps) {
    passed += steps;
    u32 on = stage + steps, wrapped = on - num_stages;
    stage = min(on, wrapped);  // below zero it is a large number
    if (stage == (int)wrapped) parity ^= 1;
  }
  DEVICE void back(int steps) {
    passed -= steps;
    stage -= steps;
    if (stage < 0) stage += num_stages, parity ^= 1;
  }
};

// Segments in the order they were claimed, for one warp; calls work(segment) until there are none, and gives
// the one that says so.
template <bool kComputes, typename Work>
DEVICE const Segment& for_each_segment(Shared& shared, Work work) {
  for (int i = 0;;) {
    barrier_wait(&shared.segment_full[i % kSegments], i / kSegments & 1);
    const Segment& g = shared.segment[i % kSegments];
    if (g.from == g.to) return g;
    work(g);
    __syncwarp();
    i = g.number;
    if (threadIdx.x % 32 == 0) {
      if (kComputes) barrier_arrive(&shared.segment_done[i % kSegments]);
      barrier_arrive(&shared.segment_empty[i % kSegments]);
    }
    i++;
  }
}

// ==== Sums ====

// How blocks hand each other the sums of tiles that they share.
//
// A thread leaves the bits of its sums, inverted. No sum has the bits that would give zero (a NaN that is none of
// arithmetic's), so zero says that nothing is left yet: whoever adds up reads until there is more, without a flag or a
// fence before it. It writes zero behind itself, so all is zero between launches, whatever their weights.
//   p.left_sums  [phase][piece][8 tokens][consumer thread][4 numbers]

// A consumer's place among the sums of a piece.
DEVICE u32 sums_thread() {
  u32 thread = threadIdx.x - 32 * kFirstConsumer;
  asm volatile("" : "+r"(thread));  // so that what follows from it is not kept where sums are made
  return thread;
}

DEVICE uint4* left_sums(const ExpertsParams& p, int phase, int piece, int thread) {
  return p.left_sums + (i64)(phase * gridDim.x + piece) * (kFewRows / 8 * kConsumerThreads) + thread;
}

DEVICE void store_left(uint4* to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

DEVICE uint4 load_left(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

DEVICE bool is_left(const uint4& v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

DEVICE void add_left(float* sums, const uint4& v) {
  sums[0] += __uint_as_float(~v.x), sums[1] += __uint_as_float(~v.y);
  sums[2] += __uint_as_float(~v.z), sums[3] += __uint_as_float(~v.w);
}

// Some pieces at once, there or not yet, of kGroups times eight tokens; `from` is the place of the first of all.
template <int kAtOnce, int kGroups>
struct Pieces {
  uint4 v[kAtOnce][kGroups];
  static DEVICE uint4* place(uint4* from, int piece, int group) {
    return from + (u32)piece * (kFewRows / 8 * kConsumerThreads) + group * kConsumerThreads;
  }
  DEVICE void ask(uint4* from, int first, int count) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int j = 0; j < kGroups; j++) v[i][j] = load_left(place(from, min(first + i, count - 1), j));
    }
  }
  DEVICE bool are_left() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kAtOnce * kGroups; i++) all &= is_left(v[i / kGroups][i % kGroups]);
    return __all_sync(~0u, all);
  }
  // Adds all, in order; the first ones have been asked for.
  DEVICE void take(uint4* from, int count, float* sums) {
#pragma unroll 1
    for (int first = 0; true; ask(from, first, count)) {
      if (!are_left()) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; i++, first++) {
        if (first == count) return;
#pragma unroll
        for (int j = 0; j < kGroups; j++) {
          add_left(sums + 4 * j, v[i][j]);
          store_left(place(from, first, j), 0, 0, 0, 0);
        }
      }
      if (first == count) return;
    }
  }
};

// ==== Prepare ====

// A stage's tokens made ready for raw codes: rows are multiplied by a power of two where they lie, and each row's sum
// over the stage's columns becomes the starting value of the sums.

// Tiles of 8 tokens are prepared by a warp that does nothing else, those of 16, which it could not keep up with, by the
// warps that multiply them. For more tokens codes are dequantized: that takes less than preparing and scaling sums.
DEVICE constexpr bool is_raw(int tokens) { return kRaw && tokens <= kRawTokens; }
DEVICE constexpr bool takes_raw(int tokens) { return kRaw && tokens == 8; }
DEVICE constexpr bool prepares_itself(int tokens) { return kRaw && tokens == kRawTokens; }

// Where in a stage's tokens a lane's first chunk of eight tokens lies: a quarter of the warp has 8 rows of 8 columns.
DEVICE u32 prepared_place(int first_token) {
  int lane = threadIdx.x % 32, row = lane % 8;
  return (first_token + row) * 128 + (lane / 8 ^ row) * 16;
}

// One warp, 8 tokens, `mine` their prepared_place. Eight tokens by 32 columns are operand A: rows g and g + 8 of it are
// the same token's, and the sums come times the numbers in even and odd columns of operand B.
template <int kTokens>
DEVICE void prepare_tokens(const Ring& ring, float* starts, u32 mine, int first_token) {
  u32 first = shared_address(ring.tokens()) + mine, pairs[4][4];
  auto place = [&](int i) { return (first ^ i % 2 * 64) + i / 2 * token_rows_of(kTokens) * 128; };
#pragma unroll
  for (int i = 0; i < 4; i++) load_matrices(pairs[i], place(i));
#pragma unroll
  for (int i = 0; i < 4 && kScaleTokens; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[i][j] = mul_pair(pairs[i][j], kTokenFactor);
    store_matrices(place(i), pairs[i]);
  }
  if constexpr (kSumTokens) {
    u32 lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // so that what follows from it is not kept between stages
    u32 code = lane & 4 ? kStart[1] : kStart[0], same = code;
    asm volatile("" : "+r"(same));  // a pair of registers for all products
    float sums[4], parts[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) mma_from_zero(parts[i], pairs[i], code, same);  // none waits for another
#pragma unroll
    for (int m = 0; m < 4; m++) sums[m] = parts[0][m] + parts[1][m] + (parts[2][m] + parts[3][m]);
    // As the accumulators of lanes 4 r + c lie: rows g of tokens 2 c and 2 c + 1, then rows g + 8.
    u32 token = first_token + lane / 4, high = lane % 4;
    if (high < 2) starts[token / 2 * 4 + high * 2 + token % 2] = high ? sums[1] + sums[3] : sums[0] + sums[2];
  }
}

// ==== Words ====

// How blocks hand `hidden` to each other in tiles of 8 tokens: words of 64 bits, half a result and half the number of
// the launch that wrote it. Whoever needs a word reads it until the number is right, so there is neither a flag nor a
// fence before it: what is stored is seen after one way through the memory; store, fence, flag, poll and copy take five.
// Larger tiles would move too many bytes twice over.
//
// Words lie behind the flags (decode_stage.cuh), are written at most once a launch and never cleared:
//   p.hidden_words  [expert][step of w2][8 columns][token][2 columns], since an expert has one such tile at most

DEVICE constexpr bool goes_by_words(int tokens) { return tokens == 8; }

constexpr int kHiddenWords = 8 * kStepColumns / 2;  // of a step

DEVICE u64* hidden_words(const ExpertsParams& p, const Schedule& s, int expert, int step) {
  return p.hidden_words + (i64)(expert * s.steps[1] + step) * kHiddenWords;
}

DEVICE u64 make_word(u32 value, int launch) { return (u64)(u32)launch << 32 | value; }

DEVICE void store_word(u64* to, u32 value, int launch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(make_word(value, launch)) : "memory");
}

// Two at once; either is whole by itself.
struct TwoWords {
  u64 word[2];
  DEVICE u32 value(int i) const { return (u32)word[i]; }
  DEVICE bool written(int launch) const { return (int)(word[0] >> 32) == launch && (int)(word[1] >> 32) == launch; }
};

DEVICE void store_two_words(u64* to, u32 first, u32 second, int launch) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(make_word(first, launch)),
               "l"(make_word(second, launch))
               : "memory");
}

DEVICE TwoWords load_two_words(const u64* from) {
  TwoWords v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.word[0]), "=l"(v.word[1])
               : "l"(from)
               : "memory");
  return v;
}

// 16 weight rows of a warp, as store_rows has them.
DEVICE void store_hidden(const ExpertsParams& p, const Schedule& s, const Segment& g, int launch, int first,
                         const float* sums, Units unit) {
  int lane = threadIdx.x % 32, column = kGated ? first / 2 : first;
  asm volatile("" : "+r"(lane));  // so that what follows from it is not kept where sums are made
  u64* to = hidden_words(p, s, g.expert, column / kStepColumns) + column % kStepColumns / 8 * 32;
  finish_rows<8, true>(p, g.expert, g.rows, first, sums, 0, unit, [&](int token, const u32* pairs) {
    if constexpr (kGated) {
      store_word(to + token * 4 + lane % 4, pairs[0], launch);
    } else {
      store_two_words(to + lane % 4 / 2 * 32 + token * 4 + lane % 2 * 2, pairs[0], pairs[1], launch);
    }
  });
}

// The warps of tokens and of flags take the steps of a segment of w2 in turn, and bring each one's tokens into its
// stage. Lanes 2 t and 2 t + 1 of half a warp have token t of every other 8 columns.
DEVICE void take_hidden(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring) {
  constexpr int kLoads = kHiddenWords / 64, kTurns = kTokenWarps + 1;
  int lane = threadIdx.x % 32, token = lane / 2 % 8, step = g.from + threadIdx.x / 32 - kTokenWarp, end = g.to;
  ring.forward(min(step, end) - g.from);
#pragma unroll 1
  while (step < end) {
    const u64* from = hidden_words(p, shared.schedule, g.expert, step) + lane * 2;
    asm volatile("" : "+l"(from));  // one register pair, not one for each load
    int columns = token < g.rows ? p.gemm[1].columns - step * kStepColumns - lane / 16 * 8 : 0;
    TwoWords words[kLoads];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kLoads; i++) words[i] = i * 16 < columns ? load_two_words(from + i * 64) : TwoWords{};
#pragma unroll
      for (int i = 0; i < kLoads; i++) all &= i * 16 >= columns || words[i].written(shared.launch);
    } while (!__all_sync(~0u, all));
    // This warp has not seen every filling of the stage, so the parity of `empty` alone does not say which is over.
    while (read_shared(&shared.issued) <= ring.passed) {
    }
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    u32 row = shared_address(ring.tokens()) + token * 128 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      u32 to = row + i / 4 * token_rows_of(8) * 128 + (i % 4 * 2 + lane / 16 ^ token) * 16;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words[i].value(0)), "r"(words[i].value(1))
                   : "memory");
    }
    if constexpr (takes_raw(8)) {
      __syncwarp();
      prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_place(0), 0);
    }
    barrier_arrive(&shared.landed[ring.stage], kTokenWarps);  // as in every filling of a stage
    barrier_arrive(&shared.full[ring.stage], kTokenWarps);
    ring.forward(min(kTurns, end - step));
    step += kTurns;
  }
}

// ==== Loads ====

// The warps that do not compute: one streams weights, two copy the tokens' rows, one sets flags.

// ---- the weights' warp ----

// The codes of a stage where a tile has fewer rows than others.
DEVICE void load_few_codes(u32 to, const u8* from, u32 strip_bytes, int rows, int step, u32 column_bytes, u64* full,
                           u64 policy) {
#pragma unroll 1
  for (int i = 0; i < rows / 64; i++, to += kStripBytes, from += strip_bytes) {
    bulk_copy(to, from, 64 * column_bytes, full, policy);
  }
  if (rows % 64 == 0) return;
  // Half a strip: its blocks lie closer than in a stage.
  from -= (i64)step * (kStripBytes / 2);
#pragma unroll 1
  for (u32 bytes = 0; bytes < column_bytes; bytes += 32 * kBits / 8, to += 4 * kPieceBytes, from += 2 * kPieceBytes) {
    bulk_copy(to, from, 2 * kPieceBytes, full, policy);
  }
}

constexpr int kFirstStages = 4;

// All stages of a segment; one lane. Beside busy warps an instruction takes it seven cycles, so a stage must not take
// many: what memory delivers waits for nobody else.
DEVICE void load_weights(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring, u64 policy) {
  const GemmParams& gemm = p.gemm[g.phase];
  bool grouped = SCALES_PER_STEP > 1 || gemm.groups > 1;
  int step = g.from, to_step = g.to, tile_row = g.row_tile * kTileRows, rows = min(gemm.rows - tile_row, kTileRows);
  int columns_left = gemm.columns - step * kStepColumns, group = grouped ? step * SCALES_PER_STEP : 0;
  int groups_left = gemm.groups - group;
  u32 strip_bytes = gemm.columns * (64 * kBits / 8), scale_bytes = rows * kScaleBytes;
  i64 group_bytes = grouped ? gemm.rows * kScaleBytes : 0;
  i64 place = (((i64)g.expert * gemm.groups + group) * gemm.rows + tile_row) * kScaleBytes;
  const u8 *scales = gemm.scales + place, *zeros = gemm.zeros + place;
  const u8* codes = gemm.weights + ((i64)g.expert * gemm.rows + tile_row) * gemm.columns * kBits / 8;
  codes += (i64)step * kStripBytes;
#pragma unroll 1
  for (; step < to_step; step++, codes += kStripBytes) {
    u32 column_bytes = min(columns_left, kStepColumns) * kBits / 8;
    int groups = SCALES_PER_STEP == 1 ? 1 : min(groups_left, SCALES_PER_STEP);
    u64* full = &shared.full[ring.stage];
    u32 to = shared_address(ring.codes());
    // At first no more at once than keeps the memory busy, or the tokens, and blocks that come later, wait behind it.
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
      load_few_codes(to, codes, strip_bytes, rows, step, column_bytes, full, policy);
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

// A last step of fewer columns multiplies the scales behind them by zero: they must be numbers.
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

// The number within its launch of the first of the tickets drawn.
DEVICE int ticket_number(const ExpertsParams& p, u64 ticket, u32 count) {
  u32 number = (u32)ticket % kTicketsPerLaunch, all = 3 * gridDim.x;
  if (number + count == all) draw_tickets(p, kTicketsPerLaunch - all);
  return (int)number;
}

// `ticket` is the first one, claimed already; lane 0 has it.
DEVICE void run_weight_warp(const ExpertsParams& p, Shared& shared, Ring ring, int ticket) {
  int lane = threadIdx.x % 32, published = 0;
  u64 policy = policy_evict_first();
  auto publish = [&](const Segment& g) {
    int i = published % kSegments;
    barrier_wait(&shared.segment_empty[i], published / kSegments & 1 ^ 1);
    if (lane == 0) {
      shared.segment[i] = g;
      shared.segment[i].number = published;
      barrier_arrive(&shared.segment_full[i]);
    }
    published++;
  };
  clear_scales(p, ring);
  for (ticket = __shfl_sync(~0u, ticket, 0); ticket < 2 * (int)gridDim.x;) {
    Ring first = ring;
    int loaded = 0;
    cut_piece(shared.schedule, ticket, [&](const Segment& g) {
      loaded += g.to - g.from;
      publish(g);
      if (elected()) load_weights(p, shared, g, ring, policy);
      __syncwarp();
    });
    // A block may take a second piece of w2 once `hidden` is there for its first one: by then every other block that
    // runs has asked for its weights of w13, and has had a piece of w2 too. Loads of more than a ring have waited so.
    bool waits = ticket >= (int)gridDim.x && loaded > 0 && loaded <= ring.num_stages;
    if (waits && elected()) barrier_wait(&shared.empty[first.stage], first.parity);
    __syncwarp();
    if (lane == 0) ticket = ticket_number(p, draw_tickets(p, 1), 1);
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  publish(find_addition(shared.schedule, ticket));
}

// ---- the tokens' warps ----

DEVICE i64 input_row(const ExpertsParams& p, const Segment& g, int i) {
  if (g.phase == 1) return g.first_row + i;
  return p.row_ids == nullptr ? g.place + i : p.row_ids[g.place + i] / p.ids_divisor;
}

// The step up to which the columns of `hidden` are there, at least one beyond `step`: one of w13's tiles is 128 of them,
// or 256 where nothing is gated.
DEVICE int wait_for_hidden(const ExpertsParams& p, Shared& shared, const Segment& g, int step) {
  int mine = step + threadIdx.x % 32;
  const int* flag = tile_flag(p, shared.schedule, g.active, mine / (kGated ? 1 : 2));
  u32 missing;
  do {
    missing = __ballot_sync(~0u, mine < g.to && load_acquire_gpu(flag) != shared.launch);
  } while (missing & 1);
  __syncwarp();
  return step + (missing ? __ffs(missing) - 1 : 32);
}

// Whether the sums of a segment's tile are completed where it is computed.
DEVICE bool is_completed(const Schedule& s, const Segment& g) {
  return g.from == 0 && (g.phase == 0 || s.parts[1] <= 0);
}

// The end of the tile that a segment belongs to, counted as pieces are.
DEVICE int tile_end(const Schedule& s, const Segment& g) {
  return s.piece_start(g.phase, g.piece + 1) + s.steps[g.phase] - g.to;
}

// By kWarps warps, `thread` counted over them: each copies the same 16-byte chunk of every second or fourth of at most
// kRows rows, which somebody prepares for raw codes once they have landed, or which are complete.
template <int kWarps, int kRows>
DEVICE void copy_tokens(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring, u32 thread,
                        bool raw) {
  constexpr int kChunks = kStepColumns / 8, kRowsAtOnce = kWarps * 32 / kChunks;
  const GemmParams& gemm = p.gemm[g.phase];
  int lane = thread % 32, chunk = thread % kChunks, first = thread / kChunks, num_rows = g.rows - first;
  u32 place = chunk / 8 * token_rows_of(g.rows) * 128 + first * 128 + (chunk ^ first) % 8 * 16;
  // A lane finds where one row begins, in 16-byte chunks, which 32 bits can count.
  u32 start = lane < g.rows ? (u32)input_row(p, g, lane) * (u32)(gemm.columns / 8) : 0;
  u32 from[kRows / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; i++) from[i] = __shfl_sync(~0u, start, first + i * kRowsAtOnce);
  int ready = g.phase == 0 ? g.to : g.from, end = g.to, columns_left = gemm.columns - g.from * kStepColumns - chunk * 8;
  const uint4* input = reinterpret_cast<const uint4*>(gemm.input) + g.from * (kStepColumns / 8) + chunk;
#pragma unroll 1
  for (int step = g.from; step < end; step++) {
    if (step >= ready) ready = wait_for_hidden(p, shared, g, step);
    u32 to = shared_address(ring.tokens()) + place, valid = columns_left > 0 ? 16 : 0;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; i++) {
      int row = i * kRowsAtOnce;
      if (row >= num_rows) break;
      copy_async_16((to ^ row % 8 * 16) + row * 128, input + from[i], valid);
    }
    if (kRaw && !raw && lane == 0) barrier_arrive(&shared.landed[ring.stage], 32);  // as in every filling of a stage
    barrier_arrive_on_copies(raw ? &shared.landed[ring.stage] : &shared.full[ring.stage]);
    columns_left -= kStepColumns;
    input += kStepColumns / 8;
    asm volatile("" : "+l"(input));  // so that addresses are found when they are needed: there are many
    ring.forward(1);
  }
}

// Until a tile of w13 is stored, then tells other blocks, so that nobody who computes waits for stores to land.
DEVICE void tell_of_tile(const ExpertsParams& p, Shared& shared, const Segment& g) {
  if (g.from > 0 || g.phase == 1 || goes_by_words(tile_tokens(g.rows))) return;
  barrier_wait(&shared.segment_done[g.number % kSegments], g.number / kSegments & 1);
  if (threadIdx.x % 32 == 0) {
    store_release_gpu(tile_flag(p, shared.schedule, g.active, g.row_tile), shared.launch);
  }
}

// Two warps of tokens: both copy, or where codes are raw one copies and the other prepares what has landed; a third
// sets flags, or where words need none it helps with the tokens.
DEVICE void run_token_warps(const ExpertsParams& p, Shared& shared, Ring ring) {
  for_each_segment<false>(shared, [&](const Segment& g) {
    u32 thread = threadIdx.x - 32 * kTokenWarp;
    asm volatile("" : "+r"(thread));  // so that what follows from it is found for every segment, not kept meanwhile
    if (goes_by_words(tile_tokens(g.rows)) && g.phase == 1) {
      take_hidden(p, shared, g, ring);
    } else if (thread >= 32 * kTokenWarps) {
      ring.advance(g.to - g.from);
      tell_of_tile(p, shared, g);
    } else if (!takes_raw(tile_tokens(g.rows))) {
      copy_tokens<kTokenWarps, kFewRows>(p, shared, g, ring, thread, is_raw(tile_tokens(g.rows)));
    } else if (thread < 32) {
      copy_tokens<1, 8>(p, shared, g, ring, thread, true);
    } else {
      for (int step = g.from, end = g.to; step < end; step++, ring.forward(1)) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);  // the last filling is over
        barrier_arrive(&shared.landed[ring.stage]);
        barrier_wait(&shared.landed[ring.stage], ring.parity);
        prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_place(0), 0);
        barrier_arrive(&shared.full[ring.stage], kTokenWarps);
      }
    }
  });
}

// ==== Start ====

// What comes before the first copy of a launch: barriers, weights called into L2, the first ticket, tables.

constexpr int kPrefetchSteps = 3;

// One thread, whose time nobody needs yet: they take half a microsecond, and 1.5 us more by lanes, which take turns.
DEVICE void init_barriers(Shared& shared) {
#pragma unroll
  for (int i = 0; i < kMaxStages; i++) {
    barrier_init(&shared.full[i], 1 + 32 * kTokenWarps);
    barrier_init(&shared.empty[i], kReleases);
    barrier_init(&shared.landed[i], 32 * kTokenWarps);
  }
#pragma unroll
  for (int i = 0; i < kSegments; i++) {
    barrier_init(&shared.segment_full[i], 1);
    barrier_init(&shared.segment_done[i], kConsumerWarps);
    barrier_init(&shared.segment_empty[i], kTokenWarps + 1 + kConsumerWarps);
  }
  barrier_init(&shared.exchange_free, kConsumerWarps);
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// One thread: where the tables and the ring lie.
DEVICE void place_tables(Shared& shared, int most_tiles) {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  shared.end = (bytes - most_tiles * sizeof(Schedule::Active)) / 16 * 16;
  shared.schedule.list = shared.end - (u32)(reinterpret_cast<u8*>(&shared.schedule) - reinterpret_cast<u8*>(&shared));
  shared.issued = 0;
}

// One warp, before anything of this launch is known: the first steps of a piece of w13, cut as if all experts had as
// many rows. Which block will have that piece does not matter, and memory has nothing else to do.
DEVICE void prefetch_weights(const ExpertsParams& p, int lane) {
  const GemmParams& gemm = p.gemm[0];
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int tiles = p.num_experts * row_tiles, all = tiles * steps;
  bool whole = are_whole(tiles, steps, 1, all);
  int at = whole ? quotient(blockIdx.x * tiles, gridDim.x) * steps : even_start(all, blockIdx.x);
  int tile = quotient(at, steps), step = at - tile * steps, expert = quotient(tile, row_tiles);
  int first = (tile - expert * row_tiles) * kTileRows + lane * 64;
  int columns = min(gemm.columns - step * kStepColumns, kPrefetchSteps * kStepColumns);
  if (tile >= tiles || lane >= kStrips || first + 64 > gemm.rows) return;
  const u8* strip = gemm.weights + ((i64)expert * gemm.rows + first) * gemm.columns * kBits / 8;
  bulk_prefetch(strip + (i64)step * kStripBytes, columns * 64 * kBits / 8);
}

// The first ticket, in lane 0, and what follows from it and the row counts.
DEVICE int start_launch(const ExpertsParams& p, Shared& shared, int lane) {
  u64 ticket = lane == 0 ? draw_tickets(p, 1) : 0;
  make_tables(shared.schedule, p, lane);
  __syncwarp();
  if (lane != 0) return 0;
  if (shared.schedule.largest == 0) {
    // All blocks see that nothing is to be claimed: their other tickets are counted, without waiting for their numbers.
    draw_tickets(p, 2 + (blockIdx.x == 0 ? kTicketsPerLaunch - 3 * gridDim.x : 0));
    return 0;
  }
  shared.launch = (int)(ticket / kTicketsPerLaunch) + 1;
  return ticket_number(p, ticket, 1);
}

// ==== Multiply ====

// One stage of weights, dequantized or as raw codes, times a few tokens, added to a tile's sums, by one team of
// warps.
//
// The consumer warps form kTeams teams that take the steps of a tile in turn: a warp has kTeams blocks of 16 rows, so
// that a team covers the tile. More teams read the tokens less often and have more time for a stage.

// As measured: with four teams the sums of more tokens leave too few registers.
DEVICE constexpr int teams_of(int tokens) { return tokens == 8 ? 4 : 2; }

template <int kTokens, int kTeams>
struct Lane {
  static constexpr int kTeamWarps = kConsumerWarps / kTeams;
  int team, warp, lane;
  u32 codes, tokens, scales;  // where in a stage this lane's first ones are
  DEVICE Lane() {
    u32 thread = threadIdx.x - 32 * kFirstConsumer;
    asm volatile("" : "+r"(thread));  // so that what follows from it is found for every segment, not kept meanwhile
    int consumer = thread / 32;
    team = consumer / kTeamWarps, warp = consumer % kTeamWarps, lane = thread % 32;
    int block = warp * kTeams, row = lane % 8;
    codes = block / 4 * kStripBytes + block % 4 * kPieceBytes + lane * (kPieceBytes / 32);
    // A quarter of the warp gives the addresses of 8 rows: for 8 tokens of 32 columns, otherwise of 16 tokens and 16.
    tokens = kTokens == 8 ? row * 128 + (lane / 8 ^ row) * 16
                          : (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
    scales = (block * 16 + lane / 4 * 2) * kScaleBytes;
    // Found once for every segment; where all number types have registers left.
    asm volatile("" : "+r"(team));
    if (kBits == 4) asm volatile("" : "+r"(codes));
  }
  DEVICE int first_row(int i) const { return (warp * kTeams + i) * 16; }  // of the tile
  DEVICE int first_row_of_group() const { return warp / 4 * 4 * kTeams * 16; }
};

// What one lane has of the tokens' 64 columns. One instruction reads 16 tokens, or of 8 tokens 32 columns.
template <int kTokens>
using Tokens = u32[4][kTokens == 8 ? 1 : (kTokens + 8) / 16 * 2][2];  // [16 columns][8 tokens]

// As measured, of fewer tokens mma.sync is the faster one.
DEVICE constexpr bool by_warpgroup(int tokens) { return tokens > 16; }

template <int kTokens, int kTeams>
DEVICE void multiply_stage(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring) {
  constexpr bool kOneGroup = SCALES_PER_STEP == 1;
  constexpr int kEvery = kOneGroup ? 4 : 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  Scales s[kTeams];
  auto load = [&](int group, int i) {
    const u8* row = scales + group * kScaleRow + i * 16 * kScaleBytes;
    s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
  };
#pragma unroll
  for (int i = 0; i < kTeams && kOneGroup; i++) load(0, i);
#pragma unroll 1
  for (int half = 0; half < 2; half++) {  // 64 columns; in a loop, since instructions must come from somewhere too
    u32 words[2][kTeams][2 * kWords];
    Tokens<kTokens> b;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int i = 0; i < kTeams && k % 2 == 0; i++) {
        load_words(words[k / 2][i], codes + (half * 8 + k / 2 * 4 + i) * kPieceBytes);
      }
#pragma unroll
      for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
        load_matrices(b[k][2 * j], (tokens ^ k * 32) + half * token_rows_of(kTokens) * 128 + j * 2048);
      }
#pragma unroll
      for (int i = 0; i < kTeams; i++) {
        if (!kOneGroup && k % kEvery == 0) load(half * (SCALES_PER_STEP / 2) + k / kEvery, i);
        u32 a[4];
        dequantize_folded(&words[k / 2][i][k % 2 * kWords], s[i], a);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j++) mma(&sums[i][4 * j], a, b[k][j][0], b[k][j][1]);
      }
    }
  }
}

// A lane's codes number k of 16 columns, of four bits with those that follow.
DEVICE void read_words(u32* words, const u8* piece, int k) {
  if (kBits == 4 && k % 2 == 1) return;
  uint2 v = *reinterpret_cast<const uint2*>(piece + k / 2 * 4 * kPieceBytes + k % 2 * 8);
  words[0] = v.x, words[1] = v.y;
}

// Starting values of a stage's sums of 16 rows; `scales` are those of the rows.
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

// A stage's sums of 16 rows, scaled, to those of the tile.
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

// The same with raw codes: the stage's sums first, which are then scaled.
template <int kTokens, int kTeams>
DEVICE void multiply_raw(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring,
                         const float* starts) {
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 start = shared_address(starts) + me.lane % 4 * 16;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  float stage_sums[kTeams][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTeams; i++) load_starts<kTokens>(stage_sums[i], start, scales + i * 16 * kScaleBytes);
  u32 words[kTeams][2];
  Tokens<kTokens> b;
#pragma unroll
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int i = 0; i < kTeams; i++) read_words(words[i], codes + i * kPieceBytes, k);
    u32 from = (tokens ^ k % 4 * 32) + k / 4 * token_rows_of(kTokens) * 128;
#pragma unroll
    for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
      load_matrices(b[k % 4][2 * j], from + j * 2048);
    }
#pragma unroll
    for (int i = 0; i < kTeams; i++) {
      u32 a[4];
      raw_pairs(&words[i][k * kWords % 2], a);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) mma(&stage_sums[i][4 * j], a, b[k % 4][j][0], b[k % 4][j][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTeams; i++) add_scaled<kTokens>(sums[i], stage_sums[i], scales + i * 16 * kScaleBytes);
}

// Dequantized, by warpgroups, whose tensor cores read the tokens themselves. 32 columns are dequantized while those
// before them are multiplied.
template <int kTokens, int kTeams>
DEVICE void multiply_by_group(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring) {
  constexpr int kEvery = 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  constexpr bool kAhead = kFolded && WEIGHT_TYPE != UINT8B128;  // others have no registers left for the next codes
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  // The compiler sees that it is the same for all lanes.
  u64 tokens = kDescriptorHigh << 32 | __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.tokens())), 0);
  Scales s[kTeams];
  u32 words[kTeams][2 * kWords];
  u32 a[2][2][kTeams][4];
  auto read = [&](int quarter) {
#pragma unroll
    for (int i = 0; i < kTeams; i++) load_words(words[i], codes + (quarter * 4 + i) * kPieceBytes);
  };
  fence_proxy_async();  // tokens were written by ordinary copies
  if (kAhead) read(0);
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++) {
    if (!kAhead) read(quarter);
#pragma unroll
    for (int n = 0; n < 2 * kTeams; n++) {
      int k = quarter * 2 + n / kTeams, i = n % kTeams;
      if (k % kEvery == 0) {
        const u8* row = scales + k / kEvery * kScaleRow + i * 16 * kScaleBytes;
        s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
      }
      dequantize_folded(&words[i][k % 2 * kWords], s[i], a[quarter % 2][k % 2][i]);
    }
    if (kAhead && quarter < 3) read(quarter + 1);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 2 * kTeams; n++) {
      int k = quarter * 2 + n / kTeams, i = n % kTeams;
      wgmma<kTokens>(sums[i], a[quarter % 2][k % 2][i], tokens + (k % 4 * 2 + k / 4 * token_rows_of(kTokens) * 8));
    }
    wgmma_commit();
    if (quarter < 3) wgmma_wait<1>();
  }
  wgmma_wait<0>();
}

// ==== Finish ====

// What becomes of a tile's sums: added over the teams, left for another block or completed with those of others,
// stored. From here on a warp has one block of 16 rows.

// Shared memory for the sums that teams hand to each other, in front of `end`.
DEVICE constexpr int exchange_bytes(int tokens, int teams) { return (teams - 1) * kConsumerThreads * tokens / 2 * 4; }

// Every team hands the blocks of rows that others finish to them: `total` is that of block `team`. What was read is free
// again once every warp has arrived at `exchange_free`.
template <int kTokens, int kTeams>
DEVICE void add_teams(const Lane<kTokens, kTeams>& me, Shared& shared, const Segment& g,
                      const float (&sums)[kTeams][kTokens / 2], float (&total)[kTokens / 2]) {
  u8* exchange = reinterpret_cast<u8*>(&shared) + shared.end - exchange_bytes(kTokens, kTeams);
  float4* mine = reinterpret_cast<float4*>(exchange) + me.warp * (kTeams * (kTeams - 1) * kTokens / 8 * 32) + me.lane;
  auto place = [&](int block, int team, int j) {
    return mine + ((block * (kTeams - 1) + (team - block & kTeams - 1) - 1) * (kTokens / 8) + j) * 32;
  };
  barrier_wait(&shared.exchange_free, g.number & 1 ^ 1);
#pragma unroll
  for (int i = 0; i < kTeams; i++) {
    if (i == me.team) {
#pragma unroll
      for (int m = 0; m < kTokens / 2; m++) total[m] = sums[i][m];
    } else {
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        const float* v = &sums[i][4 * j];
        *place(i, me.team, j) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
  named_barrier<kSumsBarrier, kConsumerThreads>();
#pragma unroll
  for (int t = 1; t < kTeams; t++) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float4 v = mine[((me.team * (kTeams - 1) + t - 1) * (kTokens / 8) + j) * 32];
      total[4 * j] += v.x, total[4 * j + 1] += v.y, total[4 * j + 2] += v.z, total[4 * j + 3] += v.w;
    }
  }
  __syncwarp();
  if (me.lane == 0) barrier_arrive(&shared.exchange_free);
}

// How many pieces follow a segment's in its tile.
DEVICE int pieces_behind(const Schedule& s, const Segment& g) {
  int end = tile_end(s, g), after = g.piece + 1;
  while (after < (int)gridDim.x && s.piece_start(g.phase, after) < end) after++;
  return after - g.piece - 1;
}

// A tile's sums over the teams, and over all blocks where this one has its first step; false where another block has
// it, for which they are left.
template <int kTokens, int kTeams>
DEVICE bool complete_sums(const Lane<kTokens, kTeams>& me, const ExpertsParams& p, Shared& shared, const Segment& g,
                          const float (&sums)[kTeams][kTokens / 2], float (&total)[kTokens / 2]) {
  const Schedule& s = shared.schedule;
  bool completed = is_completed(s, g);
  if (completed && g.to < s.steps[g.phase]) {
    // The others' are asked for while the teams still add.
    int others = pieces_behind(s, g);
    uint4* from = left_sums(p, g.phase, g.piece + 1, sums_thread());
    Pieces<kTokens == 8 ? 2 : 1, kTokens / 8> pieces;
    pieces.ask(from, 0, others);
    add_teams<kTokens, kTeams>(me, shared, g, sums, total);
    pieces.take(from, others, total);
    return true;
  }
  add_teams<kTokens, kTeams>(me, shared, g, sums, total);
  if (!completed) {
    uint4* to = left_sums(p, g.phase, g.piece, sums_thread());
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      const u32* v = reinterpret_cast<const u32*>(&total[4 * j]);
      store_left(to + j * kConsumerThreads, ~v[0], ~v[1], ~v[2], ~v[3]);
    }
  }
  return completed;
}

DEVICE constexpr Units units_of(int tokens) {
  return is_raw(tokens) ? Units{kRawUnit, kNibbles ? kRawUnit / 16.0f : kRawUnit} : Units{kUnfold, kUnfold};
}

// All that a tile's sums go through once its steps are done here.
template <int kTokens, int kTeams>
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g,
                           const float (&sums)[kTeams][kTokens / 2]) {
  constexpr Units kUnit = units_of(kTokens);
  Lane<kTokens, kTeams> me;
  float total[kTokens / 2];
  if (!complete_sums<kTokens, kTeams>(me, p, shared, g, sums, total)) return;
  int first = g.row_tile * kTileRows + me.first_row(me.team);
  if (first >= p.gemm[g.phase].rows) return;
  if (g.phase == 1) {
    store_rows<kTokens, false>(p, g.expert, g.first_row, g.place, g.rows, first, total, 0, kUnit);
  } else if constexpr (goes_by_words(kTokens)) {
    store_hidden(p, shared.schedule, g, shared.launch, first, total, kUnit);
  } else {
    store_rows<kTokens, true>(p, g.expert, g.first_row, g.place, g.rows, first, total, 0, kUnit);
  }
}

// A part of a tile, all of whose pieces are left: a warp adds up 16 rows for eight tokens at a time.
DEVICE void add_part(const ExpertsParams& p, Shared& shared, const Segment& g) {
  u32 thread = sums_thread();
  int pieces = shared.schedule.parts[1], lane = thread % 32, tokens = tile_tokens(g.rows), teams = teams_of(tokens);
  int groups = tokens / 8, units = groups * kConsumerWarps, end = quotient((g.part + 1) * units, pieces);
  for (int unit = quotient(g.part * units, pieces) + thread / 32; unit < end; unit += kConsumerWarps) {
    int warp = quotient(unit, groups), group = unit - warp * groups, team_warps = kConsumerWarps / teams;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint4* from = left_sums(p, 1, g.piece, warp * 32 + lane) + group * kConsumerThreads;
    Pieces<4, 1> parts;
    parts.ask(from, 0, pieces);
    parts.take(from, pieces, sums);
    int first = g.row_tile * kTileRows + (warp % team_warps * teams + warp / team_warps) * 16;
    if (first >= p.gemm[1].rows) continue;
    store_rows<8, false>(p, g.expert, g.first_row, g.place, g.rows, first, sums, 8 * group, units_of(tokens));
  }
}

// ==== Kernel ====

// A warp prepares half of the tokens of every eighth stage, one of its team's.
struct Turn {
  static constexpr int kUnits = kRawTokens / 8, kEvery = kConsumerWarps / kUnits;
  int step;  // of the segment; the next one whose stage it has
  DEVICE Turn(int team, int warp, int teams) : step(warp / kUnits * teams + team) {}
  DEVICE void prepare(Shared& shared, const Ring& ring) {
    int first_token = threadIdx.x / 32 % kUnits * 8;
    step += kEvery;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_wait(&shared.landed[ring.stage], ring.parity);
    prepare_tokens<kRawTokens>(ring, shared.starts[ring.stage], prepared_place(first_token), first_token);
    barrier_arrive(&shared.full[ring.stage], kTokenWarps / kUnits);
  }
};

template <int kTokens>
DEVICE void compute_segment(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring) {
  constexpr int kTeams = teams_of(kTokens);
  Lane<kTokens, kTeams> me;
  int first = g.row_tile * kTileRows + (by_warpgroup(kTokens) ? me.first_row_of_group() : me.first_row(0));
  bool present = first < p.gemm[g.phase].rows;
  float sums[kTeams][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTeams * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.token_rows = kTokens > 16 ? kFewRows : token_rows_of(shared.schedule.largest);  // what it is, not kept meanwhile
  // A stage is prepared beside the products of the one before it; the first has none before it.
  constexpr int kBefore = prepares_itself(kTokens) ? kTeams : 0;
  Turn turn(me.team, me.warp, kTeams);
  int steps = g.to - g.from, step = me.team - kBefore;
  ring.forward(me.team);
  ring.back(kBefore);
  for (; step < steps; step += kTeams, ring.forward(kTeams)) {
    if (kBefore > 0 && step + kBefore == turn.step && turn.step < steps) {
      Ring next = ring;
      next.forward(kBefore);
      turn.prepare(shared, next);
    }
    if (step >= 0) {
      // Another team may not have had this stage's last filling yet: that must be over before the next is waited for.
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      if (present) {
        if constexpr (by_warpgroup(kTokens)) {
          multiply_by_group<kTokens, kTeams>(me, sums, ring);
        } else if constexpr (is_raw(kTokens)) {
          multiply_raw<kTokens, kTeams>(me, sums, ring, shared.starts[ring.stage]);
        } else {
          multiply_stage<kTokens, kTeams>(me, sums, ring);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[ring.stage], kReleases / me.kTeamWarps);
    }
  }
  ring.back(step - steps);
  finish_segment<kTokens, kTeams>(p, shared, g, sums);
}

DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, Ring ring) {
  const Segment& last = for_each_segment<true>(shared, [&](const Segment& g) {
    switch (tile_tokens(g.rows)) {
      case 8: compute_segment<8>(p, shared, g, ring); break;
      case 16: compute_segment<16>(p, shared, g, ring); break;
      case 24: compute_segment<24>(p, shared, g, ring); break;
      default: compute_segment<kFewRows>(p, shared, g, ring);
    }
  });
  if (last.part >= 0) add_part(p, shared, last);
}

// Who waits for a stage by its parity must not miss two of its fillings: teams, which see every fourth step, need four.
static_assert(kRingPlace + exchange_bytes(kFewRows, teams_of(kFewRows)) +
                      4 * (kTokenPlace + kFewRows * 2 * kStepColumns) + kMostExperts * sizeof(Schedule::Active) <=
                  kSharedBytes,
              "no room for four stages");

// Stages that fit in front of the exchange where the largest tile has so many tokens; tiles of 8 may be beside it.
template <int kTokens>
DEVICE int stages_before(u32 end) {
  constexpr u32 kSmall = exchange_bytes(8, teams_of(8)), kLarge = exchange_bytes(kTokens, teams_of(kTokens));
  constexpr u32 kStageBytes = kTokenPlace + token_rows_of(kTokens) * 2 * kStepColumns;
  return min((end - kRingPlace - (kSmall > kLarge ? kSmall : kLarge)) / kStageBytes, kMaxStages);
}

DEVICE Ring make_ring(u8* memory, u32 end, int largest) {
  Ring ring;
  ring.memory = memory;
  ring.token_rows = token_rows_of(largest);
  ring.num_stages = largest <= 8    ? stages_before<8>(end)
                    : largest <= 16 ? stages_before<16>(end)
                                    : stages_before<kFewRows>(end);
  return ring;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(const __grid_constant__ ExpertsParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int warp = threadIdx.x / 32, ticket = 0;
  if (threadIdx.x == 0) {
    place_tables(shared, p.most_tiles);
  } else if (warp == kFlagWarp) {
    prefetch_weights(p, threadIdx.x % 32);
  } else if (warp == kFirstConsumer) {
    if (threadIdx.x % 32 == 0) init_barriers(shared);
    __syncwarp();
    named_arrive<kInitBarrier, 64>();
  }
  __syncwarp();
  grid_dependency_wait();
  grid_dependency_launch();
  // The weights' warp asks for its first weights as soon as there are tables; the others cut both phases meanwhile.
  if (warp == kWeightWarp) {
    ticket = start_launch(p, shared, threadIdx.x);
    named_arrive<kTablesBarrier, kThreads>();
    named_barrier<kInitBarrier, 64>();
  } else {
    named_barrier<kTablesBarrier, kThreads>();
  }
  if (shared.schedule.largest == 0) return;  // all experts have more rows, or none
  if (warp != kWeightWarp) {
    cut_phases(shared.schedule, threadIdx.x - 32, kThreads - 32);
    named_barrier<kCutBarrier, kThreads - 32>();
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
