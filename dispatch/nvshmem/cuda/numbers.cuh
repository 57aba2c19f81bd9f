// Arithmetic on vectors of eight columns: 16 bytes of bf16 or f16 (ACT_BF16 selects), f32, or eight codes of 8 bits;
// and their quantization to e4m3, or with INT8 to int8, with one scale per 128 columns.
#pragma once

#include "protocol.cuh"

constexpr int kColumns = 8;                  // of a vector
constexpr int kScaleVectors = 16;            // vectors that share a scale: 128 columns
constexpr int kVectors = HIDDEN / kColumns;  // of a row
constexpr int kGroups = (kVectors + kScaleVectors - 1) / kScaleVectors;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr float kLargestCode = INT8 ? 127.0f : 448.0f;
constexpr float kTinyScale = 1.17549435e-38f;
constexpr float kSmall = 8.2718061255302767e-25f;  // 2^-80
constexpr float kLarge = 1.2379400392853803e27f;   // 2^90

struct Floats {
  float v[kColumns];
};

DEVICE float low_half(u32 pair) {
#if ACT_BF16
  return __uint_as_float(pair << 16);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
#endif
}

DEVICE float high_half(u32 pair) {
#if ACT_BF16
  return __uint_as_float(pair & 0xffff0000u);
#else
  float f;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
#endif
}

DEVICE u32 pack_halves(float low, float high) {
  u32 pair;
#if ACT_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

DEVICE Floats unpack(Vec v) {
  return Floats{{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y), low_half(v.z), high_half(v.z),
                 low_half(v.w), high_half(v.w)}};
}

DEVICE Vec pack(const Floats& f) {
  return Vec{pack_halves(f.v[0], f.v[1]), pack_halves(f.v[2], f.v[3]), pack_halves(f.v[4], f.v[5]),
             pack_halves(f.v[6], f.v[7])};
}

// Results on the wire: bf16 beside bf16 rows, and f32 beside f16 rows, as a rank's part of a token's sum may exceed
// 65504 although the whole does not.
constexpr int kResultColumns = ACT_BF16 ? kColumns : 4;  // of a vector
constexpr int kResultVectors = HIDDEN / kResultColumns;  // of a row
constexpr int kResultBytes = 16 * kResultVectors;

#if ACT_BF16
using Sums = Floats;
using OutputVec = Vec;  // as many columns of an output row, rounded to its 16 bits
DEVICE Sums unpack_result(Vec v) { return unpack(v); }
DEVICE Vec pack_result(const Sums& f) { return pack(f); }
DEVICE OutputVec pack_output(const Sums& f) { return pack(f); }
#else
struct Sums {
  float v[kResultColumns];
};
using OutputVec = u64;

DEVICE Sums unpack_result(Vec v) {
  return Sums{{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}};
}

DEVICE Vec pack_result(const Sums& f) {
  return Vec{__float_as_uint(f.v[0]), __float_as_uint(f.v[1]), __float_as_uint(f.v[2]), __float_as_uint(f.v[3])};
}

DEVICE OutputVec pack_output(const Sums& f) {
  return static_cast<u64>(pack_halves(f.v[2], f.v[3])) << 32 | pack_halves(f.v[0], f.v[1]);
}
#endif

DEVICE void add_result(Sums& sum, Vec v) {
  const Sums f = unpack_result(v);
#pragma unroll
  for (int i = 0; i < kResultColumns; ++i) {
    sum.v[i] = __fadd_rn(sum.v[i], f.v[i]);
  }
}

// Two codes, x in the lower byte; rounded to nearest even; magnitudes are at most kLargestCode, or NaN, of which int8
// has none: 0.
#if INT8
DEVICE u32 to_codes(float x, float y) { return (__float2int_rn(x) & 0xff) | (__float2int_rn(y) & 0xff) << 8; }
#elif __CUDA_ARCH__ >= 890
DEVICE u32 to_codes(float x, float y) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
  return pair;
}
#else
DEVICE u32 to_e4m3(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
  const float magnitude = fabsf(x);
  if (x != x) {
    return sign | 0x7f;
  }
  if (magnitude < 0.015625f) {  // below 2^-6 codes are multiples of 2^-9
    return sign | static_cast<u32>(__float2int_rn(magnitude * 512.0f));
  }
  u32 m = __float_as_uint(magnitude);
  m += 0x7ffff + (m >> 20 & 1);
  return sign | ((m >> 20) - (120 << 3));
}

DEVICE u32 to_codes(float x, float y) { return to_e4m3(x) | to_e4m3(y) << 8; }
#endif

