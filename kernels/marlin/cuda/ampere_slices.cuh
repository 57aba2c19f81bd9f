// Few tiles of many columns: a tile's columns cut into slices, so that all blocks have work.
//
// Every slice leaves its sums in `partials`; the block that comes last, whichever it is, adds them up in their order and
// has the tile's. `sync` counts the slices of each tile that have come, and is zero before and after.
#pragma once
#include "ampere_multiply.cuh"

struct AmpereParams {
  ExpertsParams experts;
  const int* column_groups;  // [E, columns] where groups are looked up
  int max_slices;            // of all tiles together: what `partials` has room for
};

constexpr int kMostSlices = 16, kLeastSteps = 4 * kTeams;
constexpr int kSliceCost = 12;  // what a slice's begin and end take, in steps

// Slices of each tile: as many as shorten the longest block's way most.
DEVICE int slices_of(const AmpereParams& p, int num_tiles, int steps) {
  int best = 1, best_rounds = (num_tiles + gridDim.x - 1) / gridDim.x;
  int most = min(kMostSlices, steps / kLeastSteps);
  for (int slices = 2; slices <= most && num_tiles * slices <= p.max_slices; slices++) {
    int rounds = (num_tiles * slices + gridDim.x - 1) / gridDim.x;
    if (rounds * (steps + kSliceCost * slices) * best < best_rounds * (steps + kSliceCost * best) * slices) {
      best = slices, best_rounds = rounds;
    }
  }
  return best;
}

DEVICE float4* slice_sums(const AmpereParams& p, int item) {
  return reinterpret_cast<float4*>(p.experts.partials) + (i64)item * p.experts.max_tile_tokens * (kTileRows / 4) +
         threadIdx.x;
}

// Whether this slice is the last to come; then `sums` are those of the whole tile.
DEVICE bool add_slices(const AmpereParams& p, const Tile& tile, int number, int slice, int slices, Sums& sums) {
  float4* to = slice_sums(p, number * slices + slice);
#pragma unroll
  for (int j = 0; j < kTileTokens / 8; j++) {
    if (8 * j >= tile.tokens) break;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* v = &sums[i][4 * j];
      __stcg(to + (2 * j + i) * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  __threadfence();
  __syncthreads();
  bool last = threadIdx.x == 0 && atomicAdd(p.experts.sync + number, 1) == slices - 1;
  if (!__syncthreads_or(last)) return false;
  if (last) p.experts.sync[number] = 0;
  __threadfence();
#pragma unroll
  for (int m = 0; m < kTileTokens; m++) sums[m / (kTileTokens / 2)][m % (kTileTokens / 2)] = 0.0f;
#pragma unroll 1
  for (int other = 0; other < slices; other++) {
    const float4* from = slice_sums(p, number * slices + other);
#pragma unroll
    for (int j = 0; j < kTileTokens / 8; j++) {
      if (8 * j >= tile.tokens) break;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 v = __ldcg(from + (2 * j + i) * kThreads);
        float* total = &sums[i][4 * j];
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
      }
    }
  }
  return true;
}
