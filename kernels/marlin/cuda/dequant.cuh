// Dequantizes packed codes to operand A of the tensor cores: four pairs per lane for 16 rows x 16 columns.
//
// WEIGHT_TYPE selects the number type, ACT_BF16 the activations' dtype. `Scales` holds what a lane needs for its rows g
// and g + 8 (g = lane / 4) over one group of columns, each number twice, so that one instruction serves both halves of
// a pair.
#pragma once
#include "mma.cuh"

#define UINT4 0
#define UINT4B8 1
#define UINT8B128 2
#define FLOAT8_E4M3 3
#define NVFP4 4
#define MXFP4 5
#define MXFP4_BY_ROW 6  // packed for rows of 8 bits

constexpr int kBits = (WEIGHT_TYPE == UINT8B128 || WEIGHT_TYPE == FLOAT8_E4M3) ? 8 : 4;
constexpr bool kHasZeros = WEIGHT_TYPE == UINT4;
constexpr int kScaleBytes = WEIGHT_TYPE >= NVFP4 ? 1 : 2;
constexpr int kWords = kBits / 4;  // int32 per lane for 16 columns

constexpr bool kIntegers = WEIGHT_TYPE <= UINT8B128;

struct Scales {
  u32 scale[2];
  u32 offset[2];  // minus the code's offset and zero point; only if there are zero points
};

// ---- small floats: their bits are moved into the fields of bf16 or f16; a power of two corrects the exponent bias
// ----

// Two bytes of a word, for permute_bytes: each is followed by eight copies of its sign.
constexpr u32 kEvenBytes = 0xa280, kOddBytes = 0xb391, kLowBytes = 0x9180;

// Those bytes of a word of e4m3 numbers, as the bits of bf16s that are 2^120 too small, or of f16s 2^8 too small.
DEVICE u32 e4m3_bits(u32 word, u32 bytes) {
  u32 wide = permute_bytes(word, 0, bytes);
  return ACT_BF16 ? wide << 4 & 0x87f087f0u : wide << 7 & 0xbf80bf80u;
}

// x 2^120 (or 2^8) corrects the exponent bias (e4m3 7 -> bf16 127, f16 15).
DEVICE u32 e4m3_pair(u32 bits) { return mul_pair(bits, ACT_BF16 ? 0x7b807b80u : 0x5c005c00u); }

// Pair j of a word's four-bit e2m1 numbers, whose bits repack.py has moved, as the bits of bf16s that are 2^126 too
// small. A rotation and a mask make three of the pairs, a multiplication the last one. BY_ROW: two bytes of the word,
// or rotated, that end in an exponent's upper bit, each above one that begins with the other bits.
DEVICE u32 e2m1_bits(u32 word, int j) {
  constexpr u32 kBitsOfBf16 = 0x81c081c0u;
  if constexpr (WEIGHT_TYPE == MXFP4_BY_ROW) {
    u32 upper = j < 2 ? word : __funnelshift_l(word, word, 4), lower = word << (j < 2 ? 5 : 1);
    return permute_bytes(upper, lower, j == 0 ? 0x1504 : j == 1 ? 0x3726 : j == 2 ? 0x2514 : 0x0736) & kBitsOfBf16;
  }
  if (j == 3) return (word & 0x001b001bu) * (1u << 3 | 1u << 8 | 1u << 14) & kBitsOfBf16;
  return (j == 0 ? word : __funnelshift_l(word, word, j == 1 ? 10 : 13)) & kBitsOfBf16;
}

// x 2^126 (or 2^14) corrects the exponent bias (e2m1 1 -> bf16 127, f16 15).
DEVICE u32 e2m1_pair(u32 bits) {
#if ACT_BF16
  return mul_pair(bits, 0x7e807e80u);  // 2^126
#else
  return mul_pair(and_or(bits, 0x80008000u, (bits & 0x01c001c0u) << 3), 0x74007400u);  // 2^14
#endif
}

// 2^(byte - 127) for both bytes, as a pair.
DEVICE u32 e8m0_pair(u32 low, u32 high) {
  float a = __uint_as_float(low == 0 ? 0x00400000u : low << 23);
  float b = __uint_as_float(high == 0 ? 0x00400000u : high << 23);
  return to_pair(a, b);
}

// ---- scales ----

