// Reorders the columns of rows to the order of each expert's packed weights (act-order), for the sm_80 kernels and
// Hopper.
//
//   output[row, i] = input[row, order[e, i]]      for every row of expert e
//
// Layout in:  PHASE 0: rows of x, wherever they lie; PHASE 1: rows of `hidden`.  Layout out: PHASE 0: where the
//             experts' results will go (batched, or row `id` of sorted ids); PHASE 1: in place.
// Blocks:     each takes a few rows of one expert through shared memory, so input and output may be the same.
// Example:    order [2, 0, 1, 3]: row [a, b, c, d] becomes [c, a, b, d].
#include "ampere_schedule.cuh"

struct GatherParams {
  ExpertsParams experts;
  const int* order;  // [E, columns]
  const u16* input;
  u16* output;
  int columns;
  int rows_at_once;
};

DEVICE i64 gathered_row(const ExpertsParams& p, int expert, int first_row, int i) {
  if (PHASE == 1) return first_row + i;
  return p.sorted ? p.row_ids[first_row + i] : (i64)expert * p.max_rows + i;
}

extern "C" __global__ void __launch_bounds__(256) gather_columns(const __grid_constant__ GatherParams p) {
  extern __shared__ __align__(128) u8 memory[];
  int tables_bytes = (tables_ints(p.experts.num_experts) * 4 + 15) / 16 * 16;
  TokenTiles tiles = make_token_tiles(p.experts, reinterpret_cast<int*>(memory), p.rows_at_once);
  u16* rows = reinterpret_cast<u16*>(memory + tables_bytes);
  int chunks = p.columns / 8;
  for (int item = blockIdx.x; item < tiles.count(); item += gridDim.x) {
    int expert = expert_of(tiles, item, 1), first_row = tiles.row_start[expert];
    int first = (item - tiles.tile_start[expert]) * p.rows_at_once;
    int count = min(tiles.rows(expert) - first, p.rows_at_once);
    for (int row = 0; row < count; row++) {
      const u16* from = p.input + input_row(p.experts, PHASE, expert, first_row, first + row) * p.columns;
      for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
        reinterpret_cast<uint4*>(rows)[row * chunks + i] = reinterpret_cast<const uint4*>(from)[i];
      }
    }
    __syncthreads();
    const int2* order = reinterpret_cast<const int2*>(p.order + (i64)expert * p.columns);
    for (int i = threadIdx.x; i < p.columns / 2; i += blockDim.x) {
      int2 columns = order[i];
      for (int row = 0; row < count; row++) {
        u16* to = p.output + gathered_row(p.experts, expert, first_row, first + row) * p.columns;
        const u16* from = rows + row * p.columns;
        reinterpret_cast<u32*>(to)[i] = from[columns.x] | (u32)from[columns.y] << 16;
      }
    }
    __syncthreads();
  }
}
