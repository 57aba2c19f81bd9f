// Widens packed codes to operand A of the 8-bit tensor cores: int8, e4m3 or e5m2 bytes, weights without their scale.
//
// A word of four-bit codes holds columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of rows g and g + 8 (repack.py). It becomes two
// words of one row each, with a column in each byte. Operands are exactly the weights divided by kCodeUnit:
//
//   rows   weights    a byte                                                     kCodeUnit
//   int8   uint4      code - zero point                                          1
//   int8   uint4b8    16 x (code - 8): the nibble at the byte's top, its sign    1 / 16
//                     bit flipped
//   int8   uint8b128  code - 128                                                 1
//   e4m3   e4m3       the code                                                   1
//   e4m3   uint4,     n = code - 8 or - zero point as sign and magnitude: the    2^9
//          uint4b8    byte 0 to 16, read as e4m3, is n * 2^-9, also beyond the
//                     subnormal numbers
//   e4m3   mxfp4      e5m2: code * 2^(13 - d), where the scale of its 32 columns 2^-13
//                     is d binades below the largest of its row
//
// mxfp4: after folding, a row's sums have one scale, its largest (passed in place of zero points). Codes are packed as
// selectors of byte permutations (repack.py): two registers hold the operands of all magnitudes, with the exponent
// added, and signs are inserted. Operands are exact up to d = 26. Beyond, they are at most 2^-24 of the largest weight
// that the row can have, and so is their error.
//
// Example (e4m3 rows, uint4b8): codes 0x3 and 0xb are -5 and 3: bytes 0x85 and 0x03, which are -5 * 2^-9 and 3 * 2^-9.
// Example (mxfp4): code 0xd is -3; as -3 * 2^13 = 0xf6 where d = 0, as 0xee where d = 2.
#pragma once
#include "dequant.cuh"

static_assert(
    ROWS_INT8 ? kIntegers : WEIGHT_TYPE != UINT8B128 && WEIGHT_TYPE != NVFP4 && WEIGHT_TYPE != MXFP4,
    "int8 rows multiply integers; e4m3 rows multiply e4m3, four-bit integers and mxfp4 that is packed for them");

constexpr float kCodeUnit = ROWS_INT8                    ? (WEIGHT_TYPE == UINT4B8 ? 0.0625f : 1.0f)
                            : kIntegers                  ? 512.0f
                            : WEIGHT_TYPE == FLOAT8_E4M3 ? 1.0f
                                                         : 0x1p-13f;

// Whether the distances of scales from the largest of their row are folded into the operands.
constexpr bool kFoldsScales = WEIGHT_TYPE == MXFP4_BY_ROW;

// (word ^ flips) & mask in one instruction.
DEVICE u32 flip_and_mask(u32 word, u32 flips, u32 mask) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(out) : "r"(word), "r"(flips), "r"(mask));
  return out;
}

// Subtracts a zero point, repeated in every byte of `zeros`, from four nibbles, one in each byte.
DEVICE u32 subtract_zeros(u32 nibbles, u32 zeros) { return ((nibbles | 0x80808080u) - zeros) ^ 0x80808080u; }

// Converts the bytes low - negative * (most + 1) to sign and magnitude; negative is 0 or 1, and low is 0 to most, but
// at least 1 if negative. The magnitude of a negative one is the complement of low, plus 1.
DEVICE u32 sign_and_magnitude(u32 low, u32 negative, u32 most) { return (low ^ negative * most) + negative * 0x81; }

// The same subtraction with results as sign and magnitude.
DEVICE u32 subtract_zeros_signed(u32 nibbles, u32 zeros) {
  u32 sum = (nibbles | 0x80808080u) - zeros;  // 128 more
  return sign_and_magnitude(sum & 0x0f0f0f0fu, ~sum >> 7 & 0x01010101u, 15);
}

// Converts a 16-bit zero point to an integer repeated in all bytes of a word.
DEVICE u32 zero_bytes(u32 zero) { return (u32)to_float(zero) * 0x01010101u; }

