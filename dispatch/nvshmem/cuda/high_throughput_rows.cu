// High-throughput (prefill) dispatch beside experts, second part: rows, each with a flag, while the experts run.
//
// Layout in:   rows [T, HIDDEN] of 16 bits, topk_ids [T, TOPK]; slots and placement of high_throughput_plan.cu.
// Layout out:  at each rank the rows of its tokens, by (source, token), this rank's own too; a flag per row, and one
//              per source once all of its rows are there (kernels/cuda/arrival.cuh). Here the order in which the
//              combine sends results.
// Order:       a warp sends its rows in the order in which experts are computed, that of their ids, by each row's first
//              expert at its destination; destinations alternate.
// Warp roles:  31 warps of a block send, one releases their flags (Flag queue). The last block to finish orders
//              results.
// Progress:    sending waits for no other rank. The next kernel may start when all blocks of this one have.
// Example:     a warp's tokens have experts {7, 2}, {3} at one rank: the first token's row goes first (2), then the
//              second's (3).
#include "high_throughput.cuh"

struct Params {
  Common common;
  const u8* rows;       // [T, HIDDEN]
  const int* topk_ids;  // [T, TOPK]
  const int* owners;    // [num_ids], -1 for ranks that take no part
  const int* slots;     // [T, RANKS]
  u64 source_flags;     // offset
  const int* expert_map;
  int* order;    // [R * C]: received rows, by the last of their experts
  u64* ordered;  // the epoch once `order` is that of this batch
  int num_ids;
  int num_tokens;
};

constexpr int kSenders = kWarps - 1;  // of a block
constexpr int kMostExperts = 1024;    // of a rank
constexpr u32 kNone = ~0u;

// The first expert of a token at each rank; kNone where it has none.
DEVICE void first_experts(const Params& p, int token, u32 (&first)[RANKS]) {
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    first[rank] = kNone;
  }
  for (int slot = 0; slot < TOPK && token < p.num_tokens; ++slot) {
    const int id = p.topk_ids[static_cast<u64>(token) * TOPK + slot], owner = owner_of(p, id);
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
      const bool is_sent = owner == rank && p.slots[static_cast<u64>(token) * RANKS + rank] >= 0;
      first[rank] = is_sent ? min(first[rank], static_cast<u32>(id)) : first[rank];
    }
  }
}

// Tokens first, first + warps, ...: 32 at a time, one of each lane.
DEVICE void send_rows(const Params& p, FlagQueue<kSenders>& due, int first, int warps) {
  const Common& c = p.common;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int sent = 0;
  for (int begin = first; begin < p.num_tokens; begin += 32 * warps) {
    u32 experts[RANKS];
    first_experts(p, begin + lane * warps, experts);
    u32 left = (1u << RANKS) - 1;  // ranks
    for (int turn = 0; left; ++turn) {
      const int to = (c.rank + 1 + turn) % RANKS;
      u32 next = kNone;
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        next = rank == to && experts[rank] != kNone ? experts[rank] << 5 | lane : next;
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        next = min(next, __shfl_xor_sync(kAllLanes, next, step));
      }
      if (next == kNone) {
        left &= ~(1u << to);
        continue;
      }
      const int source = static_cast<int>(next % 32);
      const u64 token = begin + source * warps;
      const u64 row = p.slots[token * RANKS + to] + c.placement->send[to];
      copy_row(p.rows + token * kPlainBytes, c.at(to, c.rows + kRowBytes * row));
      enqueue_flags(due, lane == sent++ % kQueuedFlags ? c.flag_of(to, c.row_flags, row) : nullptr);
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        experts[rank] = rank == to && lane == source ? kNone : experts[rank];
      }
    }
  }
}

// By the last block to finish: tells all ranks that this rank's rows are there.
DEVICE void announce(const Params& p, u64 epoch) {
  const Common& c = p.common;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < RANKS && c.alive(peer)) {
    __threadfence_system();
    store_volatile(c.flag_of(peer, p.source_flags, c.rank), epoch);
  }
}

// The last expert of a received row, as its number here. Numbers ascend with ids.
DEVICE int last_expert(const Params& p, int row) {
  const Common& c = p.common;
  const int* ids = reinterpret_cast<const int*>(c.at(c.rank, c.ids)) + static_cast<u64>(row) * TOPK;
  int last = -1;
#pragma unroll
  for (int slot = 0; slot < TOPK; ++slot) {
    last = max(last, ids[slot]);
  }
  return min(max(local_expert(p, last), 0), kMostExperts - 1);
}

// By a block: a counting sort of the rows that arrive here by their last expert, for the combine.
DEVICE void order_rows(const Params& p, u64 epoch) {
  __shared__ int first[kMostExperts];
  const int thread = static_cast<int>(threadIdx.x), total = p.common.placement->total;
  for (int i = thread; i < kMostExperts; i += kThreads) {
    first[i] = 0;
  }
  __syncthreads();
  for (int row = thread; row < total; row += kThreads) {
    atomicAdd(&first[last_expert(p, row)], 1);
  }
  __syncthreads();
  if (thread < 32) {
    int before = 0;
    for (int i = thread; i < kMostExperts; i += 32) {
      const int count = first[i];
      int inclusive = count;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int more = __shfl_up_sync(kAllLanes, inclusive, step);
        inclusive += thread >= step ? more : 0;
      }
      first[i] = before + inclusive - count;
      before += __shfl_sync(kAllLanes, inclusive, 31);
    }
  }
  __syncthreads();
  for (int row = thread; row < total; row += kThreads) {
    p.order[atomicAdd(&first[last_expert(p, row)], 1)] = row;
  }
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    store_volatile(p.ordered, epoch);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_rows(const __grid_constant__ Params p) {
  const Common& c = p.common;
  __shared__ FlagQueue<kSenders> due;
  clear_queue(due);
  grid_dependency_wait();
  grid_dependency_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const u64 epoch = c.current_epoch();
  const bool has_failed = c.failed();
  if (warp < kSenders) {
    if (!has_failed) {
      send_rows(p, due, warp * gridDim.x + blockIdx.x, gridDim.x * kSenders);
    }
    finish_enqueuing(due);
  } else {
    release_flags(due, kSenders, epoch);
  }
  if (is_last_block(c)) {
    if (threadIdx.x == 0) {
      *c.finished = 0;
    }
    if (!has_failed) {
      announce(p, epoch);
    }
    order_rows(p, epoch);
  }
}
