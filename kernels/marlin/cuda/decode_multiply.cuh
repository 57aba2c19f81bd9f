// One stage of weights, dequantized in full or as raw codes, times a few tokens, added to a tile's sums, by one team of
// warps.
//
// The consumer warps form kTeams teams that take the steps of a tile in turn: a warp has kTeams blocks of 16 rows, so
// that a team covers the tile. More teams read the tokens less often and have more time for a stage.
#pragma once
#include "decode_prepare.cuh"
#include "prefill_dequant.cuh"

template <int kTokens, int kTeams>
struct Lane {
  static constexpr int kTeamWarps = kConsumerWarps / kTeams;
  int team, warp, lane;
  u32 codes, tokens, scales;  // where in a stage this lane's first ones are
  DEVICE Lane() {
    int consumer = threadIdx.x / 32 - kFirstConsumer;
    team = consumer / kTeamWarps, warp = consumer % kTeamWarps, lane = threadIdx.x % 32;
    int block = warp * kTeams, row = lane % 8;
    codes = block / 4 * kStripBytes + block % 4 * kPieceBytes + lane * (kPieceBytes / 32);
    // A quarter of the warp gives the addresses of 8 rows: for 8 tokens of 32 columns, otherwise of 16 tokens and 16.
    tokens = kTokens == 8 ? row * 128 + (lane / 8 ^ row) * 16
                          : (lane / 16 * 8 + row) * 128 + (lane / 8 % 2 ^ row) * 16;
    scales = (block * 16 + lane / 4 * 2) * kScaleBytes;
    asm volatile("" : "+r"(team), "+r"(codes), "+r"(tokens), "+r"(scales));  // found once for every segment
  }
  DEVICE int first_row(int i) const { return (warp * kTeams + i) * 16; }  // of the tile
};

// What one lane has of the tokens' 64 columns. One instruction reads 16 tokens, or of 8 tokens 32 columns.
template <int kTokens>
using Tokens = u32[4][kTokens == 8 ? 1 : (kTokens + 8) / 16 * 2][2];  // [16 columns][8 tokens]

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
        load_matrices(b[k][2 * j], (tokens ^ k * 32) + half * ring.token_rows * 128 + j * 2048);
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

// The same of 8 tokens with raw codes: the stage's sums first, which are then scaled.
template <int kTeams>
DEVICE void multiply_raw(const Lane<8, kTeams>& me, float (&sums)[kTeams][4], const Ring& ring, const float* starts) {
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 tokens = shared_address(ring.tokens()) + me.tokens, words[kTeams][2 * kWords], b[2][2];
  float stage_sums[kTeams][4];
  constexpr int kAtOnce = kBits == 4 ? 8 : 2;  // products of 16 columns: words of eight bits take more registers
  float4 start = kSumTokens ? *reinterpret_cast<const float4*>(starts + me.lane % 4 * 4) : make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kTeams; i++) {
    float zero[2] = {1.0f, 1.0f};
    if constexpr (kHasZeros) load_raw_zeros(scales + kScaleRow + i * 16 * kScaleBytes, zero);
    stage_sums[i][0] = start.x * zero[0], stage_sums[i][1] = start.y * zero[0];
    stage_sums[i][2] = start.z * zero[1], stage_sums[i][3] = start.w * zero[1];
  }
#pragma unroll kAtOnce
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int i = 0; i < kTeams && k % 2 == 0; i++) load_words(words[i], codes + (k / 2 * 4 + i) * kPieceBytes);
    if (k % 2 == 0) load_matrices(b[0], (tokens ^ k % 4 * 32) + k / 4 * ring.token_rows * 128);
#pragma unroll
    for (int i = 0; i < kTeams; i++) {
      u32 a[4];
      raw_pairs(&words[i][k % 2 * kWords], a);
      mma(stage_sums[i], a, b[k % 2][0], b[k % 2][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTeams; i++) {
    float scale[2];
    load_raw_scales(scales + i * 16 * kScaleBytes, scale);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      float v = stage_sums[i][m];
      if (kNibbles && m >= 2) v -= stage_sums[i][m - 2];
      sums[i][m] = fmaf(scale[m / 2], v, sums[i][m]);
    }
  }
}
