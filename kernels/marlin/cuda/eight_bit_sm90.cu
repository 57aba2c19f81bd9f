// Prefill (large-M) expert kernel with 8-bit rows for Hopper: w13, activation and w2 of all local experts in one
// persistent launch, at the tensor cores' 8-bit rate.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// ROWS_INT8 1: int8 rows x uint4, uint4b8 or uint8b128 weights, sums in int32. 0: e4m3 rows x e4m3 weights, in f32.
// In:  packed weights (repack.py) with scales of GROUPS_PER_STEP groups every 128 columns, or one a row (0);
//      x as codes with one scale a row (eight_bit_rows.cu). Between: hidden as codes with one scale every 128 columns.
// Out: rows of sorted ids (params.py), unweighted, 16 bits.
// Warp roles (12 warps):  0-7 two consumer warpgroups: 128 weight rows x up to 128 tokens each; widen, wgmma, promote,
//                         epilogue;  8 claims tiles and streams weights;  9 streams tokens;  10, 11 give their registers.
// Operands: weights are A, widened from packed codes in registers; tokens are B, K-major, 128-byte swizzle.
// Pipeline: ring of kStages stages of 128 columns (256 rows of codes, tokens, scales), full/empty mbarriers per stage.
// Promotion: the tensor cores add up the products of one group of columns; the sum, times the scales of its weight row
//            and (w2) of its token, is added to an f32 sum. int8 sums with one scale a row need none in w13: they stay
//            int32 until the end.
// Schedule: data-parallel tiles claimed by an atomic ticket: expert by expert, weight rows, then tokens; w13 before w2.
//           A tile of w2 waits for all tiles of w13 of its expert, whose tickets are earlier, so their CTAs are running.
// Epilogue of w13: gate and up rows alternate, so 256 rows make 128 columns of hidden, one scale group of every token.
// Sums are made in a fixed order: same input, same bits.
//
// Example: one expert, 200 rows, K 256, N 128: w13 has 1 x 2 tiles of 256 rows x 104 and 96 tokens, 2 steps each; w2
// likewise with 1 step. Tickets 0 and 1 are w13's; tickets 2 and 3 wait until both are stored.
#include "dequant.cuh"
#include "eight_bit_layout.cuh"
#include "epilogue.cuh"
#include "tile_queue.cuh"
#include "wgmma.cuh"

static_assert(kGated, "a tile of w13 makes 128 columns of hidden where gate and up alternate");
static_assert(ROWS_INT8 ? kIntegers : WEIGHT_TYPE == FLOAT8_E4M3, "int8 rows multiply integers, e4m3 rows e4m3");

// ==== Pipeline ====

constexpr int kTileRows = 256;
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps, kTokenWarp = kConsumerWarps + 1;
constexpr int kThreads = 384;  // whole warpgroups, which setmaxnreg needs

constexpr bool kGrouped = GROUPS_PER_STEP > 0;
constexpr int kGroups = kGrouped ? GROUPS_PER_STEP : 1;  // of a step
constexpr int kBlockColumns = 32;                        // of a wgmma

// A stage: codes of weights (repack.py), of tokens (wgmma.cuh), scales and zero points of weights, scales of tokens.
constexpr int kPieceBytes = 16 * kBlockColumns * kBits / 8;  // 16 rows x 32 columns
constexpr int kStripBytes = 64 * kGroupColumns * kBits / 8;  // 64 rows x 128 columns
constexpr int kScaleRowBytes = kTileRows * 2;
constexpr int kTokensPlace = kTileRows / 64 * kStripBytes;
constexpr int kScalesPlace = kTokensPlace + kTileTokens * kGroupColumns;
constexpr int kZerosPlace = kScalesPlace + (kGrouped ? kGroups * kScaleRowBytes : 0);
constexpr int kTokenScalesPlace = kZerosPlace + (kHasZeros ? kGroups * kScaleRowBytes : 0);
constexpr int kStageBytes = (kTokenScalesPlace + kTileTokens * 4 + 1023) / 1024 * 1024;  // tokens begin at 1024 bytes

constexpr int kBoxTokens = 32;  // rows of one tensor copy

