// High-throughput (prefill) combine: sends each rank's result rows to the ranks of their tokens, which add them up as
// they arrive.
//
// Layout in:   results [received rows, HIDDEN] of this rank's experts, already weighted and summed per row, in bf16, or
//              in f32 beside f16 rows; the slots of this rank's tokens. SLOTS: results [received rows, TOPK, HIDDEN] in
//              bf16, neither weighted nor summed. OVERLAP: the experts still write them, and a flag per expert
//              (kernels/cuda/arrival.cuh).
// Layout out:  output [T, HIDDEN], the sum over ranks in rank order, in f32, rounded once; zeros for a token without
//              any. This rank's own results are read in place; OVERLAP: they are stored like the others'.
// Warp roles:  32 warps per block. 0 to 15 send rows, 16 releases their flags (Flag queue), 17 to 31 receive: claim
//              parts of tokens, wait for their rows, add them. Senders join the receivers when they have finished.
// SLOTS:       Whoever reads a row adds up its slots in slot order, product and sum rounded in f32, and rounds to bf16,
//              as kernels/mul_sum.py does. Warps claim what they send, so any block may be missing.
// OVERLAP:     Blocks wait for the rows first, so that a rank whose rows are missing is named, and not those that
//              wait for them. 24 warps send. They claim parts of rows in the order in which these rows' last experts
//              are computed, and wait for the experts. All blocks start when the experts have; those that find no
//              room do when blocks of the experts end.
// Example:     a token with rows from ranks 2 and 0: out = round(y0 + y2).
#include "high_throughput.cuh"

struct Params {
  Common common;
  const u8* results;  // [received rows, HIDDEN]
  const int* slots;   // [T, RANKS], as the batch was sent
  u8* output;         // [T, HIDDEN]
#if SLOTS
  const int* expert_map;  // [num_ids]: number of each id among this rank's experts, -1 for others
#endif
#if OVERLAP
  const u64* finished;  // [experts]: the epoch once all results of that expert are in `results`
  const int* order;     // received rows, by the last of their experts
  const u64* ordered;   // the epoch once `order` is that of this batch
  const u64* sources;   // [RANKS]: the epoch once all rows of that source are here
#endif
#if SLOTS
  int num_ids;
#endif
  int num_tokens;
};

constexpr int kSenders = OVERLAP ? kWarps * 3 / 4 : kWarps / 2;  // of a block
// A warp adds up one part of a token, kPartVectors vectors, so that the last tokens take little time.
constexpr int kPartVectors = 128;
constexpr int kParts = (kResultVectors + kPartVectors - 1) / kPartVectors;
constexpr int kSums = 2;                       // vectors that a lane sums at a time
constexpr bool kOwnSlots = SLOTS && !OVERLAP;  // this rank's own rows are read in place, as slots

#if OVERLAP
// Waits for the rows of a source. If they do not arrive, all later waits of this rank end at once. No result is
// finished earlier, since w13 precedes w2.
DEVICE void await_source(const Params& p, int source) {
  const u64 epoch = p.common.current_epoch();
  if (p.common.alive(source) && load_acquire_sys(p.sources + source) != epoch) {
    Wait<PHASE_DISPATCH>(p.common.limits, epoch).for_flag(p.sources + source, epoch, source);
  }
}
#endif

// A received row, distributed over a warp: lane s holds the local expert of slot s, -1 for none, and its weight.
struct SlotsOfRow {
  const u8* results;
  int expert;
  float weight;
};

