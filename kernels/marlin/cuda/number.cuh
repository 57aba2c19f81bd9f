// Arithmetic on pairs of 16-bit activations: bf16 if ACT_BF16 is 1, else f16.
#pragma once
#include "ptx.cuh"

#if ACT_BF16
#define ACT_NAME "bf16"
constexpr u32 kOnePair = 0x3f803f80u;
#else
#define ACT_NAME "f16"
constexpr u32 kOnePair = 0x3c003c00u;
#endif
constexpr u32 kMinusZeroPair = 0x80008000u;

DEVICE u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn." ACT_NAME "x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// a * b + c with the low (or high) half of b and c for both halves of a. The instruction selects halves by itself, so
// no pair has to be built.
DEVICE u32 fma_low(u32 a, u32 b, u32 c) {
  u32 out;
  asm("{\n.reg .b16 l, h;\n.reg .b32 b, c;\n"
      "mov.b32 {l, h}, %2;\nmov.b32 b, {l, l};\nmov.b32 {l, h}, %3;\nmov.b32 c, {l, l};\n"
      "fma.rn." ACT_NAME "x2 %0, %1, b, c;\n}"
      : "=r"(out)
      : "r"(a), "r"(b), "r"(c));
  return out;
}

DEVICE u32 fma_high(u32 a, u32 b, u32 c) {
  u32 out;
  asm("{\n.reg .b16 l, h;\n.reg .b32 b, c;\n"
      "mov.b32 {l, h}, %2;\nmov.b32 b, {h, h};\nmov.b32 {l, h}, %3;\nmov.b32 c, {h, h};\n"
      "fma.rn." ACT_NAME "x2 %0, %1, b, c;\n}"
      : "=r"(out)
      : "r"(a), "r"(b), "r"(c));
  return out;
}

// sm_80 cannot add or multiply bf16 pairs; these fmas give exactly the same.
DEVICE u32 mul_pair(u32 a, u32 b) { return fma_pair(a, b, kMinusZeroPair); }
DEVICE u32 add_pair(u32 a, u32 b) { return fma_pair(a, kOnePair, b); }

// The first argument becomes the low half.
DEVICE u32 to_pair(float low, float high) {
  u32 out;
  asm("cvt.rn." ACT_NAME "x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

DEVICE float to_float(u16 value) {
#if ACT_BF16
  return __uint_as_float((u32)value << 16);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
#endif
}
