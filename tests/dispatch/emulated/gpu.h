// Enough of CUDA for the NVSHMEM kernels on a CPU: each thread of the GPU is a coroutine, and gpu.cpp lets one that may
// go on have its turn, drawn at random, whenever the one before it comes to a load or store that other ranks see, to a
// pause, or to a meeting of its warp or group.
//
// Emulated: warps that meet, barriers, shared memory, atomic operations, the clock, kernels that come up while the one
// before them runs, packets that arrive whole, stores to other ranks that arrive late and in any order unless a fence
// is between them, and puts of NVSHMEM's device library (memory.cpp). Not emulated: caches, loads that are early,
// packets that arrive in parts, registers, the time that anything takes on a GPU.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__

namespace emulated {
constexpr int kLanes = 32, kBarriers = 4, kMostBrought = 64;
// Who knows of a store, so that a fence of theirs is one behind it.
enum Scope { THREAD, WARP, BLOCK, RANK, SYSTEM };

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
  std::vector<unsigned> loaded;  // by load_of_warp
};

struct Block {
  Kernel* kernel;
  int rank;
  Dim index;
  int num_threads, live;
  bool lets_next_come_up = false;
  std::vector<Warp> warps;
  Meeting barriers[kBarriers];
  std::map<int, std::unique_ptr<char[]>> shared;  // by the declaration's number
};

struct Thread {
  Block* block;
  Dim index;
  size_t loads_of_warp = 0;
  bool begun = false, ended = false;
  ucontext_t context;
  jmp_buf at;
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
void* shared(int number, size_t bytes);  // of the block
long draw(long below);

// Of memory.cpp.
void store_bytes(void* at, const void* data, int bytes);  // late where it is another rank's memory
void load_bytes(const void* at, void* data, int bytes);   // without another's turn in between
void fence(Scope scope);                                  // what the running thread knows of, that scope does then
void tell_warp();                                         // what its lanes have stored, all of them know then
void tell_block(const Meeting& of);                       // the same of all that wait there and the running thread
void begin_memory(int landing_per_mille);
void see_stores();                        // to be called before another thread runs
void land_some();                         // each turn
void land_all(const Block& of);           // when its kernel ends
void pause_before_store(const void* at);  // of gpu.cpp
// As the device library's, with own addresses for those of a rank, whose memory is one region.
void put(void* there, const void* from, long bytes, uint64_t* flag, uint64_t value, int rank);

template <typename T, int number>
T& shared() {
  return *static_cast<T*>(shared(number, sizeof(T)));
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
  return meet(Brought{value, source},
              [](Brought* all) {
                T values[kLanes];
                for (int i = 0; i < kLanes; i++) values[i] = all[i].value;
                for (int i = 0; i < kLanes; i++) all[i].value = values[all[i].source % kLanes];
              })
      .value;
}

inline void barrier(int number, int threads) {
  Meeting& meeting = running->block->barriers[number];
  if (++meeting.arrived == threads) {
    tell_block(meeting);
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
  T value;
  load_bytes(at, &value, sizeof value);
  return value;
}

// The same for all lanes, as where one instruction loads it.
inline unsigned load_of_warp(const unsigned* at) {
  Warp& warp = running->block->warps[running->index.x / kLanes];
  const size_t number = running->loads_of_warp++;
  if (number == warp.loaded.size()) warp.loaded.push_back(*at);
  return warp.loaded[number];
}

template <typename T>
void store(T* at, T value) {
  pause_before_store(at);
  yield();
  store_bytes(at, &value, sizeof value);
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
    for (int i = 0; i < kLanes; i++) load_bytes(all[i].at, &all[i].value, sizeof(Vec));
  });
  yield();
  return found.value;
}

template <typename Vec>
void store_whole(Vec* at, Vec value) {
  yield();
  meet(Place<Vec>{at, value}, [](Place<Vec>* all) {
    constexpr int kOfPacket = 8;
    for (int i = 0; i < kLanes; i += kOfPacket) {
      Vec packet[kOfPacket];
      for (int j = 0; j < kOfPacket; j++) packet[j] = all[i + j].value;
      store_bytes(all[i].at, packet, sizeof packet);
    }
  });
}

