// Enough of CUDA for the low-latency kernels on a CPU: each thread of the GPU is a coroutine, and gpu.cpp lets one that
// may go on have its turn, drawn at random, whenever the one before it comes to a load or store that other ranks see, to
// a pause, or to a meeting of its warp or group.
//
// Emulated: warps that meet, barriers of a group, shared memory, atomic additions, the clock, kernels that come up while
// the one before them runs, packets that arrive whole. Not emulated: memory that is seen in another order than it was
// written in, caches, packets that arrive in parts, registers, the time that anything takes on a GPU.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__

namespace emulated {
constexpr int kLanes = 32, kBarriers = 3, kSharedBytes = 32 << 10, kMostBrought = 32;

struct Dim {
  unsigned x;
};
struct Kernel;
struct Thread;

struct Meeting {
  int arrived = 0;
  std::vector<Thread*> waiting;
};

struct Warp : Meeting {
  // What lanes bring, and what they get; a lane may bring the next before others have taken what they got.
  alignas(16) char brought[kLanes][kMostBrought], got[kLanes][kMostBrought];
};

struct Block {
  Kernel* kernel;
  Dim index;
  int live;
  bool lets_next_come_up = false;
  std::vector<Warp> warps;
  Meeting barriers[kBarriers];
  alignas(16) char shared[kSharedBytes];
};

struct Thread {
  Block* block;
  Dim index;
  bool ended = false;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

extern Thread* running;
Dim grid();
long now_ns();
void yield();                 // others may have their turn
void sleep(long ns);          // not before so much later
void wait_for_wake();         // until wake()
void wake(Meeting& meeting);  // all that wait there
void wait_for_kernel_before();
void before_store(const void* at);

template <typename T>
T& shared() {
  static_assert(sizeof(T) <= kSharedBytes);
  return *reinterpret_cast<T*>(running->block->shared);
}

inline int lane() { return running->index.x % kLanes; }

// Gives `value` to the meeting of the warp; the last lane that comes lets finish(values) change all of them at once.
template <typename T, typename Finish>
T meet(T value, const Finish& finish) {
  static_assert(sizeof(T) <= kMostBrought);
  Warp& warp = running->block->warps[running->index.x / kLanes];
  memcpy(warp.brought[lane()], &value, sizeof value);
  if (++warp.arrived == kLanes) {
    T values[kLanes];
    for (int i = 0; i < kLanes; i++) memcpy(&values[i], warp.brought[i], sizeof value);
    finish(values);
    for (int i = 0; i < kLanes; i++) memcpy(warp.got[i], &values[i], sizeof value);
    wake(warp);
  } else {
    warp.waiting.push_back(running);
    wait_for_wake();
  }
  memcpy(&value, warp.got[lane()], sizeof value);
  return value;
}

template <typename T>
T shuffle(T value, int source) {
  struct Brought {
    T value;
    int source;
  };
  return meet(Brought{value, source}, [](Brought* all) {
           T values[kLanes];
           for (int i = 0; i < kLanes; i++) values[i] = all[i].value;
           for (int i = 0; i < kLanes; i++) all[i].value = values[all[i].source % kLanes];
         }).value;
}

inline void barrier(int number, int threads) {
  Meeting& meeting = running->block->barriers[number];
  if (++meeting.arrived == threads) {
    wake(meeting);
    yield();
  } else {
    meeting.waiting.push_back(running);
    wait_for_wake();
  }
}

template <typename T>
T load(const T* at) {
  yield();
  return *at;
}

template <typename T>
void store(T* at, T value) {
  before_store(at);
  yield();
  *at = value;
}

// Vectors of a warp's four packets, loaded or stored without anybody else's turn in between.
template <typename Vec>
struct Place {
  Vec* at;
  Vec value;
};

template <typename Vec>
Vec load_whole(const Vec* at) {
  auto found = meet(Place<Vec>{const_cast<Vec*>(at), {}}, [](Place<Vec>* all) {
    for (int i = 0; i < kLanes; i++) all[i].value = *all[i].at;
  });
  yield();
  return found.value;
}

template <typename Vec>
void store_whole(Vec* at, Vec value) {
  yield();
  meet(Place<Vec>{at, value}, [](Place<Vec>* all) {
    for (int i = 0; i < kLanes; i++) *all[i].at = all[i].value;
  });
}

// Two columns in bf16, to nearest, ties to even; of finite numbers and NaN.
inline unsigned bf16(float f) {
  unsigned bits;
  memcpy(&bits, &f, sizeof bits);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
}  // namespace emulated

#define threadIdx (emulated::running->index)
#define blockIdx (emulated::running->block->index)
#define gridDim (emulated::grid())

using std::max;
using std::min;

inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulated::yield(); }
template <typename T>
T atomicAdd(T* at, T value) {
  emulated::yield();
  T before = *at;
  *at += value;
  return before;
}

inline void __syncwarp() {
  emulated::meet(0, [](int*) {});
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulated::meet(unsigned(vote), [](unsigned* votes) {
    unsigned bits = 0;
    for (int i = 0; i < emulated::kLanes; i++) bits |= votes[i] << i;
    std::fill_n(votes, emulated::kLanes, bits);
  });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulated::shuffle(value, source);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulated::shuffle(value, emulated::lane() ^ bits);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline float __uint_as_float(unsigned bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
// Compiled with -ffp-contract=off, so that these are rounded each.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float f) { return (int)std::nearbyint(f); }

// Makes a kernel callable with a pointer to its parameters.
#define KERNEL(name)                                                                         \
  extern "C" void run_##name(const void* p) { name(*reinterpret_cast<const Params*>(p)); } \
  extern "C" int bytes_of_##name() { return sizeof(Params); }
