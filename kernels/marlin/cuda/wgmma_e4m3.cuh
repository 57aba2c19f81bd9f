// Hopper's matrix product of a warpgroup in e4m3: 64 weight rows (registers) x N tokens (shared memory) over 32 columns.
//
// Tokens lie K-major, 128 columns (128 bytes) a row, otherwise as in wgmma.cuh, and so do a lane's sums. Of the weights
// a lane has rows g and g + 8, columns 4 t to 4 t + 3, then 16 columns further on.
#pragma once
#include "wgmma.cuh"

// d = a * b, or d + a * b.
template <int kTokens, bool kAdd>
DEVICE void wgmma_e4m3(float* d, const u32* a, u64 b);

#define WGMMA_E4M3_FORM(n, adds, first, list, a0, a1, a2, a3, place, ...)                                           \
  template <>                                                                                                       \
  DEVICE void wgmma_e4m3<n, adds>(float* d, const u32* a, u64 b) {                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" list "}, {" a0 ", " a1 ", " a2 ", " a3 \
                 "}, " place ", " first ", 1, 1;"                                                                   \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
#define WGMMA_E4M3(n, ...)                         \
  WGMMA_E4M3_FORM(n, false, "0", __VA_ARGS__)      \
  WGMMA_E4M3_FORM(n, true, "1", __VA_ARGS__)

WGMMA_E4M3(32, LIST_16, "%16", "%17", "%18", "%19", "%20", SUMS_8(0), SUMS_8(8))
WGMMA_E4M3(64, LIST_32, "%32", "%33", "%34", "%35", "%36", SUMS_32(0))
WGMMA_E4M3(96, LIST_48, "%48", "%49", "%50", "%51", "%52", SUMS_32(0), SUMS_8(32), SUMS_8(40))
WGMMA_E4M3(128, LIST_64, "%64", "%65", "%66", "%67", "%68", SUMS_32(0), SUMS_32(32))
