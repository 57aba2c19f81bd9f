// Expert GEMM for every GPU from sm_80 on: PHASE 0 is w13 with the activation, PHASE 1 is w2; one launch each.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// Layout in:   weights packed as repack.py draws them, scales and zero points [E, groups, rows]; with act-order every
//              column has a group of its own (column_groups). x rows of K 16-bit numbers: batched, by reference or as
//              sorted ids.
// Layout out:  `hidden` [all rows, N], one expert after the other; `out` batched or, with sorted ids, at row `id`.
// Warps:       4, all alike: copy, dequantize, mma.sync. With TILE_TOKENS = 16 each warp takes all 128 weight rows and
//              every fourth step (split-K within the CTA), with 32 two warps share the rows, with 64 each has 32 rows.
// Operands:    weights are A, dequantized in registers; tokens are B.
// Pipeline:    ring of 2 or 3 shared-memory stages per split-K group, 64 columns of K each, filled by cp.async.
// Schedule:    data-parallel: a tile is 128 weight rows x up to TILE_TOKENS tokens of one expert; CTAs take tiles round
//              robin, those that share weights at about the same time. If there are too few tiles for the CTAs,
//              split-K: each tile's columns are cut into slices, and the CTA that finishes last adds them up. No CTA
//              waits for another, and sums are made in a fixed order: same input, same bits.
// Example:     TILE_TOKENS = 32, 8 tiles of 112 steps on 324 CTAs: 14 slices of 8 steps each. Each leaves its sums in
//              `partials`; the last one of a tile to arrive adds up slices 0, 1, ... 13, whatever their order of
//              arrival.
#include "ampere_schedule.cuh"
#include "dequant.cuh"
#include "epilogue.cuh"
#include "mma.cuh"

// ==== Pipeline ====
//
// TILE_TOKENS, 16, 32 or 64: most tokens of a tile. A warp always has equally many sums, of 128, 64 or 32 of the tile's
// weight rows. The warps that share the tile's rows form a split-K group; the groups of a CTA take the steps by turns,
// and each has a ring of stages.
constexpr int kTileRows = 128;
constexpr int kTileTokens = TILE_TOKENS;
constexpr int kStepColumns = 64;
constexpr int kStages = kTileTokens == 16 ? 2 : 3;
constexpr int kBlocksPerSM = GROUP_COLUMNS == 0 ? 2 : 3;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroupWarps = kTileTokens / 16;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kSplitK = kWarps / kGroupWarps;

// GROUP_COLUMNS: columns that share a scale; 0: each column's group is looked up; -1: one group per row.
constexpr bool kLookUp = GROUP_COLUMNS == 0;
constexpr int kStepGroups = GROUP_COLUMNS > 0 && GROUP_COLUMNS < kStepColumns ? kStepColumns / GROUP_COLUMNS : 1;
constexpr int kTileFragments = kTileRows / 16;
constexpr int kCodeBytes = kStepColumns / 32 * kTileFragments * kFragmentBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;
constexpr int kScaleStage = kLookUp ? 0 : kStepGroups * kScaleRow * (kHasZeros ? 2 : 1);
constexpr int kTokenBytes = kTileTokens * 2 * kStepColumns;
constexpr int kStageBytes = kCodeBytes + kScaleStage + kTokenBytes;
constexpr int kRingBytes = kStages * kStageBytes;

struct Tile {
  int expert, first, first_row;  // first: of its weight rows; first_row: rows of all experts before
  int first_token, tokens;       // of the expert's
};

// codes [2][8 fragments][lane], scales [group][128 rows], zero points likewise, tokens [token][128 bytes], swizzled.
struct Stage {
  u8* base;
  DEVICE u8* codes() const { return base; }
  DEVICE u8* scales(int group) const { return base + kCodeBytes + group * kScaleRow; }
  DEVICE u8* zeros(int group) const { return scales(kStepGroups + group); }
  DEVICE u8* tokens() const { return base + kCodeBytes + kScaleStage; }
};

// All threads of a group arrive here and see what the others wrote.
DEVICE void group_barrier() {
  if constexpr (kGroupWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / kGroupThreads), "n"(kGroupThreads) : "memory");
  }
}

