// Epilogue of all packed-expert kernels: global scale, bias, activation, rows of tokens.
#pragma once
#include "number.cuh"
#include "params.cuh"

// ==== Activation ====
//
// The activation between the two GEMMs, in f32. ACTIVATION is its number. CLAMP_LIMIT, if defined, clamps the gate from
// above and up on both sides: the gate before the activation, or behind silu in SWIGLUSTEP, which always has a limit.

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

// Exponentials below 2^-126 vanish beside 1 anyway; flushing them to zero saves three instructions.
DEVICE float sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.44269504f * x));
  return __fdividef(1.0f, 1.0f + power);
}
// limit * tanh(x / limit), with an error of about 1e-7 of the limit, which exceeds the rounding of a 16-bit result
// below 1e-3 of the limit. Choosing a series there spills 3.6 kB in the prefill kernel.
DEVICE float soft(float x, float limit) { return limit * (2.0f * sigmoid(x * (2.0f / limit)) - 1.0f); }
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

// `up` is ignored by activations without a gate.
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

// ==== Rows ====
//
// Output row of row i of an expert. `first_row`: rows of all experts before it; `first_output_row`: position of its row
// 0 among the batched rows or in the list of sorted ids.
DEVICE i64 output_row_of(const ExpertsParams& p, int phase, int first_row, i64 first_output_row, int i) {
  if (phase == 0) return first_row + i;
  return p.sorted ? p.row_ids[first_output_row + i] : first_output_row + i;
}

// Scales, activates and transposes a lane's sums of eight tokens to token-major: one pair with a gate, otherwise two.
template <bool kActivate>
DEVICE void finish_sums(const float* sums, const float* alpha, const float* bias, u32* out) {
  float v[4];
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = sums[k] * alpha[k / 2] + bias[k / 2];
  if constexpr (kActivate && kGated) {
    out[0] = transpose_8x8(to_pair(activate(v[0], v[2]), activate(v[1], v[3])));
  } else {
    if constexpr (kActivate) {
#pragma unroll
      for (int k = 0; k < 4; k++) v[k] = activate(v[k], 0.0f);
    }
    out[0] = transpose_8x8(to_pair(v[0], v[1]));
    out[1] = transpose_8x8(to_pair(v[2], v[3]));
  }
}

// Factors of the sums of rows g and g + 8 (dequantized weights may be a power of two too small).
struct SumScale {
  float low = 1.0f, high = 1.0f;
};

// Finishes 16 weight rows of a warp, from `first` on, for the expert's tokens from `first_token` up to `rows`. `sums`
// are accumulators of the tensor cores. Calls put(token, pairs) with a lane's two neighbouring results, or four without
// a gate.
template <int kTokens, bool kActivate, typename Put>
DEVICE void finish_rows(const ExpertsParams& p, int expert, int rows, int first, const float* sums, int first_token,
                        SumScale sum_scale, Put put) {
  constexpr bool kGate = kActivate && kGated;
  const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
  int lane = threadIdx.x % 32, width = kGate ? gemm.rows / 2 : gemm.rows;
  asm volatile("" : "+r"(lane));  // opaque: nothing derived from it is kept across the main loop
  int row = lane / 4, low = kGate ? first / 2 + row : first + row / 2 * 4 + row % 2;
  int high = kGate ? width + low : low + 2;
  float alpha[2] = {sum_scale.low, sum_scale.high}, bias[2] = {0.0f, 0.0f};
  if (gemm.alphas != nullptr) {
    alpha[0] *= gemm.alphas[expert * gemm.alphas_per_expert];
    alpha[1] *= gemm.alphas[kGate ? (expert + 1) * gemm.alphas_per_expert - 1 : expert * gemm.alphas_per_expert];
  }
  if (gemm.bias != nullptr) {
    bias[0] = to_float(gemm.bias[(i64)expert * gemm.rows + low]);
    bias[1] = to_float(gemm.bias[(i64)expert * gemm.rows + high]);
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    if (first_token + 8 * j >= rows) continue;
    u32 out[2];
    finish_sums<kActivate>(sums + 4 * j, alpha, bias, out);
    int token = first_token + 8 * j + lane / 4;
    if (token < rows) put(token, out);
  }
}

// The same, stored to the expert's output rows.
template <int kTokens, bool kActivate>
DEVICE void store_rows(const ExpertsParams& p, int expert, int first_row, i64 first_output_row, int rows, int first,
                       const float* sums, int first_token = 0, SumScale sum_scale = {}) {
  constexpr int kPhase = kActivate ? 0 : 1;
  finish_rows<kTokens, kActivate>(p, expert, rows, first, sums, first_token, sum_scale, [&](int token, const u32* out) {
    int lane = threadIdx.x % 32, width = kActivate && kGated ? p.gemm[0].rows / 2 : p.gemm[kPhase].rows;
    u16* to = p.gemm[kPhase].output + output_row_of(p, kPhase, first_row, first_output_row, token) * width;
    if constexpr (kActivate && kGated) {
      *reinterpret_cast<u32*>(to + first / 2 + lane % 4 * 2) = out[0];
    } else {
      *reinterpret_cast<uint2*>(to + first + lane % 4 * 4) = make_uint2(out[0], out[1]);
    }
  });
}
