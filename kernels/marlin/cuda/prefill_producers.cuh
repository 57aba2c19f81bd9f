// The warps that fill the rings: one streams codes, three copy the tokens' rows.
#pragma once
#include "prefill_stage.cuh"

// ---- codes and scales, by bulk copies of one thread ----

struct CodeSource {
  const u8 *codes, *scales, *zeros;  // of the tile's first row
  u32 strip_bytes, group_bytes;      // from one strip to the next, from one group to the next
  int rows, columns, groups;
  DEVICE CodeSource(const GemmParams& gemm, const Segment& g) : columns(gemm.columns), groups(gemm.groups) {
    i64 first = g.first_row;
    rows = min(gemm.rows - g.first_row, g.tile_rows);
    codes = gemm.weights + (g.expert * (i64)gemm.rows + first) * columns * kBits / 8;
    strip_bytes = 64 * columns * kBits / 8;
    group_bytes = gemm.rows * kScaleBytes;
    i64 scale = (g.expert * (i64)groups * gemm.rows + first) * kScaleBytes;
    scales = gemm.scales + scale;
    zeros = gemm.zeros + scale;
  }
};

template <int kMost>
DEVICE void load_codes(const CodeSource& source, int step, Ring<kMost>& ring, u64 policy) {
  int columns = min(source.columns - step * kStepColumns, kStepColumns);
  int first_group = source.groups > 1 ? step * SCALES_PER_STEP : 0;
  int groups = source.groups > 1 ? min(source.groups - first_group, SCALES_PER_STEP) : 1;
  int scale_bytes = source.rows * kScaleBytes;
  u64* full = ring.full();
  barrier_arrive_expecting(full, source.rows * columns * kBits / 8 + groups * scale_bytes * (kHasZeros ? 2 : 1));
  u32 to = shared_address(ring.codes());
  const u8* from = source.codes + step * kStripBytes;
  int whole = source.rows / 64;
#pragma unroll
  for (int i = 0; i < kMostRows<kMost> / 64; i++) {
    if (i >= whole) break;
    bulk_copy(to + i * kStripBytes, from + i * source.strip_bytes, 64 * columns * kBits / 8, full, policy);
  }
  if (source.rows % 64) {
    from = source.codes + whole * source.strip_bytes + step * (kStripBytes / 2);
    for (int c = 0; c < columns / 32; c++) {
      u32 block = to + whole * kStripBytes + c * 4 * kPieceBytes;
      bulk_copy(block, from + c * 2 * kPieceBytes, 2 * kPieceBytes, full, policy);
    }
  }
#pragma unroll
  for (int i = 0; i < SCALES_PER_STEP; i++) {
    if (i >= groups) break;
    u32 offset = (first_group + i) * source.group_bytes;
    u32 row = to + kCodeBytes<kMost> + i * kScaleRow<kMost>;
    bulk_copy(row, source.scales + offset, scale_bytes, full, policy);
    if constexpr (kHasZeros) {
      bulk_copy(row + SCALES_PER_STEP * kScaleRow<kMost>, source.zeros + offset, scale_bytes, full, policy);
    }
  }
}

// One thread claims items and tells the other warps their segments, one after the other, as it begins to load them.
template <int kMost>
DEVICE void run_weight_thread(const ExpertsParams& p, Shared& shared, Ring<kMost>& ring, int ticket) {
  int total = shared.schedule.phase[0].items + shared.schedule.phase[1].items;
  // Blocks at work together read the same codes at about the same time: these need not stay in L2, tokens and `hidden`
  // should. Not tried for large tiles.
  u64 policy = kMost == kLargeTokens ? policy_evict_normal() : policy_evict_first();
  int place = 0, parity = 1;
  auto announce = [&](const Segment& g) { announce_segment(shared, g, place, parity); };
  while (ticket < total) {
    if constexpr (kMost == kLargeTokens) {
      const Segment& g = shared.segment[place];  // few registers are left: all is read again every step
      announce(whole_tile(shared.schedule, p.num_experts, ticket));
      for (int step = 0; step < g.to; step++) {
        ring.wait_empty();
        load_codes(CodeSource(p.gemm[g.phase], g), step, ring, policy);
        ring.advance();
      }
    } else {
      cut_item(shared.schedule, p.num_experts, ticket, [&](const Segment& g) {
        announce(g);
        CodeSource source(p.gemm[g.phase], g);
        for (int step = g.from; step < g.to; step++) {
          ring.wait_empty();
          load_codes(source, step, ring, policy);
          ring.advance();
        }
      });
    }
    ticket = atomicAdd(p.sync, 1);
  }
  shared.first_addition = ticket - total;
  Segment none;
  none.phase = -1;
  announce(none);
}

