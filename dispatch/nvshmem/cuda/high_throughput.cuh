// What the three kernels of a prefill batch share: the symmetric block (high_throughput_block.py computes the offsets) and its flags.
//
//   counts   [R, 4]      lines: how many rows source s sends to each rank, two numbers a line
//   done     [2, R]      lines: source s has written all of its rows (0) or results (1) here
//   ids, weights, rows   [R * C]: what arrives, ordered by (source, token), without gaps
//   results  [C * min(R, TOPK)]: rows on their way home, by (rank that computed, token), without gaps
//
// A rank posts its counts of a batch when it is done with the batch before, in stream order. Nobody writes here before
// that, so blocks are used again without a barrier. Every line carries the batch's epoch.
#pragma once

#include "numbers.cuh"

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kLinesOfCounts = 4;
constexpr int kVectors = HIDDEN / kColumns;
constexpr int kGroups = (kVectors + kScaleVectors - 1) / kScaleVectors;
constexpr int kResultBytes = 2 * HIDDEN;
constexpr int kRowBytes = FP8 ? (HIDDEN + 4 * kGroups + 15) / 16 * 16 : kResultBytes;
constexpr int kAtOnce = 4;  // vectors of a lane that are loaded before the first is stored
constexpr u32 kAllLanes = 0xffffffffu;
enum { ROWS_DONE, RESULTS_DONE };

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
    u64 counts, done, ids, weights, rows, results;
    Limits limits;
    u32* epoch;     // of the last batch whose counts were exchanged
    u32* finished;  // blocks of the running kernel that have sent everything
    Placement* placement;
    int rank;

    __device__ __forceinline__ u8* at(int peer, u64 offset) const { return reinterpret_cast<u8*>(peers[peer]) + offset; }
    __device__ __forceinline__ u8* counts_of(int peer, int source, int line) const {
        return at(peer, counts + 16ull * (source * kLinesOfCounts + line));
    }
    __device__ __forceinline__ u8* done_of(int peer, int what, int source) const {
        return at(peer, done + 16ull * (what * RANKS + source));
    }
    __device__ __forceinline__ bool failed() const { return *reinterpret_cast<volatile u32*>(&limits.status->failed); }
};

// The block that finishes last tells all ranks, and waits for all of them: what comes behind the kernel may read.
template <u32 kPhase>
__device__ __forceinline__ void finish(const Common& c, int what, u32 epoch) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        last = atomicAdd(c.finished, 1u) == gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    if (last && threadIdx.x < RANKS) {
        const int peer = static_cast<int>(threadIdx.x);
        if (peer == 0) {
            *c.finished = 0;
        }
        if (!c.failed()) {
            __threadfence_system();
            store_line(c.done_of(peer, what, c.rank), 0, 0, epoch);
        }
        Wait<kPhase> wait(c.limits, epoch);
        Vec line;
        wait.for_line(c.done_of(c.rank, what, peer), peer, line);
        __threadfence_system();
    }
}