// Widens eight four-bit integers; zeros_low and zeros_high are the rows' zero points from zero_bytes, if there are any.
DEVICE void widen_four_bits(u32 word, u32 zeros_low, u32 zeros_high, u32& low, u32& high) {
  if constexpr (kHasZeros) {
    low = ROWS_INT8 ? subtract_zeros(word & 0x0f0f0f0fu, zeros_low)
                    : subtract_zeros_signed(word & 0x0f0f0f0fu, zeros_low);
    high = ROWS_INT8 ? subtract_zeros(word >> 4 & 0x0f0f0f0fu, zeros_high)
                     : subtract_zeros_signed(word >> 4 & 0x0f0f0f0fu, zeros_high);
  } else if constexpr (kIntegers && ROWS_INT8) {
    low = flip_and_mask(word << 4, 0x80808080u, 0xf0f0f0f0u);
    high = flip_and_mask(word, 0x80808080u, 0xf0f0f0f0u);
  } else {
    low = sign_and_magnitude(word & 0x07070707u, ~word >> 3 & 0x01010101u, 7);
    high = sign_and_magnitude(word >> 4 & 0x07070707u, ~word >> 7 & 0x01010101u, 7);
  }
}

// ==== mxfp4 ====

// Signed max(a + b, 0) of each half.
DEVICE u32 add_relu(u32 a, u32 b) {
  u32 out;
  asm("{\n.reg .b32 sum, zero;\nmov.b32 zero, 0;\nadd.s16x2 sum, %1, %2;\nmax.s16x2.relu %0, sum, zero;\n}"
      : "=r"(out)
      : "r"(a), "r"(b));
  return out;
}

// Converts e8m0 bytes of rows g and g + 8 to two 16-bit exponents; both are 0 for a group beyond the last.
DEVICE u32 exponent_pair(u32 bytes, bool is_there) { return permute_bytes(bytes, 0, is_there ? 0x4140 : 0x4444); }

// 2^(byte - 127), but not less than the least normal number.
DEVICE float exponent_value(u32 byte) { return __uint_as_float(max(byte, 1u) << 23); }

// From the largest exponents of rows g and g + 8, computes what is added to exponents to make them those of operands.
constexpr u32 kLargestExponent = 27;
DEVICE u32 exponent_offsets(u32 largest) {
  u32 low = kLargestExponent - max(largest & 0xff, 1u), high = kLargestExponent - max(largest >> 8, 1u);
  return permute_bytes(low, high, 0x5410);
}

// Returns 27 - d for scales d binades below the largest, and 0 from d = 27 on.
DEVICE u32 operand_exponents(u32 exponents, u32 offsets) { return add_relu(exponents, offsets); }

// Lookup table from a nibble to the operand of its magnitude: 0, 2, 0.5, 3 in `low` and 1, 4, 1.5, 6 in `high`.
struct Operands {
  u32 low, high;
  DEVICE explicit Operands(u32 exponent)
      : low(0x0a000800u + exponent * 0x04040400u), high(0x0e060c04u + exponent * 0x04040404u) {}
};

// Widens eight e2m1 codes, four of each row.
DEVICE void widen_e2m1(u32 word, const Operands& of_low, const Operands& of_high, u32& low, u32& high) {
  u32 magnitudes = word & 0x77777777u, turned = word << 4;
  // The sign of code i is bit 4 i + 7; that of the last code wraps to bit 3.
  u32 signs_low = permute_bytes(word, turned, 0x6150), signs_high = permute_bytes(word, turned, 0x4372);
  low = and_or(signs_low, 0x80808080u, permute_bytes(of_low.low, of_low.high, magnitudes));
  high = and_or(signs_high, 0x80808080u, permute_bytes(of_high.low, of_high.high, magnitudes >> 16));
}

// Widens four 8-bit codes.
DEVICE u32 widen_eight_bits(u32 word) { return WEIGHT_TYPE == UINT8B128 ? word ^ 0x80808080u : word; }
