// Launch parameters that all packed-expert kernels share; params.py mirrors the structs.
#pragma once
#include "ptx.cuh"

// 1: rows arrive and results leave while the kernel runs (arrival.cuh).
#ifndef ARRIVALS
#define ARRIVALS 0
#endif
#if ARRIVALS
#include "arrival.cuh"
#endif

// 1: a decode kernel that computes a whole layer of a few tokens (decode_sm90.cu, section "Route"): it routes them
// itself and sums their slots, or with PEERS takes them from other ranks' packets and returns the sums.
#ifndef ROUTED
#define ROUTED 0
#endif
#ifndef PEERS
#define PEERS 0
#endif
#if PEERS
namespace peers {
#include "low_latency_layer.cuh"
}
#elif ROUTED
#include "router.cuh"
#endif

// A batch-invariant build computes every tile of the decode kernel in the same way: as one of 16 rows, whole.
#ifndef BATCH_INVARIANT
#define BATCH_INVARIANT 0
#endif

// Most rows of a tile of the decode kernel (decode_sm90.cu).
constexpr int kDecodeTileTokens = BATCH_INVARIANT ? 16 : 32;

// Limits of Hopper's kernels: experts that their tables in shared memory have room for, and that memory's size.
constexpr int kMaxExperts = 768;
constexpr int kSharedBytes = 232448;

// a / b for a, b >= 0 and a quotient below 2^21, in a third of the time of a division.
DEVICE int quotient(int a, int b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));
  int q = (int)((float)a * inverse), rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}

struct GemmParams {
  const u8* weights;      // packed, [E][rows * columns * bits / 8]
  const u8* scales;       // [E, groups, rows]
  const u8* zeros;        // zero points, likewise, or null; MXFP4_BY_ROW: the largest scale of every row, [E, rows]
  const u16* bias;        // [E, rows] in natural order, or null
  const float* alphas;    // global scales, [E, alphas_per_expert], or null
  const u16* input;       // rows of `columns` numbers
  u16* output;            // rows of `rows` numbers (half as many after a gated activation)
  int columns;            // of the weights: the depth of the products
  int rows;               // of the weights
  int groups;             // of a row, each with one scale
  int alphas_per_expert;  // 1, or 2 if gate and up differ
};

struct ExpertsParams {
  GemmParams gemm[2];     // w13, then w2
  const int* num_tokens;  // [E] rows of each expert
  const int* row_ids;     // input rows by reference [E, max_rows], sorted ids [all rows], or null: rows are batched
  int* sync;              // tickets and flags: reset after use, or counting up
  float* partials;        // sums of tiles that several CTAs share
  uint4* fixup_sums;      // the same of decode_sm90.cu (section "Fixup")
  u64* hidden_packets;    // `hidden` as flag-in-data packets (decode_sm90.cu, section "Hidden packets")
  int num_experts;
  int max_rows;         // of one expert
  int ids_divisor;      // input row = id / ids_divisor
  int sorted;           // row_ids lists all rows, one expert after the other, and outputs go to row `id`
  int max_tile_tokens;  // that `partials` has room for
  // Experts of up to max_small_m rows are small-M, the decode kernel's (select_kernel.cuh). It exceeds
  // kDecodeTileTokens if that kernel computes all experts, in tiles of up to kDecodeTileTokens.
  int max_small_m;
  int launch_overhead;  // cost of running both kernels; 0: max_small_m holds whatever the rows are
  int max_tiles;        // tiles of tokens that all experts of the decode kernel may have together
#if ARRIVALS
  Arrival arrival;
#endif
#if PEERS
  peers::Batch batch;
#elif ROUTED
  RouterParams router;
#endif
#if ROUTED
  u64* results;  // of every slot, as flag-in-data packets
#endif
};

// Rows of expert e.
DEVICE int rows_of(const ExpertsParams& p, int e) { return min(max(p.num_tokens[e], 0), p.max_rows); }

// The expert e with table[e] <= value < table[e + 1], the entries times `scale`.
DEVICE int find_expert(const int* table, int n, int scale, int value) {
  int low = 0, high = n;  // table[low] <= value < table[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (table[middle] * scale <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A tensor map (CUtensorMap), for bulk copies of boxes of a matrix; hopper.tensor_map encodes it.
struct alignas(64) TensorMap {
  u8 bytes[128];
};
