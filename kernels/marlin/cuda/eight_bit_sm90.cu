// Prefill (large-M) expert kernel with 8-bit rows for Hopper: w13, activation and w2 of all local experts in one
// persistent launch, at the tensor cores' 8-bit rate.
//
//   hidden[r] = act(w13[e] x[r] + b1[e]);  out[r] = w2[e] hidden[r] + b2[e]      for every row r of expert e
//
// ROWS_INT8 1: int8 rows x uint4, uint4b8 or uint8b128 weights, accumulated in int32.
// ROWS_INT8 0: e4m3 rows x e4m3, uint4, uint4b8 or mxfp4 weights, accumulated in f32.
// Layout in:  packed weights (repack.py) with scales of GROUPS_PER_STEP groups every 128 columns, or one a row (0);
//             x as codes with one scale a row (eight_bit_rows.cu).
// Between:    hidden as codes with one scale every 128 columns.
// Layout out: rows of sorted ids (params.py), unweighted, 16 bits.
// Warp roles (12 warps):  0-7 are two consumer warpgroups of 128 weight rows x up to 128 tokens each: widen, wgmma,
//                         promote, epilogue;  8 claims tiles and streams weights;  9 streams tokens;  10 detects
//                         constant blocks of scales of e4m3 weights;  11 (and 10 otherwise) only frees registers.
// Operands: weights are A: widened from packed codes in registers (mxfp4 to e5m2, with the distances of a row's scales
//           folded in: eight_bit_widen.cuh), or e4m3 codes in shared memory. Tokens are B: K-major, 128-byte swizzle.
//           Tiles of many tokens and e4m3 weights with group scales have tokens as A (eight_bit_by_token.cuh).
// Pipeline: ring of kStages stages of 128 columns (256 rows of codes, tokens, scales), full/empty mbarriers per stage.
// Promotion: the tensor cores accumulate the products of one group of columns. If weight rows have one scale (mxfp4:
//            the largest), they accumulate two steps in w13 and one in w2. The result, times the group's scale and (w2)
//            the token's, is added to an f32 sum. w13 of int8 weights with one scale a row needs no promotion.
// Schedule: data-parallel tiles claimed by an atomic ticket: expert by expert, weight rows, then tokens; w13 before w2.
//           A tile of w2 waits for all w13 tiles of its expert; their tickets are earlier, so their CTAs are running.
// Epilogue of w13: gate and up rows alternate, so 256 rows make 128 columns of hidden, one scale group of every token.
// Sums are made in a fixed order: same input, same bits.
//
// Example: one expert, 200 rows, K 256, N 128: w13 has 1 x 2 tiles of 256 rows x 128 and 72 tokens, 2 steps each; w2
// likewise with 1 step. Tickets 0 and 1 are w13's; tickets 2 and 3 wait until both are stored.
#include "eight_bit_by_token.cuh"
#include "tile_queue.cuh"

// ==== Pipeline ====

constexpr int kWeightWarp = kConsumerWarps, kTokenWarp = kConsumerWarps + 1, kScaleWarp = kConsumerWarps + 2;
constexpr int kThreads = 384;  // whole warpgroups, which setmaxnreg needs

constexpr int kBoxTokens = 32;  // rows of one tensor copy

constexpr int kTablesBytes = 3 * (kMaxExperts + 1) * sizeof(int);
constexpr int kBesidesRing = kTablesBytes + (kConsumerWarps + 5) * kTileTokens * 4 + 1024;
constexpr int kStages = (kSharedBytes - kBesidesRing) / kStageBytes;
constexpr int kRingBytes = kStages * kStageBytes;

struct Shared {
  u64 full[kStages], empty[kStages], found[kStages];
  u64 slice_full[kQueuedSlices], slice_empty[kQueuedSlices];
  TileSlice slice[kQueuedSlices];
  Largest largest;
  u32 of_token[2][2][kTileTokens];  // of every other tile of a warpgroup: scales of the input (w13), output rows (w2)
  u32 blocks[kStages];              // what find_blocks says of each
};