// `row` is the scale row in shared memory, `index` the position of row g in it; row g + 8 comes next.
DEVICE Scales load_scales(const u8* row, const u8* zeros, int index) {
  Scales s;
  u32 pair;
  if constexpr (kScaleBytes == 2) {
    pair = *reinterpret_cast<const u32*>(row + 2 * index);
  } else {
    u32 bytes = *reinterpret_cast<const u16*>(row + index);
    pair = WEIGHT_TYPE == NVFP4 ? e4m3_pair(e4m3_bits(bytes, kLowBytes)) : e8m0_pair(bytes & 0xff, bytes >> 8);
  }
  s.scale[0] = permute_bytes(pair, 0, 0x1010);
  s.scale[1] = permute_bytes(pair, 0, 0x3232);
  if constexpr (kHasZeros) {
    u32 zero = *reinterpret_cast<const u32*>(zeros + 2 * index) ^ 0x80008000u;
    zero = add_pair(zero, ACT_BF16 ? 0xc300c300u : 0xe400e400u);  // -128, -1024
    s.offset[0] = permute_bytes(zero, 0, 0x1010);
    s.offset[1] = permute_bytes(zero, 0, 0x3232);
  }
  return s;
}

// ---- codes ----

constexpr int kFragmentBytes = 512 * kBits / 8;  // 16 rows x 32 columns

// Where fragment i of a block of 32 columns begins, and what a lane reads of it (repack.py). Four bits: its two words.
// Eight bits: two fragments lie in one another, and a lane gives ldmatrix the address of a row of four core matrices.
DEVICE constexpr int fragment_place(int i) {
  return kBits == 4 ? i * kFragmentBytes : i / 2 * 2 * kFragmentBytes + i % 2 * 256;
}
DEVICE int lane_place(int lane) { return kBits == 4 ? lane * 8 : lane / 8 % 2 * 512 + lane / 16 * 128 + lane % 8 * 16; }
constexpr int kNextColumnsPlace = 128;  // of the second 16 columns of eight bits

// A lane's codes of 16 rows x 32 columns, from kOffset bytes behind an address in shared memory: kWords for 16 columns.
template <int kOffset>
DEVICE void load_words_at(u32 from, u32* w) {
  if constexpr (kBits == 4) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(w[0]), "=r"(w[1]) : "r"(from), "n"(kOffset) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4+%5];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from), "n"(kOffset)
                 : "memory");
  }
}

DEVICE void load_words(u32* words, const u8* from) {
  if constexpr (kBits == 4) {
    uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    load_matrices(words, shared_address(from));
  }
}

// Four-bit codes j and j + 4 of a word as numbers that are 128 (bf16) or 1024 (f16) too large.
DEVICE u32 four_bit_pair(u32 word, int j) {
  return and_or(word >> (4 * j), 0x000f000fu, ACT_BF16 ? 0x43004300u : 0x64006400u);
}

// Bytes k and k + 2 of a word as numbers, minus 128.
DEVICE u32 eight_bit_pair(u32 word, int k) {
#if ACT_BF16
  float low = __uint_as_float(permute_bytes(word, 0x4b000000u, 0x7650 + k)) - 8388736.0f;
  float high = __uint_as_float(permute_bytes(word, 0x4b000000u, 0x7652 + k)) - 8388736.0f;
  return to_pair(low, high);
#else
  return add_pair(permute_bytes(word, 0x64646464u, k ? 0x4341 : 0x4240), 0xe480e480u);  // -1152
#endif
}

// Of a lane's kWords of 16 columns, the eight-bit codes of pair j, in the order of dequantize().
DEVICE u32 word_of_pair(const u32* words, int j) { return words[j % 2 % kWords]; }
DEVICE u32 e4m3_bits_of_pair(const u32* words, int j) {
  return e4m3_bits(word_of_pair(words, j), j < 2 ? kEvenBytes : kOddBytes);
}

// The four pairs of 16 columns: rows g and g + 8, then the same rows eight columns further on.
DEVICE void dequantize(const u32* words, const Scales& s, u32* a) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 value;
    if constexpr (WEIGHT_TYPE == UINT4) {
      value = add_pair(four_bit_pair(words[0], j), s.offset[j & 1]);
    } else if constexpr (WEIGHT_TYPE == UINT4B8) {
      value = add_pair(four_bit_pair(words[0], j), ACT_BF16 ? 0xc308c308u : 0xe408e408u);  // -136, -1032
    } else if constexpr (WEIGHT_TYPE == UINT8B128) {
      value = eight_bit_pair(word_of_pair(words, j), j / 2);
    } else if constexpr (WEIGHT_TYPE == FLOAT8_E4M3) {
      value = e4m3_pair(e4m3_bits_of_pair(words, j));
    } else {
      value = e2m1_pair(e2m1_bits(words[0], j));
    }
    a[j] = mul_pair(value, s.scale[j & 1]);
  }
}

// ==== Folded ====
//
// The same with fewer instructions: one multiplication or fma per pair if the type allows it, with the scale folded in.
//
// The bits of a small code, read as a bf16, are a tiny number proportional to it; so are four-bit integers one nibble
// higher. Multiplied by a scale that makes up for all of that but 2^-26, it is the weight, rounded once, for scales
// from 2^-91 to 2^21; the sums are multiplied by 2^26 at the end. For integers an fma subtracts the offset: 8 or 128
// times a scale is exact. f16 lacks the exponents for this, and zero points times a scale are not exact: those become
// numbers first and are then multiplied by their scale (which must be below 128 for four bits in f16).

