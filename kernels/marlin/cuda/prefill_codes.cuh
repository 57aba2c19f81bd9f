// What the tensor cores are given: sums, codes and scales of a lane.
#pragma once
#include "folded.cuh"
#include "prefill_stage.cuh"

// Sums of a lane: [half of the warpgroup's 128 rows][8 tokens][row g, row g + 8][two tokens]. While they are made they
// take the registers of their own tokens only.
template <int kTokens>
using SumsOf = float[2][kTokens / 2];

// Pieces of 16 neighbouring rows that a consumer warp has of 128, 192 or 256 rows: two, or one of 128 rows and in the
// second half of a narrow tile.
DEVICE int pieces_of(int warp, int rows) {
  return rows == kTileRows || (rows == kNarrowRows && warp < kConsumerWarps / 2) ? 2 : 1;
}

// Their first row.
DEVICE int warp_row(int warp, int rows) {
  if (pieces_of(warp, rows) == 2) return warp * 32;
  return warp * 16 + (rows == kNarrowRows ? kTileRows / 4 : 0);
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
  // Of `rows` weight rows of a stage, the first of them `first`.
  DEVICE CodeReader(bool one_group, int rows, int first = 0) : one_group(one_group) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int row = first + warp_row(thread / 32, rows), lane = thread % 32;
    codes = row / 64 * kStripBytes + row % 64 / 16 * kPieceBytes + lane * (kPieceBytes / 32);
    scales = (row + lane / 4 * 2) * kScaleBytes;
  }

  template <int kMost>
  DEVICE Scales load(const Ring<kMost>& ring, int group, int first_row) const {
    const u8* row = ring.codes() + kCodeBytes<kMost> + scales + group * kScaleRow<kMost> + first_row * kScaleBytes;
    return load_folded_scales(row, row + SCALES_PER_STEP * kScaleRow<kMost>);
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
      to.scales[i][n / kPieces] = load(ring, group, i * 16);
    }
  }
};
