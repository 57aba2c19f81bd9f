// e4m3 expert kernel for Hopper: w13, gated activation and w2 of all local experts in one persistent launch, with
// weights and activations in e4m3, whose products take half the time of bf16.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// Layout in:   weights e4m3, packed as repack.py draws them, with one scale per row or per row and 128 columns. x e4m3
//              with one scale per row, as e4m3_rows.cu makes it (e4m3_layout.cuh). Rows are those of sorted ids
//              (params.cuh).
// Layout out:  `hidden` e4m3 with one scale per row and 128 columns; `out` 16-bit, at row `id`.
// Warp roles (warp-specialized, 12 warps):
//   0 to 7     consumers: two warpgroups of 128 weight rows x up to 128 tokens: wgmma, scales, bias, activation,
//              quantize
//   8          scheduler (claims tiles) and producer of weights (bulk copies)
//   9          producer of tokens (tensor copies); it waits for w13's tiles before it reads `hidden`
//   10, 11     none: registers are moved between whole warpgroups
// Pipeline:    ring of 4 shared-memory stages, each 128 columns of K (codes of 256 weight rows and of the tokens,
//              scales); full and empty mbarriers per stage. Tensor cores add up the products of a stage, which are then
//              added to the tile's sums in f32, times their scales.
// Schedule:    data-parallel: tiles are claimed by an atomic ticket, w13's before w2's, so a tile only waits for tiles
//              of CTAs that are running. No tile is split, and sums are made in a fixed order: same input, same bits.
// Example:     a tile of w13 is 256 rows, gate and up alternating, and makes 128 columns of `hidden`: their largest
//              magnitude is found over both warpgroups, say 8.96; the scale is 8.96 / 448 = 0.02, codes are result /
//              0.02.
#include "e4m3_layout.cuh"
#include "epilogue.cuh"
#include "number.cuh"
#include "tile_queue.cuh"
#include "wgmma.cuh"

// ==== Pipeline ====
//
// What the warps of a CTA share: the ring of stages, the queue of slices, tables, and the exchange that ends a tile.

constexpr int kTileRows = 256;
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps, kTokenWarp = kConsumerWarps + 1;
constexpr int kThreads = 384;  // whole warpgroups, between which registers are moved
constexpr int kStages = 4;

// Offsets in a stage: codes of weights as repack.py draws them, of tokens as wgmma.cuh does, scales of rows and of
// tokens.
constexpr int kFragmentBytes = 512;  // codes of 16 rows x 32 columns
constexpr int kStripBytes = 64 * kGroupColumns;
constexpr int kTokensOffset = kTileRows * kGroupColumns;
constexpr int kScalesOffset = kTokensOffset + kTileTokens * kGroupColumns;
constexpr int kTokenScalesOffset = kScalesOffset + kTileRows * 2;
constexpr int kStageBytes = kTokenScalesOffset + kTileTokens * 4;
constexpr int kRingBytes = kStages * kStageBytes;
static_assert(kStageBytes % 1024 == 0, "swizzled tokens begin at a multiple of 1024 bytes");

constexpr int kBoxTokens = 32;  // rows of one tensor copy

// Launch parameters. tokens: e4m3 input of either GEMM; w13's output is w2's input.
struct E4m3Params {
  TensorMap tokens[2];
  ExpertsParams experts;
  const float* row_scales;  // [capacity], of the input
  u8* hidden;               // [capacity, columns of w2]
  float* hidden_scales;     // [columns of w2 / 128, capacity]
  int capacity;             // rows
};

struct TileSlice {
  int phase, expert, first_row, first_token, tokens;  // which tile; phase -1: no more slices
};

struct Shared {
  u64 full[kStages], empty[kStages];
  u64 slice_full[kQueuedSlices], slice_empty[kQueuedSlices];
  TileSlice slice[kQueuedSlices];
  float largest[kConsumerWarps][kTileTokens];  // magnitude of a tile's results, by warp
  float scale[kTileTokens];                    // inverse scale of each of its tokens
};