struct EightBitParams {
  TensorMap tokens[2];  // codes of the input, codes of hidden
  ExpertsParams experts;
  const float* row_scales;  // [capacity], of the input
  u8* hidden;               // [capacity, columns of w2]
  float* hidden_scales;     // [ceil(columns of w2 / 128), capacity]
  int capacity;             // rows
};

struct TileSlice {
  int phase, expert, first_row, first_token, tokens;  // phase -1: there are no more
};

constexpr int kTablesBytes = 3 * (kMaxExperts + 1) * sizeof(int);
constexpr int kBesidesRing = kTablesBytes + (kConsumerWarps + 5) * kTileTokens * 4 + 1024;
constexpr int kStages = (kSharedBytes - kBesidesRing) / kStageBytes;
constexpr int kRingBytes = kStages * kStageBytes;

struct Shared {
  u64 full[kStages], empty[kStages];
  u64 slice_full[kQueuedSlices], slice_empty[kQueuedSlices];
  TileSlice slice[kQueuedSlices];
  float largest[kConsumerWarps][kTileTokens];  // magnitudes of a w13 tile's results, by warp
  float inverse_scale[kTileTokens];
  u32 of_token[2][2][kTileTokens];  // of every other tile of a warpgroup: scales of the input (w13), output rows (w2)
};

static_assert(kRingBytes + sizeof(Shared) + kTablesBytes <= kSharedBytes, "no room for the tables of experts");

// The tables of experts follow.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }
DEVICE Tables tables_of(u8* memory, int n) {
  return Tables(reinterpret_cast<int*>(memory + kRingBytes + sizeof(Shared)), n);
}

