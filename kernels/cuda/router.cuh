// Chooses the experts of a token from its router logits, by one warp: the rule of moe_ep/routing/topk.py.
//
// Layout in:   logits [T, NUM_EXPERTS] (LOGITS: 0 f32, 1 bf16, 2 f16), bias f32 [NUM_EXPERTS] where HAS_BIAS.
// Layout out:  lane k has the id and the weight of slot k. Ids are those of the plain form, bit for bit; of equal
//              values the lowest id comes first.
// Lanes:       a lane has neighbouring experts, kVector at a time, with softmax, whose sum is then added up as by the
//              Triton kernel (kernels/routing.py); otherwise every 32nd expert, so that a group of 32 is one register.
// Example:     sigmoid logits [0, 2, 1, 2], TOP_K 2, RENORMALIZE: lanes 0 and 1 have ids 1 and 3, weights .5 and .5.
#pragma once
#include "ptx.cuh"

#define SOFTMAX 0
#define SIGMOID 1
#define SQRTSOFTPLUS 2

struct RouterParams {
  const void* logits;  // [T, NUM_EXPERTS], contiguous
  const float* bias;   // [NUM_EXPERTS], or null
  float* weights;      // [T, TOP_K], written
  int* ids;            // [T, TOP_K], written
  float scaling_factor;
  int num_tokens;
};

struct Choice {
  int id;
  float weight;
};

DEVICE constexpr int power_of_2(int value) {
  int power = 32;
  while (power < value) power *= 2;
  return power;
}

constexpr int kExpertsPerLane = power_of_2(NUM_EXPERTS) / 32;
constexpr int kVector = SCORING != SOFTMAX ? 1 : kExpertsPerLane < 4 ? kExpertsPerLane : 4;
constexpr int kGroupSize = NUM_EXPERTS / NUM_GROUPS;
constexpr int kNotThere = -0x7f800001;  // the key of -inf
static_assert(TOP_K <= 32 && NUM_GROUPS <= 32, "a lane has one slot and one group");

// The expert of a lane's register i; rises with i.
DEVICE int expert_of(int lane, int i) { return i / kVector * 32 * kVector + lane * kVector + i % kVector; }

DEVICE float load_logit(const RouterParams& p, int token, int expert) {
  i64 at = (i64)token * NUM_EXPERTS + expert;
#if LOGITS == 0
  return static_cast<const float*>(p.logits)[at];
#elif LOGITS == 1
  return __uint_as_float((u32) static_cast<const u16*>(p.logits)[at] << 16);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<const u16*>(p.logits)[at]));
  return out;
#endif
}

// The quotient as Triton computes it, with an error of 2 in the last place.
DEVICE float divide(float a, float b) {
  float out;
  asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// int32 that compare as the f32 do, zeros of both signs alike; the way back is the same.
DEVICE int key_of_bits(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
DEVICE int key_of(float value) { return key_of_bits(__float_as_int(__fadd_rn(value, 0.0f))); }
DEVICE float value_of(int key) { return __int_as_float(key_of_bits(key)); }

// A finite f32 to choose by.
DEVICE float finite(float value) {
  constexpr float kHighest = 3.4028234663852886e38f;
  return value == value ? fminf(fmaxf(value, -kHighest), kHighest) : -kHighest;
}

// The score of a logit; `largest` and `sum` are of all logits, for softmax.
DEVICE float score_of(float logit, float largest, float sum) {
#if SCORING == SOFTMAX
  return divide(expf(__fsub_rn(logit, largest)), sum);
#elif SCORING == SIGMOID
  return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-logit)));
#else
  return __fsqrt_rn(logit > 20.0f ? logit : log1pf(expf(logit)));
#endif
}

// Takes the experts that are not in the best TOPK_GROUP groups away. With a bias a group's score is the sum of its two
// best choices, otherwise the best.
DEVICE void keep_best_groups(int (&keys)[kExpertsPerLane], int lane) {
  int mine = kNotThere;
#pragma unroll
  for (int g = 0; g < NUM_GROUPS; g++) {
    int best = kNotThere, second = kNotThere;
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) {
      int key = expert_of(lane, i) / kGroupSize == g ? keys[i] : kNotThere;
      second = max(second, min(best, key));
      best = max(best, key);
    }
    int first = __reduce_max_sync(~0u, best);
#if HAS_BIAS
    if (kGroupSize > 1) {
      // One of the experts that have the best choice is left out.
      bool leads = lane == __ffs(__ballot_sync(~0u, best == first)) - 1;
      second = __reduce_max_sync(~0u, leads ? second : best);
      first = key_of(finite(__fadd_rn(value_of(first), value_of(second))));
    }
#endif
    if (lane == g) mine = first;
  }
  int before = 0;
#pragma unroll
  for (int g = 0; g < NUM_GROUPS; g++) {
    int other = __shfl_sync(~0u, mine, g);
    before += other > mine || (other == mine && g < lane);
  }
  u32 kept = __ballot_sync(~0u, lane < NUM_GROUPS && before < TOPK_GROUP);
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    if (!(kept >> expert_of(lane, i) / kGroupSize & 1)) keys[i] = kNotThere;
  }
}

// One warp; lanes from TOP_K on have no slot.
DEVICE Choice choose_experts(const RouterParams& p, int token) {
  int lane = threadIdx.x % 32, keys[kExpertsPerLane];
  float largest = 0.0f, sum = 0.0f, logits[kExpertsPerLane];
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    logits[i] =
        expert_of(lane, i) < NUM_EXPERTS ? load_logit(p, token, expert_of(lane, i)) : __int_as_float(0xff800000);
  }
#if SCORING == SOFTMAX
  largest = logits[0];
#pragma unroll
  for (int i = 1; i < kExpertsPerLane; i++) largest = fmaxf(largest, logits[i]);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) sum = __fadd_rn(sum, expf(__fsub_rn(logits[i], largest)));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
#endif
#pragma unroll
  for (int i = 0; i < kExpertsPerLane; i++) {
    int expert = expert_of(lane, i);
    float choice = logits[i];
#if HAS_BIAS
    choice = __fadd_rn(score_of(choice, largest, sum), expert < NUM_EXPERTS ? p.bias[expert] : 0.0f);
#endif
    keys[i] = expert < NUM_EXPERTS ? key_of(finite(choice)) : kNotThere;
  }
  if (TOPK_GROUP < NUM_GROUPS) keep_best_groups(keys, lane);
  Choice mine = {0, 0.0f};
#pragma unroll 1
  for (int k = 0; k < TOP_K; k++) {
    int best = keys[0], first = 0x7fffffff;
#pragma unroll
    for (int i = 1; i < kExpertsPerLane; i++) best = max(best, keys[i]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = kExpertsPerLane - 1; i >= 0; i--) first = keys[i] == best ? expert_of(lane, i) : first;
    first = __reduce_min_sync(~0u, first);
#pragma unroll
    for (int i = 0; i < kExpertsPerLane; i++) keys[i] = expert_of(lane, i) == first ? kNotThere : keys[i];
    if (lane == k) mine.id = first;
  }
  if (lane < TOP_K) mine.weight = score_of(load_logit(p, token, mine.id), largest, sum);
  __syncwarp();
#if RENORMALIZE
  constexpr float kTiny = 1.1754943508222875e-38f;
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) total = __fadd_rn(total, __shfl_sync(~0u, mine.weight, k));
  mine.weight = divide(mine.weight, total < kTiny ? kTiny : total);
#endif
  mine.weight = __fmul_rn(mine.weight, p.scaling_factor);
  return mine;
}