// By a warp: computes the weighted sum of the row's slots for this lane's kSums vectors: `start`, and every 32nd after
// it.
DEVICE void sum_slots(const SlotsOfRow& row, int start, Sums (&sum)[kSums]) {
  constexpr int kSlots = 2;  // loaded at a time
  for (u32 left = __ballot_sync(kAllLanes, row.expert >= 0); left;) {
    Vec v[kSlots][kSums];
    float of_slot[kSlots];
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      const bool is_there = left != 0;
      const int slot = is_there ? __ffs(left) - 1 : 0;
      left &= left - 1;
      of_slot[n] = __shfl_sync(kAllLanes, row.weight, slot);
      of_slot[n] = is_there ? of_slot[n] : 0.0f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const u32 at = slot * kResultVectors + start + 32 * i;
        v[n][i] = is_there && start + 32 * i < kResultVectors ? reinterpret_cast<const Vec*>(row.results)[at] : Vec{};
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
}

#if SLOTS
DEVICE SlotsOfRow slots_of(const Params& p, u64 row) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const u64 at = 4 * (row * TOPK + lane);
  const float weight = lane < TOPK ? *reinterpret_cast<const float*>(c.at(c.rank, c.weights + at)) : 0.0f;
  const int expert = lane < TOPK ? local_expert(p, *reinterpret_cast<const int*>(c.at(c.rank, c.ids + at))) : -1;
  return SlotsOfRow{p.results + static_cast<u64>(kPlainBytes) * TOPK * row, expert, weight};
}

// By a warp: stores a part of the sum of a row's slots to `target`.
DEVICE void store_sum(const SlotsOfRow& row, int part, u8* target) {
  const int begin = part * kPartVectors;
  for (int start = begin; start < begin + kPartVectors; start += 32 * kSums) {
    const int at = start + threadIdx.x % 32;
    Sums sum[kSums] = {};
    sum_slots(row, at, sum);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (at + 32 * i < kResultVectors) {
        reinterpret_cast<Vec*>(target)[at + 32 * i] = pack_result(sum[i]);
      }
    }
  }
}

// Returns the flag of a part that the warp has sent to one lane, null to the others; lanes take turns.
DEVICE u64* flag_of_part(const Common& c, int to, u64 row, int part, int sent) {
  const bool is_mine = threadIdx.x % 32 == static_cast<u32>(sent) % kQueuedFlags;
  return is_mine ? c.flag_of(to, c.result_flags, row * kParts + part) : nullptr;
}
#endif

#if OVERLAP
// By a warp: waits for all experts of a row and sends a part of their sum. Sends nothing once a wait of this rank has
// failed, because the contents of rows are undefined then.
DEVICE bool send_sum(const Params& p, Wait<PHASE_COMBINE>& wait, u64 row, int part, u8* target, u64 epoch) {
  const Common& c = p.common;
  const SlotsOfRow slots = slots_of(p, row);
  const u64* flag = p.finished + max(slots.expert, 0);
  const bool came = slots.expert < 0 || load_acquire_sys(flag) == epoch || wait.for_flag(flag, epoch, c.rank);
  __syncwarp();
  const bool has_failed = c.failed();
  if (!__all_sync(kAllLanes, came && !has_failed)) {
    return false;
  }
  store_sum(slots, part, target);
  return true;
}

// Sends the results of rows in the order in which their experts are computed.
DEVICE void send_results(const Params& p, FlagQueue<kSenders>& due, u64 epoch) {
  const Common& c = p.common;
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
    enqueue_flags(due, is_sent ? flag_of_part(c, to, there, part, sent++) : nullptr);
  }
}

#else
// Destinations alternate, and each rank begins with the next rank, so that no rank's links become a hot spot.
constexpr int kRowsPerTurn = 64;  // rows that go to one rank before the next

struct Destination {
  int source;  // the rank that the row came from
  int index;   // of its rows
};

DEVICE Destination destination_of(const Common& c, int i) {
  const int turn = i / kRowsPerTurn;
  return {(c.rank + 1 + turn % kOthers) % RANKS, turn / kOthers * kRowsPerTurn + i % kRowsPerTurn};
}

// The exclusive upper bound of destination_of's argument.
DEVICE int num_destinations(const Common& c) {
  return (most_rows(c) + kRowsPerTurn - 1) / kRowsPerTurn * kOthers * kRowsPerTurn;
}