// The position of a warp in the ring; all it keeps are a shared address and two counters.
struct Ring {
  static constexpr int kFullPlace = kRingBytes, kEmptyPlace = kRingBytes + kStages * 8;  // the first members of Shared
  u32 address;
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : address(shared_address(memory)) {}
  DEVICE u32 place() const { return address + stage * kStageBytes; }
  DEVICE u64* full(Shared& shared) { return &shared.full[stage]; }
  DEVICE void wait_full() { barrier_wait_at<kFullPlace>(address + 8 * stage, parity); }
  DEVICE void wait_empty() { barrier_wait_at<kEmptyPlace>(address + 8 * stage, parity ^ 1); }
  DEVICE void release(int stage) { barrier_arrive_at<kEmptyPlace>(address + 8 * stage); }
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE int steps_of(const ExpertsParams& p, int phase) {
  return (p.gemm[phase].columns + kGroupColumns - 1) / kGroupColumns;
}
DEVICE int row_tiles_of(const ExpertsParams& p, int phase) { return (p.gemm[phase].rows + kTileRows - 1) / kTileRows; }

// sync: tickets, CTAs that are done, stored tiles of every expert's w13.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }

// ==== Producers ====

DEVICE TileSlice slice_of(const ExpertsParams& p, const Tables& tables, int ticket) {
  int n = p.num_experts, first = tables.tiles[n] * row_tiles_of(p, 0);
  TileSlice g;
  g.phase = ticket >= first;
  int tile = ticket - (g.phase ? first : 0), row_tiles = row_tiles_of(p, g.phase);
  g.expert = find_expert(tables.tiles, n, row_tiles, tile);
  int rest = tile - tables.tiles[g.expert] * row_tiles, rows = rows_of(p, g.expert);
  TokenTiles tokens(rows);
  int row_tile = quotient(rest, tokens.count);
  g.first_row = row_tile * kTileRows;
  g.first_token = (rest - row_tile * tokens.count) * tokens.each;
  g.tokens = min(rows - g.first_token, tokens.each);
  return g;
}

// Claims tiles and streams the codes, scales and zero points of their weights. The last step may have fewer columns.
DEVICE void run_weight_thread(const ExpertsParams& p, const Tables& tables, Shared& shared, Ring ring) {
  int total = tables.tiles[p.num_experts] * (row_tiles_of(p, 0) + row_tiles_of(p, 1));
  u64 policy = policy_evict_normal();
  int index = 0, parity = 1;
  for (int ticket = atomicAdd(p.sync, 1); ticket < total; ticket = atomicAdd(p.sync, 1)) {
    TileSlice g = slice_of(p, tables, ticket);
    push_slice(shared, g, index, parity);
    const GemmParams& gemm = p.gemm[g.phase];
    int rows = min(gemm.rows - g.first_row, kTileRows), steps = steps_of(p, g.phase);
    i64 strip_stride = (i64)64 * gemm.columns * kBits / 8;
    const u8* codes = gemm.weights + (g.expert * (i64)gemm.rows + g.first_row) * gemm.columns * kBits / 8;
    i64 scales = (g.expert * (i64)gemm.groups * gemm.rows + g.first_row) * 2;
    for (int step = 0; step < steps; step++) {
      int columns = min(gemm.columns - step * kGroupColumns, kGroupColumns);
      int bytes = 64 * columns * kBits / 8, groups = min(gemm.groups - step * kGroups, kGroups);
      int scale_rows = kGrouped ? groups * (kHasZeros ? 2 : 1) : (kHasZeros ? 1 : 0);
      ring.wait_empty();
      barrier_arrive_expecting(ring.full(shared), rows / 64 * bytes + scale_rows * rows * 2);
      for (int i = 0; i < rows / 64; i++) {
        bulk_copy(ring.place() + i * kStripBytes, codes + i * strip_stride + step * kStripBytes, bytes,
                  ring.full(shared), policy);
      }
      for (int i = 0; i < (kGrouped ? groups : 1); i++) {
        i64 from = scales + (kGrouped ? (step * kGroups + i) * (i64)gemm.rows * 2 : 0);
        u32 row = i * kScaleRowBytes;
        if (kGrouped)
          bulk_copy(ring.place() + kScalesPlace + row, gemm.scales + from, rows * 2, ring.full(shared), policy);
        if (kHasZeros)
          bulk_copy(ring.place() + kZerosPlace + row, gemm.zeros + from, rows * 2, ring.full(shared), policy);
      }
      ring.advance();
    }
  }
  TileSlice none;
  none.phase = -1;
  push_slice(shared, none, index, parity);
}

// Streams the tokens of a tile, zeros beyond their columns, and in w2 their scales.
DEVICE void run_token_thread(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                             Ring& ring) {
  const ExpertsParams& p = params.experts;
  if (g.phase == 1) {
    wait_at_least(ready_flag(p, g.expert), TokenTiles(rows_of(p, g.expert)).count * row_tiles_of(p, 0));
    fence_proxy_async_global();
  }
  int row = tables.starts[g.expert] + g.first_token;
  int boxes = (g.tokens + kBoxTokens - 1) / kBoxTokens;
  int scale_bytes = g.phase == 1 ? (g.tokens + kStartMultiple - 1) / kStartMultiple * kStartMultiple * 4 : 0;
  u64 policy = policy_evict_normal();
  for (int step = 0; step < steps_of(p, g.phase); step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(shared), boxes * kBoxTokens * kGroupColumns + scale_bytes);
    for (int i = 0; i < boxes; i++) {
      u32 to = ring.place() + kTokensPlace + i * kBoxTokens * kGroupColumns;
      tensor_copy(to, &params.tokens[g.phase], step * kGroupColumns, row + i * kBoxTokens, ring.full(shared));
    }
    if (scale_bytes > 0) {
      const float* scales = params.hidden_scales + step * (i64)params.capacity + row;
      bulk_copy(ring.place() + kTokenScalesPlace, scales, scale_bytes, ring.full(shared), policy);
    }
    ring.advance();
  }
}

// ==== wgmma ====

// 64 weight rows (registers) x kTokens tokens (shared memory) over 32 columns. Tokens lie as in wgmma.cuh, 128 columns
// (128 bytes) a row, and so do the sums of a lane. Of the weights a lane has rows g and g + 8, columns 4 t to 4 t + 3,
// then the same 16 columns further on.

#if ROWS_INT8
using Sum = int;
#define SUM_CONSTRAINT "+r"
#define WGMMA_TYPES "s32.s8.s8"
#define WGMMA_SIGNS
#else
using Sum = float;
#define SUM_CONSTRAINT "+f"
#define WGMMA_TYPES "f32.e4m3.e4m3"
#define WGMMA_SIGNS ", 1, 1"
#endif

