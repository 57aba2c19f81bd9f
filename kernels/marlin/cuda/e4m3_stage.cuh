// What the warps of a block share: a ring of stages of 128 columns, the segments ahead, tables, and what ends a tile.
#pragma once
#include "e4m3_tables.cuh"
#include "segments.cuh"

constexpr int kTileRows = 256;
constexpr int kConsumerWarps = 8;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kWeightWarp = kConsumerWarps, kTokenWarp = kConsumerWarps + 1;
constexpr int kThreads = 384;  // whole warpgroups, of which registers are given and taken
constexpr int kStages = 4;

// Of a stage: codes of weights as repack.py draws them, of tokens as wgmma.cuh does, scales of rows and of tokens.
constexpr int kPieceBytes = 512;  // codes of 16 rows x 32 columns
constexpr int kStripBytes = 64 * kGroupColumns;
constexpr int kTokensPlace = kTileRows * kGroupColumns;
constexpr int kScalesPlace = kTokensPlace + kTileTokens * kGroupColumns;
constexpr int kTokenScalesPlace = kScalesPlace + kTileRows * 2;
constexpr int kStageBytes = kTokenScalesPlace + kTileTokens * 4;
constexpr int kRingBytes = kStages * kStageBytes;
static_assert(kStageBytes % 1024 == 0, "swizzled tokens begin at a multiple of 1024 bytes");

constexpr int kBoxTokens = 32;  // rows of one tensor copy

// What the tensor copies know about the tokens' codes: e4m3.py encodes it.
struct alignas(64) TokensMap {
  u8 bytes[128];
};

// The input of either GEMM in e4m3; w13's output is w2's input.
struct E4m3Params {
  TokensMap tokens[2];
  ExpertsParams experts;
  const float* row_scales;  // [capacity], of the input
  u8* hidden;               // [capacity, columns of w2]
  float* hidden_scales;     // [columns of w2 / 128, capacity]
  int capacity;             // rows
};

struct Segment {
  int phase, expert, first_row, first_token, tokens;  // which tile; phase -1: there are no more
};

struct Shared {
  u64 full[kStages], empty[kStages];
  u64 segment_full[kSegments], segment_empty[kSegments];
  Segment segment[kSegments];
  float largest[kConsumerWarps][kTileTokens];  // of a tile's results, by warp
  float scale[kTileTokens];                    // of its tokens
};

static_assert(kRingBytes + sizeof(Shared) + 3 * (kMostExperts + 1) * sizeof(int) <= kSharedBytes,
              "no room for experts' tables");

// Behind the ring; tables of experts follow.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }
DEVICE Tables tables_of(u8* memory, int n) {
  return Tables(reinterpret_cast<int*>(memory + kRingBytes + sizeof(Shared)), n);
}

// Where a warp is in the ring.
struct Ring {
  Shared& shared;
  u32 address;
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : shared(shared_of(memory)), address(shared_address(memory)) {}
  DEVICE u32 place() const { return address + stage * kStageBytes; }
  DEVICE u64* full() { return &shared.full[stage]; }
  DEVICE void wait_full() { barrier_wait(full(), parity); }
  DEVICE void wait_empty() { barrier_wait(&shared.empty[stage], parity ^ 1); }
  DEVICE void release() { barrier_arrive(&shared.empty[stage]); }
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE int steps_of(const ExpertsParams& p, int phase) { return p.gemm[phase].columns / kGroupColumns; }
DEVICE int row_tiles_of(const ExpertsParams& p, int phase) { return (p.gemm[phase].rows + kTileRows - 1) / kTileRows; }

// sync: tickets, blocks done, tiles of every expert's w13 that are stored.
DEVICE int* ready_flag(const ExpertsParams& p, int expert) { return p.sync + 2 + expert; }
