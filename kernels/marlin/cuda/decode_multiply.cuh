// One stage of weights, dequantized or as raw codes, times a few tokens, added to a tile's sums, by one team of
// warps.
//
// The consumer warps form kTeams teams that take the steps of a tile in turn: a warp has kTeams blocks of 16 rows, so
// that a team covers the tile. More teams read the tokens less often and have more time for a stage.
#pragma once
#include "decode_prepare.cuh"
#include "folded.cuh"
#include "wgmma.cuh"

// As measured: with four teams the sums of more tokens leave too few registers.
DEVICE constexpr int teams_of(int tokens) { return tokens == 8 ? 4 : 2; }

template <int kTokens, int kTeams>
struct Lane {
  static constexpr int kTeamWarps = kConsumerWarps / kTeams;
  int team, warp, lane;
  u32 codes, tokens, scales;  // where in a stage this lane's first ones are
  DEVICE Lane() {
    u32 thread = threadIdx.x - 32 * kFirstConsumer;
    asm volatile("" : "+r"(thread));  // so that what follows from it is found for every segment, not kept meanwhile
    int consumer = thread / 32;
    team = consumer / kTeamWarps, warp = consumer % kTeamWarps, lane = thread % 32;
    int block = warp * kTeams, row = lane % 8;
    codes = block / 4 * kStripBytes + block % 4 * kPieceBytes + lane * (kPieceBytes / 32);
    // A quarter of the warp gives the addresses of 8 rows: for 8 tokens of 32 columns, otherwise of 16 tokens and 16.
    tokens = kTokens == 8 ? row * 128 + (lane / 8 ^ row) * 16
                          : (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
    scales = (block * 16 + lane / 4 * 2) * kScaleBytes;
    // Found once for every segment; where all number types have registers left.
    asm volatile("" : "+r"(team));
    if (kBits == 4) asm volatile("" : "+r"(codes));
  }
  DEVICE int first_row(int i) const { return (warp * kTeams + i) * 16; }  // of the tile
  DEVICE int first_row_of_group() const { return warp / 4 * 4 * kTeams * 16; }
};

// What one lane has of the tokens' 64 columns. One instruction reads 16 tokens, or of 8 tokens 32 columns.
template <int kTokens>
using Tokens = u32[4][kTokens == 8 ? 1 : (kTokens + 8) / 16 * 2][2];  // [16 columns][8 tokens]

// As measured, of fewer tokens mma.sync is the faster one.
DEVICE constexpr bool by_warpgroup(int tokens) { return tokens > 16; }

template <int kTokens, int kTeams>
DEVICE void multiply_stage(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring) {
  constexpr bool kOneGroup = SCALES_PER_STEP == 1;
  constexpr int kEvery = kOneGroup ? 4 : 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  Scales s[kTeams];
  auto load = [&](int group, int i) {
    const u8* row = scales + group * kScaleRow + i * 16 * kScaleBytes;
    s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
  };
#pragma unroll
  for (int i = 0; i < kTeams && kOneGroup; i++) load(0, i);
#pragma unroll 1
  for (int half = 0; half < 2; half++) {  // 64 columns; in a loop, since instructions must come from somewhere too
    u32 words[2][kTeams][2 * kWords];
    Tokens<kTokens> b;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int i = 0; i < kTeams && k % 2 == 0; i++) {
        load_words(words[k / 2][i], codes + (half * 8 + k / 2 * 4 + i) * kPieceBytes);
      }
#pragma unroll
      for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
        load_matrices(b[k][2 * j], (tokens ^ k * 32) + half * token_rows_of(kTokens) * 128 + j * 2048);
      }
#pragma unroll
      for (int i = 0; i < kTeams; i++) {
        if (!kOneGroup && k % kEvery == 0) load(half * (SCALES_PER_STEP / 2) + k / kEvery, i);
        u32 a[4];
        dequantize_folded(&words[k / 2][i][k % 2 * kWords], s[i], a);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j++) mma(&sums[i][4 * j], a, b[k][j][0], b[k][j][1]);
      }
    }
  }
}

// A lane's codes number k of 16 columns, of four bits with those that follow.
DEVICE void read_words(u32* words, const u8* piece, int k) {
  if (kBits == 4 && k % 2 == 1) return;
  uint2 v = *reinterpret_cast<const uint2*>(piece + k / 2 * 4 * kPieceBytes + k % 2 * 8);
  words[0] = v.x, words[1] = v.y;
}

