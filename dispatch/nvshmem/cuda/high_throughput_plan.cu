// High-throughput (prefill) plan, the first kernel of a batch: which token goes where, and, after one exchange of
// counts, where all ranks' rows begin.
//
// Layout in:   topk_ids [T, TOPK], owners [num_ids] (-1 for ranks that do not participate).
// Layout out:  slots [T, RANKS]: the number of each token among all rows that this rank sends, ordered by (rank,
//              token), -1 for none; the placement (Placement, high_throughput.cuh).
// Warps:       32 of one block. Each has a run of tokens; its counts and those of the warps before it number the rows.
// Example:     owners [0, 0, 1, 1], ids [[0, 1], [2, 0], [-1, 3]]: counts [2, 2], slots [[0, -1], [1, 2], [-1, 3]].
#include "high_throughput.cuh"

struct Params {
  Common common;
  const int* topk_ids;
  const int* owners;
  int* slots;
  u64* arriving;  // in host memory: the batch's number, and its rows that arrive here; null if not wanted
  int num_ids, num_tokens, batch;
};

constexpr int kTokensAtOnce = TOPK > 8 ? 1 : 4;  // tokens of a thread whose ids are loaded together

struct Shared {
  int before[kWarps][RANKS];              // tokens of the warp for each rank; then of the warps before it
  int counts[RANKS][2 * kLinesOfCounts];  // rows that each rank sends to each
  int first[RANKS];                       // the first row of each rank
  int all_came;
};

// Destinations, as bits, of each of a thread's tokens, which are 32 apart; only ranks in `alive`.
DEVICE void ranks_of(const Params& p, u32 alive, int first, int end, u32 (&ranks)[kTokensAtOnce]) {
  alignas(16) int ids[kTokensAtOnce][TOPK];
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    const int* from = p.topk_ids + static_cast<u64>(min(first + 32 * i, end - 1)) * TOPK;
    if (TOPK % 4 == 0) {
#pragma unroll
      for (int j = 0; j < TOPK / 4; ++j) {
        reinterpret_cast<Vec*>(ids[i])[j] = reinterpret_cast<const Vec*>(from)[j];
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < TOPK; ++slot) {
        ids[i][slot] = from[slot];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTokensAtOnce; ++i) {
    ranks[i] = 0;
#pragma unroll
    for (int slot = 0; slot < TOPK; ++slot) {
      const int id = ids[i][slot], owner = id >= 0 && id < p.num_ids ? __ldg(p.owners + id) : -1;
      ranks[i] |= owner >= 0 ? 1u << owner : 0u;
    }
    ranks[i] = first + 32 * i < end ? ranks[i] & alive : 0;
  }
}

// Counts tokens, and leaves each token's destinations in its first slot, for write_slots.
DEVICE void count_tokens(const Params& p, Shared& shared, u32 alive, int begin, int end) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int first = begin + lane; first < end + lane; first += 32 * kTokensAtOnce) {
    u32 ranks[kTokensAtOnce];
    ranks_of(p, alive, first, end, ranks);
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const int token = first + 32 * i;
      if (token < end) {
        p.slots[static_cast<u64>(token) * RANKS] = static_cast<int>(ranks[i]);
      }
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        const int here = __popc(__ballot_sync(kAllLanes, ranks[i] >> rank & 1));
        count += lane == rank ? here : 0;
      }
    }
  }
  if (lane < RANKS) {
    shared.before[threadIdx.x / 32][lane] = count;
  }
}

// By a warp: turns each warp's tokens for `rank` into those of the warps before it, and their sum into the count.
DEVICE void sum_before(Shared& shared, int own, int rank) {
  static_assert(kWarps == 32, "a lane has a warp's tokens");
  const int lane = threadIdx.x % 32, count = shared.before[lane][rank];
  int inclusive = count;
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, inclusive, step);
    inclusive += lane >= step ? before : 0;
  }
  shared.before[lane][rank] = inclusive - count;
  if (lane == kWarps - 1) {
    shared.counts[own][rank] = inclusive;
  }
}

// One SM writes all slots, so the number of stores matters.
DEVICE void store_slots(int* to, const int (&slots)[RANKS]) {
  if (RANKS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < RANKS / 4; ++i) {
      reinterpret_cast<Vec*>(to)[i] = reinterpret_cast<const Vec*>(slots)[i];
    }
  } else {
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
      to[rank] = slots[rank];
    }
  }
}