static_assert(kRingBytes + sizeof(Shared) + kTablesBytes <= kSharedBytes, "no room for the tables of experts");

// The tables of experts follow.
DEVICE Shared& shared_of(u8* memory) { return *reinterpret_cast<Shared*>(memory + kRingBytes); }
DEVICE Tables tables_of(u8* memory, int n) {
  return Tables(reinterpret_cast<int*>(memory + kRingBytes + sizeof(Shared)), n);
}

// A warp's position in the ring: a shared address and two counters, which is all that stays in registers.
struct Ring {
  // The first members of Shared.
  static constexpr int kFullPlace = kRingBytes, kEmptyPlace = kFullPlace + kStages * 8,
                       kFoundPlace = kEmptyPlace + kStages * 8;
  u32 address;
  int stage = 0, parity = 0;
  DEVICE explicit Ring(u8* memory) : address(shared_address(memory)) {}
  DEVICE u32 place() const { return address + stage * kStageBytes; }
  DEVICE u64* full(Shared& shared) { return &shared.full[stage]; }
  DEVICE void wait_full() { barrier_wait_at<kFullPlace>(address + 8 * stage, parity); }
  DEVICE void wait_found() { barrier_wait_at<kFoundPlace>(address + 8 * stage, parity); }
  DEVICE void wait_empty() { barrier_wait_at<kEmptyPlace>(address + 8 * stage, parity ^ 1); }
  // A warp calls this when it has read a stage.
  DEVICE void release(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive_at<kEmptyPlace>(address + 8 * stage);
  }
  DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ==== Producers ====

DEVICE TileSlice slice_of(const ExpertsParams& p, const Tables& tables, int ticket) {
  int first = tiles_of(p, tables, 0), phase = ticket >= first;
  return tile_of(p, tables, phase, ticket - (phase ? first : 0));
}

// Copies the codes of one step of a tile's weights. Codes that wgmma reads from shared memory come as one tensor box
// for each half of the rows. Columns beyond the last are zeros; rows beyond the expert's last hold whatever follows in
// memory.
DEVICE int bytes_of_codes(int rows, int columns) {
  return kFromShared ? kTokensPlace : rows / 64 * (64 * columns * kBits / 8);
}
DEVICE void copy_codes(const EightBitParams& params, const TileSlice& g, int rows, int step, int columns, u32 to,
                       u64* full, u64 policy) {
  const GemmParams& gemm = params.experts.gemm[g.phase];
  i64 first = g.expert * (i64)gemm.rows + g.first_row;
  if constexpr (kFromShared) {
    for (int half = 0; half < 2; half++) {
      tensor_copy(to + half * 2 * kStripBytes, &params.weights[g.phase], 0, first / 64 + 2 * half, 4 * step, full);
    }
  } else {
    const u8* from = gemm.weights + first * gemm.columns * kBits / 8 + step * kStripBytes;
    for (int i = 0; i < rows / 64; i++) {
      bulk_copy(to + i * kStripBytes, from + i * (i64)64 * gemm.columns * kBits / 8, 64 * columns * kBits / 8, full,
                policy);
    }
  }
}

// Claims tiles and streams the codes, scales and zero points of their weights. The last step may be narrower.
DEVICE void run_weight_thread(const EightBitParams& params, const Tables& tables, Shared& shared, Ring ring) {
  const ExpertsParams& p = params.experts;
  int total = tiles_of(p, tables, 0) + tiles_of(p, tables, 1);
  u64 policy = policy_evict_normal();
  int index = 0, parity = 1;
  for (int ticket = atomicAdd(p.sync, 1); ticket < total; ticket = atomicAdd(p.sync, 1)) {
    TileSlice g = slice_of(p, tables, ticket);
    push_slice(shared, g, index, parity);
    const GemmParams& gemm = p.gemm[g.phase];
    int rows = min(gemm.rows - g.first_row, kTileRows), steps = steps_of(p, g.phase);
    i64 scales = (g.expert * (i64)gemm.groups * gemm.rows + g.first_row) * kScaleBytes;
    for (int step = 0; step < steps; step++) {
      int columns = min(gemm.columns - step * kGroupColumns, kGroupColumns);
      int groups = min(gemm.groups - step * kGroups, kGroups);
      int scale_rows = kGrouped ? groups * (kHasZeros ? 2 : 1) : (kHasZeros ? 1 : 0), row_bytes = rows * kScaleBytes;
      ring.wait_empty();
      barrier_arrive_expecting(ring.full(shared), bytes_of_codes(rows, columns) + scale_rows * row_bytes);
      copy_codes(params, g, rows, step, columns, ring.place(), ring.full(shared), policy);
      for (int i = 0; i < (kGrouped ? groups : 1); i++) {
        i64 from = scales + (kGrouped ? (step * kGroups + i) * (i64)gemm.rows * kScaleBytes : 0);
        u32 row = i * kScaleRowBytes;
        if (kGrouped)
          bulk_copy(ring.place() + kScalesPlace + row, gemm.scales + from, row_bytes, ring.full(shared), policy);
        if (kHasZeros)
          bulk_copy(ring.place() + kZerosPlace + row, gemm.zeros + from, row_bytes, ring.full(shared), policy);
      }
      ring.advance();
    }
  }
  TileSlice none;
  none.phase = -1;
  push_slice(shared, none, index, parity);
}

// Streams the tokens of a tile and, in w2, their scales. Columns beyond the last are zeros.
DEVICE void run_token_thread(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                             Ring& ring) {
  const ExpertsParams& p = params.experts;
  if (g.phase == 1) {
    wait_at_least(ready_flag(p, g.expert), TokenTiles(rows_of(p, g.expert)).count * row_tiles_of(p, 0));
    fence_proxy_async_global();
  }
  int row = tables.starts[g.expert] + g.first_token;
  int boxes = (g.tokens + kBoxTokens - 1) / kBoxTokens;
  int scale_bytes = g.phase == 1 ? (g.tokens + kStartMultiple - 1) / kStartMultiple * kStartMultiple * 4 : 0;
  u64 policy = policy_evict_normal();
  for (int step = 0; step < steps_of(p, g.phase); step++) {
    ring.wait_empty();
    barrier_arrive_expecting(ring.full(shared), boxes * kBoxTokens * kGroupColumns + scale_bytes);
    for (int i = 0; i < boxes; i++) {
      u32 to = ring.place() + kTokensPlace + i * kBoxTokens * kGroupColumns;
      tensor_copy(to, &params.tokens[g.phase], step * kGroupColumns, row + i * kBoxTokens, ring.full(shared));
    }
    if (scale_bytes > 0) {
      const float* scales = params.hidden_scales + step * (i64)params.capacity + row;
      bulk_copy(ring.place() + kTokenScalesPlace, scales, scale_bytes, ring.full(shared), policy);
    }
    ring.advance();
  }
}

// Runs find_blocks on every stage of a tile that has tokens as operand A.
DEVICE void run_scale_warp(const EightBitParams& params, Shared& shared, const TileSlice& g, Ring& ring) {
  for (int step = 0; step < steps_of(params.experts, g.phase); step++, ring.advance()) {
    ring.wait_full();
    u32 blocks = is_by_token(g.tokens) ? find_blocks(ring.place()) : 0;
    if (threadIdx.x % 32 == 0) {
      shared.blocks[ring.stage] = blocks;
      barrier_arrive(&shared.found[ring.stage]);
    }
    ring.release(ring.stage);
  }
}

// ==== Products ====

// Multiplies one block of 32 columns; the weights are in registers, or in shared memory at a descriptor.
template <int kTokens>
DEVICE void multiply_block(Sum* part, const u32* weights, u64 first_weights, u64 tokens, int block, int adds) {
  if constexpr (kFromShared) {
    wgmma_eight_bit<kTokens>(part, first_weights + block * (kHalfBlockBytes / 16), tokens + 2 * block, adds);
  } else {
    wgmma_eight_bit<kTokens>(part, weights, tokens + 2 * block, adds);
  }
}

// Multiplies all steps of a tile whose weight rows have several scales, or whose weights lie in shared memory. Each
// half of a warp's rows and each group of a step is multiplied and promoted by itself, so that unpromoted sums take
// half as many registers. Packed weights of the next product are read while the tensor cores multiply.
template <int kTokens, int kPhase>
DEVICE void multiply_tile(SumsOf<kTokens>& sums, int steps, int groups, Ring& ring) {
  constexpr int kBlocks = 4 / kGroups;
  LanePlace own;
  Packed<kBlocks> packed;
  clear(sums);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(ring.address + kTokensPlace), 0);
  // A warpgroup has 128 rows of weights, and its descriptors begin at either half of each pair of fragments.
  u32 own_weights = ring.address + threadIdx.x / 128 * 2 * kStripBytes;
  u32 first_weights = __shfl_sync(~0u, plain_descriptor(own_weights), 0);
  ring.wait_full();
  packed.load_part(ring.place(), own, 0, 0);
  for (; steps > 0; steps--, groups -= kGroups) {
    u64 tokens = kDescriptorHigh << 32 | (first + ring.stage * (kStageBytes / 16));
    u64 from = plain_descriptor_high(512) | (first_weights + ring.stage * (kStageBytes / 16));
    int stage = ring.stage;
    u32 token_scales = token_scales_in(ring.place());
#pragma unroll
    for (int n = 0; n < 2 * kGroups; n++) {
      int group = n / 2, half = n % 2;
      u32 weights[kBlocks][4];
      Sum part[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kBlocks && !kFromShared; i++) packed.widen(i, weights[i]);
      float low = packed.low(), high = packed.high();
      // Columns that the last step lacks multiply zeros, but their scales may be anything.
      if (kGroups > 1 && group >= groups) low = high = 0.0f;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlocks; i++) {
        multiply_block<kTokens>(part, weights[i], from + fragment_place(half) / 16, tokens, group * kBlocks + i, i > 0);
      }
      wgmma_commit();
      if (n < 2 * kGroups - 1) {
        int next = n + 1;
        packed.load_part(ring.place(), own, next % 2, next / 2 * kBlocks);
      } else {
        ring.advance();
        if (steps > 1) {
          ring.wait_full();
          packed.load_part(ring.place(), own, 0, 0);
        }
      }
      wgmma_wait<0>();
      promote<kTokens, kPhase>(sums[half], part, low, high, token_scales);
    }
    ring.release(stage);
  }
}

