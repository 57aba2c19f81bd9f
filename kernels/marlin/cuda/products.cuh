// One stage of weights times tokens, added to a tile's sums: by warps for a few tokens, by warpgroups for many.
#pragma once
#include "mma.cuh"
#include "stage.cuh"
#include "wgmma.cuh"

// Read anew for every tile: what follows from it is then not kept in registers from tile to tile.
struct Lane {
  int half, warp, lane;  // strips half and half + 2 of 64 rows, 16 rows in them, lane of the warp
  DEVICE Lane() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    half = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  }
  DEVICE const u8* codes(Ring& ring) const {
    return ring.codes() + half * kStripBytes + warp * kPieceBytes + lane * (kPieceBytes / 32);
  }
  DEVICE int first_row(int i) const { return (half + 2 * i) * 64 + warp * 16; }  // of the tile
  DEVICE int place(int i) const { return first_row(i) + lane / 4 * 2; }          // of row g's scale
};

// One stage of a few tokens into the sums: products of one warp, which have less to wait for than a warpgroup's.
//
// The codes of integers go into the products as they are, and scales and offsets are applied to the sums of a group of
// columns: sums += scale * (sum of code * x) - scale * offset * (sum of x), where the sum of x is one more product,
// with a matrix of ones. That takes half the instructions of dequantizing every weight.
template <int kTokens>
DEVICE void multiply_stage_by_warp(const Lane& me, float (&sums)[2][kTokens / 2], Ring& ring) {
  constexpr bool kRaw = kTokens <= kRawTokens;
  constexpr int kEvery = 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  const u32 ones[4] = {kOnePair, kOnePair, kOnePair, kOnePair};
  const u8* codes = me.codes(ring);
  constexpr int kAhead = kBits == 4 ? 4 : 1;  // blocks of 32 columns whose codes are read together
  u32 words[2][kAhead][2 * kWords];
  u32 tokens = shared_address(ring.tokens()) + me.lane % 8 * 128;
  float products[2][kRaw ? kTokens / 2 : 1], inputs[kRaw ? kTokens / 2 : 1];
  float scale[2][2], offset[2][2];
  Scales s[2];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    u32 b[kTokens / 8][4];
    if (k % 2 == 0) {
      if (k / 2 % kAhead == 0) {
#pragma unroll
        for (int n = 0; n < 2 * kAhead; n++) {
          int block = k / 2 + n / 2;
          load_words(words[n % 2][n / 2], codes + n % 2 * 2 * kStripBytes + block * 4 * kPieceBytes);
        }
      }
      int chunk = k % 4 * 2 + me.lane / 8;
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        load_matrices(b[j], tokens + k / 4 * ring.token_rows * 128 + j * 1024 + (chunk ^ me.lane % 8) * 16);
      }
    }
    if (k % kEvery == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u8* row = ring.scales() + k / kEvery * kScaleRow;
        const u8* zeros = row + SCALES_PER_STEP * kScaleRow;
        if constexpr (kRaw) {
          load_raw_scales(row, zeros, me.place(i), scale[i], offset[i]);
        } else {
          s[i] = load_scales(row, zeros, me.place(i));
        }
      }
#pragma unroll
      for (int n = 0; n < (kRaw ? kTokens / 2 : 0); n++) products[0][n] = products[1][n] = inputs[n] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 a[4];
      if constexpr (kRaw) {
        raw_codes(&words[i][k / 2 % kAhead][k % 2 * kWords], a);
      } else {
        dequantize(&words[i][k / 2 % kAhead][k % 2 * kWords], s[i], a);
      }
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        mma(kRaw ? &products[i][4 * j] : &sums[i][4 * j], a, b[j][k % 2 * 2], b[j][k % 2 * 2 + 1]);
      }
    }
    if constexpr (kRaw && kRawOffset != 0) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) mma(&inputs[4 * j], ones, b[j][k % 2 * 2], b[j][k % 2 * 2 + 1]);
    }
    if (kRaw && k % kEvery == kEvery - 1) {
#pragma unroll
      for (int n = 0; n < kTokens; n++) {
        int i = n / (kTokens / 2), m = n % (kTokens / 2), h = m / 2 % 2;
        sums[i][m] += scale[i][h] * products[i][m];
        if constexpr (kRawOffset != 0) sums[i][m] -= offset[i][h] * inputs[m / 4 * 4 + m % 2];
      }
    }
  }
}

// One stage of many tokens into the sums; `previous` is released as soon as its products are done.
template <int kTokens>
DEVICE void multiply_stage(const Lane& me, float (&sums)[2][kTokens / 2], u32* a, Ring& ring, u64* previous) {
  constexpr int kEvery = 8 / SCALES_PER_STEP;
  // Products in flight while as many are prepared; more take more registers, and bytes take most to dequantize.
  constexpr int kGroup = kTokens <= 64 ? 4 : WEIGHT_TYPE == UINT8B128 ? 1 : 2;
  const u8* codes = me.codes(ring);
  u64 tokens = wgmma_descriptor(shared_address(ring.tokens()));
  u64 half = (u64)ring.token_rows * 128 / 16;
  u32 words[2][2 * kWords];
  Scales s[2];
#pragma unroll
  for (int first = 0; first < 16; first += kGroup) {  // 16 columns of one of the two strips
    u32* group = a + first / kGroup % 2 * kGroup * 4;
#pragma unroll
    for (int n = first; n < first + kGroup; n++) {
      int k = n / 2, i = n % 2;
      if (k % 2 == 0) load_words(words[i], codes + i * 2 * kStripBytes + k / 2 * 4 * kPieceBytes);
      if (k % kEvery == 0) {
        const u8* row = ring.scales() + k / kEvery * kScaleRow;
        s[i] = load_scales(row, row + SCALES_PER_STEP * kScaleRow, me.place(i));
      }
      dequantize(&words[i][k % 2 * kWords], s[i], group + (n - first) * 4);
    }
    wgmma_fence();
#pragma unroll
    for (int n = first; n < first + kGroup; n++) {
      wgmma<kTokens>(sums[n % 2], group + (n - first) * 4, tokens + n / 8 * half + n / 2 % 4 * 2);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (first == 0 && previous != nullptr && me.lane == 0) barrier_arrive(previous);
  }
}