// d = a * b, or d + a * b.
template <int kTokens, bool kAdd>
DEVICE void wgmma_eight_bit(Sum* d, const u32* a, u64 b);

#define EIGHT(i)                                                                                      \
  SUM_CONSTRAINT(d[i]), SUM_CONSTRAINT(d[i + 1]), SUM_CONSTRAINT(d[i + 2]), SUM_CONSTRAINT(d[i + 3]), \
      SUM_CONSTRAINT(d[i + 4]), SUM_CONSTRAINT(d[i + 5]), SUM_CONSTRAINT(d[i + 6]), SUM_CONSTRAINT(d[i + 7])
#define THIRTY_TWO(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)

#define WGMMA_EIGHT_BIT_FORM(n, adds, first, list, a0, a1, a2, a3, place, ...)                                         \
  template <>                                                                                                          \
  DEVICE void wgmma_eight_bit<n, adds>(Sum * d, const u32* a, u64 b) {                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32." WGMMA_TYPES " {" list "}, {" a0 ", " a1 ", " a2 ", " a3 \
                 "}, " place ", " first WGMMA_SIGNS ";"                                                                \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                \
  }
#define WGMMA_EIGHT_BIT(n, ...)                    \
  WGMMA_EIGHT_BIT_FORM(n, false, "0", __VA_ARGS__) \
  WGMMA_EIGHT_BIT_FORM(n, true, "1", __VA_ARGS__)

WGMMA_EIGHT_BIT(32, LIST_16, "%16", "%17", "%18", "%19", "%20", EIGHT(0), EIGHT(8))
WGMMA_EIGHT_BIT(64, LIST_32, "%32", "%33", "%34", "%35", "%36", THIRTY_TWO(0))
WGMMA_EIGHT_BIT(96, LIST_48, "%48", "%49", "%50", "%51", "%52", THIRTY_TWO(0), EIGHT(32), EIGHT(40))
WGMMA_EIGHT_BIT(128, LIST_64, "%64", "%65", "%66", "%67", "%68", THIRTY_TWO(0), THIRTY_TWO(32))

// ==== Widening ====

// Codes become operand A as int8 or e4m3: uint4b8 as 16 x (code - 8), which the sign bit of its nibble gives for two
// instructions, uint4 as code - zero point, uint8b128 as code - 128, e4m3 as it is.
constexpr float kCodeUnit = WEIGHT_TYPE == UINT4B8 ? 0.0625f : 1.0f;

// (word ^ flips) & mask in one instruction.
DEVICE u32 flip_and_mask(u32 word, u32 flips, u32 mask) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(out) : "r"(word), "r"(flips), "r"(mask));
  return out;
}

// Four nibbles, one in each byte, minus their zero point, which stands in every byte of `zeros`.
DEVICE u32 subtract_zeros(u32 nibbles, u32 zeros) { return ((nibbles | 0x80808080u) - zeros) ^ 0x80808080u; }

// A zero point, which is a 16-bit number, in all bytes of a word.
DEVICE u32 zero_bytes(u32 zero) { return (u32)to_float(zero) * 0x01010101u; }

// What a lane reads of a stage for one wgmma group: 16 weight rows x kBlocks x 32 columns, their scales, zero points.
template <int kBlocks>
struct Packed {
  u32 codes[kBlocks][kBits / 2];
  u32 scales, zeros;

