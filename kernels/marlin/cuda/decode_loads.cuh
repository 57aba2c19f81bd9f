// The warps that do not compute: one streams weights, two copy the tokens' rows, one sets flags.
#pragma once
#include "activation.cuh"
#include "decode_words.cuh"

// ---- the weights' warp ----

// The codes of a stage where a tile has fewer rows than others.
DEVICE void load_few_codes(u32 to, const u8* from, u32 strip_bytes, int rows, int step, u32 column_bytes, u64* full,
                           u64 policy) {
#pragma unroll 1
  for (int i = 0; i < rows / 64; i++, to += kStripBytes, from += strip_bytes) {
    bulk_copy(to, from, 64 * column_bytes, full, policy);
  }
  if (rows % 64 == 0) return;
  // Half a strip: its blocks lie closer than in a stage.
  from -= (i64)step * (kStripBytes / 2);
#pragma unroll 1
  for (u32 bytes = 0; bytes < column_bytes; bytes += 32 * kBits / 8, to += 4 * kPieceBytes, from += 2 * kPieceBytes) {
    bulk_copy(to, from, 2 * kPieceBytes, full, policy);
  }
}

constexpr int kFirstStages = 4;

// All stages of a segment; one lane. Beside busy warps an instruction takes it seven cycles, so a stage must not take
// many: what memory delivers waits for nobody else.
DEVICE void load_weights(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring, u64 policy) {
  const GemmParams& gemm = p.gemm[g.phase];
  bool grouped = SCALES_PER_STEP > 1 || gemm.groups > 1;
  int step = g.from, to_step = g.to, tile_row = g.row_tile * kTileRows, rows = min(gemm.rows - tile_row, kTileRows);
  int columns_left = gemm.columns - step * kStepColumns, group = grouped ? step * SCALES_PER_STEP : 0;
  int groups_left = gemm.groups - group;
  u32 strip_bytes = gemm.columns * (64 * kBits / 8), scale_bytes = rows * kScaleBytes;
  i64 group_bytes = grouped ? gemm.rows * kScaleBytes : 0;
  i64 place = (((i64)g.expert * gemm.groups + group) * gemm.rows + tile_row) * kScaleBytes;
  const u8 *scales = gemm.scales + place, *zeros = gemm.zeros + place;
  const u8* codes = gemm.weights + ((i64)g.expert * gemm.rows + tile_row) * gemm.columns * kBits / 8;
  codes += (i64)step * kStripBytes;
#pragma unroll 1
  for (; step < to_step; step++, codes += kStripBytes) {
    u32 column_bytes = min(columns_left, kStepColumns) * kBits / 8;
    int groups = SCALES_PER_STEP == 1 ? 1 : min(groups_left, SCALES_PER_STEP);
    u64* full = &shared.full[ring.stage];
    u32 to = shared_address(ring.codes());
    // At first no more at once than keeps the memory busy, or the tokens, and blocks that come later, wait behind it.
    if (g.phase == 0 && ring.passed >= kFirstStages && ring.passed < ring.num_stages) {
      barrier_wait(&shared.full[ring.stage - kFirstStages], 0);
    }
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_arrive_expecting(full, rows * column_bytes + groups * scale_bytes * (kHasZeros ? 2 : 1));
    if (rows == kTileRows) {
#pragma unroll
      for (int i = 0; i < kStrips; i++) {
        bulk_copy(to + i * kStripBytes, codes + i * strip_bytes, 64 * column_bytes, full, policy);
      }
    } else {
      load_few_codes(to, codes, strip_bytes, rows, step, column_bytes, full, policy);
    }
    to += kCodeBytes;
#pragma unroll
    for (int i = 0; i < SCALES_PER_STEP; i++) {
      if (i >= groups) break;
      bulk_copy(to + i * kScaleRow, scales, scale_bytes, full, policy);
      scales += group_bytes;
      if constexpr (kHasZeros) {
        bulk_copy(to + (SCALES_PER_STEP + i) * kScaleRow, zeros, scale_bytes, full, policy);
        zeros += group_bytes;
      }
    }
    columns_left -= kStepColumns, groups_left -= SCALES_PER_STEP;
    ring.forward(1);
    count_shared(&shared.issued);
  }
}

