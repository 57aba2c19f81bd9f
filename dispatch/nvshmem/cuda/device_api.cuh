// Puts to ranks whose memory is not mapped here, through NVSHMEM's device library; compiled with DEVICE_API=1.
//
// Addresses are this rank's own symmetric addresses, which NVSHMEM translates. Sources must be symmetric memory too,
// since a network card reads them, and must not change until the peer has answered.
#pragma once

#include "protocol.cuh"

#ifndef DEVICE_API
#define DEVICE_API 0
#endif

#if DEVICE_API
// The library was compiled with a 64-bit integer type of `long`, NVRTC's headers use `long long`: only its own headers
// may see the former, so those of CCCL and CUDA, which they include, come first. They also need some traits in std.
#include <cuda/atomic>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
#include <cuda_awbarrier_primitives.h>
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

// By a warp: puts `bytes` from `from` to `there` on `pe`, then `value` to the flag. Returns before either is done.
DEVICE void put_with_flag(void* there, const void* from, u64 bytes, u64* flag, u64 value, int pe) {
  auto* at = reinterpret_cast<library_u64*>(flag);
  nvshmemx_putmem_signal_nbi_warp(there, from, bytes, at, value, NVSHMEM_SIGNAL_SET, pe);
}

// By one thread: puts `value` to the flag on `pe`, unordered.
DEVICE void put_flag(u64* flag, u64 value, int pe) {
  nvshmemx_signal_op(reinterpret_cast<library_u64*>(flag), value, NVSHMEM_SIGNAL_SET, pe);
}

// By one thread: waits until its earlier puts have arrived.
DEVICE void wait_for_puts() { nvshmem_quiet(); }

// After a poll of the flag has seen `value`: makes the data that was put before the flag visible.
DEVICE void settle(u64* flag, u64 value) {
  nvshmem_uint64_test(reinterpret_cast<library_u64*>(flag), NVSHMEM_CMP_EQ, value);
}
#endif
