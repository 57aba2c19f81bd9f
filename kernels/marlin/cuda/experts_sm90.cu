// Both GEMMs of the experts and the activation between them in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// The weights are operand A (dequantized in registers), the tokens operand B (shared memory, 8 to 128 of them), so that
// a few rows cost no padding. The warps of a block:
//   0 to 7     two warpgroups of 128 weight rows: dequantize, multiply, add up shared tiles, apply bias and activation
//   8          claims items (schedule.cuh) and streams packed weights and scales with bulk copies
//   9 to 11    copy the tokens' rows, wherever they are, and wait for w13's tiles before they read `hidden`
// Shared memory is a ring of stages of 128 columns: codes of 256 rows, their scales, the tokens. Its depth follows the
// largest tile there is, so that a few rows leave room for many weights in flight. Weights run ahead of the tokens:
// those of w2 stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Stage`.
#include "finish.cuh"
#include "producers.cuh"

template <int kTokens>
DEVICE void compute_segment(const ExpertsParams& p, Shared& shared, Segment g, Ring& ring) {
  Lane me;
  float sums[2][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  if constexpr (kTokens <= 32) {
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      multiply_stage_by_warp<kTokens>(me, sums, ring);
      __syncwarp();
      if (me.lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      ring.advance();
    }
  } else {
    u32 a[32];
    u64* previous = nullptr;
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      fence_proxy_async();  // the tokens were written by ordinary copies and are read by the tensor cores
      multiply_stage<kTokens>(me, sums, a, ring, previous);
      previous = &shared.empty[ring.stage];
      ring.advance();
    }
    wgmma_wait<0>();
    if (me.lane == 0) barrier_arrive(previous);
  }
  // Found again rather than kept: the sums leave few registers for it.
  asm volatile("" : "+r"(g.tile));
  locate_tile(shared.schedule, p.num_experts, g);
  finish_segment<kTokens>(p, shared, g, sums);
}

DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, Ring ring) {
  for_each_item(shared, p.num_experts, [&](const Segment& g) {
    switch (tile_tokens(g.tokens)) {
      case 8: compute_segment<8>(p, shared, g, ring); break;
      case 16: compute_segment<16>(p, shared, g, ring); break;
      case 32: compute_segment<32>(p, shared, g, ring); break;
      case 64: compute_segment<64>(p, shared, g, ring); break;
      default: compute_segment<128>(p, shared, g, ring);
    }
  });
}

// The ring fills what is left of the block's shared memory behind the tables.
DEVICE Ring make_ring(u8* start, u32 free_bytes, int token_rows) {
  Ring ring;
  ring.base = start;
  ring.token_rows = token_rows;
  ring.stage_bytes = kCodeBytes + kScaleStage + token_rows * 2 * kStepColumns;
  ring.num_stages = min((int)(free_bytes / ring.stage_bytes), kMaxStages);
  return ring;
}

// The last block to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.item[0] = atomicAdd(p.sync + 1, 1) == (int)gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.item[0]) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts + 2 * kMaxBlocks; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts(const __grid_constant__ ExpertsParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int ticket = threadIdx.x == kWeightWarp * 32 ? atomicAdd(p.sync, 1) : 0;
  if (threadIdx.x < 32) {
    make_tables(shared.schedule, p, threadIdx.x);
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < kMaxStages; i++) {
      barrier_init(&shared.full[i], 1 + kTokenWarps * 32);
      barrier_init(&shared.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kItems; i++) {
      barrier_init(&shared.item_full[i], 1);
      barrier_init(&shared.item_empty[i], kTokenWarps + kConsumerWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  make_pieces(shared.schedule, p.num_experts);
  u32 dynamic_bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic_bytes));
  u32 used = (sizeof(Shared) + 4 * (p.num_experts + 1) * sizeof(int) + 1023) / 1024 * 1024;
  Ring ring = make_ring(memory + used, dynamic_bytes - used, shared.schedule.largest_tile);
  if (p.gemm[0].columns % kStepColumns || p.gemm[1].columns % kStepColumns) {
    // A last step of fewer columns multiplies what lies behind them by zero: it must be a number.
    uint4* words = reinterpret_cast<uint4*>(memory + used);
    for (u32 i = threadIdx.x; i < (dynamic_bytes - used) / 16; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerThreads) {
    registers_grow<216>();
    run_consumers(p, shared, ring);
  } else {
    registers_shrink<72>();
    if (threadIdx.x / 32 == kWeightWarp) {
      run_weight_warp(p, shared, ring, ticket);
    } else {
      run_token_warps(p, shared, ring);
    }
  }
  leave(p, shared);
}
