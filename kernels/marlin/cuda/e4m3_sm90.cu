// Both GEMMs of the experts in e4m3, and the gated activation between them, in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// Weights are e4m3 with one scale for each row, or for each row's 128 columns. x is e4m3 with one scale for each row
// (e4m3_rows.cu), hidden with one for each row's 128 columns: a tile of w13 is 256 rows, gate and up by turns, and makes
// those 128 columns. Products of 128 columns are added up by the tensor cores, and then, times their scales, in f32.
// The warps of a block:
//   0 to 7     two warpgroups of 128 weight rows x up to 128 tokens: multiply, apply bias and activation, quantize
//   8          claims tiles and streams weights
//   9          copies tokens, and waits for w13's tiles before it reads hidden
// Rows are those of sorted ids (params.py). Sums are made in a fixed order: same input, same bits.
#include "e4m3_producers.cuh"
#include "e4m3_products.cuh"
#include "store.cuh"

static_assert(kGated, "a tile of w13 makes 128 columns of hidden where gate and up alternate");

// Activated results in place of the gates' sums: [16 rows][8 tokens][row g][two tokens].
template <int kTokens>
DEVICE void activate_sums(const E4m3Params& params, const Segment& g, int row, SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  const GemmParams& gemm = p.gemm[0];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* scales = params.row_scales + row + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int column = (g.first_row + warp * 32 + half * 16) / 2 + lane / 4;
    float alpha[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
    if (gemm.alphas != nullptr) {
      alpha[0] = gemm.alphas[g.expert * gemm.alphas_per_expert];
      alpha[1] = gemm.alphas[(g.expert + 1) * gemm.alphas_per_expert - 1];
    }
    if (gemm.bias != nullptr) {
      const u16* biases = gemm.bias + (i64)g.expert * gemm.rows;
      bias[0] = to_float(biases[column]), bias[1] = to_float(biases[gemm.rows / 2 + column]);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float2 scale = 8 * j < g.tokens ? __ldg(reinterpret_cast<const float2*>(scales + 8 * j)) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float own = i ? scale.y : scale.x;
        float gate = sums[half][4 * j + i] * (own * alpha[0]) + bias[0];
        float up = sums[half][4 * j + 2 + i] * (own * alpha[1]) + bias[1];
        sums[half][4 * j + i] = activate(gate, up);
      }
    }
  }
}

// The scales of a tile's 128 columns of results, for every token: in shared memory, and where w2's tokens have theirs.
template <int kTokens>
DEVICE void find_scales(const E4m3Params& params, Shared& shared, const Segment& g, int row, SumsOf<kTokens>& sums) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float largest = fmaxf(fabsf(sums[0][4 * j + i]), fabsf(sums[1][4 * j + i]));
      for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
      if (lane < 4) shared.largest[warp][8 * j + 2 * lane + i] = largest;
    }
  }
  named_barrier<1, kConsumerThreads>();
  int token = threadIdx.x;
  if (token < kTokens) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; w++) largest = fmaxf(largest, shared.largest[w][token]);
    float scale = fmaxf(largest / kLargestCode, kLeastScale);
    shared.scale[token] = 1.0f / scale;
    int group = g.first_row / kTileRows;
    if (token < g.tokens) params.hidden_scales[(i64)group * params.capacity + row + token] = scale;
  }
  named_barrier<1, kConsumerThreads>();
}

template <int kTokens>
DEVICE void store_hidden(const E4m3Params& params, const Tables& tables, Shared& shared, const Segment& g,
                         SumsOf<kTokens>& sums) {
  const ExpertsParams& p = params.experts;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = tables.starts[g.expert] + g.first_token;
  activate_sums<kTokens>(params, g, row, sums);
  find_scales<kTokens>(params, shared, g, row, sums);
  u8* to = params.hidden + (row + lane / 4) * (i64)p.gemm[1].columns + g.first_row / 2 + warp * 16 + lane % 4 * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2*>(&shared.scale[8 * j + lane % 4 * 2]);
    // Rows g and g + 8 of either token side by side; the lane gets those of rows 2 t and 2 t + 1 of one token.
    u32 first = e4m3_codes(sums[0][4 * j] * inverse.x, sums[1][4 * j] * inverse.x);
    u32 second = e4m3_codes(sums[0][4 * j + 1] * inverse.y, sums[1][4 * j + 1] * inverse.y);
    u32 codes = permute_bytes(transpose_8x8(first | second << 16), 0, 0x3120);
    if (8 * j + lane / 4 < g.tokens) *reinterpret_cast<u32*>(to + 8 * j * (i64)p.gemm[1].columns) = codes;
  }
  fence_proxy_async_global();
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) add_release(ready_flag(p, g.expert), 1);
}

