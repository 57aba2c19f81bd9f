// Layout of activations in 8 bits: where each expert's rows lie, how they are divided into tiles, and their codes.
//
// ROWS_INT8 selects the number type: int8 (1) or e4m3 (0). value = code * scale, scale = max |x| / kLargestCode.
// Experts follow each other, and each starts at a multiple of 16 rows, so that one copy fetches the scales of a tile's
// rows. The columns of a row are permuted like those of packed 4-bit weights (repack.py): in every 16 columns,
// bytes 4 t to 4 t + 3 hold columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9.
//
// Example: experts of 3, 0 and 9 rows: starts 0, 16, 16, 32; firsts 0, 3, 3, 12; one token tile, none, one.
#pragma once
#include "params.cuh"

#ifndef TILE_TOKENS
#define TILE_TOKENS 128
#endif

constexpr int kGroupColumns = 128;  // columns of a pipeline stage; as many columns of `hidden` share a scale
constexpr float kLargestCode = ROWS_INT8 ? 127.0f : 448.0f;
constexpr float kLeastScale = 8.673617379884035e-19f;  // 2^-60
constexpr int kTileTokens = TILE_TOKENS;               // the most rows of a tile
constexpr int kStartMultiple = 16;
constexpr int kTileMultiple = 32;  // a tile's tokens are padded to a multiple of this

// Divides an expert's rows into as few token tiles as possible, of about equal size.
struct TokenTiles {
  int count, each;
  DEVICE explicit TokenTiles(int rows) : count((rows + kTileTokens - 1) / kTileTokens), each(kTileTokens) {
    if (count > 1) each = (quotient(rows + count - 1, count) + kTileMultiple - 1) / kTileMultiple * kTileMultiple;
  }
};

// Prefix sums over experts, num_experts + 1 entries each: the first row in the 8-bit buffers, the first row in the list
// of sorted ids, and the first token tile.
struct Tables {
  int *starts, *firsts, *tiles;
  DEVICE Tables(int* memory, int n) : starts(memory), firsts(memory + n + 1), tiles(memory + 2 * (n + 1)) {}

  // One warp calls this; it handles 32 experts at a time.
  DEVICE void make(const ExpertsParams& p, int lane) {
    int n = p.num_experts, sums[3] = {0, 0, 0};
#pragma unroll 1
    for (int base = 0; base <= n; base += 32) {
      int e = base + lane, rows = e < n ? rows_of(p, e) : 0;
      int own[3] = {(rows + kStartMultiple - 1) / kStartMultiple * kStartMultiple, rows, TokenTiles(rows).count};
      int* tables[3] = {starts, firsts, tiles};
#pragma unroll
      for (int i = 0; i < 3; i++) {
        int sum = sum_of_lanes(own[i], lane);
        if (e <= n) tables[i][e] = sums[i] + sum - own[i];
        sums[i] += __shfl_sync(~0u, sum, 31);
      }
    }
  }
};

// p.sync holds the ticket counter, the count of finished CTAs, and for each expert the count of stored tiles of w13.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }

// Permutes the scales of every 16 tokens, so that a lane's four lie together: token 8 j + 2 t + i at 4 t + 2 j + i
// (j, i < 2).
DEVICE int scale_place(int token) { return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2; }

// Maximum that propagates NaN: a row with a NaN gets the scale NaN, and its results are NaN too.
DEVICE float max_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Converts two numbers to codes, rounded to nearest even and saturated; the first goes to the low byte.
DEVICE u32 code_pair(float low, float high) {
#if ROWS_INT8
  u32 out;
  asm("{\n.reg .s32 l, h;\n"
      "cvt.rni.s32.f32 l, %1;\ncvt.rni.s32.f32 h, %2;\n"
      "cvt.pack.sat.s8.s32.b32 %0, h, l, 0;\n}"
      : "=r"(out)
      : "f"(low), "f"(high));
  return out;
#else
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
#endif
}