// A last step of fewer columns multiplies the scales behind them by zero: they must be numbers.
DEVICE void clear_scales(const ExpertsParams& p, Ring ring) {
  if (SCALES_PER_STEP == 1 || (p.gemm[0].columns % kStepColumns == 0 && p.gemm[1].columns % kStepColumns == 0)) return;
  for (int stage = 0; stage < ring.num_stages; stage++, ring.stage++) {
    uint4* words = reinterpret_cast<uint4*>(ring.scales());
    for (int i = threadIdx.x % 32; i < kScaleStage / 16; i += 32) words[i] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();
  __syncwarp();
}

DEVICE u64 draw_tickets(const ExpertsParams& p, u32 count) {
  return atomicAdd(reinterpret_cast<u64*>(p.sync), (u64)count);
}

// The number within its launch of the first of the tickets drawn.
DEVICE int ticket_number(const ExpertsParams& p, u64 ticket, u32 count) {
  u32 number = (u32)ticket % kTicketsPerLaunch, all = 3 * gridDim.x;
  if (number + count == all) draw_tickets(p, kTicketsPerLaunch - all);
  return (int)number;
}

// `ticket` is the first one, claimed already; lane 0 has it.
DEVICE void run_weight_warp(const ExpertsParams& p, Shared& shared, Ring ring, int ticket) {
  int lane = threadIdx.x % 32, published = 0;
  u64 policy = policy_evict_first();
  auto publish = [&](const Segment& g) {
    int i = published % kSegments;
    barrier_wait(&shared.segment_empty[i], published / kSegments & 1 ^ 1);
    if (lane == 0) {
      shared.segment[i] = g;
      shared.segment[i].number = published;
      barrier_arrive(&shared.segment_full[i]);
    }
    published++;
  };
  clear_scales(p, ring);
  for (ticket = __shfl_sync(~0u, ticket, 0); ticket < 2 * (int)gridDim.x;) {
    Ring first = ring;
    int loaded = 0;
    cut_piece(shared.schedule, ticket, [&](const Segment& g) {
      loaded += g.to - g.from;
      publish(g);
      if (elected()) load_weights(p, shared, g, ring, policy);
      __syncwarp();
    });
    // A block may take a second piece of w2 once `hidden` is there for its first one: by then every other block that
    // runs has asked for its weights of w13, and has had a piece of w2 too. Loads of more than a ring have waited so.
    bool waits = ticket >= (int)gridDim.x && loaded > 0 && loaded <= ring.num_stages;
    if (waits && elected()) barrier_wait(&shared.empty[first.stage], first.parity);
    __syncwarp();
    if (lane == 0) ticket = ticket_number(p, draw_tickets(p, 1), 1);
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  publish(find_addition(shared.schedule, ticket));
}

// ---- the tokens' warps ----

DEVICE i64 input_row(const ExpertsParams& p, const Segment& g, int i) {
  if (g.phase == 1) return g.first_row + i;
  return p.row_ids == nullptr ? g.place + i : p.row_ids[g.place + i] / p.ids_divisor;
}

// The step up to which the columns of `hidden` are there, at least one beyond `step`: one of w13's tiles is 128 of them,
// or 256 where nothing is gated.
DEVICE int wait_for_hidden(const ExpertsParams& p, Shared& shared, const Segment& g, int step) {
  int mine = step + threadIdx.x % 32;
  const int* flag = tile_flag(p, shared.schedule, g.active, mine / (kGated ? 1 : 2));
  u32 missing;
  do {
    missing = __ballot_sync(~0u, mine < g.to && load_acquire(flag) != shared.launch);
  } while (missing & 1);
  __syncwarp();
  return step + (missing ? __ffs(missing) - 1 : 32);
}

// Whether the sums of a segment's tile are completed where it is computed.
DEVICE bool is_completed(const Schedule& s, const Segment& g) {
  return g.from == 0 && (g.phase == 0 || s.parts[1] <= 0);
}

// The end of the tile that a segment belongs to, counted as pieces are.
DEVICE int tile_end(const Schedule& s, const Segment& g) {
  return s.piece_start(g.phase, g.piece + 1) + s.steps[g.phase] - g.to;
}

// By kWarps warps, `thread` counted over them: each copies the same 16-byte chunk of every second or fourth of at most
// kRows rows, which somebody prepares for raw codes once they have landed, or which are complete.
template <int kWarps, int kRows>
DEVICE void copy_tokens(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring, u32 thread,
                        bool raw) {
  constexpr int kChunks = kStepColumns / 8, kRowsAtOnce = kWarps * 32 / kChunks;
  const GemmParams& gemm = p.gemm[g.phase];
  int lane = thread % 32, chunk = thread % kChunks, first = thread / kChunks, num_rows = g.rows - first;
  u32 place = chunk / 8 * token_rows_of(g.rows) * 128 + first * 128 + (chunk ^ first) % 8 * 16;
  // A lane finds where one row begins, in 16-byte chunks, which 32 bits can count.
  u32 start = lane < g.rows ? (u32)input_row(p, g, lane) * (u32)(gemm.columns / 8) : 0;
  u32 from[kRows / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; i++) from[i] = __shfl_sync(~0u, start, first + i * kRowsAtOnce);
  int ready = g.phase == 0 ? g.to : g.from, end = g.to, columns_left = gemm.columns - g.from * kStepColumns - chunk * 8;
  const uint4* input = reinterpret_cast<const uint4*>(gemm.input) + g.from * (kStepColumns / 8) + chunk;
#pragma unroll 1
  for (int step = g.from; step < end; step++) {
    if (step >= ready) ready = wait_for_hidden(p, shared, g, step);
    u32 to = shared_address(ring.tokens()) + place, valid = columns_left > 0 ? 16 : 0;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; i++) {
      int row = i * kRowsAtOnce;
      if (row >= num_rows) break;
      copy_async_16((to ^ row % 8 * 16) + row * 128, input + from[i], valid);
    }
    if (kRaw && !raw && lane == 0) barrier_arrive(&shared.landed[ring.stage], 32);  // as in every filling of a stage
    barrier_arrive_on_copies(raw ? &shared.landed[ring.stage] : &shared.full[ring.stage]);
    columns_left -= kStepColumns;
    input += kStepColumns / 8;
    asm volatile("" : "+l"(input));  // so that addresses are found when they are needed: there are many
    ring.forward(1);
  }
}

// Until a tile of w13 is stored, then tells other blocks, so that nobody who computes waits for stores to land.
DEVICE void tell_of_tile(const ExpertsParams& p, Shared& shared, const Segment& g) {
  if (g.from > 0 || g.phase == 1 || goes_by_words(tile_tokens(g.rows))) return;
  barrier_wait(&shared.segment_done[g.number % kSegments], g.number / kSegments & 1);
  if (threadIdx.x % 32 == 0) {
    store_release(tile_flag(p, shared.schedule, g.active, g.row_tile), shared.launch);
  }
}

// Two warps of tokens: both copy, or where codes are raw one copies and the other prepares what has landed; a third
// sets flags, or where words need none it helps with the tokens.
DEVICE void run_token_warps(const ExpertsParams& p, Shared& shared, Ring ring) {
  for_each_segment<false>(shared, [&](const Segment& g) {
    u32 thread = threadIdx.x - 32 * kTokenWarp;
    asm volatile("" : "+r"(thread));  // so that what follows from it is found for every segment, not kept meanwhile
    if (goes_by_words(tile_tokens(g.rows)) && g.phase == 1) {
      take_hidden(p, shared, g, ring);
    } else if (thread >= 32 * kTokenWarps) {
      ring.advance(g.to - g.from);
      tell_of_tile(p, shared, g);
    } else if (!takes_raw(tile_tokens(g.rows))) {
      copy_tokens<kTokenWarps, kFewRows>(p, shared, g, ring, thread, is_raw(tile_tokens(g.rows)));
    } else if (thread < 32) {
      copy_tokens<1, 8>(p, shared, g, ring, thread, true);
    } else {
      for (int step = g.from, end = g.to; step < end; step++, ring.forward(1)) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);  // the last filling is over
        barrier_arrive(&shared.landed[ring.stage]);
        barrier_wait(&shared.landed[ring.stage], ring.parity);
        prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_place(0), 0);
        barrier_arrive(&shared.full[ring.stage], kTokenWarps);
      }
    }
  });
}
