// From codes to operand A with few instructions: one multiplication or fma a pair where the type allows it.
//
// The bits of a small number, read as a bf16, are a tiny number proportional to it, for four-bit integers one place
// higher alike. Multiplied by a scale that makes up for it all but 2^-26, it is the weight, rounded once, for scales
// from 2^-91 up to 2^21; the sums are multiplied by 2^26 at the end. Of integers fma takes the offset off: 8 or 128
// times a scale is exact. f16 lacks the exponents for this, and zero points times a scale are not exact: these become
// numbers first and are multiplied by their scale then (which in f16 must be less than 128 for four bits).
#pragma once
#include "dequant.cuh"

// ---- numbers first, then their scale ----
//
// The bits of a small number, read as an activation, are a subnormal one that is proportional to it: for four bits and
// for four bits one place higher alike. One fma makes it normal and takes the offset off, so two of a word's four pairs
// need no shift. Rows g come out too small by 64, in f16 by 512, rows g + 8 by 4 or 32: units, which their scales make
// up for.
constexpr bool kHasUnits = kIntegers && kBits == 4;
constexpr u32 kUnitPair = ACT_BF16 ? 0x40804280u : 0x50006000u;          // both units
constexpr u32 kMinusPerUnit = ACT_BF16 ? 0xbe80bc80u : 0xa8009800u;      // -1 / each
constexpr u32 kMinusEight[2] = {ACT_BF16 ? 0xbe00be00u : 0xa400a400u, ACT_BF16 ? 0xc000c000u : 0xb400b400u};
constexpr u32 kMakeNormal = ACT_BF16 ? 0x7f007f00u : 0x78007800u;        // 2^127, 2^15

// What goes with them: scales in those units, for both numbers of a pair, and minus the zero points.
DEVICE Scales load_unit_scales(const u8* row, const u8* zeros) {
  if constexpr (!kHasUnits) return load_scales(row, zeros, 0);
  Scales s;
  u32 pair = mul_pair(*reinterpret_cast<const u32*>(row), kUnitPair);
  u32 offset = kHasZeros ? mul_pair(*reinterpret_cast<const u32*>(zeros), kMinusPerUnit) : 0;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    s.scale[h] = permute_bytes(pair, 0, h ? 0x3232 : 0x1010);
    s.offset[h] = kHasZeros ? permute_bytes(offset, 0, h ? 0x3232 : 0x1010) : kMinusEight[h];
  }
  return s;
}

// The pairs that dequantize() makes, not scaled; of integers in those units.
DEVICE void unscaled(const u32* words, const Scales& s, u32* a) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if constexpr (kHasUnits) {
      u32 bits = (j < 2 ? words[0] : words[0] >> 8) & (j & 1 ? 0x00f000f0u : 0x000f000fu);
      a[j] = fma_pair(bits, kMakeNormal, s.offset[j & 1]);
    } else if constexpr (WEIGHT_TYPE == UINT8B128) {
      a[j] = eight_bit_pair(words[(j >> 1) % kWords], j & 1);
    } else if constexpr (WEIGHT_TYPE == FLOAT8_E4M3) {
      a[j] = e4m3_pair(e4m3_bits(words[(j >> 1) % kWords], j & 1));
    } else {
      a[j] = e2m1_pair(e2m1_bits(words[0], j));
    }
  }
}

// ---- folded ----

constexpr bool kFolded = ACT_BF16 && !kHasZeros;
constexpr float kUnfold = kFolded ? 67108864.0f : 1.0f;  // 2^26

// Pairs of powers of two: what the scales of rows g (low) and g + 8 (high) are multiplied by.
constexpr u32 kFold = WEIGHT_TYPE == UINT4B8 ? 0x73007500u         // 2^107, 2^103
                      : WEIGHT_TYPE == UINT8B128 ? 0x75007500u     // 2^107
                      : WEIGHT_TYPE == FLOAT8_E4M3 ? 0x6e806e80u   // 2^94
                                                   : 0x71807180u;  // 2^100
constexpr u32 kFoldedOffset = WEIGHT_TYPE == UINT4B8 ? 0xb400b400u : 0xb600b600u;  // -8 or -128 * 2^-26

// The scales of rows g and g + 8 as one pair, scale[0], and alike what is added, offset[0].
DEVICE Scales load_folded_scales(const u8* row, const u8* zeros) {
  if constexpr (!kFolded) return load_unit_scales(row, zeros);
  u32 pair;
  if constexpr (kScaleBytes == 2) {
    pair = *reinterpret_cast<const u32*>(row);
  } else {
    u32 bytes = *reinterpret_cast<const u16*>(row);
    // An e8m0 byte is a bf16's exponent, all but the least (2^-127), which becomes zero; up to 2^27 is room.
    pair = WEIGHT_TYPE == NVFP4 ? e4m3_pair(e4m3_bits(bytes, 0)) : permute_bytes(bytes, 0, 0x4140) << 7;
  }
  Scales s;
  s.scale[0] = mul_pair(pair, kFold);
  s.offset[0] = kIntegers ? mul_pair(pair, kFoldedOffset) : kMinusZeroPair;
  return s;
}

DEVICE u32 fold(u32 bits, const Scales& s, bool high) {
  return high ? fma_high(bits, s.scale[0], s.offset[0]) : fma_low(bits, s.scale[0], s.offset[0]);
}

// The four pairs of 16 columns, as dequantize() orders them, too small by kUnfold.
DEVICE void dequantize_folded(const u32* words, const Scales& s, u32* a) {
  if constexpr (!kFolded) unscaled(words, s, a);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if constexpr (!kFolded) {
      a[j] = mul_pair(a[j], s.scale[j & 1]);
    } else if constexpr (WEIGHT_TYPE == UINT4B8) {
      u32 bits = (j < 2 ? words[0] : words[0] >> 8) & (j & 1 ? 0x00f000f0u : 0x000f000fu);
      a[j] = fold(bits, s, j & 1);
    } else if constexpr (WEIGHT_TYPE == UINT8B128) {
      a[j] = fold(permute_bytes(words[(j >> 1) % kWords], 0, j & 1 ? 0x4342 : 0x4140), s, j & 1);
    } else if constexpr (WEIGHT_TYPE == FLOAT8_E4M3) {
      a[j] = fold(e4m3_bits(words[(j >> 1) % kWords], j & 1), s, j & 1);
    } else {
      a[j] = fold(e2m1_bits(words[0], j), s, j & 1);
    }
  }
}
