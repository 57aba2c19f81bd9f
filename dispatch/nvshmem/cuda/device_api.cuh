// Puts to ranks whose memory is not mapped here, through NVSHMEM's device library; kernels with DEVICE_API=1 have them.
//
// Addresses are this rank's own, of symmetric memory: NVSHMEM finds the copy on the other one. What is put must lie in
// symmetric memory too, since a network card reads it, and must not change until the other rank has answered.
#pragma once

#include "protocol.cuh"

#ifndef DEVICE_API
#define DEVICE_API 0
#endif

#if DEVICE_API
// The library was compiled with 64-bit integers that are long, and NVRTC's headers have long long: its own headers must
// see the former, and those of CCCL, which they include, be through before. They also take some traits from std.
#include <cuda/atomic>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using cuda::std::enable_if;
using cuda::std::is_floating_point;
using cuda::std::is_integral;
using cuda::std::is_same;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std
typedef unsigned long library_u64;
typedef long library_i64;
#define uint64_t library_u64
#define int64_t library_i64
#include <nvshmem.h>
#undef uint64_t
#undef int64_t

// A warp's: `bytes` from `from` to `there` on `pe`, and behind them `value` to the flag. Returns before that is done.
DEVICE void put_with_flag(void* there, const void* from, u64 bytes, u64* flag, u64 value, int pe) {
  auto* at = reinterpret_cast<library_u64*>(flag);
  nvshmemx_putmem_signal_nbi_warp(there, from, bytes, at, value, NVSHMEM_SIGNAL_SET, pe);
}

// One thread's: `value` to the flag on `pe`, ordered behind nothing.
DEVICE void put_flag(u64* flag, u64 value, int pe) {
  nvshmemx_signal_op(reinterpret_cast<library_u64*>(flag), value, NVSHMEM_SIGNAL_SET, pe);
}

// One thread's: until what was put before is there.
DEVICE void wait_for_puts() { nvshmem_quiet(); }

// To be called once a poll of the flag has seen `value`: what was put before it is there then.
DEVICE void settle(u64* flag, u64 value) {
  nvshmem_uint64_test(reinterpret_cast<library_u64*>(flag), NVSHMEM_CMP_EQ, value);
}
#endif