static_assert(kRingBytes + sizeof(Shared) + 3 * (kMaxExperts + 1) * sizeof(int) <= kSharedBytes,
              "no room for experts' tables");

// Behind the ring; the experts' tables follow.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }
DEVICE Tables tables_of(u8* memory, int n) {
  return Tables(reinterpret_cast<int*>(memory + kRingBytes + sizeof(Shared)), n);
}

// A warp's position in the ring.
struct Ring {
  Shared& shared;
  u32 address;
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : shared(shared_of(memory)), address(shared_address(memory)) {}
  DEVICE u32 stage_address() const { return address + stage * kStageBytes; }
  DEVICE u64* full() { return &shared.full[stage]; }
  DEVICE void wait_full() { barrier_wait(full(), parity); }
  DEVICE void wait_empty() { barrier_wait(&shared.empty[stage], parity ^ 1); }
  DEVICE void release() { barrier_arrive(&shared.empty[stage]); }
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE int steps_of(const ExpertsParams& p, int phase) { return p.gemm[phase].columns / kGroupColumns; }
DEVICE int row_tiles_of(const ExpertsParams& p, int phase) { return (p.gemm[phase].rows + kTileRows - 1) / kTileRows; }

// sync: tickets, CTAs done, then per expert the number of w13's tiles that are stored.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }

// ==== Scheduler and producers ====
//
// Two threads fill the ring: one claims tiles and streams weights, the other copies tokens. Tiles are numbered expert
// by expert, then by weight rows, then by tokens, w13's before w2's.

DEVICE TileSlice slice_of(const ExpertsParams& p, const Tables& tables, int ticket) {
  int n = p.num_experts, first = tables.tiles[n] * row_tiles_of(p, 0);
  TileSlice g;
  g.phase = ticket >= first;
  int tile = ticket - (g.phase ? first : 0), row_tiles = row_tiles_of(p, g.phase);
  g.expert = find_expert(tables.tiles, n, 1, quotient(tile, row_tiles));
  int rest = tile - tables.tiles[g.expert] * row_tiles, rows = rows_of(p, g.expert);
  TokenTiles tokens(rows);
  int row_tile = quotient(rest, tokens.count);
  g.first_row = row_tile * kTileRows;
  g.first_token = (rest - row_tile * tokens.count) * tokens.each;
  g.tokens = min(rows - g.first_token, tokens.each);
  return g;
}

DEVICE void run_weight_thread(const ExpertsParams& p, const Tables& tables, Shared& shared, Ring ring) {
  int total = tables.tiles[p.num_experts] * (row_tiles_of(p, 0) + row_tiles_of(p, 1));
  u64 policy = policy_evict_normal();
  int index = 0, parity = 1;
  auto push = [&](const TileSlice& g) { push_slice(shared, g, index, parity); };
  for (int ticket = atomicAdd(p.sync, 1); ticket < total; ticket = atomicAdd(p.sync, 1)) {
    TileSlice g = slice_of(p, tables, ticket);
    push(g);
    const GemmParams& gemm = p.gemm[g.phase];
    int rows = min(gemm.rows - g.first_row, kTileRows);
    const u8* codes = gemm.weights + (g.expert * (i64)gemm.rows + g.first_row) * gemm.columns;
    const u8* scales = gemm.scales + (g.expert * (i64)gemm.groups * gemm.rows + g.first_row) * 2;
    for (int step = 0; step < steps_of(p, g.phase); step++) {
      ring.wait_empty();
      barrier_arrive_expecting(ring.full(), rows * (kGroupColumns + 2));
      for (int i = 0; i < rows / 64; i++) {
        const u8* strip = codes + i * (i64)64 * gemm.columns + step * kStripBytes;
        bulk_copy(ring.stage_address() + i * kStripBytes, strip, kStripBytes, ring.full(), policy);
      }
      const u8* group = scales + (gemm.groups > 1 ? step * (i64)gemm.rows * 2 : 0);
      bulk_copy(ring.stage_address() + kScalesOffset, group, rows * 2, ring.full(), policy);
      ring.advance();
    }
  }
  TileSlice none;
  none.phase = -1;
  push(none);
}

DEVICE void run_token_thread(const E4m3Params& params, const Tables& tables, const TileSlice& g, Ring& ring) {
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
    barrier_arrive_expecting(ring.full(), boxes * kBoxTokens * kGroupColumns + scale_bytes);
    for (int i = 0; i < boxes; i++) {
      u32 to = ring.stage_address() + kTokensOffset + i * kBoxTokens * kGroupColumns;
      tensor_copy(to, &params.tokens[g.phase], step * kGroupColumns, row + i * kBoxTokens, ring.full());
    }
    if (scale_bytes > 0) {
      const float* scales = params.hidden_scales + step * (i64)params.capacity + row;
      bulk_copy(ring.stage_address() + kTokenScalesOffset, scales, scale_bytes, ring.full(), policy);
    }
    ring.advance();
  }
}

