// PTX instructions that CUDA C++ has no functions for, of sm_80 and sm_90a, and the integer types of all kernels.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarriers ----

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

DEVICE void barrier_arrive(u64* barrier, u32 times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
}

DEVICE void barrier_arrive_expecting(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

DEVICE bool barrier_try_wait(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

DEVICE void barrier_wait(u64* barrier, u32 parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}

// The same for a barrier kOffset bytes behind an address: the offset is part of the instruction.
template <int kOffset>
DEVICE void barrier_arrive_at(u32 address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0+%1];" ::"r"(address), "n"(kOffset) : "memory");
}

template <int kOffset>
DEVICE void barrier_wait_at(u32 address, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1+%3], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address), "r"(parity), "n"(kOffset)
        : "memory");
  } while (done == 0);
}

// bar.sync for some warps only; id 0 is __syncthreads.
template <int kId, int kThreads>
DEVICE void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Counts this thread among those that named_barrier<kId, kThreads> waits for, without waiting.
template <int kId, int kThreads>
DEVICE void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// True in one thread of the warp, always the same; the compiler then knows that there is only one.
DEVICE bool elected() {
  u32 chosen;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}

// ---- copies into shared memory ----

DEVICE u64 policy_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE u64 policy_evict_normal() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void bulk_copy(u32 to, const void* from, u32 num_bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Into the L2 cache only; a multiple of 16 bytes.
DEVICE void bulk_prefetch(const void* from, u32 num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes) : "memory");
}

// A word, or half of one, of shared memory; volatile, so that it is read here and not kept from before.
DEVICE u32 load_shared_u32(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

DEVICE void load_shared_pair(u32 address, u32* words) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

DEVICE u32 load_shared_u16(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

// 16 bytes; zeros behind the first valid_bytes (0 or 16).
DEVICE void copy_async_16(u32 to, const void* from, u32 valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid_bytes) : "memory");
}

// Copies 4 bytes asynchronously.
DEVICE void copy_async_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Waits until all asynchronous copies that this thread issued have landed.
DEVICE void copies_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Asynchronous copies of a thread in groups: ends the present one; waits until all but the last kPending have landed.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Copies a box of a matrix in global memory, described by its tensor map, from the given column and row on.
DEVICE void tensor_copy(u32 to, const void* map, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The same of a tensor of three dimensions, the innermost first.
DEVICE void tensor_copy(u32 to, const void* map, int x, int y, int z, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// Arrives once all earlier cp.async of this thread have landed; the barrier's count includes this arrival.
DEVICE void barrier_arrive_on_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Between ordinary stores and reads of them through the async proxy (bulk copies, wgmma).
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- flags in global memory, within a GPU ----

DEVICE int load_acquire_gpu(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

DEVICE void add_release_gpu(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

DEVICE int add_acquire_release_gpu(int* p, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
  return before;
}

DEVICE void store_release_gpu(int* p, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

DEVICE void wait_at_least(const int* p, int value) {
  while (load_acquire_gpu(p) < value) {
  }
}

// ---- flags in global memory, between GPUs ----

// Release-store: publishes the CTA's prior writes (after __syncthreads) to the acquirer on any GPU.
DEVICE void store_release_sys(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

DEVICE u64 load_acquire_sys(const u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// The GPU's global timer, which all SMs share.
DEVICE u64 global_timer_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ---- counters in shared memory that warps poll ----

DEVICE int read_shared(int* p) {
  int value;
  asm volatile("atom.relaxed.cta.shared.add.s32 %0, [%1], 0;" : "=r"(value) : "r"(shared_address(p)) : "memory");
  return value;
}

DEVICE void count_shared(int* p) {
  asm volatile("red.relaxed.cta.shared.add.s32 [%0], 1;" ::"r"(shared_address(p)) : "memory");
}

// ---- programmatic dependent launch ----

// Waits until the kernels before this one have ended and their stores are visible. Nothing before sm_90 overlaps them.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start, once every block has called this or has ended.
DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- registers ----

template <int kCount>
DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Transposes an 8 x 8 matrix of 16-bit numbers across the warp: lane 4 r + c holds row r, columns 2 c and 2 c + 1.
DEVICE u32 transpose_8x8(u32 pair) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Inclusive prefix sum over the lanes.
DEVICE int sum_of_lanes(int sum, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  return sum;
}

DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

DEVICE u32 and_or(u32 value, u32 mask, u32 bits) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(value), "r"(mask), "r"(bits));
  return out;
}
