// Inter-rank protocol of the NVSHMEM kernels: loads and stores of peer memory, flag-in-data lines and packets, waits
// for them, and the division of a kernel's work between sending and receiving warps.
#pragma once

#include "deadline.cuh"

struct alignas(16) Vec {
  u32 x, y, z, w;
};

// 16 bytes in one access that bypasses this SM's cache.
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

// A line: 8 bytes of data, each 4 of them beside the epoch (flag-in-data, as NCCL's LL protocol). 16 bytes arrive as a
// whole, so a reader that sees the epoch sees the data, and no fence is needed.
DEVICE void store_line(void* at, u32 a, u32 b, u32 epoch) { store_volatile(at, Vec{a, epoch, b, epoch}); }

DEVICE bool is_of(Vec line, u32 epoch) { return line.y == epoch && line.w == epoch; }

// A packet: 128 flag-in-data bytes (as NCCL's LL128 protocol) that eight neighbouring threads store with one
// instruction and load with one. Seven have a vector of data each, the eighth a line with 8 bytes more. Over NVLink
// between GPUs of one host such a store arrives as a whole, so one flag serves 112 bytes.
constexpr int kPacketBytes = 128;
constexpr int kPacketVectors = 7;
constexpr int kPacketThreads = 8;

DEVICE int packet_slot() { return threadIdx.x % kPacketThreads; }

// Each thread's vector of four packets; by whole, converged warps.
DEVICE Vec load_packets(const void* at) {
  __syncwarp();
  return load_volatile(at);
}

DEVICE void store_packets(void* at, Vec v) {
  __syncwarp();
  store_volatile(at, v);
}

// Waits for what other ranks send.
template <u32 kPhase>
class Wait : public Deadline<kPhase> {
  using Base = Deadline<kPhase>;

 public:
  using Base::epoch;

  DEVICE Wait(const Limits& limits, u32 epoch) : Base(limits, epoch) {}

  // A number of 32 bits with the epoch in the upper half.
  DEVICE bool for_number(const u64* at, int peer, u32& number) {
    u64 both = 0;
    const bool came = Base::until(peer, [&] {
      both = *reinterpret_cast<const volatile u64*>(at);
      return static_cast<u32>(both >> 32) == epoch;
    });
    number = static_cast<u32>(both);
    return came;
  }

  DEVICE bool for_line(const void* at, int peer, Vec& line) {
    return Base::until(peer, [&] {
      line = load_volatile(at);
      return is_of(line, epoch);
    });
  }

  // Each thread's vector of a packet; `v` is what it loaded before. By whole warps, whose threads return the same.
  DEVICE bool for_packets(const void* at, int peer, Vec& v) {
    for (u32 spin = 1; !__all_sync(~0u, packet_slot() < kPacketVectors || is_of(v, epoch)); ++spin) {
      if (spin % Base::kSpins == 0 && __any_sync(~0u, Base::has_timed_out(peer))) {
        return false;
      }
      if (spin > Base::kSpinsWithoutPause) {
        __nanosleep(Base::kPauseNs);
      }
      v = load_packets(at);
    }
    return true;
  }
};

// One half of a block's warps: one half sends and the other receives, so that waiting never delays sending.
template <int kBarrier, int kSize>
struct Group {
  DEVICE static void sync() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kSize) : "memory"); }

  // The same, and whether `own` is true for all threads.
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

// Sending is distributed dynamically, by tickets of a counter whose upper half is the batch's epoch: any block that
// runs can send everything, so no block waits for one that cannot start because the GPU is busy. Receiving is divided
// statically: a block that does not run yet only delays its own share, which some running block of a peer sends.
//
// The first ticket is drawn while earlier kernels still run. So a kernel resets the counter of the kernel that follows
// in turn before it lets any start (hand_over); all draws of that counter precede it, because their kernels have ended.
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

  // Draws the next ticket early, to hide its latency.
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

// By one thread of each sending block, once it has waited for earlier kernels.
DEVICE void hand_over(bool is_first, u64* counter, u32 epoch) {
  if (is_first) {
    *reinterpret_cast<volatile u64*>(counter) = static_cast<u64>(epoch) << 32;
    __threadfence();
  }
  grid_dependency_launch();
}
