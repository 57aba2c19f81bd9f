// A ring of stages in shared memory, filled by asynchronous copies of all threads: 64 columns of a tile each.
#pragma once
#include "ampere_schedule.cuh"
#include "dequant.cuh"

constexpr int kTileRows = 128;
constexpr int kTileTokens = 64;
constexpr int kStepColumns = 64;
constexpr int kStages = 3;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

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

struct Tile {
  int expert, first, first_row;     // first: of its weight rows; first_row: rows of all experts before
  int first_token, tokens;          // of the expert's
};

// codes [2][8 pieces][lane], scales [group][128 rows], zeros alike, tokens [64][128 bytes].
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

DEVICE void copy_16(void* to, const void* from) { copy_async_16(shared_address(to), from, 16); }

// Where one thread's share of a tile comes from: the same 16-byte chunk of every sixteenth token's row.
struct Source {
  static constexpr int kApart = kThreads / 8, kRows = kTileTokens / kApart;
  const u16* token[kRows];
  const u8 *codes, *scales, *zeros;
  DEVICE Source(const ExpertsParams& p, const Tile& tile) {
    const GemmParams& gemm = p.gemm[PHASE];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      int row = threadIdx.x / 8 + i * kApart;
      i64 from = row < tile.tokens ? input_row(p, PHASE, tile.expert, tile.first_row, tile.first_token + row) : 0;
      token[i] = gemm.input + from * gemm.columns + threadIdx.x % 8 * 8;
    }
    codes = gemm.weights + ((i64)tile.expert * gemm.rows + tile.first) * gemm.columns * kBits / 8;
    i64 scale = ((i64)tile.expert * gemm.groups * gemm.rows + tile.first) * kScaleBytes;
    scales = gemm.scales + scale;
    zeros = gemm.zeros + scale;
  }
};

// Pieces of a strip lie together for every 32 columns; the last strip may have two instead of four.
DEVICE void load_codes(const GemmParams& gemm, const Tile& tile, const Source& source, int step, Stage stage) {
#pragma unroll
  for (int i = 0; i < kCodeBytes / 16 / kThreads; i++) {
    int place = (threadIdx.x + i * kThreads) * 16;
    int block = place / (kTilePieces * kPieceBytes), piece = place / kPieceBytes % kTilePieces, strip = piece / 4;
    int pieces = min(gemm.rows - tile.first - 64 * strip, 64) / 16;
    if (piece % 4 >= pieces || step * kStepColumns + block * 32 >= gemm.columns) continue;
    const u8* from = source.codes + (i64)strip * 64 * gemm.columns * kBits / 8;
    copy_16(stage.codes() + place,
            from + (i64)((step * 2 + block) * pieces + piece % 4) * kPieceBytes + place % kPieceBytes);
  }
}

DEVICE void load_scale_rows(const GemmParams& gemm, const Tile& tile, const Source& source, int step, Stage stage) {
  int group = threadIdx.x * 16 / kScaleRow, place = threadIdx.x * 16 % kScaleRow;
  int all = GROUP_COLUMNS == -1 ? group : step * kStepColumns / (GROUP_COLUMNS > 0 ? GROUP_COLUMNS : 1) + group;
  if (group >= kStepGroups || all >= gemm.groups || place >= (gemm.rows - tile.first) * kScaleBytes) return;
  i64 from = (i64)all * gemm.rows * kScaleBytes + place;
  copy_16(stage.scales(group) + place, source.scales + from);
  if constexpr (kHasZeros) copy_16(stage.zeros(group) + place, source.zeros + from);
}

DEVICE void load_stage(const GemmParams& gemm, const Tile& tile, const Source& source, int step, Stage stage) {
  load_codes(gemm, tile, source, step, stage);
  if constexpr (!kLookUp) load_scale_rows(gemm, tile, source, step, stage);
  int chunk = threadIdx.x % 8, column = step * kStepColumns;
  if (column + chunk * 8 >= gemm.columns) return;
#pragma unroll
  for (int i = 0; i < Source::kRows; i++) {
    int row = threadIdx.x / 8 + i * Source::kApart;
    if (row < tile.tokens) copy_16(stage.tokens() + row * 128 + (chunk ^ row % 8) * 16, source.token[i] + column);
  }
}