DEVICE void copy_16(void* to, const void* from) { copy_async_16(shared_address(to), from, 16); }

// Addresses of one thread's share of a tile: the same 16-byte chunk of every kApart-th token's row.
struct Source {
  static constexpr int kApart = kGroupThreads / 8, kRows = kTileTokens / kApart;
  const u16* token[kRows];
  const u8 *codes, *scales, *zeros;
  DEVICE Source(const ExpertsParams& p, const Tile& tile, int thread) {
    const GemmParams& gemm = p.gemm[PHASE];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      int row = thread / 8 + i * kApart;
      i64 from = row < tile.tokens ? input_row(p, PHASE, tile.expert, tile.first_row, tile.first_token + row) : 0;
      token[i] = gemm.input + from * gemm.columns + thread % 8 * 8;
    }
    codes = gemm.weights + ((i64)tile.expert * gemm.rows + tile.first) * gemm.columns * kBits / 8;
    i64 scale = ((i64)tile.expert * gemm.groups * gemm.rows + tile.first) * kScaleBytes;
    scales = gemm.scales + scale;
    zeros = gemm.zeros + scale;
  }
};

// The fragments of a strip of 64 rows lie together for every 32 columns; the last strip may have two instead of four.
// kWhole: the stage has all rows and columns.
template <bool kWhole>
DEVICE void load_codes(const GemmParams& gemm, const Tile& tile, const Source& source, int thread, int step,
                       Stage stage) {
#pragma unroll
  for (int i = 0; i < kCodeBytes / 16 / kGroupThreads; i++) {
    int offset = (thread + i * kGroupThreads) * 16;
    int block = offset / (kTileFragments * kFragmentBytes), fragment = offset / kFragmentBytes % kTileFragments;
    int strip = fragment / 4;
    int fragments = kWhole ? 4 : min(gemm.rows - tile.first - 64 * strip, 64) / 16;
    if (!kWhole && (fragment % 4 >= fragments || step * kStepColumns + block * 32 >= gemm.columns)) continue;
    const u8* from = source.codes + (i64)strip * 64 * gemm.columns * kBits / 8;
    copy_16(stage.codes() + offset,
            from + (i64)((step * 2 + block) * fragments + fragment % 4) * kFragmentBytes + offset % kFragmentBytes);
  }
}

DEVICE void load_scale_rows(const GemmParams& gemm, const Tile& tile, const Source& source, int thread, int step,
                            Stage stage) {
#pragma unroll
  for (int at = thread * 16; at < kStepGroups * kScaleRow; at += kGroupThreads * 16) {
    int group = at / kScaleRow, offset = at % kScaleRow;
    int all = GROUP_COLUMNS == -1 ? group : step * kStepColumns / (GROUP_COLUMNS > 0 ? GROUP_COLUMNS : 1) + group;
    if (all >= gemm.groups || offset >= (gemm.rows - tile.first) * kScaleBytes) continue;
    i64 from = (i64)all * gemm.rows * kScaleBytes + offset;
    copy_16(stage.scales(group) + offset, source.scales + from);
    if constexpr (kHasZeros) copy_16(stage.zeros(group) + offset, source.zeros + from);
  }
}

DEVICE void load_stage(const GemmParams& gemm, const Tile& tile, const Source& source, int thread, int step,
                       Stage stage) {
  if (tile.first + kTileRows <= gemm.rows && (step + 1) * kStepColumns <= gemm.columns) {
    load_codes<true>(gemm, tile, source, thread, step, stage);
  } else {
    load_codes<false>(gemm, tile, source, thread, step, stage);
  }
  if constexpr (!kLookUp) load_scale_rows(gemm, tile, source, thread, step, stage);
  int chunk = thread % 8, column = step * kStepColumns;
  if (column + chunk * 8 >= gemm.columns) return;
#pragma unroll
  for (int i = 0; i < Source::kRows; i++) {
    int row = thread / 8 + i * Source::kApart;
    if (row < tile.tokens) copy_16(stage.tokens() + row * 128 + (chunk ^ row % 8) * 16, source.token[i] + column);
  }
}

