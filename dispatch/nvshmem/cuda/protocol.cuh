// How ranks talk through each other's memory: loads and stores that peers see, waits with a deadline, and who does what
// in a kernel.
#pragma once

#include "ptx.cuh"

struct alignas(16) Vec {
  u32 x, y, z, w;
};

// Sixteen bytes as one access that no cache of this SM answers.
DEVICE Vec load_volatile(const void* at) {
  Vec v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

DEVICE void store_volatile(void* at, Vec v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

DEVICE void store_volatile(u64* at, u64 value) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// A line: eight bytes of data and, beside each four of them, the epoch. Sixteen bytes arrive whole, so a reader that
// sees the epoch sees the data, and nobody waits for a fence.
DEVICE void store_line(void* at, u32 a, u32 b, u32 epoch) { store_volatile(at, Vec{a, epoch, b, epoch}); }

DEVICE bool is_of(Vec line, u32 epoch) { return line.y == epoch && line.w == epoch; }

// A packet: 128 bytes that eight neighbouring threads store with one instruction and load with one: a vector each of
// seven, and of the eighth a line that holds two words more. Over NVLink between GPUs of one host such a store arrives
// whole (what NCCL's LL128 protocol stands on), so the line is there last, and one flag serves 112 bytes.
constexpr int kPacketBytes = 128;
constexpr int kPacketVectors = 7;
constexpr int kPacketThreads = 8;

DEVICE int packet_slot() { return threadIdx.x % kPacketThreads; }

// Each thread's vector of four packets; for whole warps, which must not have come apart.
DEVICE Vec load_packets(const void* at) {
  __syncwarp();
  return load_volatile(at);
}

DEVICE void store_packets(void* at, Vec v) {
  __syncwarp();
  store_volatile(at, v);
}

// What a rank keeps to itself for all of its buffers.
struct Status {
  u32 failed;  // a wait of this rank has ended without what it waited for
  u32 alive;   // bit r: rank r takes part
};

// Words of the failure record in the host's memory; behind them one word for each rank, 1 where it was waited for.
enum { RECORD_FAILED, RECORD_PHASE, RECORD_EPOCH, RECORD_RANKS };
enum { PHASE_DISPATCH = 1, PHASE_COMBINE = 2 };

struct Limits {
  Status* status;
  u32* record;
  u64 timeout_ns;  // 0 for none
};

// A thread's waits for other ranks; all of a kernel end at one time, counted from the first that takes long.
template <u32 kPhase>
class Wait {
 public:
  DEVICE Wait(const Limits& limits, u32 epoch) : epoch(epoch), limits_(limits) {}

  // A flag of 64 bits, or two of 32 side by side.
  DEVICE bool for_flag(const u64* flag, u64 value, int peer) {
    // Acquiring empties this SM's cache, so that is done once, when it is there.
    return until(peer, [&] { return *reinterpret_cast<const volatile u64*>(flag) == value; }) &&
           load_acquire_sys(flag) == value;
  }

  // A number of 32 bits with its epoch above it.
  DEVICE bool for_number(const u64* at, int peer, u32& number) {
    u64 both = 0;
    const bool came = until(peer, [&] {
      both = *reinterpret_cast<const volatile u64*>(at);
      return static_cast<u32>(both >> 32) == epoch;
    });
    number = static_cast<u32>(both);
    return came;
  }

  DEVICE bool for_line(const void* at, int peer, Vec& line) {
    return until(peer, [&] {
      line = load_volatile(at);
      return is_of(line, epoch);
    });
  }

  // Each thread's vector of a packet, `v` where it was loaded before; for whole warps, whose threads get one answer.
  DEVICE bool for_packets(const void* at, int peer, Vec& v) {
    for (u32 spin = 1; !__all_sync(~0u, packet_slot() < kPacketVectors || is_of(v, epoch)); ++spin) {
      if (spin % kSpins == 0 && __any_sync(~0u, is_over(peer))) {
        return false;
      }
      if (spin > kImpatient) {
        __nanosleep(kPauseNs);
      }
      v = load_packets(at);
    }
    return true;
  }

  const u32 epoch;

 private:
  static constexpr u32 kSpins = 64;     // between two looks at the clock
  static constexpr u32 kImpatient = 6;  // spins without a pause
  static constexpr u32 kPauseNs = 40;
  static constexpr u64 kNever = ~0ull;

  template <typename Ready>
  DEVICE bool until(int peer, const Ready& ready) {
    for (u32 spin = 1; !ready(); ++spin) {
      if (spin % kSpins == 0 && is_over(peer)) {
        return false;
      }
      if (spin > kImpatient) {
        __nanosleep(kPauseNs);  // Memory that many poll is slow for everybody.
      }
    }
    return true;
  }

  // True when the time is over, which is then on record with the rank that did not come, or when a kernel before this
  // one has failed: nothing is waited for any more then.
  DEVICE bool is_over(int peer) {
    const u64 now = global_timer_ns();
    if (deadline_ == 0) {
      const bool hopeless = *reinterpret_cast<volatile u32*>(&limits_.status->failed);
      deadline_ = hopeless ? 1 : limits_.timeout_ns ? now + limits_.timeout_ns : kNever;
    }
    if (now < deadline_) {
      return false;
    }
    if (deadline_ > 1) {
      volatile u32* words = limits_.record;
      words[RECORD_PHASE] = kPhase;
      words[RECORD_EPOCH] = epoch;
      words[RECORD_RANKS + peer] = 1;
      __threadfence_system();
      words[RECORD_FAILED] = 1;
      *reinterpret_cast<volatile u32*>(&limits_.status->failed) = 1;
    }
    return true;
  }

  const Limits& limits_;
  u64 deadline_ = 0;  // of globaltimer; 0 before the first look, 1 where there is no hope
};

// One half of a block: the one sends and the other receives, so that waiting never keeps anything from being sent.
template <int kBarrier, int kSize>
struct Group {
  DEVICE static void sync() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kSize) : "memory"); }

  // The same, and whether it is true for all threads.
  DEVICE static bool all(bool own) {
    u32 every;
    asm volatile(
        "{\n.reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.and.pred q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(every)
        : "r"(static_cast<u32>(own)), "n"(kBarrier), "n"(kSize)
        : "memory");
    return every != 0;
  }
};