// Multiplies kSteps steps of a tile whose weight rows have one scale. The tensor cores accumulate all these columns for
// one half of a warp's rows, then for the other; each is promoted once. While they multiply a block of columns, the
// next block is widened. `of_half` holds the first block at entry, and at exit the first of the next step, if there is
// one.
template <int kTokens, int kPhase, int kSteps>
DEVICE void multiply_steps(SumsOf<kTokens>& sums, const u32 (&offsets)[2], int groups, bool is_last,
                           Packed<1> (&of_half)[1], const LanePlace& own, u32 first_tokens, Ring& ring) {
  Packed<1>& packed = of_half[0];
  const Ring begin = ring;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    Sum part[kTokens / 2];
    u32 weights[2][4];
    ring = begin;
    int previous = ring.stage;
#pragma unroll
    for (int i = 0; i < 4 * kSteps; i++) {
      int block = i % 4;
      bool ends = i == 4 * kSteps - 1;
      u64 tokens = kDescriptorHigh << 32 | (first_tokens + ring.stage * (kStageBytes / 16));
      packed.fold_scales(offsets[half], block < 2 || groups - i / 4 * kGroups > 2);
      packed.widen(0, weights[i % 2]);
      wgmma_fence();
      wgmma_eight_bit<kTokens>(part, weights[i % 2], tokens + 2 * block, i > 0);
      wgmma_commit();
      if (block < 3) {
        packed.load_part(ring.place(), own, half, block + 1);
      } else if (ends && half == 0) {
        packed.load_part(begin.place(), own, 1, 0);
      } else {
        ring.advance();
        if (!ends || !is_last) {
          if (ends || half == 0) ring.wait_full();
          packed.load_part(ring.place(), own, ends ? 0 : half, 0);
        }
      }
      if (!ends) wgmma_wait<1>();
      if (half == 1 && block == 0 && i > 0) {
        ring.release(previous);
        previous = ring.stage;
      }
    }
    wgmma_wait<0>();
    promote<kTokens, kPhase>(sums[half], part, 1.0f, 1.0f, token_scales_in(begin.place()));
    if (half == 1) ring.release(previous);
  }
}

