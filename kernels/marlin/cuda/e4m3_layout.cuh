// Layout of the e4m3 rows of all experts, and their tiles: tables that every CTA makes from the row counts.
//
// The rows of one expert follow those of the one before; each expert begins at a multiple of eight rows, so that the
// scales of a tile's rows can be bulk-copied. Columns of a row have the order in which tensor cores read them beside
// packed weights: of every 16 columns, byte 4 t + 2 k + i is column 8 k + 2 t + i (repack.py has the same order in a
// lane's codes).
//
// Example: experts of 3, 0 and 9 rows: starts 0, 8, 8, 24; positions 0, 3, 3, 12; one tile, none, one.
#pragma once
#include "params.cuh"

constexpr int kGroupColumns = 128;  // columns of a step, and of `hidden` that share a scale
constexpr float kMaxCode = 448.0f;
constexpr float kMinScale = 8.673617379884035e-19f;  // 2^-60
constexpr int kTileTokens = 128;                     // most rows of a tile
constexpr int kStartMultiple = 8;

// An expert's rows in as few tiles as possible, of about equal size.
struct TokenTiles {
  int count, each;
  DEVICE explicit TokenTiles(int rows) : count((rows + kTileTokens - 1) / kTileTokens), each(kTileTokens) {
    if (count > 1) each = (quotient(rows + count - 1, count) + kStartMultiple - 1) / kStartMultiple * kStartMultiple;
  }
};

// Prefix sums over the experts, num_experts + 1 numbers each: where rows start, rows, tiles of rows.
struct Tables {
  int *starts, *positions, *tiles;
  DEVICE Tables(int* memory, int n) : starts(memory), positions(memory + n + 1), tiles(memory + 2 * (n + 1)) {}

  // One warp, 32 experts at a time.
  DEVICE void make(const ExpertsParams& p, int lane) {
    int n = p.num_experts, sums[3] = {0, 0, 0};
#pragma unroll 1
    for (int base = 0; base <= n; base += 32) {
      int e = base + lane, rows = e < n ? rows_of(p, e) : 0;
      int own[3] = {(rows + kStartMultiple - 1) / kStartMultiple * kStartMultiple, rows, TokenTiles(rows).count};
      int* tables[3] = {starts, positions, tiles};
#pragma unroll
      for (int i = 0; i < 3; i++) {
        int sum = sum_of_lanes(own[i], lane);
        if (e <= n) tables[i][e] = sums[i] + sum - own[i];
        sums[i] += __shfl_sync(~0u, sum, 31);
      }
    }
  }
};

// Two numbers as e4m3, the first in the low byte; magnitudes beyond 448 become 448.
DEVICE u32 e4m3_codes(float low, float high) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
