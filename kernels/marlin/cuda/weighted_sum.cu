// out[t, :] = sum over slots s of weights[t, s] * rows[t, s, :], in slot order and f32; slots without an expert (id -1)
// are not read and may hold anything. One thread sums eight columns of one token.
//
//   rows [T, slots, K] activations, weights [T, slots] f32, ids [T, slots] int32 -> out [T, K]
// Example: weights [[.5, 2]], ids [[3, -1]], rows [[[4, 6], [nan, nan]]] give [[2, 3]].
#include "number.cuh"

struct SumParams {
  const u16* rows;
  const float* weights;  // null: all 1
  const int* ids;
  u16* out;
  int tokens, slots, columns;
};

extern "C" __global__ void __launch_bounds__(256) weighted_sum(const __grid_constant__ SumParams p) {
  int chunks = p.columns / 8;
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (i64)p.tokens * chunks) return;
  i64 token = at / chunks;
  int chunk = at % chunks;
  float sum[8] = {};
  for (int slot = 0; slot < p.slots; slot++) {
    i64 row = token * p.slots + slot;
    if (p.ids[row] < 0) continue;
    float weight = p.weights == nullptr ? 1.0f : p.weights[row];
    uint4 v = *reinterpret_cast<const uint4*>(p.rows + row * p.columns + chunk * 8);
    u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += weight * to_float((u16)(pairs[i / 2] >> (i % 2 * 16)));
  }
  uint4 out = make_uint4(to_pair(sum[0], sum[1]), to_pair(sum[2], sum[3]), to_pair(sum[4], sum[5]),
                         to_pair(sum[6], sum[7]));
  *reinterpret_cast<uint4*>(p.out + token * p.columns + chunk * 8) = out;
}