// The same with both halves at once, so that three products are in flight while the next blocks are widened. Registers
// suffice for both accumulators only if tokens are few. `of_halves` holds the first block of each half.
template <int kTokens, int kPhase, int kSteps>
DEVICE void multiply_steps(SumsOf<kTokens>& sums, const u32 (&offsets)[2], int groups, bool is_last,
                           Packed<1> (&of_halves)[2], const LanePlace& own, u32 first_tokens, Ring& ring) {
  u32 token_scales = token_scales_in(ring.place()), weights[4][4];
  Sum part[2][kTokens / 2];
#pragma unroll
  for (int i = 0; i < 4 * kSteps; i++) {
    int block = i % 4;
    bool has_next = i < 4 * kSteps - 1 || !is_last;
    int stage = ring.stage;
    u64 tokens = kDescriptorHigh << 32 | (first_tokens + stage * (kStageBytes / 16));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Packed<1>& packed = of_halves[half];
      u32(&operand)[4] = weights[(2 * i + half) % 4];
      packed.fold_scales(offsets[half], block < 2 || groups - i / 4 * kGroups > 2);
      packed.widen(0, operand);
      wgmma_fence();
      wgmma_eight_bit<kTokens>(part[half], operand, tokens + 2 * block, i > 0);
      wgmma_commit();
      if (block == 3 && half == 0) {
        ring.advance();
        if (has_next) ring.wait_full();
      }
      if (block < 3 || has_next) packed.load_part(ring.place(), own, half, (block + 1) % 4);
    }
    wgmma_wait<2>();
    if (block == 0 && i > 0) ring.release((stage + kStages - 1) % kStages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    promote<kTokens, kPhase>(sums[half], part[half], 1.0f, 1.0f, token_scales);
  }
  ring.release((ring.stage + kStages - 1) % kStages);
}

