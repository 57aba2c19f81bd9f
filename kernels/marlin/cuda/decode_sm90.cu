// Both GEMMs of the experts of a few rows, and the activation between them, in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// The weights are operand A (from packed codes, in registers), the tokens operand B (8, 16, 24 or 32 of them), so that
// a few rows cost little padding. The warps of a block:
//   0          starts (decode_start.cuh), claims pieces (decode_schedule.cuh), streams weights by bulk copies
//   1, 2       copy the tokens' rows, wherever they are, and wait for w13's tiles before they read `hidden`; of 8 tokens
//              one prepares them (decode_prepare.cuh)
//   3          calls the first weights into L2, tells other blocks what is stored, and helps with the tokens
//   4 to 19    in teams: prepare more tokens, multiply, add up over teams and blocks, apply bias and activation
// Shared memory is a ring of stages of 128 columns: codes of 256 rows, their scales, the tokens. Its depth follows the
// largest tile there is, so that a few rows leave room for many weights in flight. Weights run ahead of the tokens:
// those of w2 stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
#include "decode_start.cuh"
#include "decode_finish.cuh"
#include "handover.cuh"

// A warp prepares half of the tokens of every eighth stage, one of its team's.
struct Turn {
  static constexpr int kUnits = kRawTokens / 8, kEvery = kConsumerWarps / kUnits;
  int step;  // of the segment; the next one whose stage it has
  DEVICE Turn(int team, int warp, int teams) : step(warp / kUnits * teams + team) {}
  DEVICE void prepare(Shared& shared, const Ring& ring) {
    int first_token = threadIdx.x / 32 % kUnits * 8;
    step += kEvery;
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    barrier_wait(&shared.landed[ring.stage], ring.parity);
    prepare_tokens<kRawTokens>(ring, shared.starts[ring.stage], prepared_place(first_token), first_token);
    barrier_arrive(&shared.full[ring.stage], kTokenWarps / kUnits);
  }
};

template <int kTokens>
DEVICE void compute_segment(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring) {
  constexpr int kTeams = teams_of(kTokens);
  Lane<kTokens, kTeams> me;
  int first = g.row_tile * kTileRows + (by_warpgroup(kTokens) ? me.first_row_of_group() : me.first_row(0));
  bool present = first < p.gemm[g.phase].rows;
  float sums[kTeams][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTeams * kTokens / 2; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  ring.token_rows = kTokens > 16 ? kFewRows : token_rows_of(shared.schedule.largest);  // what it is, not kept meanwhile
  // A stage is prepared beside the products of the one before it; the first has none before it.
  constexpr int kBefore = prepares_itself(kTokens) ? kTeams : 0;
  Turn turn(me.team, me.warp, kTeams);
  int steps = g.to - g.from, step = me.team - kBefore;
  ring.forward(me.team);
  ring.back(kBefore);
  for (; step < steps; step += kTeams, ring.forward(kTeams)) {
    if (kBefore > 0 && step + kBefore == turn.step && turn.step < steps) {
      Ring next = ring;
      next.forward(kBefore);
      turn.prepare(shared, next);
    }
    if (step >= 0) {
      // Another team may not have had this stage's last filling yet: that must be over before the next is waited for.
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_wait(&shared.full[ring.stage], ring.parity);
      if (present) {
        if constexpr (by_warpgroup(kTokens)) {
          multiply_by_group<kTokens, kTeams>(me, sums, ring);
        } else if constexpr (is_raw(kTokens)) {
          multiply_raw<kTokens, kTeams>(me, sums, ring, shared.starts[ring.stage]);
        } else {
          multiply_stage<kTokens, kTeams>(me, sums, ring);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[ring.stage], kReleases / me.kTeamWarps);
    }
  }
  ring.back(step - steps);
  finish_segment<kTokens, kTeams>(p, shared, g, sums);
}

DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, Ring ring) {
  const Segment& last = for_each_segment<true>(shared, [&](const Segment& g) {
    switch (tile_tokens(g.rows)) {
      case 8: compute_segment<8>(p, shared, g, ring); break;
      case 16: compute_segment<16>(p, shared, g, ring); break;
      case 24: compute_segment<24>(p, shared, g, ring); break;
      default: compute_segment<kFewRows>(p, shared, g, ring);
    }
  });
  if (last.part >= 0) add_part(p, shared, last);
}

// Who waits for a stage by its parity must not miss two of its fillings: teams, which see every fourth step, need four.
static_assert(kRingPlace + exchange_bytes(kFewRows, teams_of(kFewRows)) +
                      4 * (kTokenPlace + kFewRows * 2 * kStepColumns) + kMostExperts * sizeof(Schedule::Active) <=
                  kSharedBytes,
              "no room for four stages");

// Stages that fit in front of the exchange where the largest tile has so many tokens; tiles of 8 may be beside it.
template <int kTokens>
DEVICE int stages_before(u32 end) {
  constexpr u32 kSmall = exchange_bytes(8, teams_of(8)), kLarge = exchange_bytes(kTokens, teams_of(kTokens));
  constexpr u32 kStageBytes = kTokenPlace + token_rows_of(kTokens) * 2 * kStepColumns;
  return min((end - kRingPlace - (kSmall > kLarge ? kSmall : kLarge)) / kStageBytes, kMaxStages);
}

DEVICE Ring make_ring(u8* memory, u32 end, int largest) {
  Ring ring;
  ring.memory = memory;
  ring.token_rows = token_rows_of(largest);
  ring.num_stages = largest <= 8    ? stages_before<8>(end)
                    : largest <= 16 ? stages_before<16>(end)
                                    : stages_before<kFewRows>(end);
  return ring;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(const __grid_constant__ ExpertsParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int warp = threadIdx.x / 32, ticket = 0;
  if (threadIdx.x == 0) {
    place_tables(shared, p.most_tiles);
  } else if (warp == kFlagWarp) {
    prefetch_weights(p, threadIdx.x % 32);
  } else if (warp == kFirstConsumer) {
    if (threadIdx.x % 32 == 0) init_barriers(shared);
    __syncwarp();
    named_arrive<kInitBarrier, 64>();
  }
  __syncwarp();
  wait_for_previous_kernels();
  let_next_kernel_come();
  // The weights' warp asks for its first weights as soon as there are tables; the others cut both phases meanwhile.
  if (warp == kWeightWarp) {
    ticket = start_launch(p, shared, threadIdx.x);
    named_arrive<kTablesBarrier, kThreads>();
    named_barrier<kInitBarrier, 64>();
  } else {
    named_barrier<kTablesBarrier, kThreads>();
  }
  if (shared.schedule.largest == 0) return;  // all experts have more rows, or none
  if (warp != kWeightWarp) {
    cut_phases(shared.schedule, threadIdx.x - 32, kThreads - 32);
    named_barrier<kCutBarrier, kThreads - 32>();
  }
  Ring ring = make_ring(memory, shared.end, shared.schedule.largest);
  if (warp >= kFirstConsumer) {
    registers_grow<104>();
    run_consumers(p, shared, ring);
  } else {
    registers_shrink<64>();
    if (warp == kWeightWarp) {
      run_weight_warp(p, shared, ring, ticket);
    } else {
      run_token_warps(p, shared, ring);
    }
  }
}
