// What a block computes next: one warp claims it, and tells the others by a ring of segments in shared memory.
//
// `Shared` has Segment segment[kSegments], u64 segment_full[kSegments] and segment_empty[kSegments]; phase -1 is the end.
#pragma once
#include "ptx.cuh"

constexpr int kSegments = 4;  // known ahead

// The one thread that claims tells a segment, once there is room; place and parity are 0 and 1 at first.
template <typename Shared, typename Segment>
DEVICE void announce_segment(Shared& shared, const Segment& g, int& place, int& parity) {
  barrier_wait(&shared.segment_empty[place], parity);
  shared.segment[place] = g;
  barrier_arrive(&shared.segment_full[place]);
  if (++place == kSegments) {
    place = 0;
    parity ^= 1;
  }
}

// The segments of this block in their order, for one warp; calls work(segment) until there are none.
template <typename Shared, typename Work>
DEVICE void for_each_segment(Shared& shared, Work work) {
  for (int i = 0, parity = 0;;) {
    barrier_wait(&shared.segment_full[i], parity);
    if (shared.segment[i].phase < 0) return;
    work(shared.segment[i]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.segment_empty[i]);
    if (++i == kSegments) {
      i = 0;
      parity ^= 1;
    }
  }
}
