// One GEMM of the experts with what follows it, for every GPU from sm_80 on: PHASE 0 is w13 with the activation, PHASE
// 1 is w2.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// A tile is 128 weight rows x up to TILE_TOKENS tokens of one expert over all columns; blocks of four warps take every
// so many-th tile, those of one expert's weights together. With few tokens each warp takes columns of its own and all
// rows, with many all columns and some rows (ampere_loads.cuh). Codes, scales and tokens come by asynchronous copies, in
// stages of 64 columns; weights are operand A of the tensor cores, dequantized in registers, tokens operand B. Where
// there are too few tiles for the blocks, a tile's columns are cut into slices (ampere_slices.cuh). No block waits for
// another, and sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Stage`.
#include "ampere_schedule.cuh"
#include "dequant.cuh"
#include "epilogue.cuh"
#include "mma.cuh"

// ==== Loads ====

// A ring of stages in shared memory for each team, filled by asynchronous copies: 64 columns of a tile each.

// TILE_TOKENS, 16, 32 or 64: the most tokens of a tile. A warp has equally many sums whatever that is, of 128, 64 or 32
// of the tile's weight rows. The warps that share its rows are a team, and each team of a block takes every so many-th
// step.
constexpr int kTileRows = 128;
constexpr int kTileTokens = TILE_TOKENS;
constexpr int kStepColumns = 64;
constexpr int kStages = kTileTokens == 16 ? 2 : 3;
constexpr int kBlocksPerSM = GROUP_COLUMNS == 0 ? 2 : 3;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTeamWarps = kTileTokens / 16;
constexpr int kTeamThreads = 32 * kTeamWarps;
constexpr int kTeams = kWarps / kTeamWarps;

// GROUP_COLUMNS: columns that share a scale; 0: each column's group is looked up; -1: one group.
constexpr bool kLookUp = GROUP_COLUMNS == 0;
constexpr int kStepGroups = GROUP_COLUMNS > 0 && GROUP_COLUMNS < kStepColumns ? kStepColumns / GROUP_COLUMNS : 1;
constexpr int kPieceBytes = 512 * kBits / 8;  // 16 rows x 32 columns
constexpr int kTilePieces = kTileRows / 16;
constexpr int kCodeBytes = kStepColumns / 32 * kTilePieces * kPieceBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;
constexpr int kScaleStage = kLookUp ? 0 : kStepGroups * kScaleRow * (kHasZeros ? 2 : 1);
constexpr int kTokenBytes = kTileTokens * 2 * kStepColumns;
constexpr int kStageBytes = kCodeBytes + kScaleStage + kTokenBytes;
constexpr int kRingBytes = kStages * kStageBytes;

struct Tile {
  int expert, first, first_row;     // first: of its weight rows; first_row: rows of all experts before
  int first_token, tokens;          // of the expert's
};

// codes [2][8 pieces][lane], scales [group][128 rows], zeros alike, tokens [tile's][128 bytes].
struct Stage {
  u8* base;
  DEVICE u8* codes() const { return base; }
  DEVICE u8* scales(int group) const { return base + kCodeBytes + group * kScaleRow; }
  DEVICE u8* zeros(int group) const { return scales(kStepGroups + group); }
  DEVICE u8* tokens() const { return base + kCodeBytes + kScaleStage; }
};

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// All threads of a team have come here, and see what the others wrote.
DEVICE void meet_team() {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / kTeamThreads), "n"(kTeamThreads) : "memory");
  }
}

DEVICE void copy_16(void* to, const void* from) { copy_async_16(shared_address(to), from, 16); }

