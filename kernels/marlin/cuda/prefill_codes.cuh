// What the tensor cores are given: sums, codes and scales of a lane.
#pragma once
#include "prefill_dequant.cuh"
#include "prefill_stage.cuh"

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens]. While they are made they
// take the registers of their own tokens only.
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Pieces of 16 neighbouring rows that a consumer warp has of a tile: two, or one in the second half of a narrow tile.
DEVICE int pieces_of(int warp, int tile_rows) { return warp < kConsumerWarps / 2 || tile_rows == kTileRows ? 2 : 1; }

// Their first row.
DEVICE int warp_row(int warp, int pieces) {
  return pieces == 2 ? warp * 32 : kTileRows / 2 + (warp - kConsumerWarps / 2) * 16;
}

// What a lane needs for 64 columns of its warp's rows, a piece for each half of the warpgroup's rows.
constexpr int kScalesPerHalf = SCALES_PER_STEP <= 2 ? 1 : SCALES_PER_STEP / 2;
struct Codes {
  u32 words[2][2][2 * kWords];  // [piece][32 columns]
  Scales scales[2][kScalesPerHalf];
};

struct CodeReader {
  u32 codes, scales;  // where in a stage the lane's are
  bool one_group;
  DEVICE CodeReader(bool one_group, int pieces) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int row = warp_row(thread / 32, pieces), lane = thread % 32;
    codes = row / 64 * kStripBytes + row % 64 / 16 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = kCodeBytes + (row + lane / 4 * 2) * kScaleBytes;
  }

  // `kHalf`: which 64 of the 128 columns of the ring's stage.
  template <int kPieces, int kHalf, int kMost>
  DEVICE void read(Codes& to, const Ring<kMost>& ring) const {
    constexpr int kPlace = kHalf * 8 * kPieceBytes;
    u32 from = ring.codes_address() + codes;
    load_words_at<kPlace>(from, to.words[0][0]);
    if constexpr (kPieces == 2) load_words_at<kPlace + kPieceBytes>(from, to.words[1][0]);
    load_words_at<kPlace + 4 * kPieceBytes>(from, to.words[0][1]);
    if constexpr (kPieces == 2) load_words_at<kPlace + 5 * kPieceBytes>(from, to.words[1][1]);
    constexpr int kScales = SCALES_PER_STEP == 1 && kHalf ? 0 : kPieces * kScalesPerHalf;
#pragma unroll
    for (int n = 0; n < kScales; n++) {
      int i = n % kPieces, group = one_group ? 0 : kHalf * SCALES_PER_STEP / 2 + n / kPieces;
      const u8* row = ring.codes() + scales + group * kScaleRow + i * 16 * kScaleBytes;
      to.scales[i][n / kPieces] = load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow);
    }
  }
};
