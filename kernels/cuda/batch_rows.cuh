// What the kernels that balance a batch share: a warp's rows by expert.
#pragma once

#include "ptx.cuh"

#if IDS_64
typedef i64 Id;
#else
typedef int Id;
#endif

constexpr u32 kAllOfWarp = 0xFFFFFFFFu;

// The expert of a row, -1 for none and behind the last row.
DEVICE int expert_of(const Id* ids, int row, int end) {
  const Id id = row < end ? ids[row] : -1;
  return id >= 0 && id < EXPERTS ? static_cast<int>(id) : -1;
}

// By a whole warp, a row each: adds up the rows of each expert, with one atomic operation for each.
DEVICE void count_row(int expert, int* counts) {
  const u32 same = __match_any_sync(kAllOfWarp, expert);
  if (expert >= 0 && __ffs(same) - 1 == static_cast<int>(threadIdx.x) % 32) {
    atomicAdd(&counts[expert], __popc(same));
  }
}
