// The queue of tile slices of a CTA: the scheduler warp claims work and passes it to the other warps through a ring of
// slices in shared memory, guarded by mbarriers.
//
// `Shared` has TileSlice slice[kQueuedSlices] and u64 slice_full[kQueuedSlices], slice_empty[kQueuedSlices]. A slice of
// phase -1 ends the queue.
#pragma once
#include "ptx.cuh"

constexpr int kQueuedSlices = 4;  // that the scheduler is ahead

// The scheduler thread appends a slice once there is room; index and parity are 0 and 1 at first.
template <typename Shared, typename TileSlice>
DEVICE void push_slice(Shared& shared, const TileSlice& g, int& index, int& parity) {
  barrier_wait(&shared.slice_empty[index], parity);
  shared.slice[index] = g;
  barrier_arrive(&shared.slice_full[index]);
  if (++index == kQueuedSlices) {
    index = 0;
    parity ^= 1;
  }
}

// Calls work(slice) for the slices of this CTA in their order, in one warp, until there are no more.
template <typename Shared, typename Work>
DEVICE void for_each_slice(Shared& shared, Work work) {
  for (int i = 0, parity = 0;;) {
    barrier_wait(&shared.slice_full[i], parity);
    if (shared.slice[i].phase < 0) return;
    work(shared.slice[i]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.slice_empty[i]);
    if (++i == kQueuedSlices) {
      i = 0;
      parity ^= 1;
    }
  }
}