// ---- numbers first, then their scale ----
//
// The bits of a small code, read as an activation, are a subnormal number proportional to it. One fma makes it normal
// and subtracts the offset, so two of a word's four pairs need no shift. Rows g come out too small by a factor of 64
// (f16: 512), rows g + 8 by 4 (f16: 32): these units are multiplied into their scales.
constexpr bool kHasUnits = kIntegers && kBits == 4;
constexpr u32 kUnitPair = ACT_BF16 ? 0x40804280u : 0x50006000u;      // both units
constexpr u32 kMinusPerUnit = ACT_BF16 ? 0xbe80bc80u : 0xa8009800u;  // -1 / each unit
constexpr u32 kMinusEight[2] = {ACT_BF16 ? 0xbe00be00u : 0xa400a400u, ACT_BF16 ? 0xc000c000u : 0xb400b400u};
constexpr u32 kMakeNormal = ACT_BF16 ? 0x7f007f00u : 0x78007800u;  // 2^127, 2^15

// Scales in those units, twice each, and minus the zero points.
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

// The pairs of dequantize() before scaling; integers in those units.
DEVICE void unscaled(const u32* words, const Scales& s, u32* a) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if constexpr (kHasUnits) {
      u32 bits = (j < 2 ? words[0] : words[0] >> 8) & (j & 1 ? 0x00f000f0u : 0x000f000fu);
      a[j] = fma_pair(bits, kMakeNormal, s.offset[j & 1]);
    } else if constexpr (WEIGHT_TYPE == UINT8B128) {
      a[j] = eight_bit_pair(word_of_pair(words, j), j / 2);
    } else if constexpr (WEIGHT_TYPE == FLOAT8_E4M3) {
      a[j] = e4m3_pair(e4m3_bits_of_pair(words, j));
    } else {
      a[j] = e2m1_pair(e2m1_bits(words[0], j));
    }
  }
}

// ---- folded ----

constexpr bool kFolded = ACT_BF16 && !kHasZeros;
constexpr float kUnfold = kFolded ? 67108864.0f : 1.0f;  // 2^26

// Factors, as a pair, of the scales of rows g (low) and g + 8 (high).
constexpr u32 kFold = WEIGHT_TYPE == UINT4B8       ? 0x73007500u                   // 2^107, 2^103
                      : WEIGHT_TYPE == UINT8B128   ? 0x75007500u                   // 2^107
                      : WEIGHT_TYPE == FLOAT8_E4M3 ? 0x6e806e80u                   // 2^94
                                                   : 0x71807180u;                  // 2^100
constexpr u32 kFoldedOffset = WEIGHT_TYPE == UINT4B8 ? 0xb400b400u : 0xb600b600u;  // -8 or -128 * 2^-26

// The scales of rows g and g + 8 as one pair, scale[0], and the addends of the fma likewise, offset[0].
DEVICE Scales load_folded_scales(const u8* row, const u8* zeros) {
  if constexpr (!kFolded) return load_unit_scales(row, zeros);
  u32 pair;
  if constexpr (kScaleBytes == 2) {
    pair = *reinterpret_cast<const u32*>(row);
  } else {
    u32 bytes = *reinterpret_cast<const u16*>(row);
    // An e8m0 byte is the exponent of a bf16, except the least (2^-127), which becomes zero; there is room up to 2^27.
    pair = WEIGHT_TYPE == NVFP4 ? e4m3_pair(e4m3_bits(bytes, kLowBytes)) : permute_bytes(bytes, 0, 0x4140) << 7;
  }
  Scales s;
  s.scale[0] = mul_pair(pair, kFold);
  s.offset[0] = kIntegers ? mul_pair(pair, kFoldedOffset) : kMinusZeroPair;
  return s;
}

DEVICE u32 fold(u32 bits, const Scales& s, bool high) {
  return high ? fma_high(bits, s.scale[0], s.offset[0]) : fma_low(bits, s.scale[0], s.offset[0]);
}

// The four pairs of 16 columns in the order of dequantize(), too small by kUnfold.
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
      a[j] = fold(permute_bytes(word_of_pair(words, j), 0, j < 2 ? 0x4240 : 0x4341), s, j & 1);
    } else if constexpr (WEIGHT_TYPE == FLOAT8_E4M3) {
      a[j] = fold(e4m3_bits_of_pair(words, j), s, j & 1);
    } else {
      a[j] = fold(e2m1_bits(words[0], j), s, j & 1);
    }
  }
}