  DEVICE void load(u32 codes_from, u32 scales_from) {
#pragma unroll
    for (int n = 0; n < kBlocks; n++) {
      u32* w = codes[n];
      u32 from = codes_from + n * 4 * kPieceBytes;
      if constexpr (kBits == 4) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(from) : "memory");
      } else {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[kBits / 2 - 2]), "=r"(w[kBits / 2 - 1])
                     : "r"(from)
                     : "memory");
      }
    }
    constexpr int kZerosBehind = kZerosPlace - kScalesPlace;
    if constexpr (kGrouped) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(scales_from) : "memory");
    if constexpr (kHasZeros) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(zeros) : "r"(scales_from + kZerosBehind) : "memory");
    }
  }

  // Operand A of block n.
  DEVICE void widen(int n, u32 (&a)[4]) const {
    const u32* w = codes[n];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if constexpr (kHasZeros) {
        a[2 * k] = subtract_zeros(w[k] & 0x0f0f0f0fu, zero_bytes(zeros & 0xffff));
        a[2 * k + 1] = subtract_zeros(w[k] >> 4 & 0x0f0f0f0fu, zero_bytes(zeros >> 16));
      } else if constexpr (kBits == 4) {
        a[2 * k] = flip_and_mask(w[k] << 4, 0x80808080u, 0xf0f0f0f0u);
        a[2 * k + 1] = flip_and_mask(w[k], 0x80808080u, 0xf0f0f0f0u);
      } else {  // columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9, the order of packed 4-bit codes
        constexpr u32 kFlips = WEIGHT_TYPE == UINT8B128 ? 0x80808080u : 0;
        u32 low = w[2 * k % (kBits / 2)], high = w[(2 * k + 1) % (kBits / 2)];
        a[2 * k] = permute_bytes(low, high, 0x5140) ^ kFlips;
        a[2 * k + 1] = permute_bytes(low, high, 0x7362) ^ kFlips;
      }
    }
  }
};

// ==== Products ====

// Sums of a lane: [16 of its warp's 32 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens, typename T = float>
using SumsOf = T[2][kTokens / 2];

// The scales of a lane's tokens lie together for every 16 of a tile: token 8 j + 2 t + i at 4 t + 2 j + i (j, i < 2).
DEVICE int scale_place(int token) { return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2; }

// sums += part times the scales of the lane's rows, where they have groups, and of the tokens, in w2.
template <int kTokens, int kPhase>
DEVICE void promote(float* sums, const Sum* part, float low, float high, u32 token_scales) {
#pragma unroll
  for (int j = 0; j < kTokens / 16; j++) {
    float token[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kPhase == 1) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(token[0]), "=f"(token[1]), "=f"(token[2]), "=f"(token[3])
                   : "r"(token_scales + 64 * j));
    }
#pragma unroll
    for (int i = 8 * j; i < 8 * j + 8; i++) {
      float scale = kGrouped ? (i % 4 < 2 ? low : high) : 1.0f;
      if constexpr (kPhase == 1) scale *= token[i % 8 / 4 * 2 + i % 2];
      sums[i] = fmaf((float)part[i], scale, sums[i]);
    }
  }
}

// Where a lane's codes and scales are in a stage.
struct LanePlace {
  u32 codes, scales;
  DEVICE LanePlace() {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    codes = warp / 2 * kStripBytes + warp % 2 * 2 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = kScalesPlace + (warp * 32 + lane / 4 * 2) * 2;
  }
};

// All steps of a tile. A warp has two times 16 rows, and groups of columns in a step: each is multiplied, then promoted,
// so that unpromoted sums take half the registers. What the next one needs is read while the tensor cores multiply.
template <int kTokens, int kPhase>
DEVICE void multiply_tile(SumsOf<kTokens>& sums, int steps, int groups, Ring& ring) {
  constexpr int kBlocks = 4 / kGroups;
  int lane = threadIdx.x % 32;
  LanePlace own;
  Packed<kBlocks> packed;
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  u32 first = __shfl_sync(~0u, wgmma_descriptor(ring.address + kTokensPlace), 0);
  ring.wait_full();
  packed.load(ring.place() + own.codes, ring.place() + own.scales);
  for (; steps > 0; steps--, groups -= kGroups) {
    u64 tokens = kDescriptorHigh << 32 | (first + ring.stage * (kStageBytes / 16));
    int stage = ring.stage;
    u32 token_scales = ring.place() + kTokenScalesPlace + lane % 4 * 16;
#pragma unroll
    for (int n = 0; n < 2 * kGroups; n++) {
      int group = n / 2, half = n % 2;
      u32 weights[kBlocks][4];
      Sum part[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kBlocks; i++) packed.widen(i, weights[i]);
      float low = to_float(packed.scales & 0xffff), high = to_float(packed.scales >> 16);
      // Columns that the last step lacks multiply zeros, but their scales may be anything.
      if (kGroups > 1 && group >= groups) low = high = 0.0f;
      wgmma_fence();
      wgmma_eight_bit<kTokens, false>(part, weights[0], tokens + 2 * group * kBlocks);
#pragma unroll
      for (int i = 1; i < kBlocks; i++) {
        wgmma_eight_bit<kTokens, true>(part, weights[i], tokens + 2 * (group * kBlocks + i));
      }
      wgmma_commit();
      if (n < 2 * kGroups - 1) {
        int next = n + 1;
        packed.load(ring.place() + own.codes + next % 2 * kPieceBytes + next / 2 * kBlocks * 4 * kPieceBytes,
                    ring.place() + own.scales + next % 2 * 32 + next / 2 * kScaleRowBytes);
      } else {
        ring.advance();
        if (steps > 1) {
          ring.wait_full();
          packed.load(ring.place() + own.codes, ring.place() + own.scales);
        }
      }
      wgmma_wait<0>();
      promote<kTokens, kPhase>(sums[half], part, low, high, token_scales);
    }
    __syncwarp();
    if (lane == 0) ring.release(stage);
  }
}

