// Which of the two kernels computes an expert, decided from the row counts of all, alike in both kernels.
//
// Where all experts have as many rows, those of up to p.few_rows are faster in decode_sm90.cu, those of more in
// prefill_sm90.cu. Where rows lie on both sides, both kernels run, one after the other, and the second begins with
// nothing loaded. So one of them computes all experts where what it loses on those of the other side is less than
// p.second_kernel, what beginning anew costs.
//
// Example, Qwen3-30B's shape, where beginning anew costs 184: of 15 experts of 8 rows and one of 200, which counts as
// seven of 32 rows or less, decode_sm90.cu loses 46 - 21 with the one, prefill_sm90.cu 6 - 4 with each of the 15: the
// first computes all. Of 15 experts of 24 rows and one of 200, prefill_sm90.cu loses nothing with the 15 and computes
// all. Where beginning anew costs 20, as with DeepSeek-V3's shape, the 15 of 8 rows and the one are left to both.
#pragma once
#include "params.cuh"

constexpr int kManyTileTokens = 128;  // the most rows that prefill_sm90.cu computes at once

// What an expert takes for 256 weight rows x 128 columns, in about 235 cycles. Alone, 24 and 32 rows take less than
// this, but pieces cut by less take longer where rows are uneven (docs/benchmarks/gemm_few_rows.md).
DEVICE int few_cost(int rows) { return 3 + (rows + 7) / 8; }
// An expert of more rows counts as several.
DEVICE int few_cost_in_parts(int rows) {
  int rest = rows % kFewRows;
  return rows / kFewRows * few_cost(kFewRows) + (rest ? few_cost(rest) : 0);
}
DEVICE constexpr int many_tile_cost(int tokens) { return 4 + (tokens > 32 ? (tokens + 15) / 16 : 2); }
DEVICE int many_cost(int rows) {
  int rest = rows % kManyTileTokens;
  return rows / kManyTileTokens * many_tile_cost(kManyTileTokens) + (rest ? many_tile_cost(rest) : 0);
}

// One warp: up to how many rows an expert is decode_sm90.cu's in this launch: p.few_rows, all or none. All may be if
// the list of its tiles has room for them.
DEVICE int agreed_few_rows(const ExpertsParams& p, int lane) {
  if (p.second_kernel == 0) return p.few_rows;
  auto rows_of = [&](int e) { return min(max(p.num_tokens[e], 0), p.max_rows); };
  int largest = 0, tiles = 0, loss_of_few = 0, loss_of_many = 0;
  bool few = false;
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    largest = max(largest, rows_of(e));
    few |= rows_of(e) > 0 && rows_of(e) <= p.few_rows;
  }
  largest = __reduce_max_sync(~0u, largest);
  if (largest <= p.few_rows || !__any_sync(~0u, few)) return p.few_rows;
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(e), more = few_cost_in_parts(rows) - many_cost(rows);
    tiles += (rows + kFewRows - 1) / kFewRows;
    if (rows > p.few_rows) {
      loss_of_few += more;
    } else if (rows > 0) {
      loss_of_many -= more;
    }
  }
  loss_of_few = __reduce_add_sync(~0u, loss_of_few);
  loss_of_many = __reduce_add_sync(~0u, loss_of_many);
  bool all_few = (int)__reduce_add_sync(~0u, tiles) <= p.most_tiles && loss_of_few <= loss_of_many;
  if ((all_few ? loss_of_few : loss_of_many) >= p.second_kernel) return p.few_rows;
  return all_few ? max(largest, kFewRows) : 0;
}
