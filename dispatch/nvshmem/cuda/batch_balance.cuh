// What the kernels of dispatch/nvshmem/batch_exchange.py share, which balance a batch by its own counts: the symmetric
// block, where ranks leave lines (flag-in-data, protocol.cuh) for each other.
//
//   counts   [2, RANKS, kMostLines]   source s's rows of each expert, two experts a line; even and odd batches
//   copied   [RANKS]                  rank r has read what it copies of this rank's experts
//
// A rank that leaves the counts of batch e + 2 has those of e + 1 of all ranks, which were left by ranks that had read
// those of e. So nobody waits for room. `copied` is left only for batches with copies, which all ranks know.
#pragma once

#include "protocol.cuh"

constexpr int kMostLines = 512;

struct Common {
  u64 peers[RANKS];  // address of each rank's block
  Limits limits;
  u32 epoch;  // of the batch
  int rank;

  DEVICE u8* counts_of(int peer, int source, int line) const {
    return reinterpret_cast<u8*>(peers[peer]) + 16ull * ((epoch % 2 * RANKS + source) * kMostLines + line);
  }
  DEVICE u8* copied_of(int peer, int source) const {
    return reinterpret_cast<u8*>(peers[peer]) + 16ull * (2 * RANKS * kMostLines + source);
  }
};