// ==== wgmma in e4m3 ====
//
// 64 weight rows (registers) x N tokens (shared memory) over 32 columns. Tokens are K-major, 128 columns (128 bytes) a
// row; otherwise they and the accumulators have the layout of wgmma.cuh. Lane 4 g + t has of the weights rows g and g +
// 8, columns 4 t to 4 t + 3, then the same 16 columns further on.

// d = a * b, or d + a * b.
template <int kTokens, bool kAdd>
DEVICE void wgmma_e4m3(float* d, const u32* a, u64 b);

#define WGMMA_E4M3_FORM(n, adds, first, list, a0, a1, a2, a3, b_operand, ...)                                        \
  template <>                                                                                                        \
  DEVICE void wgmma_e4m3<n, adds>(float* d, const u32* a, u64 b) {                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" list "}, {" a0 ", " a1 ", " a2 ", " a3 \
                 "}, " b_operand ", " first ", 1, 1;"                                                                \
                 : __VA_ARGS__                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
  }
#define WGMMA_E4M3(n, ...)                    \
  WGMMA_E4M3_FORM(n, false, "0", __VA_ARGS__) \
  WGMMA_E4M3_FORM(n, true, "1", __VA_ARGS__)

WGMMA_E4M3(32, LIST_16, "%16", "%17", "%18", "%19", "%20", SUMS_8(0), SUMS_8(8))
WGMMA_E4M3(64, LIST_32, "%32", "%33", "%34", "%35", "%36", SUMS_32(0))
WGMMA_E4M3(96, LIST_48, "%48", "%49", "%50", "%51", "%52", SUMS_32(0), SUMS_8(32), SUMS_8(40))
WGMMA_E4M3(128, LIST_64, "%64", "%65", "%66", "%67", "%68", SUMS_32(0), SUMS_32(32))

// ==== Products ====
//
// Sums of a tile: products of 128 columns in e4m3, times the scales of weights and tokens, added up in f32.

// A lane's sums: [16 of its warp's 32 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Operand A of 16 rows x 128 columns: a lane's packed codes, regrouped by row.
DEVICE void load_weights(u32 from, u32 (&weights)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    u32 w[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from + n * 4 * kFragmentBytes)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) weights[n][i] = permute_bytes(w[i / 2 * 2], w[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
  }
}

// sums += part, times the scales of its rows and, in w2, of its tokens; in w13 a token has one scale for all columns.
template <int kTokens, int kPhase>
DEVICE void add_scaled(float* sums, const float* part, float low, float high, u32 token_scales) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float own[2] = {1.0f, 1.0f};
    if constexpr (kPhase == 1) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(own[0]), "=f"(own[1])
                   : "r"(token_scales + 32 * j)
                   : "memory");
    }
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i++) sums[i] = fmaf(part[i], (i % 4 < 2 ? low : high) * own[i % 2], sums[i]);
  }
}