// Where one thread's share of a tile comes from: the same 16-byte chunk of every so many-th token's row.
struct Source {
  static constexpr int kApart = kTeamThreads / 8, kRows = kTileTokens / kApart;
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

// Pieces of a strip lie together for every 32 columns; the last strip may have two instead of four. kWhole: all of the
// stage's rows and columns are there.
template <bool kWhole>
DEVICE void load_codes(const GemmParams& gemm, const Tile& tile, const Source& source, int thread, int step,
                       Stage stage) {
#pragma unroll
  for (int i = 0; i < kCodeBytes / 16 / kTeamThreads; i++) {
    int place = (thread + i * kTeamThreads) * 16;
    int block = place / (kTilePieces * kPieceBytes), piece = place / kPieceBytes % kTilePieces, strip = piece / 4;
    int pieces = kWhole ? 4 : min(gemm.rows - tile.first - 64 * strip, 64) / 16;
    if (!kWhole && (piece % 4 >= pieces || step * kStepColumns + block * 32 >= gemm.columns)) continue;
    const u8* from = source.codes + (i64)strip * 64 * gemm.columns * kBits / 8;
    copy_16(stage.codes() + place,
            from + (i64)((step * 2 + block) * pieces + piece % 4) * kPieceBytes + place % kPieceBytes);
  }
}

DEVICE void load_scale_rows(const GemmParams& gemm, const Tile& tile, const Source& source, int thread, int step,
                            Stage stage) {
#pragma unroll
  for (int at = thread * 16; at < kStepGroups * kScaleRow; at += kTeamThreads * 16) {
    int group = at / kScaleRow, place = at % kScaleRow;
    int all = GROUP_COLUMNS == -1 ? group : step * kStepColumns / (GROUP_COLUMNS > 0 ? GROUP_COLUMNS : 1) + group;
    if (all >= gemm.groups || place >= (gemm.rows - tile.first) * kScaleBytes) continue;
    i64 from = (i64)all * gemm.rows * kScaleBytes + place;
    copy_16(stage.scales(group) + place, source.scales + from);
    if constexpr (kHasZeros) copy_16(stage.zeros(group) + place, source.zeros + from);
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

// One stage of weights times the tile's tokens, and the sums of all teams.

// For every 16 weight rows and 8 tokens as mma.cuh leaves them: those of a warp's rows and its team's steps, and those
// of all steps and the 32 rows that the warp will store.
constexpr int kWarpRows = kTileRows / kTeamWarps, kWarpPieces = kWarpRows / 16;
typedef float TeamSums[kWarpPieces][kTileTokens / 2];
typedef float Sums[2][kTileTokens / 2];

// Two columns' scales of one row, from those of either column.
DEVICE Scales join_columns(const Scales& low, const Scales& high) {
  Scales s;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    s.scale[h] = permute_bytes(low.scale[h], high.scale[h], 0x5410);
    if constexpr (kHasZeros) s.offset[h] = permute_bytes(low.offset[h], high.offset[h], 0x5410);
  }
  return s;
}

// 16 rows x 16 columns whose columns each have a group of their own; `place` is that of row g among all weight rows.
DEVICE void dequantize_looked_up(const GemmParams& gemm, const int* groups, i64 expert_groups, int place,
                                 const u32* words, u32* a) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int2 group = *reinterpret_cast<const int2*>(groups + 8 * k + threadIdx.x % 4 * 2);
    auto column = [&](int number) {
      i64 from = (expert_groups + number) * gemm.rows * kScaleBytes;
      return load_scales(gemm.scales + from, gemm.zeros + from, place);
    };
    u32 all[4];
    dequantize(words, join_columns(column(group.x), column(group.y)), all);
    a[2 * k] = all[2 * k], a[2 * k + 1] = all[2 * k + 1];
  }
}

// 16 weight rows x 16 columns, number k of the stage, by one lane.
DEVICE void dequantize_piece(const GemmParams& gemm, const Tile& tile, const int* column_groups, int step, Stage stage,
                             int k, int place, const u32* words, Scales& scales, u32* a) {
  if constexpr (kLookUp) {
    i64 expert = tile.expert;
    dequantize_looked_up(gemm, column_groups + expert * gemm.columns + step * kStepColumns + 16 * k,
                         expert * gemm.groups, tile.first + place, words, a);
  } else {
    constexpr int kEvery = kStepColumns / 16 / kStepGroups;
    if (k % 2 == 0 || kEvery == 1) {
      scales = load_folded_scales(stage.scales(k / kEvery) + place * kScaleBytes, stage.zeros(k / kEvery) + 2 * place);
    }
    dequantize_folded(words, scales, a);
  }
}