// ==== Multiply ====
//
// Sums per 16 weight rows x 8 tokens, in the layout of mma.cuh: of a warp's rows over its group's steps, and of the 32
// rows that the warp will store over all steps.
constexpr int kWarpRows = kTileRows / kGroupWarps, kWarpFragments = kWarpRows / 16;
typedef float GroupSums[kWarpFragments][kTileTokens / 2];
typedef float Sums[2][kTileTokens / 2];

// Merges the scales of two neighbouring columns into pairs.
DEVICE Scales join_columns(const Scales& low, const Scales& high) {
  Scales s;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    s.scale[h] = permute_bytes(low.scale[h], high.scale[h], 0x5410);
    if constexpr (kHasZeros) s.offset[h] = permute_bytes(low.offset[h], high.offset[h], 0x5410);
  }
  return s;
}

// 16 rows x 16 columns, each column with its own group; `index` is that of row g among all weight rows.
DEVICE void dequantize_looked_up(const GemmParams& gemm, const int* groups, i64 expert_groups, int index,
                                 const u32* words, u32* a) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int2 group = *reinterpret_cast<const int2*>(groups + 8 * k + threadIdx.x % 4 * 2);
    auto column = [&](int number) {
      i64 from = (expert_groups + number) * gemm.rows * kScaleBytes;
      return load_scales(gemm.scales + from, gemm.zeros + from, index);
    };
    u32 all[4];
    dequantize(words, join_columns(column(group.x), column(group.y)), all);
    a[2 * k] = all[2 * k], a[2 * k + 1] = all[2 * k + 1];
  }
}

// 16 weight rows x 16 columns, number k of the stage, by one lane.
DEVICE void dequantize_fragment(const GemmParams& gemm, const Tile& tile, const int* column_groups, int step,
                                Stage stage, int k, int index, const u32* words, Scales& scales, u32* a) {
  if constexpr (kLookUp) {
    i64 expert = tile.expert;
    dequantize_looked_up(gemm, column_groups + expert * gemm.columns + step * kStepColumns + 16 * k,
                         expert * gemm.groups, tile.first + index, words, a);
  } else {
    constexpr int kEvery = kStepColumns / 16 / kStepGroups;
    if (k % 2 == 0 || kEvery == 1) {
      scales = load_folded_scales(stage.scales(k / kEvery) + index * kScaleBytes, stage.zeros(k / kEvery) + 2 * index);
    }
    dequantize_folded(words, scales, a);
  }
}

