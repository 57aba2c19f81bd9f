// What the kernels that balance a batch share: rows by expert.
#pragma once

#include "ptx.cuh"

#if IDS_64
typedef i64 Id;
#else
typedef int Id;
#endif

constexpr u32 kAllOfWarp = 0xFFFFFFFFu;

// The expert of an id, -1 for none.
DEVICE int expert_of(Id id) { return id >= 0 && id < EXPERTS ? static_cast<int>(id) : -1; }

// Adds a row to those of its expert. Lanes with the same expert are added up by one instruction, as nothing else is
// added and the sum is not read.
DEVICE void count_row(int expert, int* counts) {
  if (expert >= 0) {
    atomicAdd(&counts[expert], 1);
  }
}

// By a block of kThreads: adds rows 0 to end - 1 to `counts`. Loads are as wide as the ids' alignment allows, and many
// at a time, since a block that has few waits for each.
template <int kThreads>
DEVICE void count_rows(const Id* ids, int end, int* counts) {
  constexpr int kOfVector = 16 / sizeof(Id), kAtOnce = 8;
  struct alignas(16) Ids {
    Id id[kOfVector];
  };
  const int thread = static_cast<int>(threadIdx.x), whole = reinterpret_cast<u64>(ids) % 16 == 0 ? end / kOfVector : 0;
  for (int first = thread; first < whole; first += kThreads * kAtOnce) {
    Ids v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + kThreads * i < whole) {
        v[i] = reinterpret_cast<const Ids*>(ids)[first + kThreads * i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int j = 0; j < kOfVector; ++j) {
        count_row(first + kThreads * i < whole ? expert_of(v[i].id[j]) : -1, counts);
      }
    }
  }
  for (int row = whole * kOfVector + thread; row < end; row += kThreads) {
    count_row(expert_of(ids[row]), counts);
  }
}
