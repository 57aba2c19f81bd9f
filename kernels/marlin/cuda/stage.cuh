// What the warps of a block share: the ring of stages, the tickets, the flags, and their sizes.
#pragma once
#include "dequant.cuh"
#include "schedule.cuh"

constexpr int kStrips = kTileRows / 64;
constexpr int kPieceBytes = 512 * kBits / 8;                        // 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;          // of a stage
constexpr int kCodeBytes = kStrips * kStripBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;                  // a group's scales
constexpr int kScaleStage = ((SCALES_PER_STEP * kScaleRow * (kHasZeros ? 2 : 1)) + 1023) / 1024 * 1024;
constexpr int kMaxStages = 16;
constexpr int kItems = 4;                                           // tickets known ahead
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps;
constexpr int kTokenWarps = 3;
constexpr int kThreads = kConsumerThreads + 32 + 32 * kTokenWarps;

// sync: tickets, blocks done, w13 tiles finished of every expert, pieces left in `partials` for either phase.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
DEVICE int* piece_flag(const ExpertsParams& p, int phase, int piece) {
  return p.sync + 2 + p.num_experts + phase * kMaxBlocks + piece;
}

struct Shared {
  u64 full[kMaxStages], empty[kMaxStages];
  u64 item_full[kItems], item_empty[kItems];
  int item[kItems];
  int token_row[kTileTokens];
  Schedule schedule;
};

// One stage: codes [strip][32 columns][16 rows][lane], scales [group][256] (then zeros), tokens [64 columns][token][128
// bytes].
struct Ring {
  u8* base;
  int stage_bytes, num_stages, token_rows;
  int stage = 0, parity = 0;
  DEVICE u8* codes() { return base + stage * stage_bytes; }
  DEVICE u8* scales() { return codes() + kCodeBytes; }
  DEVICE u8* tokens() { return scales() + kScaleStage; }
  DEVICE void advance() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Tickets in the order they were claimed, for one warp; calls work(segment) until there are none.
template <typename Work>
DEVICE void for_each_item(Shared& shared, int n, Work work) {
  for (int i = 0, parity = 0;;) {
    barrier_wait(&shared.item_full[i], parity);
    int ticket = shared.item[i];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.item_empty[i]);
    if (ticket < 0) return;
    for_each_segment(shared.schedule, n, ticket, work);
    if (++i == kItems) {
      i = 0;
      parity ^= 1;
    }
  }
}
