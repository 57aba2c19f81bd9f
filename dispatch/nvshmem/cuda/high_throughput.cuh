// What the three kernels of a high-throughput (prefill) batch share: the symmetric block (high_throughput.py computes
// its offsets), its flags, and the queue of flags to release.
//
// R ranks, capacity C tokens per rank, TOPK slots per token.
//
//   counts       [2, R, 4]              lines: how many rows source s sends to each rank, two numbers per line
//   done         [R]                    lines: source s has written all of its rows, if rows have no flags (bf16, f16)
//   row_flags    [R * C]                the epoch once that row has arrived, if rows are converted (EIGHT_BIT,
//                                       DEVICE_API)
//   result_flags [C * min(R, TOPK)]     the epoch once that result has arrived; SLOTS: [.., parts of a result]
//   ids, weights, rows   [R * C]        what arrives, ordered by (source, token), without gaps
//   results      [C * min(R, TOPK)]     results for this rank's tokens, by (rank that computed, token), without gaps
//   source_flags [R]                    OVERLAP: the epoch once all rows of that source have arrived
//
// A rank posts its counts of a batch when it is done with the batch before, in stream order. Nobody writes here before
// that, so the block is reused without a barrier. Every line and flag carries the batch's epoch. Even and odd epochs
// have their own counts: a rank that posts those of epoch e + 2 has all ranks' of e + 1, which were posted by ranks
// that had read those of e. Counts and `done` are written in every batch, so 32 bits of the epoch suffice; flags of
// rows may be left for long and have 64.
//
// With DEVICE_API peers' memory need not be mapped: counts are sent as signals, and rows, followed by their ids and
// weights, as puts from staged copies; each rank extracts the parts that its experts read.
//
// In a dispatch of such or of 8-bit rows, and in the combine, some warps send and others receive row by row; senders
// join the receivers when everything is sent. Sending waits for no other rank, so receiving may wait for all. Half of
// each block's warps send, or, in a dispatch, almost all warps of some blocks.
#pragma once

#include "device_api.cuh"
#include "numbers.cuh"

// 1: rows are sent while the experts run (high_throughput_ids.cu and _rows.cu instead of _dispatch.cu), and results
// while they still do.
#ifndef OVERLAP
#define OVERLAP 0
#endif
// 1: the combine is given the slots of each row, neither weighted nor summed.
#ifndef SLOTS
#define SLOTS OVERLAP
#endif

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kLinesOfCounts = 4;
constexpr int kPlainBytes = 2 * HIDDEN;                  // of a row of 16 bits
constexpr bool kConvertsRows = EIGHT_BIT || DEVICE_API;  // they do not stay where they arrive
constexpr int kColumnBytes = EIGHT_BIT ? HIDDEN : kPlainBytes;
constexpr int kScaleWords = EIGHT_BIT ? (kGroups + 1) / 2 : 0;
// Bytes of a row on the wire; high_throughput_dispatch.cu describes what follows the columns.
constexpr int kTailBytes = 4 * (kScaleWords + 2 * TOPK);
constexpr int kRowBytes = kConvertsRows ? (kColumnBytes + kTailBytes + 127) / 128 * 128 : kPlainBytes;
constexpr int kAtOnce = 4;     // vectors that a lane loads before it stores the first
constexpr u32 kPauseNs = 100;  // between two polls of shared memory
enum { ROWS_TAKEN, TOKENS_TAKEN, RESULTS_TAKEN };

// Offsets of a batch's rows, made by the plan kernel.
struct Placement {
  int send[RANKS];           // row at rank d = slot + send[d]
  int begin[RANKS];          // first row here of source s
  int count[RANKS];          // rows here of source s
  int return_offset[RANKS];  // row at source s = row here + return_offset[s]
  int total;
};

struct Common {
  u64 peers[RANKS];  // address of each rank's block
  u64 counts, done, row_flags, result_flags, ids, weights, rows, results, staged_rows, staged_results;
  Limits limits;
  u64* epoch;     // of the last batch whose counts were exchanged
  u32* finished;  // blocks of the running kernel that have sent all of their rows
  u32* taken;     // [3]: how much of the batch has been claimed by warps
  Placement* placement;
  int rank;
  int pes[RANKS];  // NVSHMEM's numbers of the ranks

