// A ring of stages in shared memory for each team, filled by asynchronous copies: 64 columns of a tile each.
#pragma once
#include "ampere_schedule.cuh"
#include "dequant.cuh"

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
