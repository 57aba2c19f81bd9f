// The warps that fill the ring of stages: one streams weights, three copy the tokens' rows.
#pragma once
#include "stage.cuh"

// ---- the weights' warp ----

DEVICE void load_weights(const ExpertsParams& p, const Segment& g, int step, Ring& ring, u64* full, u64 policy) {
  const GemmParams& gemm = p.gemm[g.phase];
  int lane = threadIdx.x % 32;
  int rows = min(gemm.rows - g.row_tile * kTileRows, kTileRows);
  int columns = min(gemm.columns - step * kStepColumns, kStepColumns);
  int groups = 1, first_group = 0;
  if (SCALES_PER_STEP > 1 || gemm.groups > 1) {
    first_group = step * SCALES_PER_STEP;
    groups = min(gemm.groups - first_group, SCALES_PER_STEP);
  }
  if (lane == 0) {
    barrier_arrive_expecting(full, rows * columns * kBits / 8 + groups * rows * kScaleBytes * (kHasZeros ? 2 : 1));
  }
  __syncwarp();
  i64 expert_row = (i64)g.expert * gemm.rows + g.row_tile * kTileRows;
  const u8* codes = gemm.weights + expert_row * gemm.columns * kBits / 8;
  u32 to = shared_address(ring.codes());
  if (lane < kStrips && lane * 64 < rows) {
    int height = min(rows - lane * 64, 64);
    const u8* strip = codes + (i64)(lane * 64) * gemm.columns * kBits / 8;
    const u8* from = strip + (i64)step * kStepColumns * height * kBits / 8;
    if (height == 64) {
      bulk_copy(to + lane * kStripBytes, from, 64 * columns * kBits / 8, full, policy);
    } else {
      for (int c = 0; c < columns / 32; c++) {
        u32 block = to + lane * kStripBytes + c * 4 * kPieceBytes;
        bulk_copy(block, from + c * 2 * kPieceBytes, 2 * kPieceBytes, full, policy);
      }
    }
  } else if (lane >= 8 && lane < 8 + groups) {
    int group = lane - 8;
    i64 scale_row = (i64)g.expert * gemm.groups + first_group + group;
    i64 offset = (scale_row * gemm.rows + g.row_tile * kTileRows) * kScaleBytes;
    u32 row = shared_address(ring.scales()) + group * kScaleRow;
    bulk_copy(row, gemm.scales + offset, rows * kScaleBytes, full, policy);
    if constexpr (kHasZeros) {
      bulk_copy(row + SCALES_PER_STEP * kScaleRow, gemm.zeros + offset, rows * kScaleBytes, full, policy);
    }
  }
  __syncwarp();
}

DEVICE void run_weight_warp(const ExpertsParams& p, Shared& shared, Ring ring, int ticket) {
  int lane = threadIdx.x % 32, total = shared.schedule.phase[0].items + shared.schedule.phase[1].items;
  // Weights that several tiles of tokens read should stay in L2; otherwise nobody reads them again.
  u64 policy = shared.schedule.largest_tile < kTileTokens ? policy_evict_first() : policy_evict_normal();
  for (int i = 0, parity = 1;;) {
    ticket = __shfl_sync(~0u, ticket, 0);
    barrier_wait(&shared.item_empty[i], parity);
    if (lane == 0) {
      shared.item[i] = ticket < total ? ticket : -1;
      barrier_arrive(&shared.item_full[i]);
    }
    if (ticket >= total) return;
    if (++i == kItems) {
      i = 0;
      parity ^= 1;
    }
    for_each_segment(shared.schedule, p.num_experts, ticket, [&](const Segment& g) {
      for (int step = g.from; step < g.to; step++) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        load_weights(p, g, step, ring, &shared.full[ring.stage], policy);
        ring.advance();
      }
    });
    if (lane == 0) ticket = atomicAdd(p.sync, 1);
  }
}

// ---- the tokens' warps ----

DEVICE int input_row(const ExpertsParams& p, Schedule& s, int phase, int expert, int i) {
  if (phase == 1) return s.row_start(p.num_experts)[expert] + i;
  if (p.row_ids == nullptr) return expert * p.max_rows + i;
  i64 place = p.sorted ? s.row_start(p.num_experts)[expert] + i : (i64)expert * p.max_rows + i;
  return p.row_ids[place] / p.ids_divisor;
}

// One stage's columns of all rows of a tile; a thread copies the same 16-byte chunk of every sixth row.
DEVICE void load_tokens(const GemmParams& gemm, const int* rows, int num_rows, int step, Ring& ring, int thread) {
  constexpr int kChunks = kStepColumns / 8, kRowsAtOnce = kTokenWarps * 32 / kChunks, kBatch = 8;
  int chunk = thread % kChunks, column = step * kStepColumns + chunk * 8;
  u32 valid = column < gemm.columns ? 16 : 0;
  const u16* source = gemm.input + (valid ? column : 0);
  u32 to = shared_address(ring.tokens()) + chunk / 8 * ring.token_rows * 128;
  for (int first = thread / kChunks; first < num_rows; first += kRowsAtOnce * kBatch) {
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) row[i] = rows[min(first + i * kRowsAtOnce, kTileTokens - 1)];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      int at = first + i * kRowsAtOnce;
      if (at < num_rows) {
        copy_async_16(to + at * 128 + ((chunk ^ at) % 8) * 16, source + (i64)row[i] * gemm.columns, valid);
      }
    }
  }
}

DEVICE void run_token_warps(const ExpertsParams& p, Shared& shared, Ring ring) {
  constexpr int kTokenThreads = kTokenWarps * 32;
  int thread = threadIdx.x - (kWeightWarp + 1) * 32;
  for_each_item(shared, p.num_experts, [&](const Segment& g) {
    named_barrier<2, kTokenThreads>();
    for (int i = thread; i < g.tokens; i += kTokenThreads) {
      shared.token_row[i] = input_row(p, shared.schedule, g.phase, g.expert, g.first_token + i);
    }
    if (g.phase == 1) {
      int* tiles = shared.schedule.tile_start(p.num_experts) + g.expert;
      if (thread % 32 == 0) {
        wait_at_least(ready_flag(p, g.expert), (tiles[1] - tiles[0]) * shared.schedule.phase[0].row_tiles);
      }
      __syncwarp();
    }
    named_barrier<2, kTokenThreads>();
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      load_tokens(p.gemm[g.phase], shared.token_row, g.tokens, step, ring, thread);
      barrier_arrive_on_copies(&shared.full[ring.stage]);
      ring.advance();
    }
  });
}