// Multiplies all steps of a tile whose weights have one scale a row, as mxfp4 has after folding. In w2, tokens have a
// scale in every step, so every step is promoted. In w13, two steps are promoted together; not more, since tensor cores
// accumulate with fewer bits than f32 has (and four steps were no faster).
template <int kTokens, int kPhase>
DEVICE void multiply_tile_per_channel(SumsOf<kTokens>& sums, const u32 (&offsets)[2], int steps, int groups,
                                      Ring& ring) {
  constexpr bool kBoth = kFoldsScales && kTokens <= 64;
  LanePlace own;
  Packed<1> packed[kBoth ? 2 : 1];
  clear(sums);
  u32 tokens = __shfl_sync(~0u, wgmma_descriptor(ring.address + kTokensPlace), 0);
  ring.wait_full();
#pragma unroll
  for (int half = 0; half < 1 + kBoth; half++) packed[half].load_part(ring.place(), own, half, 0);
  for (; kPhase == 0 && steps > 1; steps -= 2, groups -= 2 * kGroups) {
    multiply_steps<kTokens, kPhase, 2>(sums, offsets, groups, steps == 2, packed, own, tokens, ring);
  }
  for (; steps > 0; steps--, groups -= kGroups) {
    multiply_steps<kTokens, kPhase, 1>(sums, offsets, groups, steps == 1, packed, own, tokens, ring);
  }
}