// Sending is handed out in order: tickets of one counter, whose upper half is the batch's epoch. Any block that runs
// can send everything, so no block waits for one that cannot start, whatever else occupies the GPU. Receiving is
// divided beforehand: what does not run yet only waits for what some rank's running blocks send.
//
// The first ticket is drawn while the kernels before still run. So a kernel sets the counter of the one that comes
// next in turn before it lets any come up (hand_over), and behind all draws of that counter, which came before its own
// wait for the kernels before.
template <typename Sync>
class Tickets {
 public:
  DEVICE Tickets(u64* counter, u64* shared) : counter_(counter), shared_(shared) {
    if (threadIdx.x == 0) {
      ahead_ = atomicAdd(counter_, 1ull);
    }
  }

  // The next ticket, the same for all threads of the group.
  DEVICE u64 next() {
    Sync::sync();
    if (threadIdx.x == 0) {
      *shared_ = ahead_ == kNone ? atomicAdd(counter_, 1ull) : ahead_;
      ahead_ = kNone;
    }
    Sync::sync();
    return *shared_;
  }

  // Has the next ticket under way.
  DEVICE void draw_ahead() {
    if (threadIdx.x == 0) {
      ahead_ = atomicAdd(counter_, 1ull);
    }
  }

 private:
  static constexpr u64 kNone = ~0ull;

  u64* counter_;
  u64* shared_;
  u64 ahead_ = kNone;
};

// By one thread of each block that sends, once it has waited for the kernels before.
DEVICE void hand_over(bool is_first, u64* counter, u32 epoch) {
  if (is_first) {
    *reinterpret_cast<volatile u64*>(counter) = static_cast<u64>(epoch) << 32;
    __threadfence();
  }
  grid_dependency_launch();
}
