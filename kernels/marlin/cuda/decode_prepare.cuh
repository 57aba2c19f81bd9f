// A stage's tokens made ready for raw codes: rows are multiplied by a power of two where they lie, and each row's sum
// over the stage's columns becomes the starting value of the sums.
#pragma once
#include "decode_stage.cuh"
#include "mma.cuh"

// Tiles of 8 tokens are prepared by a warp that does nothing else, those of 16, which it could not keep up with, by the
// warps that multiply them. For more tokens codes are dequantized: that takes less than preparing and scaling sums.
DEVICE constexpr bool is_raw(int tokens) { return kRaw && tokens <= kRawTokens; }
DEVICE constexpr bool takes_raw(int tokens) { return kRaw && tokens == 8; }
DEVICE constexpr bool prepares_itself(int tokens) { return kRaw && tokens == kRawTokens; }

// Where in a stage's tokens a lane's first chunk of eight tokens lies: a quarter of the warp has 8 rows of 8 columns.
DEVICE u32 prepared_place(int first_token) {
  int lane = threadIdx.x % 32, row = lane % 8;
  return (first_token + row) * 128 + (lane / 8 ^ row) * 16;
}

// One warp, 8 tokens, `mine` their prepared_place. Eight tokens by 32 columns are operand A: rows g and g + 8 of it are
// the same token's, and the sums come times the numbers in even and odd columns of operand B.
template <int kTokens>
DEVICE void prepare_tokens(const Ring& ring, float* starts, u32 mine, int first_token) {
  u32 first = shared_address(ring.tokens()) + mine, pairs[4][4];
  auto place = [&](int i) { return (first ^ i % 2 * 64) + i / 2 * token_rows_of(kTokens) * 128; };
#pragma unroll
  for (int i = 0; i < 4; i++) load_matrices(pairs[i], place(i));
#pragma unroll
  for (int i = 0; i < 4 && kScaleTokens; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[i][j] = mul_pair(pairs[i][j], kTokenFactor);
    store_matrices(place(i), pairs[i]);
  }
  if constexpr (kSumTokens) {
    u32 lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // so that what follows from it is not kept between stages
    u32 code = lane & 4 ? kStart[1] : kStart[0], same = code;
    asm volatile("" : "+r"(same));  // a pair of registers for all products
    float sums[4], parts[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) mma_from_zero(parts[i], pairs[i], code, same);  // none waits for another
#pragma unroll
    for (int m = 0; m < 4; m++) sums[m] = parts[0][m] + parts[1][m] + (parts[2][m] + parts[3][m]);
    // As the accumulators of lanes 4 r + c lie: rows g of tokens 2 c and 2 c + 1, then rows g + 8.
    u32 token = first_token + lane / 4, high = lane % 4;
    if (high < 2) starts[token / 2 * 4 + high * 2 + token % 2] = high ? sums[1] + sums[3] : sums[0] + sums[2];
  }
}
