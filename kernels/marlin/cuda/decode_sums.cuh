// How blocks hand each other the sums of tiles that they share.
//
// A thread leaves the bits of its sums, inverted. No sum has the bits that would give zero (a NaN that is none of
// arithmetic's), so zero says that nothing is left yet: whoever adds up reads until there is more, without a flag or a
// fence before it. It writes zero behind itself, so all is zero between launches, whatever their weights.
//   p.left_sums  [phase][piece][8 tokens][consumer thread][4 numbers]
#pragma once
#include "decode_stage.cuh"

// A consumer's place among the sums of a piece.
DEVICE u32 sums_thread() {
  u32 thread = threadIdx.x - 32 * kFirstConsumer;
  asm volatile("" : "+r"(thread));  // so that what follows from it is not kept where sums are made
  return thread;
}

DEVICE uint4* left_sums(const ExpertsParams& p, int phase, int piece, int thread) {
  return p.left_sums + (i64)(phase * gridDim.x + piece) * (kFewRows / 8 * kConsumerThreads) + thread;
}

DEVICE void store_left(uint4* to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

DEVICE uint4 load_left(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

DEVICE bool is_left(const uint4& v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }

DEVICE void add_left(float* sums, const uint4& v) {
  sums[0] += __uint_as_float(~v.x), sums[1] += __uint_as_float(~v.y);
  sums[2] += __uint_as_float(~v.z), sums[3] += __uint_as_float(~v.w);
}

// Some pieces at once, there or not yet, of kGroups times eight tokens; `from` is the place of the first of all.
template <int kAtOnce, int kGroups>
struct Pieces {
  uint4 v[kAtOnce][kGroups];
  static DEVICE uint4* place(uint4* from, int piece, int group) {
    return from + (u32)piece * (kFewRows / 8 * kConsumerThreads) + group * kConsumerThreads;
  }
  DEVICE void ask(uint4* from, int first, int count) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int j = 0; j < kGroups; j++) v[i][j] = load_left(place(from, min(first + i, count - 1), j));
    }
  }
  DEVICE bool are_left() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kAtOnce * kGroups; i++) all &= is_left(v[i / kGroups][i % kGroups]);
    return __all_sync(~0u, all);
  }
  // Adds all, in order; the first ones have been asked for.
  DEVICE void take(uint4* from, int count, float* sums) {
#pragma unroll 1
    for (int first = 0; true; ask(from, first, count)) {
      if (!are_left()) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; i++, first++) {
        if (first == count) return;
#pragma unroll
        for (int j = 0; j < kGroups; j++) {
          add_left(sums + 4 * j, v[i][j]);
          store_left(place(from, first, j), 0, 0, 0, 0);
        }
      }
      if (first == count) return;
    }
  }
};
