// mma.sync: the matrix product of one warp, 16 weight rows x 8 tokens over 16 columns, from registers; sm_80 and later.
//
// Accumulators and weights have the layout of wgmma.cuh, so both share dequantization and epilogue.
#pragma once
#include "number.cuh"

DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ACT_NAME "." ACT_NAME
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with accumulators of zero.
DEVICE void mma_from_zero(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ACT_NAME "." ACT_NAME
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// 16 bytes of shared memory; volatile, so that they are read here and not kept from before.
DEVICE void load_shared(float* out, u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(address));
}

// ldmatrix: four 8 x 8 matrices of 16-bit numbers; lane 8 m + r gives the address of row r of matrix m.
DEVICE void load_matrices(u32* out, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address));
}

// Two matrices, whose rows' addresses lanes 0 to 15 give.
DEVICE void load_two_matrices(u32* out, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address));
}

// stmatrix, the inverse of load_matrices; sm_90 and later.
DEVICE void store_matrices(u32 address, const u32* in) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(in[0]),
               "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}
