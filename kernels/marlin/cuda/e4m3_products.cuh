// A tile's sums: products of 128 columns in e4m3, times the scales of weights and tokens, added up in f32.
#pragma once
#include "e4m3_stage.cuh"
#include "number.cuh"
#include "wgmma_e4m3.cuh"

// Sums of a lane: [16 of its warp's 32 rows][8 tokens][row g, row g + 8][two tokens].
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Operand A of 16 rows x 128 columns: a lane's codes as they are packed, those of either row together.
DEVICE void load_weights(u32 from, u32 (&weights)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++) {
    u32 w[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(from + n * 4 * kPieceBytes)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) weights[n][i] = permute_bytes(w[i / 2 * 2], w[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
  }
}

// sums += part, times the scales of its rows and, in w2, those of its tokens; w13's have one for all columns.
template <int kTokens, int kPhase>
DEVICE void add_scaled(float* sums, const float* part, float low, float high, u32 token_scales) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float own[2] = {1.0f, 1.0f};
    if constexpr (kPhase == 1) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(own[0]), "=f"(own[1])
                   : "r"(token_scales + 32 * j)
                   : "memory");
    }
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i++) sums[i] = fmaf(part[i], (i % 4 < 2 ? low : high) * own[i % 2], sums[i]);
  }
}

// One half of a warp's rows after the other, so that the sums of products take half the registers.
template <int kTokens, int kPhase>
DEVICE void multiply_tile(SumsOf<kTokens>& sums, int steps, Ring& ring) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 codes = warp / 2 * kStripBytes + warp % 2 * 2 * kPieceBytes + lane * 16;
  u32 scales = kScalesPlace + (warp * 32 + lane / 4 * 2) * 2, token_scales = kTokenScalesPlace + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  for (; steps > 0; steps--) {
    ring.wait_full();
    u32 place = ring.place();
    u64 tokens = kDescriptorHigh << 32 | __shfl_sync(~0u, wgmma_descriptor(place + kTokensPlace), 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 weights[4][4], pair;
      float part[kTokens / 2];
      load_weights(place + codes + half * kPieceBytes, weights);
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(place + scales + half * 32) : "memory");
      wgmma_fence();
      wgmma_e4m3<kTokens, false>(part, weights[0], tokens);
#pragma unroll
      for (int n = 1; n < 4; n++) wgmma_e4m3<kTokens, true>(part, weights[n], tokens + 2 * n);
      wgmma_commit();
      wgmma_wait<0>();
      float low = to_float(pair & 0xffff), high = to_float(pair >> 16);
      add_scaled<kTokens, kPhase>(sums[half], part, low, high, place + token_scales);
    }
    __syncwarp();
    if (lane == 0) ring.release();
    ring.advance();
  }
}