// w13 in int8 with one scale a row: int32 sums of all columns, exact, which need no promotion.
template <int kTokens>
DEVICE void multiply_tile_exactly(SumsOf<kTokens>& result, int steps, Ring& ring) {
  LanePlace own;
  SumsOf<kTokens, Sum> sums;
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0;
  u32 first = __shfl_sync(~0u, wgmma_descriptor(ring.address + kTokensPlace), 0);
  for (; steps > 0; steps--) {
    ring.wait_full();
    u64 tokens = kDescriptorHigh << 32 | (first + ring.stage * (kStageBytes / 16));
    u32 weights[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Packed<4> packed;
      packed.load(ring.place() + own.codes + half * kPieceBytes, ring.place() + own.scales + half * 32);
#pragma unroll
      for (int n = 0; n < 4; n++) packed.widen(n, weights[half][n]);
    }
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < 4; n++) wgmma_eight_bit<kTokens, true>(sums[half], weights[half][n], tokens + 2 * n);
    }
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release(ring.stage);
    ring.advance();
  }
#pragma unroll
  for (int i = 0; i < kTokens; i++) {
    result[i / (kTokens / 2)][i % (kTokens / 2)] = (float)sums[i / (kTokens / 2)][i % (kTokens / 2)];
  }
}

// What the sums of rows g and g + 8 are multiplied by at last: the unit of codes, and scales that are one a row.
DEVICE SumScale sum_scale_of(const ExpertsParams& p, const TileSlice& g, int half) {
  SumScale unit = {kCodeUnit, kCodeUnit};
  if constexpr (!kGrouped) {
    const GemmParams& gemm = p.gemm[g.phase];
    int row = g.first_row + threadIdx.x / 32 * 32 + half * 16 + threadIdx.x % 32 / 4 * 2;
    if (row < gemm.rows) {
      u32 pair = *reinterpret_cast<const u32*>(gemm.scales + (g.expert * (i64)gemm.rows + row) * 2);
      unit.low *= to_float(pair & 0xffff), unit.high *= to_float(pair >> 16);
    }
  }
  return unit;
}

// ==== Epilogue of w13: activation, scales, codes ====

// What a tile's epilogue reads of every token is copied to shared memory while the products are made, by the thread of
// the token's number in the warpgroup: the scale of the input row in w13, the output row in w2.
template <int kPhase>
DEVICE void fetch_of_token(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                           int parity) {
  const ExpertsParams& p = params.experts;
  int token = threadIdx.x % 128;
  if (token >= g.tokens) return;
  const void* from = kPhase == 0 ? (const void*)(params.row_scales + tables.starts[g.expert] + g.first_token + token)
                                 : (const void*)(p.row_ids + tables.firsts[g.expert] + g.first_token + token);
  copy_async_4(shared_address(&shared.of_token[parity][threadIdx.x / 128][token]), from);
}