// kWhole: the stage has all columns. `first`: the warp's first weight row in the tile.
template <bool kWhole>
DEVICE void multiply_columns(const GemmParams& gemm, const Tile& tile, const int* column_groups, int first, int step,
                             Stage stage, GroupSums& sums) {
  constexpr int kPairs = kTileTokens / 16;
  int lane = threadIdx.x % 32, row = lane % 8;
  // A quarter of the warp gives the addresses of 8 rows.
  u32 tokens = shared_address(stage.tokens()) + (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
  const u8* codes = stage.codes() + fragment_place(first / 16) + lane_place(lane);
#pragma unroll
  for (int block = 0; block < kStepColumns / 32; block++) {
    if (!kWhole && step * kStepColumns + block * 32 >= gemm.columns) break;
    u32 b[2][kPairs][4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
      for (int j = 0; j < kPairs; j++) load_matrices(b[k][j], (tokens ^ (2 * block + k) * 32) + j * 2048);
    }
#pragma unroll
    for (int i = 0; i < kWarpFragments; i++) {
      if (kLookUp && tile.first + first + 16 * i >= gemm.rows) break;  // there are no scales for it
      u32 words[2 * kWords], a[4];
      Scales scales;
      load_words(words, codes + block * kTileFragments * kFragmentBytes + fragment_place(i));
#pragma unroll
      for (int k = 0; k < 2; k++) {
        dequantize_fragment(gemm, tile, column_groups, step, stage, 2 * block + k, first + 16 * i + lane / 4 * 2,
                            words + k * kWords, scales, a);
#pragma unroll
        for (int j = 0; j < kPairs; j++) {
          mma(&sums[i][8 * j], a, b[k][j][0], b[k][j][1]);
          mma(&sums[i][8 * j + 4], a, b[k][j][2], b[k][j][3]);
        }
      }
    }
  }
}

DEVICE void multiply_stage(const GemmParams& gemm, const Tile& tile, const int* column_groups, int step, Stage stage,
                           GroupSums& sums) {
  int first = threadIdx.x % kGroupThreads / 32 * kWarpRows;
  if (tile.first + first >= gemm.rows) return;
  if ((step + 1) * kStepColumns <= gemm.columns) {
    multiply_columns<true>(gemm, tile, column_groups, first, step, stage, sums);
  } else {
    multiply_columns<false>(gemm, tile, column_groups, first, step, stage, sums);
  }
}

// By all threads, once no stage is read any more: adds up the groups' sums, through the memory of the rings.
DEVICE void reduce_split_k(u8* rings, const GroupSums& own, Sums& sums) {
  if constexpr (kSplitK == 1) {
#pragma unroll
    for (int m = 0; m < kTileTokens; m++) {
      sums[m / (kTileTokens / 2)][m % (kTileTokens / 2)] = own[m / (kTileTokens / 2)][m % (kTileTokens / 2)];
    }
    return;
  }
  // [group][16 rows][8 tokens][lane]
  constexpr int kOfPiece = kTileTokens / 8 * 32;
  static_assert(kSplitK * kTileFragments * kOfPiece * (int)sizeof(float4) <= kSplitK * kRingBytes, "no room for sums");
  float4* all = reinterpret_cast<float4*>(rings) + threadIdx.x % 32;
  int warp = threadIdx.x / 32, group = warp / kGroupWarps, first = warp % kGroupWarps * kWarpFragments;
#pragma unroll
  for (int i = 0; i < kWarpFragments; i++) {
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      const float* v = &own[i][4 * j];
      all[(group * kTileFragments + first + i) * kOfPiece + j * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      float* v = &sums[i][4 * j];
#pragma unroll
      for (int t = 0; t < kSplitK; t++) {
        float4 more = all[(t * kTileFragments + 2 * warp + i) * kOfPiece + j * 32];
        v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
      }
    }
  }
  __syncthreads();
}

// ==== Split-K over CTAs ====
//
// Every slice stores its sums in `partials`; the CTA that finishes last adds them up in slice order and stores the
// tile. `sync` counts the finished slices of each tile, and is zero before and after.

struct AmpereParams {
  ExpertsParams experts;
  const int* column_groups;  // [E, columns] if groups are looked up
  int max_slices;            // of all tiles together, that `partials` has room for
};

constexpr int kMaxSlices = 16, kMinSliceSteps = 4 * kSplitK;
constexpr int kSliceCost = 12;  // cost of a slice's begin and end, in steps

// Slices of each tile: the number that shortens the longest CTA's work most.
DEVICE int slices_of(const AmpereParams& p, int num_tiles, int steps) {
  int best = 1, best_rounds = (num_tiles + gridDim.x - 1) / gridDim.x;
  int most = min(kMaxSlices, steps / kMinSliceSteps);
  for (int slices = 2; slices <= most && num_tiles * slices <= p.max_slices; slices++) {
    int rounds = (num_tiles * slices + gridDim.x - 1) / gridDim.x;
    if (rounds * (steps + kSliceCost * slices) * best < best_rounds * (steps + kSliceCost * best) * slices) {
      best = slices, best_rounds = rounds;
    }
  }
  return best;
}

DEVICE float4* slice_sums(const AmpereParams& p, int item) {
  return reinterpret_cast<float4*>(p.experts.partials) + (i64)item * p.experts.max_tile_tokens * (kTileRows / 4) +
         threadIdx.x;
}

// Returns whether this slice is the last to finish; then `sums` are those of the whole tile.
DEVICE bool reduce_slices(const AmpereParams& p, const Tile& tile, int number, int slice, int slices, Sums& sums) {
  float4* to = slice_sums(p, number * slices + slice);
#pragma unroll
  for (int j = 0; j < kTileTokens / 8; j++) {
    if (8 * j >= tile.tokens) break;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* v = &sums[i][4 * j];
      __stcg(to + (2 * j + i) * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  __threadfence();
  __syncthreads();
  bool last = threadIdx.x == 0 && atomicAdd(p.experts.sync + number, 1) == slices - 1;
  if (!__syncthreads_or(last)) return false;
  if (last) p.experts.sync[number] = 0;
  __threadfence();
#pragma unroll
  for (int m = 0; m < kTileTokens; m++) sums[m / (kTileTokens / 2)][m % (kTileTokens / 2)] = 0.0f;
#pragma unroll 1
  for (int other = 0; other < slices; other++) {
    const float4* from = slice_sums(p, number * slices + other);
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      if (8 * j >= tile.tokens) break;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 v = __ldcg(from + (2 * j + i) * kThreads);
        float* total = &sums[i][4 * j];
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
    }
  }
  return true;
}

// ==== Epilogue and kernel ====

DEVICE Tile find_tile(const GemmParams& gemm, const TokenTiles& tiles, int i) {
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows;
  Tile tile;
  tile.expert = expert_of(tiles, i, row_tiles);
  int start = tiles.tile_start[tile.expert], token_tiles = tiles.tile_start[tile.expert + 1] - start;
  int rest = i - start * row_tiles;
  tile.first = rest / token_tiles * kTileRows;
  tile.first_row = tiles.row_start[tile.expert];
  tile.first_token = rest % token_tiles * kTileTokens;
  tile.tokens = min(tiles.rows(tile.expert) - tile.first_token, kTileTokens);
  return tile;
}

// The products of steps `from` up to `to`.
DEVICE void multiply_steps(const AmpereParams& p, const Tile& tile, int from, int to, u8* rings, Sums& sums) {
  const GemmParams& gemm = p.experts.gemm[PHASE];
  int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  Source source(p.experts, tile, thread);
  GroupSums own = {};
  auto stage = [&](int n) { return Stage{rings + group * kRingBytes + n % kStages * kStageBytes}; };
  auto load = [&](int n) {
    int step = from + group + n * kSplitK;
    if (step < to) load_stage(gemm, tile, source, thread, step, stage(n));
    commit_copies();
  };
#pragma unroll
  for (int n = 0; n < kStages - 1; n++) load(n);
  for (int n = 0, step = from + group; step < to; n++, step += kSplitK) {
    wait_for_copies<kStages - 2>();
    group_barrier();  // this step's stage is filled, and the previous one is free
    load(n + kStages - 1);
    multiply_stage(gemm, tile, p.column_groups, step, stage(n), own);
  }
  __syncthreads();
  reduce_split_k(rings, own, sums);
}

constexpr SumScale kSumScale = kLookUp ? SumScale{} : SumScale{kUnfold, kUnfold};

DEVICE void store_tile(const AmpereParams& p, const Tile& tile, const Sums& sums) {
  const GemmParams& gemm = p.experts.gemm[PHASE];
  i64 first_output_row = p.experts.sorted ? tile.first_row : (i64)tile.expert * p.experts.max_rows;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int first = tile.first + threadIdx.x / 32 * 32 + 16 * i;
    if (first < gemm.rows) {
      store_rows<kTileTokens, PHASE == 0>(p.experts, tile.expert, tile.first_row, first_output_row,
                                          tile.first_token + tile.tokens, first, sums[i], tile.first_token, kSumScale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    ampere_gemm(const __grid_constant__ AmpereParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const ExpertsParams& experts = p.experts;
  TokenTiles tiles = make_token_tiles(experts, reinterpret_cast<int*>(memory + kSplitK * kRingBytes), kTileTokens);
  int num_tiles = tiles.count() * ((experts.gemm[PHASE].rows + kTileRows - 1) / kTileRows);
  int steps = (experts.gemm[PHASE].columns + kStepColumns - 1) / kStepColumns, slices = slices_of(p, num_tiles, steps);
  for (int i = blockIdx.x; i < num_tiles * slices; i += gridDim.x) {
    int slice = i % slices;
    Tile tile = find_tile(experts.gemm[PHASE], tiles, i / slices);
    Sums sums = {};
    multiply_steps(p, tile, steps * slice / slices, steps * (slice + 1) / slices, memory, sums);
    if (slices == 1 || reduce_slices(p, tile, i / slices, slice, slices, sums)) store_tile(p, tile, sums);
  }
}
