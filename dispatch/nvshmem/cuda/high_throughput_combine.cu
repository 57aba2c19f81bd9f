// High-throughput (prefill) combine: sends each rank's result rows to the ranks of their tokens, which add them up as
// they arrive.
//
// Layout in:   results [received rows, HIDDEN] of this rank's experts, already weighted and summed per row, in bf16, or in f32
//              beside f16 rows; the slots. OVERLAP: results [received rows, TOPK, HIDDEN] in bf16, neither weighted nor
//              summed, which the experts still write, and a flag per expert (kernels/cuda/arrival.cuh).
// Layout out:  output [T, HIDDEN], the sum over ranks in rank order, in f32, rounded once; zeros for a token without
//              any. This rank's own results are read in place; OVERLAP: they are stored like the others'.
// Warp roles:  32 warps per block. 0 to 15 send rows, 16 releases their flags (Flag queue), 17 to 31 receive: claim
//              parts of tokens, wait for their rows, add them. Senders join the receivers when they have finished.
// OVERLAP:     Blocks wait for the rows first, so that a rank whose rows are missing is named, and not those that
//              wait for them. 24 warps send. They claim parts of rows in the order in which these rows' last experts
//              are computed, wait for the experts, add up the slots in slot order, product and sum rounded in f32, and
//              round to bf16, as kernels/mul_sum.py does. All blocks start when the experts have; those that find no
//              room do when blocks of the experts end.
// Example:     a token with rows from ranks 2 and 0: out = round(y0 + y2).
#include "high_throughput.cuh"

struct Params {
  Common common;
  const u8* results;  // [received rows, HIDDEN]
  const int* slots;   // [T, RANKS], as the batch was sent
  u8* output;         // [T, HIDDEN]
#if OVERLAP
  const u64* finished;    // [experts]: the epoch once all results of that expert are in `results`
  const int* expert_map;  // [num_ids]: number of each id among this rank's experts, -1 for others
  const int* order;       // received rows, by the last of their experts
  const u64* ordered;     // the epoch once `order` is that of this batch
  const u64* sources;     // [RANKS]: the epoch once all rows of that source are here
  int num_ids;
#endif
  int num_tokens;
};

constexpr int kSenders = OVERLAP ? kWarps * 3 / 4 : kWarps / 2;  // of a block
constexpr int kRowsPerTurn = 64;                                 // rows that go to one rank before the next
// A token is added up by one warp per part of so many vectors, so that the last tokens take little time.
constexpr int kPartVectors = 128;
constexpr int kParts = (kResultVectors + kPartVectors - 1) / kPartVectors;

#if OVERLAP
// Waits for the rows of a source; if they do not come, no later wait of this rank lasts. No result is finished before, as
// w13 comes before w2.
DEVICE void await_source(const Params& p, int source) {
  const u64 epoch = p.common.current_epoch();
  if (p.common.alive(source) && load_acquire_sys(p.sources + source) != epoch) {
    Wait<PHASE_DISPATCH>(p.common.limits, epoch).for_flag(p.sources + source, epoch, source);
  }
}

// By a warp: a part of the weighted sum of those slots of a row that are bits of `slots`; lane s has slot s's weight.
DEVICE void sum_slots(const u8* row, u32 slots, float weight, int begin, u8* target) {
  constexpr int kSums = 2, kSlots = 2;  // vectors of a lane, and slots, that are loaded at a time
  for (int start = begin + threadIdx.x % 32; start < begin + kPartVectors; start += 32 * kSums) {
    Sums sum[kSums] = {};
    for (u32 left = slots; left;) {
      Vec v[kSlots][kSums];
      float of_slot[kSlots];
#pragma unroll
      for (int n = 0; n < kSlots; ++n) {
        const bool is_there = left != 0;
        const int slot = is_there ? __ffs(left) - 1 : 0;
        left &= left - 1;
        of_slot[n] = is_there ? __shfl_sync(kAllLanes, weight, slot) : 0.0f;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const u32 at = slot * kResultVectors + start + 32 * i;
          v[n][i] = is_there && start + 32 * i < kResultVectors ? reinterpret_cast<const Vec*>(row)[at] : Vec{};
        }
      }
#pragma unroll
      for (int n = 0; n < kSlots; ++n) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const Sums f = unpack_result(v[n][i]);
#pragma unroll
          for (int k = 0; k < kResultColumns; ++k) {
            sum[i].v[k] = __fadd_rn(sum[i].v[k], __fmul_rn(f.v[k], of_slot[n]));
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (start + 32 * i < kResultVectors) {
        reinterpret_cast<Vec*>(target)[start + 32 * i] = pack_result(sum[i]);
      }
    }
  }
}

