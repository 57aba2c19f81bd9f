// Expert GEMM with int8 rows for every GPU from sm_80 on. PHASE 0 is w13 with the activation, PHASE 1 is w2; each is
// one launch, after eight_bit_rows.cu.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// Layout in and out, tiles, widening, promotion and epilogues are those of eight_bit_sm90.cu (eight_bit_tile.cuh).
// Warp roles:  all 8 warps copy, widen, multiply (mma.sync m16n8k32) and promote, 32 of a tile's 256 weight rows each.
// Pipeline:    ring of kStages shared-memory stages of 128 columns, filled by cp.async; one CTA per SM.
// Schedule:    data-parallel: CTAs take whole tiles round robin, so tiles that share weights run together.
// Example:     4 tiles on 3 CTAs: CTA 0 computes tiles 0 and 3.
#include "eight_bit_tile.cuh"

static_assert(ROWS_INT8, "sm_80 does not multiply e4m3");

constexpr int kThreads = kConsumerThreads;
constexpr int kStages = kBits == 4 ? 3 : 2;  // fits the 99 KB of the smallest GPUs (sm_86, sm_89)
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kChunkBytes = 16;

// d += a * b: 16 weight rows x 8 tokens over 32 columns.
DEVICE void mma_int8(int* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ==== Copies ====

// All threads copy num_bytes, a multiple of 16.
DEVICE void copy_run(u32 to, const u8* from, int num_bytes) {
  for (int at = threadIdx.x * kChunkBytes; at < num_bytes; at += kThreads * kChunkBytes) {
    copy_async_16(to + at, from + at, kChunkBytes);
  }
}

// Fills a stage. The last step may be narrower; the missing columns of tokens become zeros.
DEVICE void load_stage(const EightBitParams& params, const TileSlice& g, int first_row, int step, u32 stage) {
  const ExpertsParams& p = params.experts;
  const GemmParams& gemm = p.gemm[PHASE];
  int rows = min(gemm.rows - g.first_row, kTileRows), first_column = step * kGroupColumns;
  int columns = min(gemm.columns - first_column, kGroupColumns);
  i64 first_weight_row = g.expert * (i64)gemm.rows + g.first_row;
  for (int strip = 0; strip < rows / 64; strip++) {
    const u8* codes = gemm.weights + (first_weight_row + 64 * strip) * gemm.columns * kBits / 8;
    copy_run(stage + strip * kStripBytes, codes + step * kStripBytes, 64 * columns * kBits / 8);
  }
  i64 scales = (g.expert * (i64)gemm.groups * gemm.rows + g.first_row) * kScaleBytes;
  for (int i = 0; i < (kGrouped ? min(gemm.groups - step * kGroups, kGroups) : 1); i++) {
    i64 from = scales + (kGrouped ? (step * kGroups + i) * (i64)gemm.rows * kScaleBytes : 0);
    u32 row = stage + i * kScaleRowBytes;
    if constexpr (kGrouped) copy_run(row + kScalesPlace, gemm.scales + from, rows * kScaleBytes);
    if constexpr (kHasZeros) copy_run(row + kZerosPlace, gemm.zeros + from, rows * kScaleBytes);
  }
  constexpr int kRowChunks = kGroupColumns / kChunkBytes;
  const u8* codes = reinterpret_cast<const u8*>(gemm.input) + first_row * (i64)gemm.columns + first_column;
  for (int i = threadIdx.x; i < g.tokens * kRowChunks; i += kThreads) {
    int token = i / kRowChunks, chunk = i % kRowChunks, valid = chunk * kChunkBytes < columns;
    copy_async_16(stage + kTokensPlace + token * kGroupColumns + (chunk ^ token % 8) * kChunkBytes,
                  codes + token * (i64)gemm.columns + (valid ? chunk * kChunkBytes : 0), valid * kChunkBytes);
  }
  if constexpr (PHASE == 1) {
    int num_scales = (g.tokens + kStartMultiple - 1) / kStartMultiple * kStartMultiple;
    copy_run(stage + kTokenScalesPlace,
             reinterpret_cast<const u8*>(params.hidden_scales + step * (i64)params.capacity + first_row),
             num_scales * 4);
  }
}

// ==== Products ====

DEVICE void multiply_stage(SumsOf<kTileTokens>& sums, u32 stage, int groups) {
  constexpr int kBlocks = 4 / kGroups;
  int lane = threadIdx.x % 32, row = lane % 8;
  LanePlace own;
  // ldmatrix: each quarter of the warp addresses 8 tokens, for two groups of 8 tokens x two chunks of 16 columns.
  u32 tokens = stage + kTokensPlace + (lane / 16 * 8 + row) * kGroupColumns + (lane / 8 % 2 ^ row) * kChunkBytes;
  u32 token_scales = token_scales_in(stage);
#pragma unroll
  for (int group = 0; group < kGroups; group++) {
    if (kGroups > 1 && group >= groups) break;
    Packed<kBlocks> packed[2];
    SumsOf<kTileTokens, Sum> part = {};
#pragma unroll
    for (int half = 0; half < 2; half++) packed[half].load_part(stage, own, half, group * kBlocks);
#pragma unroll
    for (int i = 0; i < kBlocks; i++) {
      u32 a[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) packed[half].widen(i, a[half]);
#pragma unroll
      for (int j = 0; j < kTileTokens / 16; j++) {
        u32 b[4];
        load_matrices(b, (tokens ^ (group * kBlocks + i) * 2 * kChunkBytes) + j * 16 * kGroupColumns);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          mma_int8(&part[half][8 * j], a[half], b[0], b[1]);
          mma_int8(&part[half][8 * j + 4], a[half], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      promote<kTileTokens, PHASE>(sums[half], part[half], packed[half].low(), packed[half].high(), token_scales);
    }
  }
}

DEVICE void multiply_tile(const EightBitParams& params, const TileSlice& g, int first_row, u32 ring,
                          SumsOf<kTileTokens>& sums) {
  const GemmParams& gemm = params.experts.gemm[PHASE];
  int steps = steps_of(params.experts, PHASE);
  auto load = [&](int step) {
    if (step < steps) load_stage(params, g, first_row, step, ring + step % kStages * kStageBytes);
    commit_copies();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; step++) load(step);
  for (int step = 0; step < steps; step++) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // this step's stage is filled, and the previous one is free
    load(step + kStages - 1);
    multiply_stage(sums, ring + step % kStages * kStageBytes, gemm.groups - step * kGroups);
  }
}

// ==== Kernel ====

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    eight_bit_gemm(const __grid_constant__ EightBitParams params) {
  extern __shared__ __align__(1024) u8 memory[];
  const ExpertsParams& p = params.experts;
  Largest& largest = *reinterpret_cast<Largest*>(memory + kRingBytes);
  Tables tables(reinterpret_cast<int*>(memory + kRingBytes + sizeof(Largest)), p.num_experts);
  if (threadIdx.x < 32) tables.make(p, threadIdx.x);
  __syncthreads();
  int num_tiles = tiles_of(p, tables, PHASE);
  for (int i = blockIdx.x; i < num_tiles; i += gridDim.x) {
    TileSlice g = tile_of(p, tables, PHASE, i);
    int first_row = tables.starts[g.expert] + g.first_token;
    SumsOf<kTileTokens> sums = {};
    multiply_tile(params, g, first_row, shared_address(memory), sums);
    if constexpr (PHASE == 0) {
      const u32* scales = reinterpret_cast<const u32*>(params.row_scales + first_row);
      store_hidden<kTileTokens>(params, tables, largest, g, scales, sums);
    } else {
      const int* rows = p.row_ids + tables.firsts[g.expert] + g.first_token;
      store_output<kTileTokens>(params, g, reinterpret_cast<const u32*>(rows), sums);
    }
    __syncthreads();  // all stages are read
  }
}
