// What the warps of a block share: a ring of stages, the segments, the flags, and their sizes; and the parameters.
#pragma once
#include "dequant.cuh"
#include "prefill_schedule.cuh"
#include "segments.cuh"

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps;
constexpr int kTokenWarps = 3;
constexpr int kThreads = 32 * (kWeightWarp + 1 + kTokenWarps);

constexpr int kPieceBytes = 512 * kBits / 8;                // codes of 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // codes of 64 rows

// Of a stage where tiles have up to so many tokens: weight rows, codes, a group's scales, all of them.
template <int kMost>
constexpr int kMostRows = kHasTall && kMost == kSmallTokens ? 2 * kTileRows : kTileRows;
template <int kMost>
constexpr int kCodeBytes = kMostRows<kMost> / 64 * kStripBytes;
template <int kMost>
constexpr int kScaleRow = kMostRows<kMost> * kScaleBytes;
template <int kMost>
constexpr int kCodeStage =
    kCodeBytes<kMost> + (SCALES_PER_STEP * kScaleRow<kMost> * (kHasZeros ? 2 : 1) + 127) / 128 * 128;

constexpr int kHalfColumns = kStepColumns / 2;
constexpr int kBoxTokens = 32;  // rows of one tensor copy
constexpr int kBoxBytes = kBoxTokens * kHalfColumns * 2;

// Stages of the ring where tiles have up to so many tokens: there is room for more of fewer.
template <int kMost>
constexpr int kStages = kBits == 8 || kMost > kTileTokens ? 3 : 4;
template <int kMost>
constexpr int kTokenStage = (kMost > kTileTokens || (kHasTall && kMost == kSmallTokens)
                                 ? (kMost + kBoxTokens - 1) / kBoxTokens * kBoxTokens
                                 : kTileTokens) *
                            kStepColumns * 2;
template <int kMost>
constexpr int kRingOf = kStages<kMost> * (kTokenStage<kMost> + kCodeStage<kMost>);
constexpr int kRingBytes = kHasTall ? kRingOf<kSmallTokens> : kRingOf<kTileTokens>;
static_assert(kRingOf<kTileTokens> <= kRingBytes && kRingOf<kSmallTokens> <= kRingBytes, "no room for a ring");
static_assert(!kHasLarge || kRingOf<kLargeTokens> <= kRingBytes, "no room for large tiles");

// What the tensor copies know about the tokens: hopper.py encodes it.
struct alignas(64) TokensMap {
  u8 bytes[128];
};

struct PrefillParams {
  TokensMap tokens[2];  // of w13's input, unless its rows are gathered, and of w2's
  ExpertsParams experts;
};

// Whether the tokens of a phase lie anywhere; otherwise those of an expert lie one after the other.
DEVICE bool are_gathered(const ExpertsParams& p, int phase) { return phase == 0 && p.row_ids != nullptr; }

// Tokens are stored eight at a time.
DEVICE int token_groups(int tokens) { return (tokens + 7) / 8; }

// sync: tickets, blocks done, groups of tokens that w13's tiles of every expert have stored, pieces left in `partials`
// for either phase.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
DEVICE int* piece_flag(const ExpertsParams& p, int phase, int piece) {
  return p.sync + 2 + p.num_experts + phase * kMaxBlocks + piece;
}

struct Shared {
  // First of all, one behind the other: Ring counts on it.
  u64 full[kStages<kTileTokens>], empty[kStages<kTileTokens>];
  u64 segment_full[kSegments], segment_empty[kSegments];
  Segment segment[kSegments];
  int first_addition;  // number of this block's first
  const u16* gathered[kLargeTokens];  // where the rows of a tile start
  Schedule schedule;
};

static_assert(kRingBytes + sizeof(Shared) + 4 * (kMostExperts + 1) * sizeof(int) <= kSharedBytes,
              "no room for experts' tables");

// Behind the ring.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }

// Where a warp is in the ring of stages, 128 columns each. Codes: [strip][32 columns][16 rows][lane], then scales
// [group][256], then zero points alike. Tokens, which lie apart: 64 columns, then the next 64, as the tensor cores read
// them: 128 bytes a row, 16-byte chunk c of row r at place c ^ (r % 8).
template <int kMost>
struct Ring {
  static constexpr int kTokenHalf = kTokenStage<kMost> / 2;
  static constexpr int kCodesPlace = kStages<kMost> * kTokenStage<kMost>;
  Shared& shared;
  u8* memory;  // the tokens of all stages, then the codes of all stages
  u32 address;  // its own
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : shared(shared_of(memory)), memory(memory), address(shared_address(memory)) {}
  DEVICE u8* tokens() { return memory + stage * kTokenStage<kMost>; }
  DEVICE u8* codes() const { return memory + kCodesPlace + stage * kCodeStage<kMost>; }
  DEVICE u32 codes_address() const { return address + kCodesPlace + stage * kCodeStage<kMost>; }
  DEVICE u64* full() { return &shared.full[stage]; }
  DEVICE u64* empty() { return &shared.empty[stage]; }
  DEVICE void wait_full() { barrier_wait_at<kRingBytes>(address + 8 * stage, parity); }
  // One of the warps that have a stage has read it.
  DEVICE void release(u32 stage) { barrier_arrive_at<kRingBytes + sizeof(Shared::full)>(address + 8 * stage); }
  DEVICE void wait_empty() { barrier_wait(empty(), parity ^ 1); }
  DEVICE void advance() {
    if (++stage == kStages<kMost>) {
      stage = 0;
      parity ^= 1;
    }
  }
};
