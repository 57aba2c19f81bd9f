// What becomes of a tile's sums: added over the teams, left for another block or completed with those of others,
// stored. From here on a warp has one block of 16 rows.
#pragma once
#include "decode_multiply.cuh"
#include "decode_sums.cuh"
#include "decode_words.cuh"

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
    return mine + ((block * (kTeams - 1) + (team - block & kTeams - 1) - 1) * (kTokens / 8) + j) * 32;
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
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      float4 v = mine[((me.team * (kTeams - 1) + t - 1) * (kTokens / 8) + j) * 32];
      total[4 * j] += v.x, total[4 * j + 1] += v.y, total[4 * j + 2] += v.z, total[4 * j + 3] += v.w;
    }
  }
  __syncwarp();
  if (me.lane == 0) barrier_arrive(&shared.exchange_free);
}

// How many pieces follow a segment's in its tile.
DEVICE int pieces_behind(const Schedule& s, const Segment& g) {
  int end = tile_end(s, g), after = g.piece + 1;
  while (after < (int)gridDim.x && s.piece_start(g.phase, after) < end) after++;
  return after - g.piece - 1;
}

// A tile's sums over the teams, and over all blocks where this one has its first step; false where another block has
// it, for which they are left.
template <int kTokens, int kTeams>
DEVICE bool complete_sums(const Lane<kTokens, kTeams>& me, const ExpertsParams& p, Shared& shared, const Segment& g,
                          const float (&sums)[kTeams][kTokens / 2], float (&total)[kTokens / 2]) {
  const Schedule& s = shared.schedule;
  bool completed = is_completed(s, g);
  if (completed && g.to < s.steps[g.phase]) {
    // The others' are asked for while the teams still add.
    int others = pieces_behind(s, g);
    uint4* from = left_sums(p, g.phase, g.piece + 1, sums_thread());
    Pieces<kTokens == 8 ? 2 : 1, kTokens / 8> pieces;
    pieces.ask(from, 0, others);
    add_teams<kTokens, kTeams>(me, shared, g, sums, total);
    pieces.take(from, others, total);
    return true;
  }
  add_teams<kTokens, kTeams>(me, shared, g, sums, total);
  if (!completed) {
    uint4* to = left_sums(p, g.phase, g.piece, sums_thread());
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      const u32* v = reinterpret_cast<const u32*>(&total[4 * j]);
      store_left(to + j * kConsumerThreads, ~v[0], ~v[1], ~v[2], ~v[3]);
    }
  }
  return completed;
}

DEVICE constexpr Units units_of(int tokens) {
  return is_raw(tokens) ? Units{kRawUnit, kNibbles ? kRawUnit / 16.0f : kRawUnit} : Units{kUnfold, kUnfold};
}

// All that a tile's sums go through once its steps are done here.
template <int kTokens, int kTeams>
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g,
                           const float (&sums)[kTeams][kTokens / 2]) {
  constexpr Units kUnit = units_of(kTokens);
  Lane<kTokens, kTeams> me;
  float total[kTokens / 2];
  if (!complete_sums<kTokens, kTeams>(me, p, shared, g, sums, total)) return;
  int first = g.row_tile * kTileRows + me.first_row(me.team);
  if (first >= p.gemm[g.phase].rows) return;
  if (g.phase == 1) {
    store_rows<kTokens, false>(p, g.expert, g.first_row, g.place, g.rows, first, total, 0, kUnit);
  } else if constexpr (goes_by_words(kTokens)) {
    store_hidden(p, shared.schedule, g, shared.launch, first, total, kUnit);
  } else {
    store_rows<kTokens, true>(p, g.expert, g.first_row, g.place, g.rows, first, total, 0, kUnit);
  }
}

// A part of a tile, all of whose pieces are left: a warp adds up 16 rows for eight tokens at a time.
DEVICE void add_part(const ExpertsParams& p, Shared& shared, const Segment& g) {
  u32 thread = sums_thread();
  int pieces = shared.schedule.parts[1], lane = thread % 32, tokens = tile_tokens(g.rows), teams = teams_of(tokens);
  int groups = tokens / 8, units = groups * kConsumerWarps, end = quotient((g.part + 1) * units, pieces);
  for (int unit = quotient(g.part * units, pieces) + thread / 32; unit < end; unit += kConsumerWarps) {
    int warp = quotient(unit, groups), group = unit - warp * groups, team_warps = kConsumerWarps / teams;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint4* from = left_sums(p, 1, g.piece, warp * 32 + lane) + group * kConsumerThreads;
    Pieces<4, 1> parts;
    parts.ask(from, 0, pieces);
    parts.take(from, pieces, sums);
    int first = g.row_tile * kTileRows + (warp % team_warps * teams + warp / team_warps) * 16;
    if (first >= p.gemm[1].rows) continue;
    store_rows<8, false>(p, g.expert, g.first_row, g.place, g.rows, first, sums, 8 * group, units_of(tokens));
  }
}