// w13 of int8 weights with one scale a row: int32 accumulators hold exact sums over all columns, without promotion.
template <int kTokens>
DEVICE void multiply_tile_exactly(SumsOf<kTokens>& result, int steps, Ring& ring) {
  LanePlace own;
  SumsOf<kTokens, Sum> sums;
  clear(sums);
  u32 first = __shfl_sync(~0u, wgmma_descriptor(ring.address + kTokensPlace), 0);
  for (; steps > 0; steps--) {
    ring.wait_full();
    u64 tokens = kDescriptorHigh << 32 | (first + ring.stage * (kStageBytes / 16));
    u32 weights[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Packed<4> packed;
      packed.load_part(ring.place(), own, half, 0);
#pragma unroll
      for (int n = 0; n < 4; n++) packed.widen(n, weights[half][n]);
    }
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < 4; n++) wgmma_eight_bit<kTokens>(sums[half], weights[half][n], tokens + 2 * n, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    ring.release(ring.stage);
    ring.advance();
  }
#pragma unroll
  for (int i = 0; i < kTokens; i++) {
    result[i / (kTokens / 2)][i % (kTokens / 2)] = (float)sums[i / (kTokens / 2)][i % (kTokens / 2)];
  }
}

// ==== Epilogues ====

// Copies what a tile's epilogue needs of each token to shared memory while the tensor cores multiply: the scale of its
// input row in w13, its output row in w2. Thread i of a warpgroup copies that of token i.
template <int kPhase>
DEVICE void fetch_of_token(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                           int parity) {
  const ExpertsParams& p = params.experts;
  int token = threadIdx.x % 128;
  if (token >= g.tokens) return;
  const void* from = kPhase == 0 ? (const void*)(params.row_scales + tables.starts[g.expert] + g.first_token + token)
                                 : (const void*)(p.row_ids + tables.firsts[g.expert] + g.first_token + token);
  copy_async_4(shared_address(&shared.of_token[parity][threadIdx.x / 128][token]), from);
}

// Waits for the copies of all threads of the warpgroup.
DEVICE const u32* wait_of_token(Shared& shared, int parity) {
  copies_async_wait();
  if (threadIdx.x < 128) {
    named_barrier<2, 128>();
  } else {
    named_barrier<3, 128>();
  }
  return shared.of_token[parity][threadIdx.x / 128];
}

// ==== Kernel ====

template <int kTokens, int kPhase>
DEVICE void multiply(const EightBitParams& params, Shared& shared, const TileSlice& g, SumsOf<kTokens>& sums,
                     Ring& ring) {
  const ExpertsParams& p = params.experts;
  int steps = steps_of(p, kPhase), groups = p.gemm[kPhase].groups;
  if constexpr (is_by_token(kTokens)) {
    multiply_by_token<kPhase>(sums, steps, groups, ring, [&](Ring& ring) {
      ring.wait_found();
      return shared.blocks[ring.stage];
    });
  } else if constexpr (kPhase == 0 && ROWS_INT8 && !kGrouped) {
    multiply_tile_exactly<kTokens>(sums, steps, ring);
  } else if constexpr (kPromotesGroups || kFromShared) {
    multiply_tile<kTokens, kPhase>(sums, steps, groups, ring);
  } else {
    u32 offsets[2] = {};
    for (int half = 0; half < 2 && kFoldsScales; half++) {
      offsets[half] = exponent_offsets(largest_scales_of(params, g, half));
    }
    multiply_tile_per_channel<kTokens, kPhase>(sums, offsets, steps, groups, ring);
  }
}

