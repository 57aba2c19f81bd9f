// Enough of CUDA for code that one warp runs, on a CPU: 32 lanes as coroutines, each of which runs until all must meet.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "ptx.cuh"  // names of types alone (test_schedule_on_cpu.py)

#define DEVICE inline

struct uint4 {
  u32 x, y, z, w;
};
struct Dim {
  unsigned x;
};
inline Dim threadIdx{0}, blockIdx{0}, gridDim{132};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }

[[noreturn]] inline void fail(const char* what, long a = 0, long b = 0, long c = 0) {
  printf("%s: %ld %ld %ld\n", what, a, b, c);
  exit(1);
}
[[noreturn]] inline void __trap() { fail("the kernel traps"); }

// The reciprocal as the GPU may round it: so many units in the last place off.
inline int reciprocal_error = 0;
inline float reciprocal(float x) {
  float inverse = 1.0f / x;
  return reciprocal_error == 0 ? inverse : std::nextafter(inverse, reciprocal_error < 0 ? 0.0f : 2.0f * inverse);
}

namespace warp {
constexpr int kLanes = 32, kStack = 64 << 10;
inline ucontext_t scheduler, lanes[kLanes];
inline std::function<void(int)> work;
inline bool ended[kLanes];
// What lanes bring to a meeting; two, since a lane may come to the next before others have left this one.
inline u64 brought[2][kLanes];
inline int meetings[kLanes];

inline void run_lane(int lane) {
  work(lane);
  ended[lane] = true;
}

// Calls body(lane) in all lanes.
inline void run(std::function<void(int)> body) {
  static std::vector<char> stacks(kLanes * kStack);
  work = std::move(body);
  for (int i = 0; i < kLanes; i++) {
    ended[i] = false, meetings[i] = 0;
    getcontext(&lanes[i]);
    lanes[i].uc_stack = {&stacks[i * kStack], 0, kStack};
    lanes[i].uc_link = &scheduler;
    makecontext(&lanes[i], (void (*)())run_lane, 1, i);
  }
  for (bool any = true; any;) {
    any = false;
    for (int i = 0; i < kLanes; i++) {
      if (ended[i]) continue;
      threadIdx.x = i, any = true;
      swapcontext(&scheduler, &lanes[i]);
    }
  }
  for (int i = 1; i < kLanes; i++) {
    if (meetings[i] != meetings[0]) fail("lanes met differently often", i, meetings[0], meetings[i]);
  }
}

// All lanes' values, by lane, once all have brought theirs.
template <typename T>
std::vector<T> meet(T value) {
  int lane = threadIdx.x % kLanes;
  u64* all = brought[meetings[lane]++ % 2];
  memcpy(&all[lane], &value, sizeof value);
  swapcontext(&lanes[lane], &scheduler);
  std::vector<T> values(kLanes);
  for (int i = 0; i < kLanes; i++) memcpy(&values[i], &all[i], sizeof(T));
  return values;
}
}  // namespace warp

template <typename T>
T __shfl_sync(u32, T value, int lane) {
  return warp::meet(value)[lane % 32];
}
template <typename T>
T __shfl_up_sync(u32, T value, int by) {
  int lane = threadIdx.x % 32;
  return warp::meet(value)[lane >= by ? lane - by : lane];
}
inline u32 __ballot_sync(u32, bool vote) {
  u32 bits = 0;
  auto votes = warp::meet<int>(vote);
  for (int i = 0; i < 32; i++) bits |= (u32)votes[i] << i;
  return bits;
}
inline bool __any_sync(u32, bool vote) { return __ballot_sync(~0u, vote) != 0; }
inline int __reduce_add_sync(u32, int value) {
  int sum = 0;
  for (int other : warp::meet(value)) sum += other;
  return sum;
}
inline int __reduce_max_sync(u32, int value) {
  int most = value;
  for (int other : warp::meet(value)) most = max(most, other);
  return most;
}
