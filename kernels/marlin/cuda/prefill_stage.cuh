// What the warps of a block share: two rings of stages, the segments, the flags, and their sizes; and the parameters.
#pragma once
#include "dequant.cuh"
#include "prefill_schedule.cuh"

constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps;
constexpr int kTokenWarps = 3;
constexpr int kThreads = 32 * (kWeightWarp + 1 + kTokenWarps);

constexpr int kStrips = kTileRows / 64;
constexpr int kPieceBytes = 512 * kBits / 8;                // codes of 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // codes of 64 rows
constexpr int kCodeBytes = kStrips * kStripBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;
constexpr int kCodeStage = kCodeBytes + (SCALES_PER_STEP * kScaleRow * (kHasZeros ? 2 : 1) + 127) / 128 * 128;
constexpr int kMaxStages = 16;

constexpr int kHalfColumns = kStepColumns / 2;
constexpr int kTokenHalf = kTileTokens * kHalfColumns * 2;  // half a stage of tokens
constexpr int kTokenStage = 2 * kTokenHalf;
constexpr int kTokenStages = kBits == 8 ? 3 : 4;  // what is left of shared memory is for codes
constexpr int kBoxTokens = 64;  // rows of one tensor copy
constexpr int kBoxBytes = kBoxTokens * kHalfColumns * 2;
constexpr int kSegments = 4;  // known ahead

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

// sync: tickets, blocks done, w13 tiles finished of every expert, pieces left in `partials` for either phase.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
DEVICE int* piece_flag(const ExpertsParams& p, int phase, int piece) {
  return p.sync + 2 + p.num_experts + phase * kMaxBlocks + piece;
}

struct Barriers {
  u64 full[kMaxStages], empty[kMaxStages];
};

struct Shared {
  Barriers codes, tokens;
  u64 segment_full[kSegments], segment_empty[kSegments];
  Segment segment[kSegments];
  const u16* gathered[kTileTokens];  // where the rows of a tile start
  int last_block;
  Schedule schedule;
};

// Stages of one kind. Codes of 128 columns: [strip][32 columns][16 rows][lane], then scales [group][256], then zero
// points alike. Tokens of 64 columns, then of the next 64, as the tensor cores read them: 128 bytes a row, 16-byte
// chunk c of row r at place c ^ (r % 8).
struct Ring {
  Barriers* barriers;
  u8* base;
  int stage_bytes, num_stages;
  int stage = 0, parity = 0;
  DEVICE Ring(Barriers& b, u8* base, int stage_bytes, int num_stages)
      : barriers(&b), base(base), stage_bytes(stage_bytes), num_stages(num_stages) {}
  DEVICE u8* data() { return base + stage * stage_bytes; }
  DEVICE u64* full() { return &barriers->full[stage]; }
  DEVICE u64* empty() { return &barriers->empty[stage]; }
  DEVICE void wait_full() { barrier_wait(full(), parity); }
  DEVICE void wait_empty() { barrier_wait(empty(), parity ^ 1); }
  DEVICE void advance() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The segments of this block in their order, for one warp; calls work(segment) until there are none.
template <typename Work>
DEVICE void for_each_segment(Shared& shared, Work work) {
  for (int i = 0, parity = 0;;) {
    barrier_wait(&shared.segment_full[i], parity);
    if (shared.segment[i].phase < 0) return;
    work(Segment(shared.segment[i]));
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.segment_empty[i]);
    if (++i == kSegments) {
      i = 0;
      parity ^= 1;
    }
  }
}
