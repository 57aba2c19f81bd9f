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

// The places of the sums, and these themselves, as operands of inline assembly.
#define LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_12 LIST_8 ", %8, %9, %10, %11"
#define LIST_16 LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_24 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LIST_32 LIST_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_40 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_48 LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_56 LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LIST_64 LIST_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_72 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LIST_80 LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_88 LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)

// d += a * b for n tokens; behind the sums' places those of a and b.
#define WGMMA(n, list, a0, a1, a2, a3, b0, ...)                                                                \
  template <>                                                                                                  \
  DEVICE void wgmma<n>(float* d, const u32* a, u64 b) {                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ACT_NAME "." ACT_NAME " {" list "}, {%" #a0 \
                 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", 1, 1, 1, 0;"                                      \
                 : __VA_ARGS__                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
  }

WGMMA(24, LIST_12, 12, 13, 14, 15, 16, SUMS_8(0), SUMS_4(8))
WGMMA(32, LIST_16, 16, 17, 18, 19, 20, SUMS_8(0), SUMS_8(8))
WGMMA(48, LIST_24, 24, 25, 26, 27, 28, SUMS_8(0), SUMS_8(8), SUMS_8(16))
WGMMA(64, LIST_32, 32, 33, 34, 35, 36, SUMS_32(0))
WGMMA(80, LIST_40, 40, 41, 42, 43, 44, SUMS_32(0), SUMS_8(32))
WGMMA(96, LIST_48, 48, 49, 50, 51, 52, SUMS_32(0), SUMS_8(32), SUMS_8(40))
WGMMA(112, LIST_56, 56, 57, 58, 59, 60, SUMS_32(0), SUMS_8(32), SUMS_8(40), SUMS_8(48))
WGMMA(128, LIST_64, 64, 65, 66, 67, 68, SUMS_32(0), SUMS_32(32))
WGMMA(144, LIST_72, 72, 73, 74, 75, 76, SUMS_32(0), SUMS_32(32), SUMS_8(64))
WGMMA(176, LIST_88, 88, 89, 90, 91, 92, SUMS_32(0), SUMS_32(32), SUMS_8(64), SUMS_8(72), SUMS_8(80))
