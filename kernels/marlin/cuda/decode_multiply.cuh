// One stage of weights times a few tokens, added to a tile's sums, by one team of warps.
//
// The consumer warps form kTeams teams that take the steps of a tile in turn: a warp has kTeams blocks of 16 rows, so
// that a team covers the tile. More teams read the tokens less often and have more time for a stage.
#pragma once
#include "decode_stage.cuh"
#include "mma.cuh"

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
    asm volatile("" : "+r"(codes), "+r"(tokens), "+r"(scales));  // kept rather than found again for every stage
  }
  DEVICE int first_row(int i) const { return (warp * kTeams + i) * 16; }  // of the tile
};

// sums += scales * products of one group of columns.
template <int kTokens>
DEVICE void add_scaled(float* sums, const float* products, const u8* row) {
  u32 scales = *reinterpret_cast<const u32*>(row);
  float scale[2] = {to_float((u16)scales), to_float((u16)(scales >> 16))};
#pragma unroll
  for (int h = 0; h < 2 && kHasUnits; h++) scale[h] *= kUnits[h];
#pragma unroll
  for (int m = 0; m < kTokens / 2; m++) sums[m] += scale[m / 2 % 2] * products[m];
}

// Integers are multiplied without their scale, which the sum of a group's products is then multiplied by, while there
// are registers for both sums; everything else is dequantized in full.
template <int kTokens, int kTeams>
DEVICE void multiply_stage(const Lane<kTokens, kTeams>& me, float (&sums)[kTeams][kTokens / 2], const Ring& ring) {
  constexpr bool kScaleLater = kIntegers && kTokens * kTeams <= 32, kOneGroup = SCALES_PER_STEP == 1;
  constexpr int kEvery = kOneGroup ? 4 : 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  const u8* codes = ring.codes() + me.codes;
  const u8* scales = ring.scales() + me.scales;
  u32 tokens = shared_address(ring.tokens()) + me.tokens;
  float products[kTeams][kScaleLater ? kTokens / 2 : 1] = {};
  Scales s[kTeams];
  auto row_scales = [&](int group, int i) { return scales + group * kScaleRow + i * 16 * kScaleBytes; };
  auto load = [&](int group, int i) {
    s[i] = load_unit_scales(row_scales(group, i), row_scales(SCALES_PER_STEP + group, i));
  };
#pragma unroll
  for (int i = 0; i < kTeams && kOneGroup; i++) load(0, i);
#pragma unroll 1
  for (int half = 0; half < 2; half++) {  // 64 columns; in a loop, since instructions must come from somewhere too
    u32 words[2][kTeams][2 * kWords], b[4][kTokens / 8][2];
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
        int group = half * (SCALES_PER_STEP / 2) + k / kEvery;
        if (!kOneGroup && k % kEvery == 0) load(group, i);
        u32 a[4];
        unscaled(&words[k / 2][i][k % 2 * kWords], s[i], a);
#pragma unroll
        for (int j = 0; j < 4 && !kScaleLater; j++) a[j] = mul_pair(a[j], s[i].scale[j & 1]);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j++) {
          if (!kScaleLater) {
            mma(&sums[i][4 * j], a, b[k][j][0], b[k][j][1]);
          } else if (!kOneGroup && k % kEvery == 0) {
            mma_from_zero(&products[i][4 * j], a, b[k][j][0], b[k][j][1]);
          } else {
            mma(&products[i][4 * j], a, b[k][j][0], b[k][j][1]);
          }
        }
        if (kScaleLater && !kOneGroup && k % kEvery == kEvery - 1) {
          add_scaled<kTokens>(sums[i], products[i], row_scales(group, i));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTeams && kScaleLater && kOneGroup; i++) {
    add_scaled<kTokens>(sums[i], products[i], row_scales(0, i));
  }
}
