// Which of the two Hopper kernels computes an expert, decided on the device from all row counts, alike in both kernels.
//
// If all experts have equally many rows, those of up to p.max_small_m rows (small-M) are faster in the decode kernel,
// others (large-M) in the prefill kernel. If there are both, both kernels run, one after the other, and the second
// starts with an empty pipeline. So one of them computes all experts if that costs less than p.launch_overhead.
//
// Hand-over (programmatic dependent launch): the decode kernel lets the prefill kernel start as soon as the kernels
// before both have ended, so that this one may read row counts and its input at once. It waits for the decode kernel
// before it writes to scratch that both use, and before it ends. It lets the next kernel start at once: if it has no
// work only one CTA of it waits, and the next call's CTAs start as soon as this call's leave them room.
//
// Example, Qwen3-30B's shape with a launch overhead of 184 and 15 experts of 8 rows beside one of 200 rows, which
// counts as seven tiles of up to 32: decode_sm90.cu loses 46 - 21 with the one, prefill_sm90.cu 6 - 4 with each of the
// 15: the decode kernel computes all. With 15 experts of 24 rows beside one of 200, prefill_sm90.cu loses nothing with
// the 15 and computes all. With DeepSeek-V3's shape and an overhead of 20, both kernels run in the first case.
#pragma once
#include "params.cuh"

constexpr int kPrefillTileTokens = 128;  // most rows of a tile of prefill_sm90.cu, but for its large tiles

// Cost of an expert for 256 weight rows x 128 columns, in units of about 235 cycles. Alone, 24 and 32 rows take less,
// but work units partitioned by less take longer when rows are uneven (docs/benchmarks/experts.md).
DEVICE int small_m_cost(int rows) { return 3 + (rows + 7) / 8; }
// An expert of more than kDecodeTileTokens rows counts as several.
DEVICE int small_m_cost_in_parts(int rows) {
  int rest = rows % kDecodeTileTokens;
  return rows / kDecodeTileTokens * small_m_cost(kDecodeTileTokens) + (rest ? small_m_cost(rest) : 0);
}
DEVICE constexpr int large_m_tile_cost(int tokens) { return 4 + (tokens > 32 ? (tokens + 15) / 16 : 2); }
DEVICE int large_m_cost(int rows) {
  int rest = rows % kPrefillTileTokens;
  return rows / kPrefillTileTokens * large_m_tile_cost(kPrefillTileTokens) + (rest ? large_m_tile_cost(rest) : 0);
}

// One warp: returns the rows up to which an expert is the decode kernel's in this launch: p.max_small_m, or as many as
// the largest expert has (all are), or 0 (none is). All can be only if the decode kernel's list has room for their
// tiles.
DEVICE int select_kernel(const ExpertsParams& p, int lane) {
  if (p.launch_overhead == 0) return p.max_small_m;
  int largest = 0, tiles = 0, small_m_loss = 0, large_m_loss = 0;
  bool any_small_m = false;
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    largest = max(largest, rows_of(p, e));
    any_small_m |= rows_of(p, e) > 0 && rows_of(p, e) <= p.max_small_m;
  }
  largest = __reduce_max_sync(~0u, largest);
  if (largest <= p.max_small_m || !__any_sync(~0u, any_small_m)) return p.max_small_m;
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    int rows = rows_of(p, e), more = small_m_cost_in_parts(rows) - large_m_cost(rows);
    tiles += (rows + kDecodeTileTokens - 1) / kDecodeTileTokens;
    if (rows > p.max_small_m) {
      small_m_loss += more;
    } else if (rows > 0) {
      large_m_loss -= more;
    }
  }
  small_m_loss = __reduce_add_sync(~0u, small_m_loss);
  large_m_loss = __reduce_add_sync(~0u, large_m_loss);
  bool all_small_m = (int)__reduce_add_sync(~0u, tiles) <= p.max_tiles && small_m_loss <= large_m_loss;
  if ((all_small_m ? small_m_loss : large_m_loss) >= p.launch_overhead) return p.max_small_m;
  return all_small_m ? max(largest, kDecodeTileTokens) : 0;
}
