// What the warps of a block share: the ring of stages, the tickets, the flags, and their sizes.
#pragma once
#include "decode_schedule.cuh"
#include "raw_codes.cuh"

constexpr int kStrips = kTileRows / 64;
constexpr int kPieceBytes = 512 * kBits / 8;                // 16 rows x 32 columns
constexpr int kStripBytes = 64 * kStepColumns * kBits / 8;  // of a stage
constexpr int kCodeBytes = kStrips * kStripBytes;
constexpr int kScaleRow = kTileRows * kScaleBytes;          // a group's scales
constexpr int kScaleStage = SCALES_PER_STEP * kScaleRow * (kHasZeros ? 2 : 1);
constexpr int kTokenPlace = (kCodeBytes + kScaleStage + 1023) / 1024 * 1024;  // wgmma wants it so
constexpr int kMaxStages = 16;
constexpr int kSegments = 8;                                // known ahead
// Warps, those that others wait for first: schedulers prefer them.
constexpr int kWeightWarp = 0;
constexpr int kTokenWarp = 1, kTokenWarps = 2;
constexpr int kFlagWarp = 3;
constexpr int kFirstConsumer = 4, kConsumerWarps = 16;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kThreads = 32 * kFirstConsumer + kConsumerThreads;
constexpr int kSumsBarrier = 1, kTablesBarrier = 2, kCutBarrier = 3, kInitBarrier = 4;  // named ones
constexpr int kReleases = 8;                                // arrivals that empty a stage
constexpr int kRawTokens = 16;                              // that raw codes are multiplied with

struct Shared {
  u64 full[kMaxStages], empty[kMaxStages];
  u64 landed[kMaxStages];         // tokens that must be prepared
  u64 segment_full[kSegments], segment_done[kSegments], segment_empty[kSegments];
  u64 exchange_free;
  __align__(16) float starts[kMaxStages][2 * kRawTokens];  // see raw_codes.cuh
  Segment segment[kSegments];
  u32 end;         // where in shared memory the ring and the exchange of sums behind it end
  int launch;      // number of this launch
  int issued;      // steps whose weights are asked for
  Schedule schedule;
};

// sync holds words of 64 bits: the ticket counter, the sums of decode_sums.cuh, a flag for each finished tile of w13, and
// the results of decode_words.cuh. The upper half of each of the last two is the number of the launch that wrote it, so
// it does not matter that launches for other weights divide them otherwise.
DEVICE int* tile_flag(const ExpertsParams& p, const Schedule& s, int active, int row_tile) {
  int* flags = reinterpret_cast<int*>(p.left_sums + 2 * gridDim.x * (kFewRows / 8 * kConsumerThreads));
  return flags + 2 * (active * s.row_tiles[0] + row_tile) + 1;
}

// One stage: codes [strip][32 columns][16 rows][lane], scales [group][256] (then zeros), tokens [64 columns][token][128
// bytes].
constexpr u32 kRingPlace = (sizeof(Shared) + 1023) / 1024 * 1024;

// Tokens that a stage has room for, where the largest tile has so many; they are read 8 or 16 at a time. A tile's own
// lie as if it were the largest.
DEVICE constexpr int token_rows_of(int largest) { return largest <= 8 ? 8 : (largest + 15) / 16 * 16; }

struct Ring {
  u8* memory;
  int num_stages, token_rows;
  int stage = 0, parity = 0, passed = 0;  // passed: steps since the launch began
  DEVICE int stage_bytes() const { return kTokenPlace + token_rows * 2 * kStepColumns; }
  DEVICE u8* codes() const { return memory + kRingPlace + stage * stage_bytes(); }
  DEVICE u8* scales() const { return codes() + kCodeBytes; }
  DEVICE u8* tokens() const { return codes() + kTokenPlace; }
  DEVICE void advance(int steps) {
    passed += steps;
    for (stage += steps; stage >= num_stages; stage -= num_stages) parity ^= 1;
  }
  // By at most as many steps as there are stages.
  DEVICE void forward(int steps) {
    passed += steps;
    u32 on = stage + steps, wrapped = on - num_stages;
    stage = min(on, wrapped);  // below zero it is a large number
    if (stage == (int)wrapped) parity ^= 1;
  }
  DEVICE void back(int steps) {
    passed -= steps;
    stage -= steps;
    if (stage < 0) stage += num_stages, parity ^= 1;
  }
};

// Segments in the order they were claimed, for one warp; calls work(segment) until there are none, and gives
// the one that says so.
template <bool kComputes, typename Work>
DEVICE const Segment& for_each_segment(Shared& shared, Work work) {
  for (int i = 0;;) {
    barrier_wait(&shared.segment_full[i % kSegments], i / kSegments & 1);
    const Segment& g = shared.segment[i % kSegments];
    if (g.from == g.to) return g;
    work(g);
    __syncwarp();
    i = g.number;
    if (threadIdx.x % 32 == 0) {
      if (kComputes) barrier_arrive(&shared.segment_done[i % kSegments]);
      barrier_arrive(&shared.segment_empty[i % kSegments]);
    }
    i++;
  }
}