  DEVICE u8* at(int peer, u64 offset) const { return reinterpret_cast<u8*>(peers[peer]) + offset; }
  DEVICE u8* counts_of(int peer, int source, int line, u32 epoch) const {
    return at(peer, counts + 16ull * ((epoch % 2 * RANKS + source) * kLinesOfCounts + line));
  }
  DEVICE u8* done_of(int peer, int source) const { return at(peer, done + 16ull * source); }
  DEVICE u64* flag_of(int peer, u64 flags, u64 index) const {
    return reinterpret_cast<u64*>(at(peer, flags + 8 * index));
  }
  DEVICE bool failed() const { return *reinterpret_cast<volatile u32*>(&limits.status->failed); }
  DEVICE u32 all_alive() const { return *reinterpret_cast<volatile u32*>(&limits.status->alive); }
  DEVICE bool alive(int peer) const { return all_alive() >> peer & 1; }
  DEVICE u64 current_epoch() const { return *reinterpret_cast<volatile u64*>(epoch); }
};

constexpr int kOthers = RANKS > 1 ? RANKS - 1 : 1;

// The most rows here of one other source.
DEVICE int most_rows(const Common& c) {
  int most = 0;
  for (int source = 0; source < RANKS; ++source) {
    most = max(most, source == c.rank ? 0 : c.placement->count[source]);
  }
  return most;
}

// Waits for a row's flag on this rank, which mostly has arrived; each thread for its own.
template <u32 kPhase>
DEVICE bool await_flag(Wait<kPhase>& wait, u64* flag, u64 epoch, int peer) {
  const bool came = load_acquire_sys(flag) == epoch || wait.for_flag(flag, epoch, peer);
#if DEVICE_API
  if (came) {
    settle(flag, epoch);
  }
#endif
  return came;
}

// By a warp: copies the first kCount vectors.
template <int kCount = kVectors>
DEVICE void copy_row(const u8* row, u8* target) {
  const Vec* from = reinterpret_cast<const Vec*>(row);
  Vec* to = reinterpret_cast<Vec*>(target);
  for (int start = threadIdx.x % 32; start < kCount; start += 32 * kAtOnce) {
    Vec v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = start + 32 * i < kCount ? from[start + 32 * i] : Vec{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + 32 * i < kCount) {
        to[start + 32 * i] = v[i];
      }
    }
  }
}

#if DEVICE_API
// By a warp: puts a staged row to `offset` at another rank, followed by its flag.
DEVICE void put_row(const Common& c, int peer, u64 offset, const u8* staged, u64 bytes, u64* own_flag, u64 epoch) {
  __threadfence_system();
  __syncwarp();
  put_with_flag(c.at(c.rank, offset), staged, bytes, own_flag, epoch, c.pes[peer]);
}
#endif

// Hands out task numbers to a warp, from a counter that the plan kernel has reset; the next number is drawn ahead.
class TaskCounter {
 public:
  DEVICE explicit TaskCounter(u32* counter) : counter_(counter) { draw(); }

  DEVICE int next() {
    const u32 number = __shfl_sync(kAllLanes, ahead_, 0);
    draw();
    return static_cast<int>(number);
  }

 private:
  DEVICE void draw() {
    if (threadIdx.x % 32 == 0) {
      ahead_ = atomicAdd(counter_, 1u);
    }
  }

  u32* counter_;
  u32 ahead_ = 0;
};

// ==== Rows of a token ====
//
// Params have a batch's common, slots, topk_ids, weights, owners and num_ids.

// Destinations of a token: the ranks as bits, and in lane r its row of the batch at rank r.
struct Rows {
  u32 ranks;
  u64 index;
};

template <typename Params>
DEVICE Rows rows_of(const Params& p, int token) {
  const int lane = threadIdx.x % 32;
  const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
  const u64 index = slot >= 0 ? static_cast<u64>(slot + p.common.placement->send[lane]) : 0;
  return Rows{__ballot_sync(kAllLanes, slot >= 0), index};
}

template <typename Params>
DEVICE int owner_of(const Params& p, int id) {
  return id >= 0 && id < p.num_ids ? p.owners[id] : -1;
}

// By a warp: a token's ids and weights to every rank that gets its row; -1 and 0 for experts of other ranks.
template <typename Params>
DEVICE void send_ids(const Params& p, int token, const Rows& rows) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const int id = lane < TOPK ? p.topk_ids[static_cast<u64>(token) * TOPK + lane] : -1, owner = owner_of(p, id);
  for (u32 left = rows.ranks; left; left &= left - 1) {
    const int rank = __ffs(left) - 1;
    const u64 at = 4ull * (__shfl_sync(kAllLanes, rows.index, rank) * TOPK + lane);
    if (lane < TOPK) {
      *reinterpret_cast<int*>(c.at(rank, c.ids + at)) = owner == rank ? id : -1;
      *reinterpret_cast<float*>(c.at(rank, c.weights + at)) =
          owner == rank ? p.weights[static_cast<u64>(token) * TOPK + lane] : 0.0f;
    }
  }
}

