// Both GEMMs of the experts with many rows and the activation between them in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// Experts of few rows are left to decode_sm90.cu (threshold.cuh). Weights are operand A of the tensor cores,
// dequantized in registers, tokens operand B in shared memory. The warps of a block:
//   0 to 7     two warpgroups of 128 weight rows (the second: 64 of narrow tiles; 192 or 256 of tall ones) x up to 176
//              tokens: dequantize, multiply, apply bias and activation
//   8          claims items (prefill_schedule.cuh) and streams codes and scales with bulk copies
//   9 to 11    load the tokens' rows, and wait for w13's tiles before they read `hidden`: one thread by tensor copies,
//              or all of them chunk by chunk where the rows are gathered
// Shared memory holds a ring of stages of 128 columns, each with codes, scales and tokens. Codes run ahead: those of w2
// stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Ring`.
#include "handover.cuh"
#include "prefill_producers.cuh"
#include "prefill_tall.cuh"

template <int kMost>
DEVICE void run_segment(const ExpertsParams& p, Shared& shared, const Segment& g, Ring<kMost>& ring) {
  if constexpr (kHasTall && kMost == kSmallTokens) {
    if (g.tile_rows > kTileRows) return run_tall_segment(p, shared.schedule, g, ring);
  }
  SumsOf<kMost> sums;
  multiply_segment<kMost>(sums, g, p.gemm[g.phase].groups == 1, are_gathered(p, g.phase), ring);
  finish_segment<kMost>(p, shared.schedule, g, sums);
}

template <int kMost>
DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, u8* memory) {
  Ring<kMost> ring(memory);
  if (threadIdx.x >= kConsumerThreads / 2) pass_turn(1);  // the first turn is the other warpgroup's
  for_each_segment(shared, [&](const Segment& in_shared) {
    if constexpr (kMost == kLargeTokens) {
      run_segment<kMost>(p, shared, in_shared, ring);  // the sums leave no registers for a copy
    } else {
      run_segment<kMost>(p, shared, Segment(in_shared), ring);
    }
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages<kTileTokens>; i++) {
    barrier_init(&shared.full[i], 1 + kTokenWarps * 32);
    barrier_init(&shared.empty[i], kConsumerWarps);
  }
  for (int i = 0; i < kSegments; i++) {
    barrier_init(&shared.segment_full[i], 1);
    barrier_init(&shared.segment_empty[i], kConsumerWarps + kTokenWarps);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

template <int kMost>
DEVICE void run_producers(const PrefillParams& params, Shared& shared, u8* memory, int ticket) {
  Ring<kMost> ring(memory);
  if (threadIdx.x / 32 == kWeightWarp) {
    ticket = __shfl_sync(~0u, ticket, 0);
    if (elected()) run_weight_thread(params.experts, shared, ring, ticket);
    __syncwarp();
  } else {
    run_token_warps(params, shared, ring);
  }
}

// A last step of fewer columns multiplies what lies behind them by zero: it must be a number.
template <int kMost>
DEVICE void clear_codes(u8* memory) {
  uint4* words = reinterpret_cast<uint4*>(Ring<kMost>(memory).codes());
  constexpr int kWordsOfAll = kStages<kMost> * kCodeStage<kMost> / 16;
  for (int i = threadIdx.x; i < kWordsOfAll; i += kThreads) words[i] = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Nothing is to be done: one block keeps the order of kernels. Every call of few rows waits for this way out, so it is
// short and comes first in the kernel.
DEVICE void leave_at_once() {
  if (blockIdx.x == 0) wait_for_previous_kernels();
  asm volatile("exit;");
}

// The last block to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = false;
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // not kept since the start
  if (thread == 0) {
    wait_for_previous_kernels();  // keeps the order of kernels
    is_last = add_acquire_release(p.sync + 1, 1) == (int)gridDim.x - 1;
  }
  if (!__syncthreads_or(is_last)) return;
  for (int i = thread; i < 2 + p.num_experts + 2 * kMaxBlocks; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill(const __grid_constant__ PrefillParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  let_next_kernel_come();
  bool few;
  int largest = most_rows(p, few), few_rows = p.few_rows;
  if (largest <= few_rows) return leave_at_once();
  if (few) few_rows = agreed_few_rows(p, threadIdx.x % 32);
  if (largest <= few_rows) return leave_at_once();
  Shared& shared = shared_of(memory);
  int ticket = threadIdx.x == kWeightWarp * 32 ? atomicAdd(p.sync, 1) : 0;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32 * kChoices) init_barriers(shared);
  // One warp makes the tables while another decides how they are cut, where it is known what tiles there are.
  Schedule& s = shared.schedule;
  int num_choices = largest > kSmallTokens ? kChoices : 1;
  if (warp < num_choices) consider(p, few_rows, largest, warp, lane, s.choices[warp]);
  if (num_choices > 1) __syncthreads();
  if (warp == 0) {
    __syncwarp();
    take_choice(s, best_choice(s, num_choices, lane), lane);
  } else if (warp == 1) {
    int most_tokens = num_choices > 1 ? best_choice(s, num_choices, lane).tiles.most_tokens : kSmallTokens;
    make_tables(s, p, few_rows, most_tokens, lane);
  }
  __syncthreads();
  make_pieces(s, p.num_experts);
  // The compiler sees that it is the same for all lanes.
  int most_tokens = __shfl_sync(~0u, shared.schedule.most_tokens, 0);
  bool large = kHasLarge && most_tokens == kLargeTokens;
  bool clears = p.gemm[0].columns % kStepColumns || p.gemm[1].columns % kStepColumns;
  if (clears) {
    if (large) {
      clear_codes<kLargeTokens>(memory);
    } else if (kHasTall && most_tokens == kSmallTokens) {
      clear_codes<kSmallTokens>(memory);
    } else {
      clear_codes<kTileTokens>(memory);
    }
  }
  if (clears || s.phase[0].pieces + s.phase[1].pieces > 0) __syncthreads();
  // Code of its own for each size of tiles: fewer registers for sums leave the compiler more to order products by.
  if (large) {
    if constexpr (kHasLarge) {
      if (threadIdx.x < kConsumerThreads) {
        registers_grow<224>();
        run_consumers<kLargeTokens>(p, shared, memory);
      } else {
        registers_shrink<56>();
        run_producers<kLargeTokens>(params, shared, memory, ticket);
      }
    }
  } else if (threadIdx.x < kConsumerThreads) {
    registers_grow<216>();
    if (most_tokens == kSmallTokens) {
      run_consumers<kSmallTokens>(p, shared, memory);
    } else {
      run_consumers<kTileTokens>(p, shared, memory);
    }
    run_additions(p, shared.schedule, shared.first_addition);
  } else {
    registers_shrink<72>();
    if (kHasTall && most_tokens == kSmallTokens) {
      run_producers<kSmallTokens>(params, shared, memory, ticket);
    } else {
      run_producers<kTileTokens>(params, shared, memory, ticket);
    }
  }
  leave(p);
}
