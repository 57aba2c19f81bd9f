// What becomes of a tile's sums: added over the teams, left for another block or completed with those of others,
// stored. From here on a warp has one block of 16 rows.
#pragma once
#include "decode_multiply.cuh"
#include "decode_words.cuh"

DEVICE float4* piece_sums(const ExpertsParams& p, int phase, int piece) {
  return reinterpret_cast<float4*>(p.partials) +
         (i64)(phase * gridDim.x + piece) * p.max_tile_tokens * (kTileRows / 4) + threadIdx.x - 32 * kFirstConsumer;
}

// Shared memory for the sums that teams hand to each other, in front of `end`.
DEVICE constexpr int exchange_bytes(int tokens, int teams) { return (teams - 1) * kConsumerThreads * tokens / 2 * 4; }

// Every team hands the blocks of rows that others finish to them: `total` is that of block `team`. What was read is free
// again once every warp has arrived at `exchange_free`.
template <int kTokens, int kTeams>
DEVICE void add_teams(const Lane<kTokens, kTeams>& me, Shared& shared, const Segment& g,
                      const float (&sums)[kTeams][kTokens / 2], float (&total)[kTokens / 2]) {
  u8* exchange = reinterpret_cast<u8*>(&shared) + shared.end - exchange_bytes(kTokens, kTeams);
  float4* mine = reinterpret_cast<float4*>(exchange) + me.warp * (kTeams * (kTeams - 1) * kTokens / 8 * 32) + me.lane;
  auto place = [&](int block, int team, int j) {
    return mine + ((block * (kTeams - 1) + team - (team > block)) * (kTokens / 8) + j) * 32;
  };
  barrier_wait(&shared.exchange_free, g.number & 1 ^ 1);
#pragma unroll
  for (int i = 0; i < kTeams; i++) {
    if (i == me.team) {
#pragma unroll
      for (int m = 0; m < kTokens / 2; m++) total[m] = sums[i][m];
    } else {
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        const float* v = &sums[i][4 * j];
        *place(i, me.team, j) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
  named_barrier<kSumsBarrier, kConsumerThreads>();
#pragma unroll
  for (int t = 1; t < kTeams; t++) {
    int other = (me.team + t) % kTeams;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float4 v = *place(me.team, other, j);
      total[4 * j] += v.x, total[4 * j + 1] += v.y, total[4 * j + 2] += v.z, total[4 * j + 3] += v.w;
    }
  }
  __syncwarp();
  if (me.lane == 0) barrier_arrive(&shared.exchange_free);
}

// The first piece behind a segment's tile.
DEVICE int piece_after(const Schedule& s, const Segment& g) {
  int end = tile_end(s, g), after = g.piece + 1;
  while (after < (int)gridDim.x && s.piece_start(g.phase, after) < end) after++;
  return after;
}

// The sums of a tile's later pieces, left by other blocks, added in order.
template <int kTokens>
DEVICE void add_pieces(const ExpertsParams& p, const Schedule& s, const Segment& g, float (&total)[kTokens / 2]) {
  constexpr int kAtOnce = 64 / kTokens;  // loads in flight: a tile of many columns has many pieces
  int after = piece_after(s, g);
  for (int first = g.piece + 1; first < after; first += kAtOnce) {
    float4 v[kAtOnce][kTokens / 8];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const float4* from = piece_sums(p, g.phase, min(first + i, after - 1));
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) v[i][j] = __ldcg(from + j * kConsumerThreads);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
#pragma unroll
      for (int j = 0; j < kTokens / 8 && first + i < after; j++) {
        total[4 * j] += v[i][j].x, total[4 * j + 1] += v[i][j].y;
        total[4 * j + 2] += v[i][j].z, total[4 * j + 3] += v[i][j].w;
      }
    }
  }
}

template <int kTokens>
DEVICE void leave_piece(const ExpertsParams& p, const Segment& g, const float (&total)[kTokens / 2]) {
  float4* to = piece_sums(p, g.phase, g.piece);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    const float* v = &total[4 * j];
    __stcg(to + j * kConsumerThreads, make_float4(v[0], v[1], v[2], v[3]));
  }
}

// A tile's sums over the teams, and over all blocks where this one has its first step; false where another block has
// it, for which they are left. As words the others' are asked for while the teams still add.
template <int kTokens, int kTeams>
DEVICE bool complete_sums(const Lane<kTokens, kTeams>& me, const ExpertsParams& p, Shared& shared, const Segment& g,
                          const float (&sums)[kTeams][kTokens / 2], float (&total)[kTokens / 2]) {
  const Schedule& s = shared.schedule;
  bool is_shared = g.from == 0 && g.to < s.steps[g.phase];
  if constexpr (goes_by_words(kTokens)) {
    if (is_shared) {
      int after = piece_after(s, g);
      Pieces others;
      others.ask(p, g, g.piece + 1, after);
      add_teams<kTokens, kTeams>(me, shared, g, sums, total);
      take_sums(p, g, after, shared.launch, others, total);
      return true;
    }
    add_teams<kTokens, kTeams>(me, shared, g, sums, total);
    if (g.from > 0) leave_sums(my_sum_words(p, g.phase, g.piece), total, shared.launch);
  } else {
    add_teams<kTokens, kTeams>(me, shared, g, sums, total);
    if (g.from > 0) {
      leave_piece<kTokens>(p, g, total);
    } else if (is_shared) {
      barrier_wait(&shared.segment_pieces[g.number % kSegments], g.number / kSegments & 1);
      add_pieces<kTokens>(p, s, g, total);
    }
  }
  return g.from == 0;
}

// All that a tile's sums go through once its steps are done here.
template <int kTokens, int kTeams>
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g,
                           const float (&sums)[kTeams][kTokens / 2]) {
  constexpr float kUnit = is_raw(kTokens) ? kRawUnit : kUnfold;
  Lane<kTokens, kTeams> me;
  float total[kTokens / 2];
  if (!complete_sums<kTokens, kTeams>(me, p, shared, g, sums, total)) return;
  int first = g.row_tile * kTileRows + me.first_row(me.team);
  if (first >= p.gemm[g.phase].rows) return;
  if (g.phase == 1) {
    store_rows<kTokens, false>(p, g.expert, g.first_row, g.rows, first, total, 0, kUnit);
  } else if constexpr (goes_by_words(kTokens)) {
    store_hidden(p, shared.schedule, g, shared.launch, first, total, kUnit);
  } else {
    store_rows<kTokens, true>(p, g.expert, g.first_row, g.rows, first, total, 0, kUnit);
  }
}