#if SLOTS
DEVICE void send_results(const Params& p, FlagQueue<kSenders>& due, u64) {
  const Common& c = p.common;
  TaskCounter tasks(c.taken + RESULTS_TAKEN);
  const int count = num_destinations(c) * kParts;
  int sent = 0;
  for (int task = tasks.next(); task < count; task = tasks.next()) {
    const int part = task % kParts;
    const auto [source, index] = destination_of(c, task / kParts);
    if (index < c.placement->count[source]) {
      const u64 row = c.placement->begin[source] + index, there = row + c.placement->return_offset[source];
      store_sum(slots_of(p, row), part, c.at(source, c.results + kResultBytes * there));
      enqueue_flags(due, flag_of_part(c, source, there, part, sent++));
    }
  }
}
#else
DEVICE void send_results(const Params& p, FlagQueue<kSenders>& due, u64 epoch) {
  const Common& c = p.common;
  const int count = num_destinations(c), lane = threadIdx.x % 32;
  int sent = 0;
  for (int i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < count; i += gridDim.x * kSenders) {
    const auto [source, index] = destination_of(c, i);
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
#endif

// A lane's vectors of a part of a row.
struct Part {
  Vec v[kPartVectors / 32];
};

#if SLOTS
DEVICE Part sum_of_part(const SlotsOfRow& row, int begin) {
  Part part;
#pragma unroll
  for (int first = 0; first < kPartVectors / 32; first += kSums) {
    Sums sum[kSums] = {};
    sum_slots(row, begin + threadIdx.x % 32 + 32 * first, sum);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      part.v[first + i] = pack_result(sum[i]);
    }
  }
  return part;
}
#endif

// By a warp: adds up the rows of `ranks` in order and stores a part of the sum. Lane r holds the address of rank r's
// row; kRows rows are loaded at a time. The row of own_rank, if it is not -1, is `own`.
DEVICE void sum_rows(u32 ranks, u64 address, int own_rank, const Part& own, int begin, int end, u8* output) {
  constexpr int kRows = kOwnSlots ? 1 : 3;  // registers are short
#pragma unroll(kOwnSlots ? kPartVectors / 32 / kSums : 1)
  for (int first = begin; first < begin + kPartVectors; first += 32 * kSums) {
    const int start = first + threadIdx.x % 32;
    Sums sum[kSums] = {};
    for (u32 left = ranks; left;) {
      Vec v[kRows][kSums];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const bool is_there = left != 0;
        const int rank = is_there ? __ffs(left) - 1 : 0;
        const u64 at = __shfl_sync(kAllLanes, address, rank);
        left &= left - 1;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const Vec* from = reinterpret_cast<const Vec*>(at) + start + 32 * i;
          const Vec other = is_there && rank != own_rank && start + 32 * i < end ? *from : Vec{};
          v[row][i] = kOwnSlots && is_there && rank == own_rank ? own.v[(first - begin) / 32 + i] : other;
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
    const int token = task / kParts, part = task % kParts, begin = part * kPartVectors;
    const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
    const bool is_own = !OVERLAP && lane == c.rank && slot >= 0;
    const u64 row = is_own ? slot + c.placement->send[lane] : slot;  // here, or among the results
    const u32 ranks = __ballot_sync(kAllLanes, slot >= 0);
    int own_rank = -1;
    Part own;
#if SLOTS && !OVERLAP
    // Summed before the others' are waited for.
    if (ranks >> c.rank & 1) {
      own_rank = c.rank;
      own = sum_of_part(slots_of(p, __shfl_sync(kAllLanes, row, own_rank)), begin);
    }
#endif
    bool came = true;
    if (slot >= 0 && !is_own) {
      const u64 flag = SLOTS ? row * kParts + part : row;
      came = await_flag(wait, c.flag_of(c.rank, c.result_flags, flag), epoch, lane);
    }
    __syncwarp();
    if (__all_sync(kAllLanes, came)) {
      const u64 address = reinterpret_cast<u64>(is_own ? p.results : c.at(c.rank, c.results)) + kResultBytes * row;
      u8* output = p.output + static_cast<u64>(token) * kPlainBytes;
      sum_rows(ranks, address, own_rank, own, begin, min(begin + kPartVectors, kResultVectors), output);
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
      send_results(p, due, epoch);
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
