// What the three kernels of a prefill batch share: the symmetric block (high_throughput_block.py computes the offsets)
// and its flags.
//
//   counts       [2, R, 4] lines: how many rows source s sends to each rank, two numbers a line
//   done         [R]       lines: source s has written all of its rows here, where no row has a flag
//   row_flags    [R * C]                which rows are there, where they are worked on as they come (e4m3)
//   result_flags [C * min(R, TOPK)]     which results are there
//   ids, weights, rows   [R * C]: what arrives, ordered by (source, token), without gaps
//   results      [C * min(R, TOPK)]: rows on their way home, by (rank that computed, token), without gaps
//
// A rank posts its counts of a batch when it is done with the batch before, in stream order. Nobody writes here before
// that, so blocks are used again without a barrier. Every line and flag carries the batch's epoch. Even and odd epochs
// have their own counts: a rank that posts those of epoch e + 2 has everybody's of e + 1, and those were posted by
// ranks that had read the ones of e. Counts and done are written for every batch, so they need no more than 32 bits of
// its number; flags of rows, which may be left for long, have 64.
//
// With DEVICE_API nobody's memory need be mapped here: counts travel as signals, and rows, with their ids and weights
// behind them, as puts out of staged copies, from which each rank makes the parts that its experts read.
//
// Dispatch of such and of e4m3 rows, and combine: some warps send, others take what arrives, row by row, and the first
// join the second when everything is sent. Sending waits for nobody, so taking may wait for everybody. Half of each
// block's warps send, or in a dispatch almost all of some blocks.
#pragma once

#include "device_api.cuh"
#include "numbers.cuh"

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kLinesOfCounts = 4;
constexpr int kVectors = HIDDEN / kColumns;
constexpr int kGroups = (kVectors + kScaleVectors - 1) / kScaleVectors;
constexpr int kResultBytes = 2 * HIDDEN;
constexpr bool kTakesRows = FP8 || DEVICE_API;  // and does not leave them where they arrive
constexpr int kColumnBytes = FP8 ? HIDDEN : kResultBytes;
constexpr int kScaleWords = FP8 ? (kGroups + 1) / 2 : 0;
// Of a row on the wire; high_throughput_wire.cuh says what is behind the columns.
constexpr int kRowBytes = kTakesRows ? (kColumnBytes + 4 * (kScaleWords + 2 * TOPK) + 127) / 128 * 128 : kResultBytes;
constexpr int kAtOnce = 4;  // vectors of a lane that are loaded before the first is stored
// Vectors of a lane that are loaded at once, at most `most`, where a row is to take the fewest rounds.
__device__ constexpr int at_once(int most) {
  const int of_lane = (kVectors + 31) / 32, rounds = (of_lane + most - 1) / most;
  return (of_lane + rounds - 1) / rounds;
}
constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kPauseNs = 100;  // between two looks at what other warps of the block leave
enum { ROWS_TAKEN, TOKENS_TAKEN };

// Made by the first kernel of a batch.
struct Placement {
  int send[RANKS];   // row at rank d = slot + send[d]
  int begin[RANKS];  // first row here of source s
  int count[RANKS];  // rows here of source s
  int home[RANKS];   // row at source s = row here + home[s]
  int total;
};

struct Common {
  u64 peers[RANKS];  // address of each rank's block
  u64 counts, done, row_flags, result_flags, ids, weights, rows, results, staged_rows, staged_results;
  Limits limits;
  u64* epoch;     // of the last batch whose counts were exchanged
  u32* finished;  // blocks of the running kernel that have sent everything
  u32* taken;     // [2]: how much of the batch was handed out to warps that take
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

// Waits for a row's flag here, which mostly is there; called by any threads, each for its own.
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

// A warp's copy of the first kVectors vectors.
DEVICE void copy_row(const u8* row, u8* target) {
  const Vec* from = reinterpret_cast<const Vec*>(row);
  Vec* to = reinterpret_cast<Vec*>(target);
  for (int start = threadIdx.x % 32; start < kVectors; start += 32 * kAtOnce) {
    Vec v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + 32 * i < kVectors) {
        to[start + 32 * i] = v[i];
      }
    }
  }
}

#if DEVICE_API
// A warp's: a staged row to where `offset` is at another rank, and its flag behind it.
DEVICE void put_row(const Common& c, int peer, u64 offset, const u8* staged, u64 bytes, u64* own_flag, u64 epoch) {
  __threadfence_system();
  __syncwarp();
  put_with_flag(c.at(c.rank, offset), staged, bytes, own_flag, epoch, c.pes[peer]);
}
#endif

// A warp's numbers out of a counter that the batch's first kernel has set to 0; the one after next is on its way.
class Turns {
 public:
  DEVICE explicit Turns(u32* counter) : counter_(counter) { draw(); }

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

// ==== Flags ====

// Flags of rows that a block sends are released by one of its warps for all others: the fence before a flag takes until
// the links have taken what is on its way, and the warps that send go on meanwhile.
//
// A warp that has stored a row leaves the flags' addresses in shared memory, a place of its own for each rank, where it
// waits for the place to be empty. The releasing warp takes what lies there and behind one fence sets those flags. It
// waits for nobody, so nobody waits for long.

template <int kMostSenders>
struct FlagsDue {
  u64 flags[kMostSenders][RANKS];  // addresses, 0 where there is none
  u32 through;                     // warps that leave no more
};

// By the whole block, before it sends.
template <int kMostSenders>
DEVICE void clear_flags(FlagsDue<kMostSenders>& due) {
  for (int i = threadIdx.x; i < kMostSenders * RANKS; i += kThreads) {
    due.flags[i / RANKS][i % RANKS] = 0;
  }
  if (threadIdx.x == 0) {
    due.through = 0;
  }
  __syncthreads();
}

// Of a row that the warp has stored; a lane below RANKS may have a flag, null for none.
template <int kMostSenders>
DEVICE void leave_flags(FlagsDue<kMostSenders>& due, u64* flag) {
  __syncwarp();
  if (flag != nullptr) {
    __threadfence_block();
    u64* place = &due.flags[threadIdx.x / 32][threadIdx.x % 32];
    while (atomicCAS(place, 0ull, reinterpret_cast<u64>(flag)) != 0) {
      __nanosleep(kPauseNs);
    }
  }
  __syncwarp();
}

// By each warp that sends, behind its last row.
template <int kMostSenders>
DEVICE void leave_no_more(FlagsDue<kMostSenders>& due) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence_block();
    atomicAdd(&due.through, 1u);
  }
}

// The releasing warp, until all `senders` are through.
template <int kMostSenders>
DEVICE void release_flags(FlagsDue<kMostSenders>& due, int senders, u64 epoch) {
  constexpr int kOfLane = (kMostSenders * RANKS + 31) / 32;
  const int places = senders * RANKS;
  for (;;) {
    // Read before the places are: what the others left before they were through is found then.
    const bool is_last = __any_sync(kAllLanes, atomicAdd(&due.through, 0u) == static_cast<u32>(senders));
    __threadfence_block();
    __syncwarp();
    u64 flags[kOfLane];
    bool found = false;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int place = threadIdx.x % 32 + 32 * i;
      flags[i] = place < places ? atomicExch(&due.flags[place / RANKS][place % RANKS], 0ull) : 0;
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