template <int kTokens, int kPhase>
DEVICE void run_tile(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g, int parity,
                     Ring& ring) {
  const ExpertsParams& p = params.experts;
  SumsOf<kTokens> sums;
  fetch_of_token<kPhase>(params, tables, shared, g, parity);
  multiply<kTokens, kPhase>(params, shared, g, sums, ring);
  const u32* of_token = wait_of_token(shared, parity);
  if constexpr (kPhase == 0) {
    if constexpr (is_by_token(kTokens)) {
      store_hidden_by_token(params, tables, g, of_token, sums);
    } else {
      store_hidden<kTokens>(params, tables, shared.largest, g, of_token, sums);
    }
    fence_proxy_async_global();
    named_barrier<1, kConsumerThreads>();
    if (threadIdx.x == 0) add_release_gpu(ready_flag(p, g.expert), 1);
  } else if constexpr (is_by_token(kTokens)) {
    store_output_by_token(params, g, of_token, sums);
  } else {
    store_output<kTokens>(params, g, of_token, sums);
  }
}

// Dispatches to the smallest instantiation, from kTokens on, that has room for the tile's tokens.
template <int kTokens, int kPhase>
DEVICE void run_tokens(const EightBitParams& params, const Tables& tables, Shared& shared, const TileSlice& g,
                       int parity, Ring& ring) {
  if constexpr (kTokens < kTileTokens) {
    if (__shfl_sync(~0u, g.tokens, 0) > kTokens) {
      return run_tokens<kTokens + 32, kPhase>(params, tables, shared, g, parity, ring);
    }
  }
  run_tile<kTokens, kPhase>(params, tables, shared, g, parity, ring);
}

DEVICE void run_consumers(const EightBitParams& params, const Tables& tables, Shared& shared, Ring ring) {
  int parity = 0;
  for_each_slice(shared, [&](const TileSlice g) {
    if (__shfl_sync(~0u, g.phase, 0) == 0) {
      run_tokens<32, 0>(params, tables, shared, g, parity, ring);
    } else {
      run_tokens<32, 1>(params, tables, shared, g, parity, ring);
    }
    parity ^= 1;
  });
}

DEVICE void init_barriers(Shared& shared) {
  for (int i = 0; i < kStages; i++) {
    barrier_init(&shared.full[i], 2);
    barrier_init(&shared.empty[i], kConsumerWarps + kMayBeByToken);
    barrier_init(&shared.found[i], 1);
  }
  for (int i = 0; i < kQueuedSlices; i++) {
    barrier_init(&shared.slice_full[i], 1);
    barrier_init(&shared.slice_empty[i], kConsumerWarps + 1 + kMayBeByToken);
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
}

// The last CTA to finish resets all flags for the next launch.
DEVICE void leave(const ExpertsParams& p) {
  __syncthreads();
  bool is_last = threadIdx.x == 0 && add_acquire_release_gpu(p.sync + 1, 1) == (int)gridDim.x - 1;
  if (!__syncthreads_or(is_last)) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    eight_bit_experts(const __grid_constant__ EightBitParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = shared_of(memory);
  Tables tables = tables_of(memory, p.num_experts);
  int warp = threadIdx.x / 32;
  if (warp == 0) tables.make(p, threadIdx.x % 32);
  if (threadIdx.x == 32) init_barriers(shared);
  __syncthreads();
  Ring ring(memory);
  if (warp < kConsumerWarps) {
    registers_grow<232>();
    run_consumers(params, tables, shared, ring);
  } else {
    registers_shrink<40>();
    if (warp == kWeightWarp) {
      if (elected()) run_weight_thread(params, tables, shared, ring);
    } else if (warp == kTokenWarp) {
      for_each_slice(shared, [&](const TileSlice g) {
        if (elected()) {
          run_token_thread(params, tables, shared, g, ring);
        } else {
          for (int step = 0; step < steps_of(p, g.phase); step++) ring.advance();
        }
      });
    } else if (kMayBeByToken && warp == kScaleWarp) {
      for_each_slice(shared, [&](const TileSlice g) { run_scale_warp(params, shared, g, ring); });
    }
    __syncwarp();
  }
  leave(p);
}