// Starting values of a stage's sums of 16 rows; `scales` are those of the rows.
template <int kTokens>
DEVICE void load_starts(float (&sums)[kTokens / 2], u32 starts, const u8* scales) {
  float zero[2] = {1.0f, 1.0f};
  if constexpr (kHasZeros) load_raw_zeros(scales + kScaleRow, zero);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float* v = &sums[4 * j];
    if constexpr (kSumTokens) {
      load_shared(v, starts + j * 64);
#pragma unroll
      for (int m = 0; m < 4 && kHasZeros; m++) v[m] *= zero[m / 2];
    } else {
#pragma unroll
      for (int m = 0; m < 4; m++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(v[m]));
    }
  }
}

// A stage's sums of 16 rows, scaled, to those of the tile.
template <int kTokens>
DEVICE void add_scaled(float (&sums)[kTokens / 2], const float (&stage_sums)[kTokens / 2], const u8* scales) {
  float scale[2];
  load_raw_scales(scales, scale);
#pragma unroll
  for (int m = 0; m < kTokens / 2; m++) {
    float v = stage_sums[m];
    if (kNibbles && m % 4 >= 2) v -= stage_sums[m - 2];
    sums[m] = fmaf(scale[m / 2 % 2], v, sums[m]);
  }
}

// The same with raw codes: the stage's sums first, which are then scaled.
template <int kTokens, int kTeams>
DEVICE void multiply_raw(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring,
                         const float* starts) {
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 start = shared_address(starts) + me.lane % 4 * 16;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  float stage_sums[kTeams][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTeams; i++) load_starts<kTokens>(stage_sums[i], start, scales + i * 16 * kScaleBytes);
  u32 words[kTeams][2];
  Tokens<kTokens> b;
#pragma unroll
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int i = 0; i < kTeams; i++) read_words(words[i], codes + i * kPieceBytes, k);
    u32 from = (tokens ^ k % 4 * 32) + k / 4 * token_rows_of(kTokens) * 128;
#pragma unroll
    for (int j = 0; j < (kTokens + 8) / 16 && (kTokens > 8 || k % 2 == 0); j++) {
      load_matrices(b[k % 4][2 * j], from + j * 2048);
    }
#pragma unroll
    for (int i = 0; i < kTeams; i++) {
      u32 a[4];
      raw_pairs(&words[i][k * kWords % 2], a);
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) mma(&stage_sums[i][4 * j], a, b[k % 4][j][0], b[k % 4][j][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTeams; i++) add_scaled<kTokens>(sums[i], stage_sums[i], scales + i * 16 * kScaleBytes);
}

// Dequantized, by warpgroups, whose tensor cores read the tokens themselves. 32 columns are dequantized while those
// before them are multiplied.
template <int kTokens, int kTeams>
DEVICE void multiply_by_group(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring) {
  constexpr int kEvery = 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  constexpr bool kAhead = kFolded && WEIGHT_TYPE != UINT8B128;  // others have no registers left for the next codes
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  // The compiler sees that it is the same for all lanes.
  u64 tokens = kDescriptorHigh << 32 | __shfl_sync(~0u, wgmma_descriptor(shared_address(ring.tokens())), 0);
  Scales s[kTeams];
  u32 words[kTeams][2 * kWords];
  u32 a[2][2][kTeams][4];
  auto read = [&](int quarter) {
#pragma unroll
    for (int i = 0; i < kTeams; i++) load_words(words[i], codes + (quarter * 4 + i) * kPieceBytes);
  };
  fence_proxy_async();  // tokens were written by ordinary copies
  if (kAhead) read(0);
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++) {
    if (!kAhead) read(quarter);
#pragma unroll
    for (int n = 0; n < 2 * kTeams; n++) {
      int k = quarter * 2 + n / kTeams, i = n % kTeams;
      if (k % kEvery == 0) {
        const u8* row = scales + k / kEvery * kScaleRow + i * 16 * kScaleBytes;
        s[i] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
      }
      dequantize_folded(&words[i][k % 2 * kWords], s[i], a[quarter % 2][k % 2][i]);
    }
    if (kAhead && quarter < 3) read(quarter + 1);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 2 * kTeams; n++) {
      int k = quarter * 2 + n / kTeams, i = n % kTeams;
      wgmma<kTokens>(sums[i], a[quarter % 2][k % 2][i], tokens + (k % 4 * 2 + k / 4 * token_rows_of(kTokens) * 8));
    }
    wgmma_commit();
    if (quarter < 3) wgmma_wait<1>();
  }
  wgmma_wait<0>();
}