// ---- tokens ----

DEVICE void wait_for_hidden(const ExpertsParams& p, Shared& shared, int expert) {
  Schedule& s = shared.schedule;
  wait_at_least(ready_flag(p, expert), token_groups(s.rows()[expert]) * (p.gemm[0].rows / 32));
}

// Tokens that lie one after the other, by tensor copies of one thread. The last may be other experts', or nobody's.
template <int kMost>
DEVICE void load_tokens(const PrefillParams& params, Shared& shared, const Segment& g, Ring<kMost>& ring) {
  const ExpertsParams& p = params.experts;
  int row = g.first_token;
  if (g.phase == 1) {
    wait_for_hidden(p, shared, g.expert);
    fence_proxy_async_global();
    row += shared.schedule.row_start(p.num_experts)[g.expert];
  } else {
    row += g.expert * p.max_rows;
  }
  int boxes = (tile_tokens<kMost>(g.tokens) + kBoxTokens - 1) / kBoxTokens;
  for (int step = g.from; step < g.to; step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(), 2 * boxes * kBoxBytes);
    barrier_arrive(ring.full(), kTokenWarps * 32 - 1);
    for (int i = 0; i < 2 * boxes; i++) {
      u32 to = shared_address(ring.tokens()) + i % 2 * Ring<kMost>::kTokenHalf + i / 2 * kBoxBytes;
      int column = step * kStepColumns + i % 2 * kHalfColumns;
      tensor_copy(to, &params.tokens[g.phase], column, row + i / 2 * kBoxTokens, ring.full());
    }
    ring.advance();
  }
}

DEVICE i64 gathered_row(const ExpertsParams& p, Schedule& s, int expert, int i) {
  i64 place = p.sorted ? s.row_start(p.num_experts)[expert] + i : (i64)expert * p.max_rows + i;
  return p.row_ids[place] / p.ids_divisor;
}

// A thread copies the same 16-byte chunk of every twelfth row; where those rows start is found once a tile.
template <int kMost>
DEVICE void gather_tokens(const ExpertsParams& p, Shared& shared, const Segment& g, Ring<kMost>& ring) {
  constexpr int kApart = 4 * kTokenWarps;
  int lane = threadIdx.x % 32, first = (threadIdx.x / 32 - kWeightWarp - 1) * 4 + lane / 8, chunk = lane % 8;
  int columns = p.gemm[0].columns;
  __syncwarp();
  for (int row = first; row < g.tokens && chunk == 0; row += kApart) {
    shared.gathered[row] = p.gemm[0].input + gathered_row(p, shared.schedule, g.expert, g.first_token + row) * columns;
  }
  __syncwarp();
  for (int step = g.from; step < g.to; step++) {
    ring.wait_empty();
    for (int half = 0; half < 2; half++) {
      int column = step * kStepColumns + half * kHalfColumns + chunk * 8;
      u32 valid = column < columns ? 16 : 0, to = shared_address(ring.tokens()) + half * Ring<kMost>::kTokenHalf;
#pragma unroll 4
      for (int row = first; row < g.tokens; row += kApart) {
        copy_async_16(to + row * 128 + (chunk ^ row % 8) * 16, shared.gathered[row] + (valid ? column : 0), valid);
      }
    }
    barrier_arrive_on_copies(ring.full());
    ring.advance();
  }
}

template <int kMost>
DEVICE void run_token_warps(const PrefillParams& params, Shared& shared, Ring<kMost>& ring) {
  const ExpertsParams& p = params.experts;
  for_each_segment(shared, [&](const Segment g) {
    if (are_gathered(p, g.phase)) {
      gather_tokens(p, shared, g, ring);
    } else if (threadIdx.x / 32 == kWeightWarp + 1 && elected()) {
      load_tokens(params, shared, g, ring);
    } else {
      for (int step = g.from; step < g.to; step++) ring.advance();
    }
    __syncwarp();
  });
}
