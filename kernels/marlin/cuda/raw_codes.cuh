// Codes as operand A without arithmetic: their bits, read as an activation, are a tiny number proportional to them.
//
// Tensor cores take subnormal numbers exactly, and eight bits are proportional to what they stand for even where the
// highest is the exponent's (in bf16; f16 allows eleven). What the bits lack is made up for on the other side: bf16
// tokens are multiplied by 2^64 before, so that products are ordinary f32 numbers for tokens from 2^-57 up to 2^64
// (larger ones become infinite). Sums get their offset (the code of zero, or the zero point) from the tokens' sum, and
// their scale once a group of 128 columns, both in f32: weights are exact.
//
// Of four-bit integers a byte holds those of rows g (low) and g + 8. As it is, it serves as operand of row g + 8, whose
// sum is then 16 times too large and more by that of row g.
#pragma once
#include "dequant.cuh"

constexpr bool kRaw = SCALES_PER_STEP == 1 && (kIntegers || WEIGHT_TYPE == FLOAT8_E4M3);
constexpr bool kNibbles = kIntegers && kBits == 4;
constexpr bool kScaleTokens = kRaw && ACT_BF16;
constexpr bool kSumTokens = kRaw && kIntegers;
constexpr u32 kTokenFactor = 0x5f805f80u;  // 2^64, for both of a pair
// What raw sums are multiplied by at last: 2^69 and 2^56 in bf16 (integers, e4m3), 2^24 and 2^8 in f16; rows g + 8 of
// four bits by a sixteenth of it.
constexpr float kRawUnit = ACT_BF16 ? (kIntegers ? 0x1p69f : 0x1p56f) : (kIntegers ? 0x1p24f : 0x1p8f);

// Pairs of codes that tokens are summed with, as starting values for rows g and rows g + 8: minus the code of zero, or
// minus one where zero points follow.
constexpr u32 kStart[2] = {
    WEIGHT_TYPE == UINT4B8 ? 0x80088008u : WEIGHT_TYPE == UINT8B128 ? 0x80808080u : 0x80018001u,
    WEIGHT_TYPE == UINT4B8 ? 0x80888088u : WEIGHT_TYPE == UINT8B128 ? 0x80808080u : 0x80018001u,
};

// The four pairs of 16 columns, as dequantize() orders them.
DEVICE void raw_pairs(const u32* words, u32* a) {
  if constexpr (kNibbles) {
    a[1] = words[0] & 0x00ff00ffu;
    a[0] = words[0] & 0x000f000fu;
    a[3] = permute_bytes(words[0], 0, 0x4341);
    a[2] = a[3] & 0x000f000fu;
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 word = words[(j >> 1) % kWords];
      if constexpr (WEIGHT_TYPE == UINT8B128) {
        a[j] = permute_bytes(word, 0, j & 1 ? 0x4342 : 0x4140);
      } else {
        a[j] = e4m3_bits(word, j & 1);
      }
    }
  }
}

// Scales of rows g and g + 8, not divided by 16 where that must be; `row` points at the first.
DEVICE void load_raw_scales(const u8* row, float* scale) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  scale[0] = to_float(pair & 0xffff), scale[1] = to_float(pair >> 16);
}

// What the tokens' sums are multiplied by where there are zero points.
DEVICE void load_raw_zeros(const u8* row, float* zero) {
  u32 pair = *reinterpret_cast<const u32*>(row);
  zero[0] = to_float(pair & 0xffff), zero[1] = fmaf(16.0f, to_float(pair >> 16), zero[0]);
}
