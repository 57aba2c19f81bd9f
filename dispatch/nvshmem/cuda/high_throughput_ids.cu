// High-throughput (prefill) dispatch beside experts, first part: ids and weights of all rows, which are few bytes. When
// this kernel ends, each rank knows which rows its experts get, and high_throughput_rows.cu sends them.
//
// Layout in:   topk_ids and weights [T, TOPK]; slots and placement of high_throughput_plan.cu.
// Layout out:  ids and weights of the rows that arrive at each rank, as high_throughput_dispatch.cu leaves them.
// Warp roles:  all send; the last block to finish notifies all ranks and waits for them.
#include "high_throughput.cuh"

struct Params {
  Common common;
  const int* topk_ids;   // [T, TOPK]
  const float* weights;  // [T, TOPK]
  const int* owners;     // [num_ids], -1 for ranks that take no part
  const int* slots;      // [T, RANKS]
  int num_ids;
  int num_tokens;
  int max_rows;  // ids of rows from the last that arrives to this one become -1
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_ids(const __grid_constant__ Params p) {
  const Common& c = p.common;
  grid_dependency_wait();
  int* ids = reinterpret_cast<int*>(c.at(c.rank, c.ids));
  const u64 begin = static_cast<u64>(c.placement->total) * TOPK, end = static_cast<u64>(p.max_rows) * TOPK;
  for (u64 i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    ids[i] = -1;
  }
  if (!c.failed()) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int token = warp * gridDim.x + blockIdx.x; token < p.num_tokens; token += gridDim.x * kWarps) {
      send_ids(p, token, rows_of(p, token));
    }
  }
  finish(c, c.current_epoch());
}
