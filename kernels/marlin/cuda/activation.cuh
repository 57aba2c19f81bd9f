// The activation between the two GEMMs, in f32; ACTIVATION is its number. With CLAMP_LIMIT, gate and up end there: the
// gate before the activation, or of SWIGLUSTEP, which always has one, behind silu.
#pragma once
#include "ptx.cuh"

#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define SWIGLUOAI 3
#define SWIGLUSTEP 4
#define SITU 5
#define SILU_NO_MUL 6
#define GELU_NO_MUL 7
#define RELU2_NO_MUL 8

constexpr bool kGated = ACTIVATION <= SITU;

// Exponentials below 2^-126 vanish beside 1 either way, which saves three instructions.
DEVICE float sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
  return __fdividef(1.0f, 1.0f + power);
}
// limit * tanh(x / limit), off by some 1e-7 of the limit: below 1e-3 of it, by more than what a 16-bit result rounds.
// A choice of a series there spills 3.6 kB of the kernel for many rows.
DEVICE float soft(float x, float limit) { return limit * (2.0f * sigmoid(x * (2.0f / limit)) - 1.0f); }
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

// `up` is not looked at where the activation is not gated.
DEVICE float activate(float gate, float up) {
#ifdef CLAMP_LIMIT
  up = fminf(fmaxf(up, -CLAMP_LIMIT), CLAMP_LIMIT);
  if constexpr (ACTIVATION == SWIGLUSTEP) return fminf(gate * sigmoid(gate), CLAMP_LIMIT) * up;
  gate = fminf(gate, CLAMP_LIMIT);
#endif
  if constexpr (ACTIVATION == SILU) return gate * sigmoid(gate) * up;
  if constexpr (ACTIVATION == GELU) return gelu(gate) * up;
  if constexpr (ACTIVATION == GELU_TANH) {
    float inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
    return gate * sigmoid(2.0f * inner) * up;
  }
  if constexpr (ACTIVATION == SWIGLUOAI) return (up + 1.0f) * gate * sigmoid(1.702f * gate);
  if constexpr (ACTIVATION == SITU) return soft(gate, 4.0f) * sigmoid(gate) * soft(up, 25.0f);
  if constexpr (ACTIVATION == SILU_NO_MUL) return gate * sigmoid(gate);
  if constexpr (ACTIVATION == GELU_NO_MUL) return gelu(gate);
  float positive = fmaxf(gate, 0.0f);
  return positive * positive;
}
