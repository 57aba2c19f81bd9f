// One stage of weights times the tile's tokens, and the sums of all teams.
#pragma once
#include "ampere_loads.cuh"
#include "folded.cuh"
#include "mma.cuh"

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