// Params have expert_map: the number of an id among this rank's experts, -1 for others.
template <typename Params>
DEVICE int local_expert(const Params& p, int id) {
  return id >= 0 && id < p.num_ids ? __ldg(p.expert_map + id) : -1;
}

// Whether this is the last block to come here, which sees what all of them have written.
DEVICE bool is_last_block(const Common& c) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(c.finished, 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  return last;
}

// The last block to finish notifies all ranks and waits for all of them, so that the next kernel may read the rows.
DEVICE void finish(const Common& c, u32 epoch) {
  const bool last = is_last_block(c);
  const int peer = static_cast<int>(threadIdx.x);
  if (last && peer < RANKS) {
    if (peer == 0) {
      *c.finished = 0;
    }
    if (c.alive(peer)) {
      if (!c.failed()) {
        __threadfence_system();
        store_line(c.done_of(peer, c.rank), 0, 0, epoch);
      }
      Wait<PHASE_DISPATCH> wait(c.limits, epoch);
      Vec line;
      wait.for_line(c.done_of(c.rank, peer), peer, line);
    }
    __threadfence_system();
  }
}

// ==== Flag queue ====
//
// One warp of each block releases the flags of the rows that the others send: the fence before a flag takes until the
// links have delivered all stores in flight, and the senders need not wait for it.
//
// A warp that has stored a row writes the addresses of its flags to its own slots in shared memory, one per rank
// (SLOTS: eight, in turns), once they are empty. The releasing warp takes all that it finds and sets them behind one
// fence. It waits for no other rank, so no sender waits long.

constexpr int kQueuedFlags = SLOTS ? 8 : RANKS;  // of a warp

template <int kMostSenders>
struct FlagQueue {
  u64 flags[kMostSenders][kQueuedFlags];  // addresses, 0 if empty
  u32 finished;                           // warps that enqueue no more
};

// By the whole block, before it sends.
template <int kMostSenders>
DEVICE void clear_queue(FlagQueue<kMostSenders>& due) {
  for (int i = threadIdx.x; i < kMostSenders * kQueuedFlags; i += kThreads) {
    due.flags[i / kQueuedFlags][i % kQueuedFlags] = 0;
  }
  if (threadIdx.x == 0) {
    due.finished = 0;
  }
  __syncthreads();
}

// Flags of a row that the warp has stored; a lane below kQueuedFlags may have one, or null.
template <int kMostSenders>
DEVICE void enqueue_flags(FlagQueue<kMostSenders>& due, u64* flag) {
  __syncwarp();
  if (flag != nullptr) {
    __threadfence_block();
    u64* slot = &due.flags[threadIdx.x / 32][threadIdx.x % 32];
    while (atomicCAS(slot, 0ull, reinterpret_cast<u64>(flag)) != 0) {
      __nanosleep(kPauseNs);
    }
  }
  __syncwarp();
}

// By each sending warp, after its last row.
template <int kMostSenders>
DEVICE void finish_enqueuing(FlagQueue<kMostSenders>& due) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence_block();
    atomicAdd(&due.finished, 1u);
  }
}

// By the releasing warp, until all `senders` have finished.
template <int kMostSenders>
DEVICE void release_flags(FlagQueue<kMostSenders>& due, int senders, u64 epoch) {
  constexpr int kOfLane = (kMostSenders * kQueuedFlags + 31) / 32;
  const int slots = senders * kQueuedFlags;
  for (;;) {
    // Read before the slots are, so that everything enqueued before the senders finished is found.
    const bool is_last = __any_sync(kAllLanes, atomicAdd(&due.finished, 0u) == static_cast<u32>(senders));
    __threadfence_block();
    __syncwarp();
    u64 flags[kOfLane];
    bool found = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int slot = threadIdx.x % 32 + 32 * i;
      flags[i] = slot < slots ? atomicExch(&due.flags[slot / kQueuedFlags][slot % kQueuedFlags], 0ull) : 0;
      found |= flags[i] != 0;
    }
    if (__any_sync(kAllLanes, found)) {
      __threadfence_system();
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if (flags[i] != 0) {
          store_volatile(reinterpret_cast<u64*>(flags[i]), epoch);
        }
      }
    } else if (is_last) {
      return;
    } else {
      __nanosleep(kPauseNs);
    }
  }
}
