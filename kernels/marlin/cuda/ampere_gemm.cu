// One GEMM of the experts with what follows it, for every GPU from sm_80 on: PHASE 0 is w13 with the activation, PHASE
// 1 is w2.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// A tile is 128 weight rows x up to TILE_TOKENS tokens of one expert over all columns; blocks of four warps take every
// so many-th tile, those of one expert's weights together. With few tokens each warp takes columns of its own and all
// rows, with many all columns and some rows (ampere_loads.cuh). Codes, scales and tokens come by asynchronous copies, in
// stages of 64 columns; weights are operand A of the tensor cores, dequantized in registers, tokens operand B. Where
// there are too few tiles for the blocks, a tile's columns are cut into slices (ampere_slices.cuh). No block waits for
// another, and sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Stage`.
#include "ampere_slices.cuh"
#include "store.cuh"

DEVICE Tile find_tile(const GemmParams& gemm, const TokenTiles& tiles, int i) {
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows;
  Tile tile;
  tile.expert = expert_of(tiles, i, row_tiles);
  int start = tiles.tile_start[tile.expert], token_tiles = tiles.tile_start[tile.expert + 1] - start;
  int rest = i - start * row_tiles;
  tile.first = rest / token_tiles * kTileRows;
  tile.first_row = tiles.row_start[tile.expert];
  tile.first_token = rest % token_tiles * kTileTokens;
  tile.tokens = min(tiles.rows(tile.expert) - tile.first_token, kTileTokens);
  return tile;
}

// The products of steps `from` up to `to`.
DEVICE void multiply_steps(const AmpereParams& p, const Tile& tile, int from, int to, u8* rings, Sums& sums) {
  const GemmParams& gemm = p.experts.gemm[PHASE];
  int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
  Source source(p.experts, tile, thread);
  TeamSums own = {};
  auto stage = [&](int n) { return Stage{rings + team * kRingBytes + n % kStages * kStageBytes}; };
  auto load = [&](int n) {
    int step = from + team + n * kTeams;
    if (step < to) load_stage(gemm, tile, source, thread, step, stage(n));
    commit_copies();
  };
#pragma unroll
  for (int n = 0; n < kStages - 1; n++) load(n);
  for (int n = 0, step = from + team; step < to; n++, step += kTeams) {
    wait_for_copies<kStages - 2>();
    meet_team();  // this step's stage is filled, and nobody reads the one before any more
    load(n + kStages - 1);
    multiply_stage(gemm, tile, p.column_groups, step, stage(n), own);
  }
  __syncthreads();
  add_teams(rings, own, sums);
}

constexpr Units kUnit = kLookUp ? Units{} : Units{kUnfold, kUnfold};

DEVICE void store_tile(const AmpereParams& p, const Tile& tile, const Sums& sums) {
  const GemmParams& gemm = p.experts.gemm[PHASE];
  i64 place = p.experts.sorted ? tile.first_row : (i64)tile.expert * p.experts.max_rows;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int first = tile.first + threadIdx.x / 32 * 32 + 16 * i;
    if (first < gemm.rows) {
      store_rows<kTileTokens, PHASE == 0>(p.experts, tile.expert, tile.first_row, place,
                                          tile.first_token + tile.tokens, first, sums[i], tile.first_token, kUnit);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    ampere_gemm(const __grid_constant__ AmpereParams p) {
  extern __shared__ __align__(128) u8 memory[];
  const ExpertsParams& experts = p.experts;
  TokenTiles tiles = make_token_tiles(experts, reinterpret_cast<int*>(memory + kTeams * kRingBytes), kTileTokens);
  int num_tiles = tiles.count() * ((experts.gemm[PHASE].rows + kTileRows - 1) / kTileRows);
  int steps = (experts.gemm[PHASE].columns + kStepColumns - 1) / kStepColumns, slices = slices_of(p, num_tiles, steps);
  for (int i = blockIdx.x; i < num_tiles * slices; i += gridDim.x) {
    int slice = i % slices;
    Tile tile = find_tile(experts.gemm[PHASE], tiles, i / slices);
    Sums sums = {};
    multiply_steps(p, tile, steps * slice / slices, steps * (slice + 1) / slices, memory, sums);
    if (slices == 1 || add_slices(p, tile, i / slices, slice, slices, sums)) store_tile(p, tile, sums);
  }
}
