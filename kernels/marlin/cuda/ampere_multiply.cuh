// One stage of weights times up to 64 tokens: every warp has 32 weight rows and all tokens.
#pragma once
#include "ampere_loads.cuh"
#include "mma.cuh"

// Of 32 weight rows; for every 16 rows and 8 tokens as mma.cuh leaves them.
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

DEVICE void multiply_stage(const GemmParams& gemm, const Tile& tile, const int* column_groups, int step, Stage stage,
                           Sums& sums) {
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32, row = lane % 8;  // first: weight row of the warp
  if (tile.first + first >= gemm.rows) return;
  // A quarter of the warp gives the addresses of 8 rows.
  u32 tokens = shared_address(stage.tokens()) + (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
  Scales scales[2];
#pragma unroll
  for (int k = 0; k < kStepColumns / 16; k++) {
    int column = step * kStepColumns + 16 * k;
    if (column >= gemm.columns) break;
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 words[2 * kWords];
      load_words(words, stage.codes() + (k / 2 * kTilePieces + first / 16 + i) * kPieceBytes + lane * (kPieceBytes / 32));
      int place = first + 16 * i + lane / 4 * 2;
      if constexpr (kLookUp) {
        dequantize_looked_up(gemm, column_groups + (i64)tile.expert * gemm.columns + column,
                             (i64)tile.expert * gemm.groups, tile.first + place, words + k % 2 * kWords, a[i]);
      } else {
        constexpr int kEvery = kStepColumns / 16 / kStepGroups;
        if (k % kEvery == 0) scales[i] = load_scales(stage.scales(k / kEvery), stage.zeros(k / kEvery), place);
        dequantize(words + k % 2 * kWords, scales[i], a[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < kTileTokens / 16; j++) {
      if (16 * j >= tile.tokens) break;
      u32 b[4];
      load_matrices(b, (tokens ^ k * 32) + j * 2048);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma(&sums[i][8 * j], a[i], b[0], b[1]);
        mma(&sums[i][8 * j + 4], a[i], b[2], b[3]);
      }
    }
  }
}
