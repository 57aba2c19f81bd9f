// wgmma of 8-bit numbers on Hopper: 64 rows of operand A x kColumns rows of operand B over 32 columns of both
// (wgmma.m64nNk32). A lane's accumulators lie as in wgmma.cuh.
//
// Operands in shared memory are either swizzled, like tokens (wgmma.cuh), or e4m3 weights in their packed order without
// swizzle: core matrices of 8 rows x 16 bytes; the two 16-byte columns of a product are 128 bytes apart (repack.py).
#pragma once
#include "eight_bit_tile.cuh"
#include "wgmma.cuh"

// The descriptor of weights without swizzle: its low half for a shared address, and its high half for groups of 8 rows
// that are eight_rows bytes apart.
DEVICE u32 plain_descriptor(u32 address) { return (address & 0x3ffff) >> 4 | (128 / 16) << 16; }
DEVICE constexpr u64 plain_descriptor_high(int eight_rows) { return u64(eight_rows / 16) << 32; }

#if ROWS_INT8
#define SUM_CONSTRAINT "+r"
#define WGMMA_TYPES "s32.s8.s8"
#define WGMMA_SIGNS
#else
#define SUM_CONSTRAINT "+f"
#define WGMMA_SIGNS ", 1, 1"
#if WEIGHT_TYPE == MXFP4_BY_ROW
#define WGMMA_TYPES "f32.e5m2.e4m3"
#else
#define WGMMA_TYPES "f32.e4m3.e4m3"
#endif
#endif

// d = a * b, or d += a * b if `adds`; operand a is in registers.
template <int kColumns>
DEVICE void wgmma_eight_bit(Sum* d, const u32* a, u64 b, int adds);

// The same with both operands in shared memory.
template <int kColumns>
DEVICE void wgmma_eight_bit(Sum* d, u64 a, u64 b, int adds);

#define EIGHT(i)                                                                                      \
  SUM_CONSTRAINT(d[i]), SUM_CONSTRAINT(d[i + 1]), SUM_CONSTRAINT(d[i + 2]), SUM_CONSTRAINT(d[i + 3]), \
      SUM_CONSTRAINT(d[i + 4]), SUM_CONSTRAINT(d[i + 5]), SUM_CONSTRAINT(d[i + 6]), SUM_CONSTRAINT(d[i + 7])
#define THIRTY_TWO(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)

// `list` names the operands of the accumulators; those of a, b and adds follow.
#define WGMMA_EIGHT_BIT(n, list, a0, a1, a2, a3, place, adds_place, ...)                                           \
  template <>                                                                                                      \
  DEVICE void wgmma_eight_bit<n>(Sum * d, const u32* a, u64 b, int adds) {                                         \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_place ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                 "k32." WGMMA_TYPES " {" list "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " place ", adds" WGMMA_SIGNS   \
                 ";\n}"                                                                                            \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                 \
  }
#define WGMMA_FROM_SHARED(n, list, a_place, place, adds_place, ...)                                                \
  template <>                                                                                                      \
  DEVICE void wgmma_eight_bit<n>(Sum * d, u64 a, u64 b, int adds) {                                                \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_place ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                 "k32." WGMMA_TYPES " {" list "}, " a_place ", " place ", adds" WGMMA_SIGNS ";\n}"                 \
                 : __VA_ARGS__                                                                                     \
                 : "l"(a), "l"(b), "r"(adds));                                                                     \
  }

WGMMA_EIGHT_BIT(32, LIST_16, "%16", "%17", "%18", "%19", "%20", "%21", EIGHT(0), EIGHT(8))
WGMMA_EIGHT_BIT(64, LIST_32, "%32", "%33", "%34", "%35", "%36", "%37", THIRTY_TWO(0))
WGMMA_EIGHT_BIT(96, LIST_48, "%48", "%49", "%50", "%51", "%52", "%53", THIRTY_TWO(0), EIGHT(32), EIGHT(40))
WGMMA_EIGHT_BIT(128, LIST_64, "%64", "%65", "%66", "%67", "%68", "%69", THIRTY_TWO(0), THIRTY_TWO(32))
WGMMA_FROM_SHARED(32, LIST_16, "%16", "%17", "%18", EIGHT(0), EIGHT(8))
WGMMA_FROM_SHARED(64, LIST_32, "%32", "%33", "%34", THIRTY_TWO(0))
WGMMA_FROM_SHARED(96, LIST_48, "%48", "%49", "%50", THIRTY_TWO(0), EIGHT(32), EIGHT(40))
WGMMA_FROM_SHARED(128, LIST_64, "%64", "%65", "%66", THIRTY_TWO(0), THIRTY_TWO(32))
