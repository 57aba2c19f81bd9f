// High-throughput (prefill) combine: sends each rank's result rows to the ranks of their tokens, which add them up as
// they arrive.
//
// Layout in:   results [received rows, HIDDEN] of this rank's experts, already weighted and summed per row, in bf16, or in f32
//              beside f16 rows; the slots.
// Layout out:  output [T, HIDDEN], the sum over ranks in rank order, in f32, rounded once; zeros for a token without
//              any. This rank's own results are read in place.
// Warp roles:  32 warps per block. 0 to 15 send rows, 16 releases their flags (Flag queue), 17 to 31 receive: claim
//              parts of tokens, wait for their rows, add them. Senders join the receivers when they have finished.
// Example:     a token with rows from ranks 2 and 0: out = round(y0 + y2).
#include "high_throughput.cuh"

struct Params {
  Common common;
  const u8* results;  // [received rows, HIDDEN]
  const int* slots;   // [T, RANKS], as the batch was sent
  u8* output;         // [T, HIDDEN]
  int num_tokens;
};

constexpr int kSenders = kWarps / 2;  // of a block
constexpr int kRowsPerTurn = 64;      // rows that go to one rank before the next
// A token is added up by one warp per part of so many vectors, so that the last tokens take little time.
constexpr int kPartVectors = 128;
constexpr int kParts = (kResultVectors + kPartVectors - 1) / kPartVectors;

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
    if (slot >= 0 && lane == c.rank) {
      const u64 row = slot + c.placement->send[lane];
      address = reinterpret_cast<u64>(p.results) + kResultBytes * row;
    } else if (slot >= 0) {
      address = reinterpret_cast<u64>(c.at(c.rank, c.results)) + static_cast<u64>(kResultBytes) * slot;
      came = await_flag(wait, c.flag_of(c.rank, c.result_flags, slot), epoch, lane);
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
  const u64 epoch = c.current_epoch();
  __shared__ FlagQueue<kSenders> due;
  clear_queue(due);
  if (warp < kSenders) {
    if (!c.failed()) {
      send_results(p, due, warp * gridDim.x + blockIdx.x, gridDim.x * kSenders, epoch);
    }
    finish_enqueuing(due);
  } else if (warp == kSenders) {
    release_flags(due, kSenders, epoch);
  }
  receive_tokens(p, epoch);
}
