// The slot of each row of a batch that was planned: of an expert's rows, in their order, the first shares[e][0] go to
// rank 0, the next shares[e][1] to rank 1, and so on.
//
// Layout in:   ids [num_rows], logical experts, others for none; shares and places [EXPERTS, RANKS] of batch_plan.cu.
// Layout out:  out [num_rows], the id of a slot, -1 for none.
// Warp roles:  a thread has one row. Each block counts the rows of all blocks before it by expert, then its own warps'.
//              So blocks wait for no other, and the order is that of the rows. They count while the plan is made.
// Example:     ids [0, 1, 0], shares [[1, 1], [0, 1]], places [[0, 3], [-1, 2]]: out [0, 2, 3].
#include "batch_rows.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;

struct Params {
  const Id* ids;
  const int* shares;
  const int* places;
  int* out;
  int num_rows;
};

struct Shared {
  int before[EXPERTS];                     // rows of the blocks before
  unsigned char of_warp[kWarps][EXPERTS];  // rows of each warp, at most 32
};

extern "C" __global__ void __launch_bounds__(kThreads) batch_rows(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int expert = thread; expert < EXPERTS; expert += kThreads) {
    shared.before[expert] = 0;
  }
  for (int i = thread; i < kWarps * EXPERTS; i += kThreads) {
    shared.of_warp[i / EXPERTS][i % EXPERTS] = 0;
  }
  __syncthreads();
  const int begin = static_cast<int>(blockIdx.x) * kThreads;
  count_rows<kThreads>(p.ids, begin, shared.before);
  const int row = begin + thread, expert = row < p.num_rows ? expert_of(p.ids[row]) : -1;
  const u32 same = __match_any_sync(kAllOfWarp, expert), before = same & ((1u << lane) - 1);
  if (expert >= 0 && before == 0) {
    shared.of_warp[warp][expert] = static_cast<unsigned char>(__popc(same));
  }
  __syncthreads();
  grid_dependency_wait();
  if (row >= p.num_rows) {
    return;
  }
  int place = -1;
  if (expert >= 0) {
    int nth = shared.before[expert] + __popc(before), rank = 0;
#pragma unroll 8
    for (int other = 0; other < kWarps; ++other) {
      nth += other < warp ? shared.of_warp[other][expert] : 0;
    }
    const int* shares = p.shares + expert * RANKS;
    while (rank < RANKS - 1 && nth >= shares[rank]) {
      nth -= shares[rank++];
    }
    place = p.places[expert * RANKS + rank];
  }
  p.out[row] = place;
}
