// What one launch is told; params.py holds the same structures.
#pragma once
#include "ptx.cuh"

// The most rows of a tile of decode_sm90.cu.
constexpr int kFewRows = 32;

// What Hopper's kernels have shared memory for: their tables of experts lie there.
constexpr int kMostExperts = 768;
constexpr int kSharedBytes = 232448;

// a / b, both at least 0 and the quotient below 2^21, in a third of the time.
DEVICE int quotient(int a, int b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));
  int q = (int)((float)a * inverse), rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}

struct GemmParams {
  const u8* weights;        // packed, [E][rows * columns * bits / 8]
  const u8* scales;         // [E, groups, rows]
  const u8* zeros;          // alike, or null
  const u16* bias;          // [E, rows] in natural order, or null
  const float* alphas;      // global scale of every expert, [E, alphas_per_expert], or null
  const u16* input;         // rows of `columns` numbers
  u16* output;              // rows of `rows` numbers (half as many after a gated activation)
  int columns;              // of the weights: the products' depth
  int rows;                 // of the weights
  int groups;               // of a row
  int alphas_per_expert;    // 1, or 2 where gate and up differ
};

struct ExpertsParams {
  GemmParams gemm[2];       // w13, then w2
  const int* num_tokens;    // [E] rows of every expert
  const int* row_ids;       // by reference [E, max_rows], sorted ids [all rows], or null: rows lie batched
  int* sync;                // flags that are reset after use or only count up
  float* partials;          // sums of tiles that several blocks share
  uint4* left_sums;         // see decode_sums.cuh
  u64* hidden_words;        // behind the flags, see decode_words.cuh
  int num_experts;
  int max_rows;             // of one expert
  int ids_divisor;          // input row = id / ids_divisor
  int sorted;               // row_ids lists all rows one expert after the other, and outputs go to row `id`
  int max_tile_tokens;      // what `partials` has room for
  int few_rows;             // an expert of up to so many rows is decode_sm90.cu's (threshold.cuh); more than kFewRows
                            // where that computes all experts, in tiles of up to kFewRows
  int second_kernel;        // what it costs that both kernels run; 0: few_rows holds whatever the rows are
  int most_tiles;           // of tokens, that all experts of decode_sm90.cu may have together
};