// kWhole: all columns of the stage are there. `first` is the warp's first weight row of the tile's.
template <bool kWhole>
DEVICE void multiply_columns(const GemmParams& gemm, const Tile& tile, const int* column_groups, int first, int step,
                             Stage stage, TeamSums& sums) {
  constexpr int kPairs = kTileTokens / 16;
  int lane = threadIdx.x % 32, row = lane % 8;
  // A quarter of the warp gives the addresses of 8 rows.
  u32 tokens = shared_address(stage.tokens()) + (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
  const u8* codes = stage.codes() + first / 16 * kPieceBytes + lane * (kPieceBytes / 32);
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
    for (int i = 0; i < kWarpPieces; i++) {
      if (kLookUp && tile.first + first + 16 * i >= gemm.rows) break;  // its scales are not there
      u32 words[2 * kWords], a[4];
      Scales scales;
      load_words(words, codes + (block * kTilePieces + i) * kPieceBytes);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        dequantize_piece(gemm, tile, column_groups, step, stage, 2 * block + k, first + 16 * i + lane / 4 * 2,
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
                           TeamSums& sums) {
  int first = threadIdx.x % kTeamThreads / 32 * kWarpRows;
  if (tile.first + first >= gemm.rows) return;
  if ((step + 1) * kStepColumns <= gemm.columns) {
    multiply_columns<true>(gemm, tile, column_groups, first, step, stage, sums);
  } else {
    multiply_columns<false>(gemm, tile, column_groups, first, step, stage, sums);
  }
}

// All threads, when no stage is read any more: sums of all teams, exchanged where the rings were.
DEVICE void add_teams(u8* rings, const TeamSums& own, Sums& sums) {
  if constexpr (kTeams == 1) {
#pragma unroll
    for (int m = 0; m < kTileTokens; m++) {
      sums[m / (kTileTokens / 2)][m % (kTileTokens / 2)] = own[m / (kTileTokens / 2)][m % (kTileTokens / 2)];
    }
    return;
  }
  // [team][16 rows][8 tokens][lane]
  constexpr int kOfPiece = kTileTokens / 8 * 32;
  static_assert(kTeams * kTilePieces * kOfPiece * (int)sizeof(float4) <= kTeams * kRingBytes, "no room for sums");
  float4* all = reinterpret_cast<float4*>(rings) + threadIdx.x % 32;
  int warp = threadIdx.x / 32, team = warp / kTeamWarps, first = warp % kTeamWarps * kWarpPieces;
#pragma unroll
  for (int i = 0; i < kWarpPieces; i++) {
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      const float* v = &own[i][4 * j];
      all[(team * kTilePieces + first + i) * kOfPiece + j * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      float* v = &sums[i][4 * j];
#pragma unroll
      for (int t = 0; t < kTeams; t++) {
        float4 more = all[(t * kTilePieces + 2 * warp + i) * kOfPiece + j * 32];
        v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
      }
    }
  }
  __syncthreads();
}

// ==== Slices ====

// Few tiles of many columns: a tile's columns cut into slices, so that all blocks have work.
//
// Every slice leaves its sums in `partials`; the block that comes last, whichever it is, adds them up in their order and
// has the tile's. `sync` counts the slices of each tile that have come, and is zero before and after.

struct AmpereParams {
  ExpertsParams experts;
  const int* column_groups;  // [E, columns] where groups are looked up
  int max_slices;            // of all tiles together: what `partials` has room for
};

constexpr int kMostSlices = 16, kLeastSteps = 4 * kTeams;
constexpr int kSliceCost = 12;  // what a slice's begin and end take, in steps

// Slices of each tile: as many as shorten the longest block's way most.
DEVICE int slices_of(const AmpereParams& p, int num_tiles, int steps) {
  int best = 1, best_rounds = (num_tiles + gridDim.x - 1) / gridDim.x;
  int most = min(kMostSlices, steps / kLeastSteps);
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

// Whether this slice is the last to come; then `sums` are those of the whole tile.
DEVICE bool add_slices(const AmpereParams& p, const Tile& tile, int number, int slice, int slices, Sums& sums) {
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

// ==== Kernel ====

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
  int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
  Source source(p.experts, tile, thread);
  TeamSums own = {};
  auto stage = [&](int n) { return Stage{rings + team * kRingBytes + n % kStages * kStageBytes}; };
  auto load = [&](int n) {
    int step = from + team + n * kTeams;
    if (step < to) load_stage(gemm, tile, source, thread, step, stage(n));
    commit_copies();
  };
#pragma unroll
  for (int n = 0; n < kStages - 1; n++) load(n);
  for (int n = 0, step = from + team; step < to; n++, step += kTeams) {
    wait_for_copies<kStages - 2>();
    meet_team();  // this step's stage is filled, and nobody reads the one before any more
    load(n + kStages - 1);
    multiply_stage(gemm, tile, p.column_groups, step, stage(n), own);
  }
  __syncthreads();
  add_teams(rings, own, sums);
}

constexpr Units kUnit = kLookUp ? Units{} : Units{kUnfold, kUnfold};

DEVICE void store_tile(const AmpereParams& p, const Tile& tile, const Sums& sums) {
  const GemmParams& gemm = p.experts.gemm[PHASE];
  i64 place = p.experts.sorted ? tile.first_row : (i64)tile.expert * p.experts.max_rows;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int first = tile.first + threadIdx.x / 32 * 32 + 16 * i;
    if (first < gemm.rows) {
      store_rows<kTileTokens, PHASE == 0>(p.experts, tile.expert, tile.first_row, place,
                                          tile.first_token + tile.tokens, first, sums[i], tile.first_token, kUnit);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    ampere_gemm(const __grid_constant__ AmpereParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const ExpertsParams& experts = p.experts;
  TokenTiles tiles = make_token_tiles(experts, reinterpret_cast<int*>(memory + kTeams * kRingBytes), kTileTokens);
  int num_tiles = tiles.count() * ((experts.gemm[PHASE].rows + kTileRows - 1) / kTileRows);
  int steps = (experts.gemm[PHASE].columns + kStepColumns - 1) / kStepColumns, slices = slices_of(p, num_tiles, steps);
  for (int i = blockIdx.x; i < num_tiles * slices; i += gridDim.x) {
    int slice = i % slices;
    Tile tile = find_tile(experts.gemm[PHASE], tiles, i / slices);
    Sums sums = {};
    multiply_steps(p, tile, steps * slice / slices, steps * (slice + 1) / slices, memory, sums);
    if (slices == 1 || add_slices(p, tile, i / slices, slice, slices, sums)) store_tile(p, tile, sums);
  }
}
