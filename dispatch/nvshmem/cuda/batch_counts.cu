// How many rows each rank has for each expert in a batch: counts this rank's and exchanges them.
//
// Layout in:   ids [num_rows], logical experts, others for none.
// Layout out:  counts [RANKS, EXPERTS].
// Warp roles:  one block; all threads count, then leave lines for all peers, then wait for theirs.
// Example:     2 ranks with ids [0, 1, 0] and [1]: counts [[2, 1], [0, 1]].
#include "batch_balance.cuh"
#include "batch_rows.cuh"

constexpr int kThreads = THREADS;
constexpr int kLines = (EXPERTS + 1) / 2;
constexpr int kCounters = 2 * kLines;
static_assert(kLines <= kMostLines, "the block has lines for all experts");

struct Params {
  Common common;
  const Id* ids;
  int* counts;
  int num_rows;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) batch_counts(const __grid_constant__ Params p) {
  const Common& c = p.common;
  __shared__ int counts[kCounters];
  grid_dependency_launch();
  const int thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < kCounters; expert += kThreads) {
    counts[expert] = 0;
  }
  __syncthreads();
  count_rows<kThreads>(p.ids, p.num_rows, counts);
  __syncthreads();
  for (int i = thread; i < RANKS * kLines; i += kThreads) {
    const int peer = i / kLines, line = i % kLines;
    if (peer != c.rank) {
      store_line(c.counts_of(peer, c.rank, line), counts[2 * line], counts[2 * line + 1], c.epoch);
    }
  }
  Wait<PHASE_DISPATCH> wait(c.limits, c.epoch);
  for (int i = thread; i < RANKS * kLines; i += kThreads) {
    const int source = i / kLines, line = i % kLines;
    Vec came{static_cast<u32>(counts[2 * line]), 0, static_cast<u32>(counts[2 * line + 1]), 0};
    if (source != c.rank && !wait.for_line(c.counts_of(c.rank, source, line), source, came)) {
      came = Vec{};
    }
    int* to = p.counts + source * EXPERTS + 2 * line;
    to[0] = static_cast<int>(came.x);
    if (2 * line + 1 < EXPERTS) {
      to[1] = static_cast<int>(came.z);
    }
  }
}