DEVICE void write_slots(const Params& p, const Shared& shared, int begin, int end) {
  const int lane = threadIdx.x % 32;
  int next[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    next[rank] = shared.first[rank] + shared.before[threadIdx.x / 32][rank];
  }
  for (int first = begin + lane; first < end + lane; first += 32 * kTokensAtOnce) {
    u32 ranks[kTokensAtOnce];
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      const int token = first + 32 * i;
      ranks[i] = token < end ? static_cast<u32>(p.slots[static_cast<u64>(token) * RANKS]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kTokensAtOnce; ++i) {
      alignas(16) int slots[RANKS];
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        const bool has = ranks[i] >> rank & 1;
        const u32 which = __ballot_sync(kAllLanes, has);
        slots[rank] = has ? next[rank] + __popc(which & ((1u << lane) - 1)) : -1;
        next[rank] += __popc(which);
      }
      if (first + 32 * i < end) {
        store_slots(p.slots + static_cast<u64>(first + 32 * i) * RANKS, slots);
      }
    }
  }
}

// Posts this rank's counts to all participating ranks.
DEVICE void post_counts(const Common& c, const Shared& shared, u32 epoch) {
  const int thread = static_cast<int>(threadIdx.x), peer = thread / kLinesOfCounts, line = thread % kLinesOfCounts;
  if (peer < RANKS && c.alive(peer)) {
    const u32 a = shared.counts[c.rank][2 * line], b = shared.counts[c.rank][2 * line + 1];
#if DEVICE_API
    if (peer != c.rank) {
      u64* both = reinterpret_cast<u64*>(c.counts_of(c.rank, c.rank, line, epoch));
      put_flag(both, static_cast<u64>(epoch) << 32 | a, c.pes[peer]);
      put_flag(both + 1, static_cast<u64>(epoch) << 32 | b, c.pes[peer]);
    }
#else
    store_line(c.counts_of(peer, c.rank, line, epoch), a, b, epoch);
#endif
  }
}

// Reads all ranks' counts; zeros for those that do not participate.
DEVICE void await_counts(const Common& c, Shared& shared, u32 epoch) {
  const int thread = static_cast<int>(threadIdx.x), peer = thread / kLinesOfCounts, line = thread % kLinesOfCounts;
  if (peer < RANKS && peer != c.rank) {
    Wait<PHASE_DISPATCH> wait(c.limits, epoch);
    Vec came{};
    if (c.alive(peer) && !wait.for_line(c.counts_of(c.rank, peer, line, epoch), peer, came)) {
      shared.all_came = 0;
    }
    shared.counts[peer][2 * line] = static_cast<int>(came.x);
    shared.counts[peer][2 * line + 1] = static_cast<int>(came.z);
    __threadfence_system();
  }
}

DEVICE void write_placement(const Params& p, const Shared& shared) {
  const Common& c = p.common;
  const int other = static_cast<int>(threadIdx.x);
  int there = 0, sent = 0, here = 0, return_offset = 0, total = 0;
  for (int rank = 0; rank < RANKS; ++rank) {
    there += rank < c.rank ? shared.counts[rank][other] : 0;
    sent += rank < other ? shared.counts[c.rank][rank] : 0;
    here += rank < other ? shared.counts[rank][c.rank] : 0;
    return_offset += rank < c.rank ? shared.counts[other][rank] : 0;
    total += shared.counts[rank][c.rank];
  }
  c.placement->send[other] = there - sent;
  c.placement->begin[other] = shared.all_came ? here : 0;
  c.placement->count[other] = shared.all_came ? shared.counts[other][c.rank] : 0;
  c.placement->return_offset[other] = return_offset - here;
  if (other == 0) {
    total = shared.all_came ? total : 0;
    c.placement->total = total;
    if (p.arriving != nullptr) {
      *reinterpret_cast<volatile u64*>(p.arriving) = static_cast<u64>(p.batch) << 32 | static_cast<u32>(total);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_plan(const __grid_constant__ Params p) {
  const Common& c = p.common;
  grid_dependency_launch();
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const u64 epoch = c.current_epoch() + 1;
  const u32 alive = c.all_alive();
  const int run = (p.num_tokens + kThreads - 1) / kThreads * 32;
  const int begin = warp * run, end = min(begin + run, p.num_tokens);
  if (thread < 2 * kLinesOfCounts) {
    shared.counts[c.rank][thread] = 0;
  }
  count_tokens(p, shared, alive, begin, end);
  __syncthreads();
  if (warp < RANKS) {
    sum_before(shared, c.rank, warp);
  }
  if (thread == 0) {
    shared.all_came = 1;
    c.taken[ROWS_TAKEN] = c.taken[TOKENS_TAKEN] = c.taken[RESULTS_TAKEN] = 0;
  }
  __syncthreads();
  post_counts(c, shared, epoch);
  if (thread < RANKS) {
    int first = 0;
    for (int rank = 0; rank < thread; ++rank) {
      first += shared.counts[c.rank][rank];
    }
    shared.first[thread] = first;
  }
  __syncthreads();
  write_slots(p, shared, begin, end);
  await_counts(c, shared, epoch);
  __syncthreads();
  if (thread == 0) {
    *c.epoch = epoch;
  }
  if (thread < RANKS) {
    write_placement(p, shared);
  }
}
