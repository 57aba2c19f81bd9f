// Waits of a kernel for other ranks, or for other kernels of its own: with a deadline, and a record of who was missing.
#pragma once

#include "ptx.cuh"

// State that a rank keeps for all of its buffers.
struct Status {
  u32 failed;  // a wait of this rank has timed out, or kWaitsEnded
  u32 alive;   // bit r: rank r participates
};
// The host has ended all waits of this rank, for good: also the ones that kernels are in.
constexpr u32 kWaitsEnded = 2;

// Words of the failure record in host memory; one word per rank follows, 1 if it was waited for. The host sets
// RECORD_ENDED, without the driver: a thread that launches kernels into a full queue keeps it from all others.
enum { RECORD_FAILED, RECORD_PHASE, RECORD_EPOCH, RECORD_ENDED, RECORD_RANKS };
enum { PHASE_DISPATCH = 1, PHASE_COMBINE = 2 };

struct Limits {
  Status* status;
  u32* record;
  u64 timeout_ns;  // 0: none
};

// A thread's waits. All of a kernel share one deadline, counted from the first wait that takes long.
template <u32 kPhase>
class Deadline {
 public:
  DEVICE Deadline(const Limits& limits, u32 epoch) : epoch(epoch), limits_(limits) {}

  // A flag of 64 bits, or two neighbouring ones of 32.
  DEVICE bool for_flag(const u64* flag, u64 value, int peer) {
    // An acquire invalidates this SM's cache, so it is done once, when the flag has arrived.
    return until(peer, [&] { return *reinterpret_cast<const volatile u64*>(flag) == value; }) &&
           load_acquire_sys(flag) == value;
  }

  const u32 epoch;

 protected:
  static constexpr u32 kSpins = 64;             // between two reads of the clock
  static constexpr u32 kSpinsWithoutPause = 6;  // spins without a pause
  static constexpr u32 kPauseNs = 40;

  template <typename Ready>
  DEVICE bool until(int peer, const Ready& ready) {
    for (u32 spin = 1; !ready(); ++spin) {
      if (spin % kSpins == 0 && has_timed_out(peer)) {
        return false;
      }
      if (spin > kSpinsWithoutPause) {
        __nanosleep(kPauseNs);  // memory that many threads poll is slow for all
      }
    }
    return true;
  }

  // True if the deadline has passed, which is then recorded with the rank that was waited for, or if an earlier wait of
  // this rank has failed: later kernels do not wait any more. Also if the host has ended all waits.
  DEVICE bool has_timed_out(int peer) {
    const u64 now = global_timer_ns();
    const u32 failed = *reinterpret_cast<volatile u32*>(&limits_.status->failed);
    if (failed == kWaitsEnded || host_ends(now)) {
      deadline_ = 1;
    } else if (deadline_ == 0) {
      deadline_ = failed ? 1 : limits_.timeout_ns ? now + limits_.timeout_ns : kNever;
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

 private:
  static constexpr u64 kNever = ~0ull;

  // The host's word is far away, so it is read for 66 us in every 0.5 ms; without state, which takes registers.
  DEVICE bool host_ends(u64 now) {
    const bool is_due = limits_.record != nullptr && (now >> 16) % 8 == 0;
    if (!is_due || *reinterpret_cast<volatile u32*>(limits_.record + RECORD_ENDED) == 0) {
      return false;
    }
    *reinterpret_cast<volatile u32*>(&limits_.status->failed) = kWaitsEnded;
    return true;
  }

  const Limits& limits_;
  u64 deadline_ = 0;  // of globaltimer; 0: not read yet, 1: an earlier wait has failed
};