// Of two pairs of numbers in 16 bits, which are not negative, the larger ones.
inline unsigned larger(unsigned a, unsigned b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}

// A number as the bits of an f16, to nearest, ties to even, and back.
inline unsigned f16(float f) {
  const unsigned sign = std::signbit(f) ? 0x8000 : 0;
  const double size = std::fabs(static_cast<double>(f));
  if (f != f || size >= 65520) {
    return f != f ? 0x7fff : sign | 0x7c00;
  }
  const int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
  // 1024 and more are normal; 2048 carries into the exponent.
  return sign | ((exponent + 14) << 10) + static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent)));
}
inline float of_f16(unsigned half) {
  const int exponent = half >> 10 & 31, digits = half & 1023;
  const float size = exponent == 31 ? (digits ? NAN : INFINITY)
                                    : std::ldexp(exponent ? 1024.0f + digits : digits, std::max(exponent, 1) - 25);
  return half & 0x8000 ? -size : size;
}

// The same of the activations' dtype.
#if ACT_BF16
inline unsigned half(float f) {  // of finite numbers and NaN
  unsigned bits;
  memcpy(&bits, &f, sizeof bits);
  return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float of_half(unsigned half) {
  const unsigned bits = half << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
#else
inline unsigned half(float f) { return f16(f); }
inline float of_half(unsigned half) { return of_f16(half); }
#endif
}  // namespace emulated

#define threadIdx (emulated::running->index)
#define blockIdx (emulated::running->block->index)
#define gridDim (emulated::grid())

using std::max;
using std::min;

inline void __threadfence_block() { emulated::fence(emulated::BLOCK); }
inline void __threadfence() { emulated::fence(emulated::RANK); }
inline void __threadfence_system() { emulated::fence(emulated::SYSTEM); }
inline void __nanosleep(unsigned) { emulated::yield(); }
inline void __syncthreads() { emulated::barrier(0, emulated::running->block->num_threads); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcv(const T* at) {
  return emulated::load(at);
}
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
template <typename T, typename Change>
T atomically(T* at, const Change& change) {
  emulated::yield();
  T before = *at;
  *at = change(before);
  return before;
}
template <typename T>
T atomicAdd(T* at, T value) {
  return atomically(at, [&](T before) { return before + value; });
}
template <typename T>
T atomicOr(T* at, T value) {
  return atomically(at, [&](T before) { return before | value; });
}
template <typename T>
T atomicExch(T* at, T value) {
  return atomically(at, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  return atomically(at, [&](T before) { return before == expected ? value : before; });
}

inline void __syncwarp() {
  emulated::meet(0, [](int*) { emulated::tell_warp(); });
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
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  return emulated::shuffle(value, emulated::lane() - (emulated::lane() < by ? 0 : by));
}

template <typename T, typename Better>
T reduce(T value, const Better& better) {
  return emulated::meet(value, [&](T* values) {
    T best = values[0];
    for (int i = 1; i < emulated::kLanes; i++) best = better(best, values[i]);
    std::fill_n(values, emulated::kLanes, best);
  });
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  return reduce(value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  return reduce(value, [](T a, T b) { return std::min(a, b); });
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
  return reduce(value, [](T a, T b) { return a + b; });
}
inline unsigned __match_any_sync(unsigned, int value) {
  return emulated::meet(value, [](int* values) {
    int same[emulated::kLanes] = {};
    for (int i = 0; i < emulated::kLanes; i++)
      for (int j = 0; j < emulated::kLanes; j++) same[i] |= (values[i] == values[j]) << j;
    memcpy(values, same, sizeof same);
  });
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
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float f) { return __float_as_uint(f); }
// Compiled with -ffp-contract=off, so that these are rounded each.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float f) { return (int)std::nearbyint(f); }

// Makes a kernel callable with a pointer to its parameters.
#define KERNEL(name)                                                                       \
  extern "C" void run_##name(const void* p) { name(*reinterpret_cast<const Params*>(p)); } \
  extern "C" int bytes_of_##name() { return sizeof(Params); }                              \
  extern "C" int threads_of_##name() { return kThreads; }