template <int kTokens>
DEVICE void store_output(const ExpertsParams& p, const Tables& tables, const Segment& g, SumsOf<kTokens>& sums) {
  i64 place = tables.places[g.expert];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int first = g.first_row + threadIdx.x / 32 * 32 + half * 16;
    if (first >= p.gemm[1].rows) break;
    int end = g.first_token + g.tokens;
    store_rows<kTokens, false>(p, g.expert, 0, place, end, first, sums[half], g.first_token);
  }
}

template <int kTokens, int kPhase>
DEVICE void run_tile(const E4m3Params& params, const Tables& tables, Shared& shared, const Segment& g, Ring& ring) {
  SumsOf<kTokens> sums;
  multiply_tile<kTokens, kPhase>(sums, steps_of(params.experts, kPhase), ring);
  if constexpr (kPhase == 0) {
    store_hidden<kTokens>(params, tables, shared, g, sums);
  } else {
    store_output<kTokens>(params.experts, tables, g, sums);
  }
}

// By the code for so many tokens, at least kTokens.
template <int kTokens, int kPhase>
DEVICE void run_tokens(const E4m3Params& params, const Tables& tables, Shared& shared, const Segment& g, Ring& ring) {
  if constexpr (kTokens < kTileTokens) {
    if (__shfl_sync(~0u, g.tokens, 0) > kTokens) {
      return run_tokens<kTokens + 32, kPhase>(params, tables, shared, g, ring);
    }
  }
  run_tile<kTokens, kPhase>(params, tables, shared, g, ring);
}

DEVICE void run_consumers(const E4m3Params& params, const Tables& tables, Shared& shared, Ring ring) {
  for_each_segment(shared, [&](const Segment g) {
    if (__shfl_sync(~0u, g.phase, 0) == 0) {
      run_tokens<32, 0>(params, tables, shared, g, ring);
    } else {
      run_tokens<32, 1>(params, tables, shared, g, ring);
    }
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages; i++) {
    barrier_init(&shared.full[i], 2);
    barrier_init(&shared.empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kSegments; i++) {
    barrier_init(&shared.segment_full[i], 1);
    barrier_init(&shared.segment_empty[i], kConsumerWarps + 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// The last block to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = threadIdx.x == 0 && add_acquire_release(p.sync + 1, 1) == (int)gridDim.x - 1;
  if (!__syncthreads_or(is_last)) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) e4m3_experts(const __grid_constant__ E4m3Params params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = shared_of(memory);
  Tables tables = tables_of(memory, p.num_experts);
  int warp = threadIdx.x / 32;
  if (warp == 0) tables.make(p, threadIdx.x % 32);
  if (threadIdx.x == 32) init_barriers(shared);
  __syncthreads();
  Ring ring(memory);
  if (warp < kConsumerWarps) {
    registers_grow<232>();
    run_consumers(params, tables, shared, ring);
  } else {
    registers_shrink<40>();
    if (warp == kWeightWarp) {
      if (elected()) run_weight_thread(p, tables, shared, ring);
    } else if (warp == kTokenWarp) {
      for_each_segment(shared, [&](const Segment g) {
        if (elected()) {
          run_token_thread(params, tables, g, ring);
        } else {
          for (int step = 0; step < steps_of(p, g.phase); step++) ring.advance();
        }
      });
    }
    __syncwarp();
  }
  leave(p);
}
