// wgmma: the matrix product of a warpgroup, 64 weight rows (registers) x N tokens (shared memory) over 16 columns;
// sm_90a.
//
// Tokens are K-major with the 128-byte swizzle: 64 columns (128 bytes) a row, 8 rows an atom, 16-byte chunk c of row r
// at position c ^ (r % 8). Accumulators of lane 4 g + t: for every 8 tokens, (row g, tokens 2 t and 2 t + 1), then (row
// g + 8, the same tokens).
#pragma once
#include "number.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kLeft>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Low half of the descriptor of a swizzled operand at a shared address; 16 columns further on it is 2 more.
constexpr u64 kDescriptorHigh = 0x40000040;
DEVICE u32 wgmma_descriptor(u32 address) { return (address & 0x3ffff) >> 4 | 1u << 16; }

template <int kTokens>
DEVICE void wgmma(float* d, const u32* a, u64 b);

#define SUMS_8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_24 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIST_32                                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_48 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_64                                                                                                 \
  LIST_32                                                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <>
DEVICE void wgmma<24>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32." ACT_NAME "." ACT_NAME
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
               : SUMS_8(0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<32>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." ACT_NAME "." ACT_NAME " {" LIST_16
               "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : SUMS_8(0), SUMS_8(8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<64>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ACT_NAME "." ACT_NAME " {" LIST_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : SUMS_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<96>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." ACT_NAME "." ACT_NAME " {" LIST_48
               "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_8(32), SUMS_8(40)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<128>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ACT_NAME "." ACT_NAME " {" LIST_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#define LIST_40 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_56 LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIST_72 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_88 LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"

template <>
DEVICE void wgmma<48>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." ACT_NAME "." ACT_NAME " {" LIST_24
               "}, {%24, %25, %26, %27}, %28, 1, 1, 1, 0;"
               : SUMS_8(0), SUMS_8(8), SUMS_8(16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<144>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n144k16.f32." ACT_NAME "." ACT_NAME " {" LIST_72
               "}, {%72, %73, %74, %75}, %76, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_32(32), SUMS_8(64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<176>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n176k16.f32." ACT_NAME "." ACT_NAME " {" LIST_88
               "}, {%88, %89, %90, %91}, %92, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_32(32), SUMS_8(64), SUMS_8(72), SUMS_8(80)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<80>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32." ACT_NAME "." ACT_NAME " {" LIST_40
               "}, {%40, %41, %42, %43}, %44, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_8(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
DEVICE void wgmma<112>(float* d, const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n112k16.f32." ACT_NAME "." ACT_NAME " {" LIST_56
               "}, {%56, %57, %58, %59}, %60, 1, 1, 1, 0;"
               : SUMS_32(0), SUMS_8(32), SUMS_8(40), SUMS_8(48)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