// One half of a warp's rows after the other, so that the products need half the registers.
template <int kTokens, int kPhase>
DEVICE void multiply_tile(SumsOf<kTokens>& sums, int steps, Ring& ring) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 codes = warp / 2 * kStripBytes + warp % 2 * 2 * kFragmentBytes + lane * 16;
  u32 scales = kScalesOffset + (warp * 32 + lane / 4 * 2) * 2, token_scales = kTokenScalesOffset + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  for (; steps > 0; steps--) {
    ring.wait_full();
    u32 stage = ring.stage_address();
    u64 tokens = kDescriptorHigh << 32 | __shfl_sync(~0u, wgmma_descriptor(stage + kTokensOffset), 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 weights[4][4], pair;
      float part[kTokens / 2];
      load_weights(stage + codes + half * kFragmentBytes, weights);
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(stage + scales + half * 32) : "memory");
      wgmma_fence();
      wgmma_e4m3<kTokens, false>(part, weights[0], tokens);
#pragma unroll
      for (int n = 1; n < 4; n++) wgmma_e4m3<kTokens, true>(part, weights[n], tokens + 2 * n);
      wgmma_commit();
      wgmma_wait<0>();
      float low = to_float(pair & 0xffff), high = to_float(pair >> 16);
      add_scaled<kTokens, kPhase>(sums[half], part, low, high, stage + token_scales);
    }
    __syncwarp();
    if (lane == 0) ring.release();
    ring.advance();
  }
}

// ==== Epilogue and kernel ====

static_assert(kGated, "a tile of w13 makes 128 columns of hidden where gate and up alternate");

// Replaces the gates' sums by activated results: [16 rows][8 tokens][row g][two tokens].
template <int kTokens>
DEVICE void activate_sums(const E4m3Params& params, const TileSlice& g, int row, SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  const GemmParams& gemm = p.gemm[0];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* scales = params.row_scales + row + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int column = (g.first_row + warp * 32 + half * 16) / 2 + lane / 4;
    float alpha[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
    if (gemm.alphas != nullptr) {
      alpha[0] = gemm.alphas[g.expert * gemm.alphas_per_expert];
      alpha[1] = gemm.alphas[(g.expert + 1) * gemm.alphas_per_expert - 1];
    }
    if (gemm.bias != nullptr) {
      const u16* biases = gemm.bias + (i64)g.expert * gemm.rows;
      bias[0] = to_float(biases[column]), bias[1] = to_float(biases[gemm.rows / 2 + column]);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float2 scale =
          8 * j < g.tokens ? __ldg(reinterpret_cast<const float2*>(scales + 8 * j)) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float own = i ? scale.y : scale.x;
        float gate = sums[half][4 * j + i] * (own * alpha[0]) + bias[0];
        float up = sums[half][4 * j + 2 + i] * (own * alpha[1]) + bias[1];
        sums[half][4 * j + i] = activate(gate, up);
      }
    }
  }
}

// Finds the scale of each token's 128 results; stores it for w2's token producer, and its inverse in shared memory.
template <int kTokens>
DEVICE void find_scales(const E4m3Params& params, Shared& shared, const TileSlice& g, int row, SumsOf<kTokens>& sums) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float largest = fmaxf(fabsf(sums[0][4 * j + i]), fabsf(sums[1][4 * j + i]));
      for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane < 4) shared.largest[warp][8 * j + 2 * lane + i] = largest;
    }
  }
  named_barrier<1, kConsumerThreads>();
  int token = threadIdx.x;
  if (token < kTokens) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) largest = fmaxf(largest, shared.largest[w][token]);
    float scale = fmaxf(largest / kMaxCode, kMinScale);
    shared.scale[token] = 1.0f / scale;
    int group = g.first_row / kTileRows;
    if (token < g.tokens) params.hidden_scales[(i64)group * params.capacity + row + token] = scale;
  }
  named_barrier<1, kConsumerThreads>();
}

