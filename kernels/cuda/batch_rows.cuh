// What the kernels that balance a batch share: rows by expert.
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

// Adds a row to those of its expert. Lanes with the same expert are added up by one instruction, as nothing else is added
// and the sum is not read.
DEVICE void count_row(int expert, int* counts) {
  if (expert >= 0) {
    atomicAdd(&counts[expert], 1);
  }
}