// By a warp: waits for all experts of a row and sends a part of their sum; nothing where a wait of this rank has failed,
// behind which rows are what they happen to be.
DEVICE bool send_sum(const Params& p, Wait<PHASE_COMBINE>& wait, u64 row, int part, u8* target, u64 epoch) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const u64 at = 4 * (row * TOPK + lane);
  const int expert = lane < TOPK ? local_expert(p, *reinterpret_cast<const int*>(c.at(c.rank, c.ids + at))) : -1;
  const float weight = expert >= 0 ? *reinterpret_cast<const float*>(c.at(c.rank, c.weights + at)) : 0.0f;
  const u64* flag = p.finished + max(expert, 0);
  const bool came = expert < 0 || load_acquire_sys(flag) == epoch || wait.for_flag(flag, epoch, c.rank);
  __syncwarp();
  const bool has_failed = c.failed();
  if (!__all_sync(kAllLanes, came && !has_failed)) {
    return false;
  }
  const u32 slots = __ballot_sync(kAllLanes, expert >= 0);
  sum_slots(p.results + static_cast<u64>(kPlainBytes) * TOPK * row, slots, weight, part * kPartVectors, target);
  return true;
}

// Rows in the order in which their experts are computed.
DEVICE void send_results(const Params& p, FlagQueue<kSenders>& due, u64 epoch) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  Wait<PHASE_COMBINE> wait(c.limits, epoch);
  const bool is_ordered = load_acquire_sys(p.ordered) == epoch || wait.for_flag(p.ordered, epoch, c.rank);
  __syncwarp();
  if (!__all_sync(kAllLanes, is_ordered)) {
    return;
  }
  TaskCounter tasks(c.taken + RESULTS_TAKEN);
  int sent = 0;
  for (int task = tasks.next(); task < c.placement->total * kParts; task = tasks.next()) {
    const int part = task % kParts;
    const int row = p.order[task / kParts];
    int to = 0;
#pragma unroll 1  // registers are short
    for (int source = 1; source < RANKS; ++source) {
      to = c.placement->begin[source] <= row ? source : to;
    }
    const u32 there = row + c.placement->return_offset[to];
    const bool is_sent =
        send_sum(p, wait, row, part, c.at(to, c.results + static_cast<u64>(kResultBytes) * there), c.current_epoch());
    const bool has_flag = is_sent && lane == sent++ % kQueuedFlags;
    enqueue_flags(due, has_flag ? c.flag_of(to, c.result_flags, static_cast<u64>(there) * kParts + part) : nullptr);
  }
}

#else
// Destinations alternate, and each rank begins with the one behind it, so that no rank's links become a hot spot.
DEVICE void send_results(const Params& p, FlagQueue<kSenders>& due, int first, int warps, u64 epoch) {
  const Common& c = p.common;
  int most = 0;
  for (int source = 0; source < RANKS; ++source) {
    most = max(most, source == c.rank ? 0 : c.placement->count[source]);
  }
  constexpr int kOthers = RANKS > 1 ? RANKS - 1 : 1;
  const int rounds = (most + kRowsPerTurn - 1) / kRowsPerTurn, lane = threadIdx.x % 32;
  int sent = 0;
  for (int i = first; i < rounds * kOthers * kRowsPerTurn; i += warps) {
    const int turn = i / kRowsPerTurn, source = (c.rank + 1 + turn % kOthers) % RANKS;
    const int index = turn / kOthers * kRowsPerTurn + i % kRowsPerTurn;
    if (index < c.placement->count[source]) {
      const u64 row = c.placement->begin[source] + index, there = row + c.placement->return_offset[source];
      const u8* result = p.results + kResultBytes * row;
#if DEVICE_API
      u8* staged = c.at(c.rank, c.staged_results + kResultBytes * row);
      copy_row<kResultVectors>(result, staged);
      u64* flag = c.flag_of(c.rank, c.result_flags, there);
      put_row(c, source, c.results + kResultBytes * there, staged, kResultBytes, flag, epoch);
#else
      copy_row<kResultVectors>(result, c.at(source, c.results + kResultBytes * there));
      enqueue_flags(due, lane == sent++ % RANKS ? c.flag_of(source, c.result_flags, there) : nullptr);
#endif
    }
  }
}
#endif