// Waits until the warpgroup's tokens are there.
DEVICE const u32* wait_of_token(Shared& shared, int parity) {
  copies_async_wait();
  if (threadIdx.x < 128) {
    named_barrier<2, 128>();
  } else {
    named_barrier<3, 128>();
  }
  return shared.of_token[parity][threadIdx.x / 128];
}

// Activated results in place of the sums of gates: [16 rows][8 tokens][row g][two tokens]; zeros beyond the last row.
template <int kTokens>
DEVICE void activate_sums(const EightBitParams& params, const TileSlice& g, const u32* row_scales,
                          SumsOf<kTokens>& sums) {
  const GemmParams& gemm = params.experts.gemm[0];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float2* scales = reinterpret_cast<const float2*>(row_scales) + lane % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int first = g.first_row + warp * 32 + half * 16, column = first / 2 + lane / 4;
    bool valid = first < gemm.rows;
    SumScale unit = sum_scale_of(params.experts, g, half);
    float alpha[2] = {unit.low, unit.high}, bias[2] = {0.0f, 0.0f};
    if (gemm.alphas != nullptr) {
      alpha[0] *= gemm.alphas[g.expert * gemm.alphas_per_expert];
      alpha[1] *= gemm.alphas[(g.expert + 1) * gemm.alphas_per_expert - 1];
    }
    if (gemm.bias != nullptr && valid) {
      const u16* biases = gemm.bias + (i64)g.expert * gemm.rows;
      bias[0] = to_float(biases[column]), bias[1] = to_float(biases[gemm.rows / 2 + column]);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float2 scale = scales[4 * j];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float token = i ? scale.y : scale.x;
        float gate = sums[half][4 * j + i] * (token * alpha[0]) + bias[0];
        float up = sums[half][4 * j + 2 + i] * (token * alpha[1]) + bias[1];
        sums[half][4 * j + i] = valid ? activate(gate, up) : 0.0f;
      }
    }
  }
}

// The scale of a tile's 128 columns of hidden for every token: its inverse in shared memory, itself in hidden_scales.
template <int kTokens>
DEVICE void find_scales(const EightBitParams& params, Shared& shared, const TileSlice& g, int row,
                        SumsOf<kTokens>& sums) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float largest = max_or_nan(fabsf(sums[0][4 * j + i]), fabsf(sums[1][4 * j + i]));
      for (int d = 4; d < 32; d *= 2) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane < 4) shared.largest[warp][8 * j + 2 * lane + i] = largest;
    }
  }
  named_barrier<1, kConsumerThreads>();
  int token = threadIdx.x;
  if (token < kTokens) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) largest = max_or_nan(largest, shared.largest[w][token]);
    float scale = max_or_nan(largest / kLargestCode, kLeastScale);
    shared.inverse_scale[token] = 1.0f / scale;
    int group = g.first_row / kTileRows;
    if (token < g.tokens) params.hidden_scales[(i64)group * params.capacity + row + scale_place(token)] = scale;
  }
  named_barrier<1, kConsumerThreads>();
}

template <int kTokens>
DEVICE void store_hidden(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                         const u32* row_scales, SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tables.starts[g.expert] + g.first_token;
  activate_sums<kTokens>(params, g, row_scales, sums);
  find_scales<kTokens>(params, shared, g, row, sums);
  int column = g.first_row / 2 + warp * 16, width = p.gemm[1].columns;
  u8* to = params.hidden + (row + lane / 4) * (i64)width + column + lane % 4 * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2*>(&shared.inverse_scale[8 * j + lane % 4 * 2]);
    // Columns g and g + 8 of either token side by side; after the transpose a lane has columns 2 t, 2 t + 8, 2 t + 1 and
    // 2 t + 9 of one token.
    u32 first = code_pair(sums[0][4 * j] * inverse.x, sums[1][4 * j] * inverse.x);
    u32 second = code_pair(sums[0][4 * j + 1] * inverse.y, sums[1][4 * j + 1] * inverse.y);
    u32 codes = transpose_8x8(first | second << 16);
    if (8 * j + lane / 4 < g.tokens && column < width) *reinterpret_cast<u32*>(to + 8 * j * (i64)width) = codes;
  }
  fence_proxy_async_global();
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release_gpu(ready_flag(p, g.expert), 1);
}

