// High-throughput (prefill) dispatch beside experts, second part: 16-bit rows, each with a flag, while the experts run.
//
// Layout in:   rows [T, HIDDEN], topk_ids [T, TOPK]; slots and placement of high_throughput_plan.cu.
// Layout out:  at each rank the rows of its tokens, by (source, token), this rank's own too; a flag per row, and one per
//              source once all of its rows are there (kernels/cuda/arrival.cuh).
// Order:       a warp sends its rows in the order in which experts are computed, that of their ids, by each row's first
//              expert at its destination; destinations alternate.
// Warp roles:  31 warps of a block send, one releases their flags (Flag queue).
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
  int num_ids;
  int num_tokens;
};

constexpr int kSenders = kWarps - 1;  // of a block
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
      enqueue_flags(due, lane == sent++ % RANKS ? c.flag_of(to, c.row_flags, row) : nullptr);
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        experts[rank] = rank == to && lane == source ? kNone : experts[rank];
      }
    }
  }
}

// By the releasing warp, behind its last flag: the last block tells all ranks that this rank's rows are there.
DEVICE void announce(const Params& p, u64 epoch) {
  const Common& c = p.common;
  const int lane = static_cast<int>(threadIdx.x % 32);
  __syncwarp();
  bool is_last = false;
  if (lane == 0) {
    __threadfence_system();
    is_last = atomicAdd(c.finished, 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  if (__any_sync(kAllLanes, is_last)) {
    __threadfence_system();
    if (lane < RANKS && c.alive(lane)) {
      store_volatile(c.flag_of(lane, p.source_flags, c.rank), epoch);
    }
    if (lane == 0) {
      *c.finished = 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_rows(const __grid_constant__ Params p) {
  const Common& c = p.common;
  __shared__ FlagQueue<kSenders> due;
  clear_queue(due);
  grid_dependency_wait();
  grid_dependency_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool has_failed = c.failed();
  if (warp < kSenders) {
    if (!has_failed) {
      send_rows(p, due, warp * gridDim.x + blockIdx.x, gridDim.x * kSenders);
    }
    finish_enqueuing(due);
  } else {
    release_flags(due, kSenders, c.current_epoch());
    if (!has_failed) {
      announce(p, c.current_epoch());
    }
  }
}