// Two codes as floats, the lower byte first; exact.
#if INT8
DEVICE void from_codes(u32 pair, float& low, float& high) {
  low = static_cast<float>(static_cast<signed char>(pair));
  high = static_cast<float>(static_cast<signed char>(pair >> 8));
}
#elif __CUDA_ARCH__ >= 890
DEVICE void from_codes(u32 pair, float& low, float& high) {
  asm("{.reg .b32 both; .reg .b16 l, h; cvt.rn.f16x2.e4m3x2 both, %2; mov.b32 {l, h}, both;"
      " cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "h"(static_cast<unsigned short>(pair)));
}
#else
DEVICE float from_e4m3(u32 code) {
  const u32 magnitude = code & 0x7f;
  const float value = __uint_as_float(magnitude << 20) *
                      1.329227995784916e36f;  // x 2^120 corrects the exponent bias (e4m3 7 -> f32 127)
  return __uint_as_float((code & 0x80) << 24 | (magnitude == 0x7f ? 0x7fc00000 : __float_as_uint(value)));
}

DEVICE void from_codes(u32 pair, float& low, float& high) {
  low = from_e4m3(pair & 0xff);
  high = from_e4m3(pair >> 8 & 0xff);
}
#endif

// x / y by the rounded inverse of y, refined once. For y = 448 and 16-bit x, the resulting scale is that of the
// correctly rounded quotient.
DEVICE float divide(float x, float y, float inverse) {
  const float q = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-q, y, x), inverse, q);
}

// 1 / y as a sum: the first term slightly too small, the rest positive, so that the sign of x = -0 is kept.
struct Inverse {
  float most, rest;

  DEVICE explicit Inverse(float y) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(most) : "f"(y));  // at most one unit in the last place off
    most = __uint_as_float(__float_as_uint(most) - 2);
    rest = __fmul_rn(__fmaf_rn(-most, y, 1.0f), most);
  }

  // x / y. For 16-bit x and y = a 16-bit number / 448, rounded, the resulting code is that of the correctly rounded
  // quotient: verified for all pairs of mantissas with 22 exponents and with inverses up to five units too small.
  DEVICE float times(float x) const { return __fmaf_rn(x, most, __fmul_rn(x, rest)); }
};

// The larger number of either half; NaN if both are, and with INT8, whose codes have no NaN, if one is.
DEVICE u32 larger(u32 a, u32 b) {
  u32 c;
#if INT8 && ACT_BF16
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#elif INT8
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#elif ACT_BF16
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
  return c;
}

struct Codes {
  u32 low, high;  // columns 0 to 3 and 4 to 7, the first in the lowest byte
};

constexpr u32 kMagnitude = 0x7fff, kMagnitudes = kMagnitude << 16 | kMagnitude;

// Scale of a group from its largest magnitude (16 bits); NaN if the group is all NaN.
DEVICE float scale_of(u32 largest) {
  const float x = low_half(largest);
  if (INT8) {
    const float scale = __fdiv_rn(x, kLargestCode);
    return scale < kTinyScale ? kTinyScale : scale;  // NaN stays
  }
  const bool is_usual = x > kSmall && x < kLarge;  // nothing underflows
  // fmaxf ignores NaN.
  return is_usual ? divide(x, kLargestCode, 1.0f / kLargestCode) : fmaxf(__fdiv_rn(x, kLargestCode), kTinyScale);
}

// Codes of one vector, with its group's scale and largest magnitude. The 16 threads of a group call it together;
// vectors behind K are zero.
DEVICE Codes quantize(Vec v, float& scale, u32& largest) {
  u32 pair = larger(larger(v.x & kMagnitudes, v.y & kMagnitudes), larger(v.z & kMagnitudes, v.w & kMagnitudes));
#pragma unroll
  for (int step = kScaleVectors / 2; step > 0; step /= 2) {
    pair = larger(pair, __shfl_xor_sync(kAllLanes, pair, step));
  }
  largest = larger(pair, pair >> 16) & kMagnitude;
  scale = scale_of(largest);
  const float x = low_half(largest);
  const Floats f = unpack(v);
  float q[kColumns];
  if (!INT8 && x > kSmall && x < kLarge) {
    const Inverse inverse(scale);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      q[i] = inverse.times(f.v[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      q[i] = __fdiv_rn(f.v[i], scale);
    }
  }
  return Codes{to_codes(q[0], q[1]) | to_codes(q[2], q[3]) << 16, to_codes(q[4], q[5]) | to_codes(q[6], q[7]) << 16};
}

DEVICE Codes quantize(Vec v, float& scale) {
  u32 largest;
  return quantize(v, scale, largest);
}

DEVICE Vec dequantize(Codes codes, float scale) {
  Floats f;
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    from_codes((i < 4 ? codes.low : codes.high) >> (i % 4 * 8), f.v[i], f.v[i + 1]);
    f.v[i] = __fmul_rn(f.v[i], scale);
    f.v[i + 1] = __fmul_rn(f.v[i + 1], scale);
  }
  return pack(f);
}
