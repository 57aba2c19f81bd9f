// The two threads that fill the ring: one claims tiles and streams weights, the other copies tokens.
//
// Tiles are numbered expert by expert, then by weight rows, then by tokens, w13's before w2's, and claimed by tickets,
// so a tile only waits for earlier tickets, whose blocks are running; nothing depends on how many blocks are resident.
#pragma once
#include "e4m3_stage.cuh"

DEVICE Segment segment_of(const ExpertsParams& p, const Tables& tables, int ticket) {
  int n = p.num_experts, first = tables.tiles[n] * row_tiles_of(p, 0);
  Segment g;
  g.phase = ticket >= first;
  int tile = ticket - (g.phase ? first : 0), row_tiles = row_tiles_of(p, g.phase);
  g.expert = expert_at(tables.tiles, n, quotient(tile, row_tiles));
  int rest = tile - tables.tiles[g.expert] * row_tiles, rows = rows_of(p, g.expert);
  TokenTiles tokens(rows);
  int row_tile = quotient(rest, tokens.count);
  g.first_row = row_tile * kTileRows;
  g.first_token = (rest - row_tile * tokens.count) * tokens.each;
  g.tokens = min(rows - g.first_token, tokens.each);
  return g;
}

DEVICE void run_weight_thread(const ExpertsParams& p, const Tables& tables, Shared& shared, Ring ring) {
  int total = tables.tiles[p.num_experts] * (row_tiles_of(p, 0) + row_tiles_of(p, 1));
  u64 policy = policy_evict_normal();
  int place = 0, parity = 1;
  auto announce = [&](const Segment& g) { announce_segment(shared, g, place, parity); };
  for (int ticket = atomicAdd(p.sync, 1); ticket < total; ticket = atomicAdd(p.sync, 1)) {
    Segment g = segment_of(p, tables, ticket);
    announce(g);
    const GemmParams& gemm = p.gemm[g.phase];
    int rows = min(gemm.rows - g.first_row, kTileRows);
    const u8* codes = gemm.weights + (g.expert * (i64)gemm.rows + g.first_row) * gemm.columns;
    const u8* scales = gemm.scales + (g.expert * (i64)gemm.groups * gemm.rows + g.first_row) * 2;
    for (int step = 0; step < steps_of(p, g.phase); step++) {
      ring.wait_empty();
      barrier_arrive_expecting(ring.full(), rows * (kGroupColumns + 2));
      for (int i = 0; i < rows / 64; i++) {
        const u8* strip = codes + i * (i64)64 * gemm.columns + step * kStripBytes;
        bulk_copy(ring.place() + i * kStripBytes, strip, kStripBytes, ring.full(), policy);
      }
      const u8* group = scales + (gemm.groups > 1 ? step * (i64)gemm.rows * 2 : 0);
      bulk_copy(ring.place() + kScalesPlace, group, rows * 2, ring.full(), policy);
      ring.advance();
    }
  }
  Segment none;
  none.phase = -1;
  announce(none);
}

DEVICE void run_token_thread(const E4m3Params& params, const Tables& tables, const Segment& g, Ring& ring) {
  const ExpertsParams& p = params.experts;
  if (g.phase == 1) {
    wait_at_least(ready_flag(p, g.expert), TokenTiles(rows_of(p, g.expert)).count * row_tiles_of(p, 0));
    fence_proxy_async_global();
  }
  int row = tables.starts[g.expert] + g.first_token;
  int boxes = (g.tokens + kBoxTokens - 1) / kBoxTokens;
  int scale_bytes = g.phase == 1 ? (g.tokens + kStartMultiple - 1) / kStartMultiple * kStartMultiple * 4 : 0;
  u64 policy = policy_evict_normal();
  for (int step = 0; step < steps_of(p, g.phase); step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(), boxes * kBoxTokens * kGroupColumns + scale_bytes);
    for (int i = 0; i < boxes; i++) {
      u32 to = ring.place() + kTokensPlace + i * kBoxTokens * kGroupColumns;
      tensor_copy(to, &params.tokens[g.phase], step * kGroupColumns, row + i * kBoxTokens, ring.full());
    }
    if (scale_bytes > 0) {
      const float* scales = params.hidden_scales + step * (i64)params.capacity + row;
      bulk_copy(ring.place() + kTokenScalesPlace, scales, scale_bytes, ring.full(), policy);
    }
    ring.advance();
  }
}
