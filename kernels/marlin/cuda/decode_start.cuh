// What comes before the first copy of a launch: barriers, weights called into L2, the first ticket, tables.
#pragma once
#include "decode_loads.cuh"

constexpr int kPrefetchSteps = 3;

// One thread, whose time nobody needs yet: they take half a microsecond, and 1.5 us more by lanes, which take turns.
DEVICE void init_barriers(Shared& shared) {
#pragma unroll
  for (int i = 0; i < kMaxStages; i++) {
    barrier_init(&shared.full[i], 1 + 32 * kTokenWarps);
    barrier_init(&shared.empty[i], kReleases);
    barrier_init(&shared.landed[i], 32 * kTokenWarps);
  }
#pragma unroll
  for (int i = 0; i < kSegments; i++) {
    barrier_init(&shared.segment_full[i], 1);
    barrier_init(&shared.segment_done[i], kConsumerWarps);
    barrier_init(&shared.segment_empty[i], kTokenWarps + 1 + kConsumerWarps);
  }
  barrier_init(&shared.exchange_free, kConsumerWarps);
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// One thread: where the tables and the ring lie.
DEVICE void place_tables(Shared& shared, int most_tiles) {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  shared.end = (bytes - most_tiles * sizeof(Schedule::Active)) / 16 * 16;
  shared.schedule.list = shared.end - (u32)(reinterpret_cast<u8*>(&shared.schedule) - reinterpret_cast<u8*>(&shared));
  shared.issued = 0;
}

// One warp, before anything of this launch is known: the first steps of a piece of w13, cut as if all experts had as
// many rows. Which block will have that piece does not matter, and memory has nothing else to do.
DEVICE void prefetch_weights(const ExpertsParams& p, int lane) {
  const GemmParams& gemm = p.gemm[0];
  int row_tiles = (gemm.rows + kTileRows - 1) / kTileRows, steps = (gemm.columns + kStepColumns - 1) / kStepColumns;
  int tiles = p.num_experts * row_tiles, all = tiles * steps;
  bool whole = are_whole(tiles, steps, 1, all);
  int at = whole ? quotient(blockIdx.x * tiles, gridDim.x) * steps : even_start(all, blockIdx.x);
  int tile = quotient(at, steps), step = at - tile * steps, expert = quotient(tile, row_tiles);
  int first = (tile - expert * row_tiles) * kTileRows + lane * 64;
  int columns = min(gemm.columns - step * kStepColumns, kPrefetchSteps * kStepColumns);
  if (tile >= tiles || lane >= kStrips || first + 64 > gemm.rows) return;
  const u8* strip = gemm.weights + ((i64)expert * gemm.rows + first) * gemm.columns * kBits / 8;
  bulk_prefetch(strip + (i64)step * kStripBytes, columns * 64 * kBits / 8);
}

// The first ticket, in lane 0, and what follows from it and the row counts.
DEVICE int start_launch(const ExpertsParams& p, Shared& shared, int lane) {
  u64 ticket = lane == 0 ? draw_tickets(p, 1) : 0;
  make_tables(shared.schedule, p, lane);
  __syncwarp();
  if (lane != 0) return 0;
  if (shared.schedule.largest == 0) {
    // All blocks see that nothing is to be claimed: their other tickets are counted, without waiting for their numbers.
    draw_tickets(p, 2 + (blockIdx.x == 0 ? kTicketsPerLaunch - 3 * gridDim.x : 0));
    return 0;
  }
  shared.launch = (int)(ticket / kTicketsPerLaunch) + 1;
  return ticket_number(p, ticket, 1);
}
