// Widens packed codes to operand A of the 8-bit tensor cores: int8 or e4m3 bytes that are weights without their scale.
//
// Four-bit codes: a word has columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of rows g and g + 8 (repack.py); the two results
// have one row each, a column a byte. Operands are the weights divided by kCodeUnit, exactly:
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
//   e4m3   mxfp4      the fields of e2m1 in those of e4m3: sign 00 exponent      2^6
//                     mantissa 00, whose bias is 6 more, subnormal too
//
// Example (e4m3 rows, uint4b8): codes 0x3 and 0xb are -5 and 3: bytes 0x85 and 0x03, which are -5 * 2^-9 and 3 * 2^-9.
#pragma once
#include "dequant.cuh"

static_assert(ROWS_INT8 ? kIntegers : WEIGHT_TYPE != UINT8B128 && WEIGHT_TYPE != NVFP4,
              "int8 rows multiply integers; e4m3 rows multiply e4m3, four-bit integers and mxfp4");

constexpr float kCodeUnit = ROWS_INT8                    ? (WEIGHT_TYPE == UINT4B8 ? 0.0625f : 1.0f)
                            : kIntegers                  ? 512.0f
                            : WEIGHT_TYPE == FLOAT8_E4M3 ? 1.0f
                                                         : 64.0f;

// (word ^ flips) & mask in one instruction.
DEVICE u32 flip_and_mask(u32 word, u32 flips, u32 mask) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(out) : "r"(word), "r"(flips), "r"(mask));
  return out;
}

// Four nibbles, one in each byte, minus their zero point, which stands in every byte of `zeros`.
DEVICE u32 subtract_zeros(u32 nibbles, u32 zeros) { return ((nibbles | 0x80808080u) - zeros) ^ 0x80808080u; }

// Sign and magnitude of the bytes low - negative * (most + 1), with negative 0 or 1 and low from 0 to most, or from 1
// where negative: the complement of low, plus 1, under a sign.
DEVICE u32 sign_and_magnitude(u32 low, u32 negative, u32 most) { return (low ^ negative * most) + negative * 0x81; }

// Four nibbles minus their zero point, as sign and magnitude.
DEVICE u32 subtract_zeros_signed(u32 nibbles, u32 zeros) {
  u32 sum = (nibbles | 0x80808080u) - zeros;  // 128 more
  return sign_and_magnitude(sum & 0x0f0f0f0fu, ~sum >> 7 & 0x01010101u, 15);
}

// A zero point, which is a 16-bit number, in all bytes of a word.
DEVICE u32 zero_bytes(u32 zero) { return (u32)to_float(zero) * 0x01010101u; }

// Eight four-bit codes; zeros: the two rows' zero points in all bytes, where there are any.
DEVICE void widen_four_bits(u32 word, u32 zeros_low, u32 zeros_high, u32& low, u32& high) {
  if constexpr (kHasZeros) {
    low = ROWS_INT8 ? subtract_zeros(word & 0x0f0f0f0fu, zeros_low)
                    : subtract_zeros_signed(word & 0x0f0f0f0fu, zeros_low);
    high = ROWS_INT8 ? subtract_zeros(word >> 4 & 0x0f0f0f0fu, zeros_high)
                     : subtract_zeros_signed(word >> 4 & 0x0f0f0f0fu, zeros_high);
  } else if constexpr (kIntegers && ROWS_INT8) {
    low = flip_and_mask(word << 4, 0x80808080u, 0xf0f0f0f0u);
    high = flip_and_mask(word, 0x80808080u, 0xf0f0f0f0u);
  } else if constexpr (kIntegers) {
    low = sign_and_magnitude(word & 0x07070707u, ~word >> 3 & 0x01010101u, 7);
    high = sign_and_magnitude(word >> 4 & 0x07070707u, ~word >> 7 & 0x01010101u, 7);
  } else {
    // The bits of each code are apart (repack.SPREAD). Codes 0, 2, 4, 6: two shifts bring exponents and mantissas to
    // bits 4 to 2 of a byte, one shift the signs to bit 7.
    u32 sizes = permute_bytes(word >> 4, __funnelshift_l(word, word, 1), 0x5270);
    u32 signs = permute_bytes(word, word << 13, 0x7351);
    low = and_or(signs, 0x80808080u, sizes & 0x1c1c1c1cu);
    // Codes 1, 3, 5, 7: of 3 and 7 even exponent and mantissa are apart, which a multiplication joins, as it does signs.
    sizes = permute_bytes(__funnelshift_l(word, word, 6), (word & 0x00190019u) * (1u << 12 | 1u << 7), 0x7250);
    signs = (word & 0x00220022u) * (1u << 14 | 1u << 2);
    high = and_or(signs, 0x80808080u, sizes & 0x1c1c1c1cu);
  }
}

// Four codes of 8 bits.
DEVICE u32 widen_eight_bits(u32 word) { return WEIGHT_TYPE == UINT8B128 ? word ^ 0x80808080u : word; }