// ==== Epilogue of w2 ====

template <int kTokens>
DEVICE void store_output(const ExpertsParams& p, const TileSlice& g, const u32* output_rows, SumsOf<kTokens>& sums) {
  int width = p.gemm[1].rows;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int first = g.first_row + threadIdx.x / 32 * 32 + half * 16;
    if (first >= width) break;
    u16* to = p.gemm[1].output + first + threadIdx.x % 4 * 4;
    auto put = [&](int token, const u32* out) {
      *reinterpret_cast<uint2*>(to + (i64)output_rows[token] * width) = make_uint2(out[0], out[1]);
    };
    finish_rows<kTokens, false>(p, g.expert, g.tokens, first, sums[half], 0, sum_scale_of(p, g, half), put);
  }
}

// ==== Kernel ====

template <int kTokens, int kPhase>
DEVICE void run_tile(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g, int parity,
                     Ring& ring) {
  const ExpertsParams& p = params.experts;
  SumsOf<kTokens> sums;
  fetch_of_token<kPhase>(params, tables, shared, g, parity);
  if constexpr (kPhase == 0 && ROWS_INT8 && !kGrouped) {
    multiply_tile_exactly<kTokens>(sums, steps_of(p, kPhase), ring);
  } else {
    multiply_tile<kTokens, kPhase>(sums, steps_of(p, kPhase), p.gemm[kPhase].groups, ring);
  }
  const u32* of_token = wait_of_token(shared, parity);
  if constexpr (kPhase == 0) {
    store_hidden<kTokens>(params, tables, shared, g, of_token, sums);
  } else {
    store_output<kTokens>(p, g, of_token, sums);
  }
}

// Takes the code for the least number of tokens that is enough, from kTokens on.
template <int kTokens, int kPhase>
DEVICE void run_tokens(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                       int parity, Ring& ring) {
  if constexpr (kTokens < kTileTokens) {
    if (__shfl_sync(~0u, g.tokens, 0) > kTokens) {
      return run_tokens<kTokens + 32, kPhase>(params, tables, shared, g, parity, ring);
    }
  }
  run_tile<kTokens, kPhase>(params, tables, shared, g, parity, ring);
}

DEVICE void run_consumers(const EightBitParams& params, const Tables& tables, Shared& shared, Ring ring) {
  int parity = 0;
  for_each_slice(shared, [&](const TileSlice g) {
    if (__shfl_sync(~0u, g.phase, 0) == 0) {
      run_tokens<32, 0>(params, tables, shared, g, parity, ring);
    } else {
      run_tokens<32, 1>(params, tables, shared, g, parity, ring);
    }
    parity ^= 1;
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages; i++) {
    barrier_init(&shared.full[i], 2);
    barrier_init(&shared.empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kQueuedSlices; i++) {
    barrier_init(&shared.slice_full[i], 1);
    barrier_init(&shared.slice_empty[i], kConsumerWarps + 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// The last CTA to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = threadIdx.x == 0 && add_acquire_release_gpu(p.sync + 1, 1) == (int)gridDim.x - 1;
  if (!__syncthreads_or(is_last)) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    eight_bit_experts(const __grid_constant__ EightBitParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = shared_of(memory);
  Tables tables = tables_of(memory, p.num_experts);
  int warp = threadIdx.x / 32;
  if (warp == 0) tables.make(p, threadIdx.x % 32);
  if (threadIdx.x == 32) init_barriers(shared);
  __syncthreads();
  Ring ring(memory);
  if (warp < kConsumerWarps) {
    registers_grow<232>();
    run_consumers(params, tables, shared, ring);
  } else {
    registers_shrink<40>();
    if (warp == kWeightWarp) {
      if (elected()) run_weight_thread(p, tables, shared, ring);
    } else if (warp == kTokenWarp) {
      for_each_slice(shared, [&](const TileSlice g) {
        if (elected()) {
          run_token_thread(params, tables, shared, g, ring);
        } else {
          for (int step = 0; step < steps_of(p, g.phase); step++) ring.advance();
        }
      });
    }
    __syncwarp();
  }
  leave(p);
}