// A part of the sum of the rows at the addresses that lanes hold, those of `ranks`, in order; kRows are loaded at a
// time.
DEVICE void sum_rows(u32 ranks, u64 address, int begin, int end, u8* output) {
  constexpr int kSums = 2, kRows = 3;
  for (int start = begin + threadIdx.x % 32; start < begin + kPartVectors; start += 32 * kSums) {
    Sums sum[kSums] = {};
    for (u32 left = ranks; left;) {
      Vec v[kRows][kSums];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const bool is_there = left != 0;
        const u64 at = __shfl_sync(kAllLanes, address, is_there ? __ffs(left) - 1 : 0);
        left &= left - 1;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const Vec* from = reinterpret_cast<const Vec*>(at) + start + 32 * i;
          v[row][i] = is_there && start + 32 * i < end ? *from : Vec{};
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          add_result(sum[i], v[row][i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (start + 32 * i < end) {
        reinterpret_cast<OutputVec*>(output)[start + 32 * i] = pack_output(sum[i]);
      }
    }
  }
}

DEVICE void receive_tokens(const Params& p, u64 epoch) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  Wait<PHASE_COMBINE> wait(c.limits, epoch);
  TaskCounter tasks(c.taken + TOKENS_TAKEN);
  for (int task = tasks.next(); task < p.num_tokens * kParts; task = tasks.next()) {
    const int token = task / kParts, begin = task % kParts * kPartVectors;
    const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
    u64 address = 0;
    bool came = true;
    if (!OVERLAP && slot >= 0 && lane == c.rank) {
      const u64 row = slot + c.placement->send[lane];
      address = reinterpret_cast<u64>(p.results) + kResultBytes * row;
    } else if (slot >= 0) {
      address = reinterpret_cast<u64>(c.at(c.rank, c.results)) + static_cast<u64>(kResultBytes) * slot;
      const u64 flag = OVERLAP ? static_cast<u64>(slot) * kParts + task % kParts : slot;
      came = await_flag(wait, c.flag_of(c.rank, c.result_flags, flag), epoch, lane);
    }
    __syncwarp();
    if (__all_sync(kAllLanes, came)) {
      u8* output = p.output + static_cast<u64>(token) * kPlainBytes;
      sum_rows(__ballot_sync(kAllLanes, slot >= 0), address, begin, min(begin + kPartVectors, kResultVectors), output);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_combine(const __grid_constant__ Params p) {
  const Common& c = p.common;
  const int warp = threadIdx.x / 32;
  __shared__ FlagQueue<kSenders> due;
  clear_queue(due);
#if OVERLAP
  if (threadIdx.x < RANKS) {
    await_source(p, threadIdx.x);
  }
  __syncthreads();
#endif
  const u64 epoch = c.current_epoch();
  if (warp < kSenders) {
    if (!c.failed()) {
#if OVERLAP
      send_results(p, due, epoch);
#else
      send_results(p, due, warp * gridDim.x + blockIdx.x, gridDim.x * kSenders, epoch);
#endif
    }
    finish_enqueuing(due);
  } else if (warp == kSenders) {
    release_flags(due, kSenders, epoch);
  }
  receive_tokens(p, epoch);
#if OVERLAP
  grid_dependency_wait();  // ends behind the experts, so that no later kernel runs beside them
#endif
}