template <int kTokens>
DEVICE void store_hidden(const E4m3Params& params, const Tables& tables, Shared& shared, const TileSlice& g,
                         SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tables.starts[g.expert] + g.first_token;
  activate_sums<kTokens>(params, g, row, sums);
  find_scales<kTokens>(params, shared, g, row, sums);
  u8* to = params.hidden + (row + lane / 4) * (i64)p.gemm[1].columns + g.first_row / 2 + warp * 16 + lane % 4 * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2*>(&shared.scale[8 * j + lane % 4 * 2]);
    // Rows g and g + 8 of each token side by side; after the transpose the lane has those of rows 2 t and 2 t + 1 of
    // one token.
    u32 first = e4m3_codes(sums[0][4 * j] * inverse.x, sums[1][4 * j] * inverse.x);
    u32 second = e4m3_codes(sums[0][4 * j + 1] * inverse.y, sums[1][4 * j + 1] * inverse.y);
    u32 codes = permute_bytes(transpose_8x8(first | second << 16), 0, 0x3120);
    if (8 * j + lane / 4 < g.tokens) *reinterpret_cast<u32*>(to + 8 * j * (i64)p.gemm[1].columns) = codes;
  }
  fence_proxy_async_global();
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release_gpu(ready_flag(p, g.expert), 1);
}

template <int kTokens>
DEVICE void store_output(const ExpertsParams& p, const Tables& tables, const TileSlice& g, SumsOf<kTokens>& sums) {
  i64 first_output_row = tables.positions[g.expert];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int first = g.first_row + threadIdx.x / 32 * 32 + half * 16;
    if (first >= p.gemm[1].rows) break;
    int end = g.first_token + g.tokens;
    store_rows<kTokens, false>(p, g.expert, 0, first_output_row, end, first, sums[half], g.first_token);
  }
}

template <int kTokens, int kPhase>
DEVICE void run_tile(const E4m3Params& params, const Tables& tables, Shared& shared, const TileSlice& g, Ring& ring) {
  SumsOf<kTokens> sums;
  multiply_tile<kTokens, kPhase>(sums, steps_of(params.experts, kPhase), ring);
  if constexpr (kPhase == 0) {
    store_hidden<kTokens>(params, tables, shared, g, sums);
  } else {
    store_output<kTokens>(params.experts, tables, g, sums);
  }
}

// Dispatches to the code for the least multiple of 32 tokens that suffices, at least kTokens.
template <int kTokens, int kPhase>
DEVICE void run_tokens(const E4m3Params& params, const Tables& tables, Shared& shared, const TileSlice& g, Ring& ring) {
  if constexpr (kTokens < kTileTokens) {
    if (__shfl_sync(~0u, g.tokens, 0) > kTokens) {
      return run_tokens<kTokens + 32, kPhase>(params, tables, shared, g, ring);
    }
  }
  run_tile<kTokens, kPhase>(params, tables, shared, g, ring);
}

DEVICE void run_consumers(const E4m3Params& params, const Tables& tables, Shared& shared, Ring ring) {
  for_each_slice(shared, [&](const TileSlice g) {
    if (__shfl_sync(~0u, g.phase, 0) == 0) {
      run_tokens<32, 0>(params, tables, shared, g, ring);
    } else {
      run_tokens<32, 1>(params, tables, shared, g, ring);
    }
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

// The last CTA to finish resets all flags for the next launch.
DEVICE void reset_flags(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = threadIdx.x == 0 && add_acquire_release_gpu(p.sync + 1, 1) == (int)gridDim.x - 1;
  if (!__syncthreads_or(is_last)) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) e4m3_experts(const __grid_constant__ E4m3Params params) {
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
          run_token_thread(params, tables, g, ring);
        } else {
          for (int step = 0; step < steps_of(p, g.phase); step++) ring.advance();
        }
      });
    }
    __syncwarp();
  }
  reset_flags(p);
}
