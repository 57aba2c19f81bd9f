// Tiles of tokens, found on the device from the experts' row counts, and the rows that they read; for the sm_80
// kernels.
#pragma once
#include "params.cuh"

// Prefix sums over the experts in shared memory, E + 1 numbers each: rows, then tiles of rows, of all experts before.
struct TokenTiles {
  int *row_start, *tile_start;
  int num_experts, tile_tokens;
  DEVICE int count() const { return tile_start[num_experts]; }
  DEVICE int rows(int expert) const { return row_start[expert + 1] - row_start[expert]; }
};

DEVICE constexpr int tables_ints(int num_experts) { return 2 * (num_experts + 1); }

// By all threads; one warp sums up the counts, 32 experts at a time.
DEVICE TokenTiles make_token_tiles(const ExpertsParams& p, int* memory, int tile_tokens) {
  TokenTiles tiles{memory, memory + p.num_experts + 1, p.num_experts, tile_tokens};
  int lane = threadIdx.x;
  if (lane < 32) {
    int before[2] = {0, 0};
    for (int base = 0; base < p.num_experts; base += 32) {
      int e = base + lane, rows = e < p.num_experts ? rows_of(p, e) : 0;
      int own[2] = {rows, (rows + tile_tokens - 1) / tile_tokens};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int sum = sum_of_lanes(own[i], lane);
        if (e < p.num_experts) memory[i * (p.num_experts + 1) + e] = before[i] + sum - own[i];
        before[i] += __shfl_sync(~0u, sum, 31);
      }
    }
    if (lane < 2) memory[lane * (p.num_experts + 1) + p.num_experts] = before[lane];
  }
  __syncthreads();
  return tiles;
}

// The expert that tile `i` belongs to if each tile of tokens counts as `per_tile` tiles.
DEVICE int expert_of(const TokenTiles& tiles, int i, int per_tile) {
  return find_expert(tiles.tile_start, tiles.num_experts, per_tile, i);
}

// Input row of row i of an expert; `first_row`: rows of all experts before it.
DEVICE i64 input_row(const ExpertsParams& p, int phase, int expert, int first_row, int i) {
  if (phase == 1) return first_row + i;
  i64 position = p.sorted ? first_row + i : (i64)expert * p.max_rows + i;
  return p.row_ids == nullptr ? position : p.row_ids[position] / p.ids_divisor;
}
