// Both GEMMs of the experts and the activation between them in one persistent kernel, for Hopper.
//
//   hidden[r, :] = activation(w13[e] x[r] + bias1[e]),  out[r, :] = w2[e] hidden[r] + bias2[e]   for every row r of e
//
// The weights are operand A (dequantized in registers), the tokens operand B (shared memory, 8 to 128 of them), so that
// a few rows cost no padding. The warps of a block:
//   0 to 7     two warpgroups of 128 weight rows: dequantize, multiply, add up shared tiles, apply bias and activation
//   8          claims items (schedule.cuh) and streams packed weights and scales with bulk copies
//   9 to 11    copy the tokens' rows, wherever they are, and wait for w13's tiles before they read `hidden`
// Shared memory is a ring of stages of 128 columns: codes of 256 rows, their scales, the tokens. Its depth follows the
// largest tile there is, so that a few rows leave room for many weights in flight. Weights run ahead of the tokens:
// those of w2 stream in while the last of w13 is computed. Sums are made in a fixed order: same input, same bits.
//
// Layouts: repack.py draws the weights; stages are described at `Stage`.
#include "activation.cuh"
#include "dequant.cuh"
#include "mma.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

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

// One stage: codes [strip][32 columns][16 rows][lane], scales [group][256] (then zeros), tokens [64 columns][token][128 B].
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

// ---- the weights' warp ----

DEVICE void load_weights(const ExpertsParams& p, const Segment& g, int step, Ring& ring, u64* full, u64 policy) {
  const GemmParams& gemm = p.gemm[g.phase];
  int lane = threadIdx.x % 32;
  int rows = min(gemm.rows - g.row_tile * kTileRows, kTileRows), columns = min(gemm.columns - step * kStepColumns, kStepColumns);
  int groups = 1, first_group = 0;
  if (SCALES_PER_STEP > 1 || gemm.groups > 1) {
    first_group = step * SCALES_PER_STEP;
    groups = min(gemm.groups - first_group, SCALES_PER_STEP);
  }
  if (lane == 0) {
    barrier_arrive_expecting(full, rows * columns * kBits / 8 + groups * rows * kScaleBytes * (kHasZeros ? 2 : 1));
  }
  __syncwarp();
  i64 expert_row = (i64)g.expert * gemm.rows + g.row_tile * kTileRows;
  const u8* codes = gemm.weights + expert_row * gemm.columns * kBits / 8;
  u32 to = shared_address(ring.codes());
  if (lane < kStrips && lane * 64 < rows) {
    int height = min(rows - lane * 64, 64);
    const u8* from = codes + (i64)(lane * 64) * gemm.columns * kBits / 8 + (i64)step * kStepColumns * height * kBits / 8;
    if (height == 64) {
      bulk_copy(to + lane * kStripBytes, from, 64 * columns * kBits / 8, full, policy);
    } else {
      for (int c = 0; c < columns / 32; c++) {
        bulk_copy(to + lane * kStripBytes + c * 4 * kPieceBytes, from + c * 2 * kPieceBytes, 2 * kPieceBytes, full, policy);
      }
    }
  } else if (lane >= 8 && lane < 8 + groups) {
    int group = lane - 8;
    i64 offset = (((i64)g.expert * gemm.groups + first_group + group) * gemm.rows + g.row_tile * kTileRows) * kScaleBytes;
    u32 row = shared_address(ring.scales()) + group * kScaleRow;
    bulk_copy(row, gemm.scales + offset, rows * kScaleBytes, full, policy);
    if constexpr (kHasZeros) {
      bulk_copy(row + SCALES_PER_STEP * kScaleRow, gemm.zeros + offset, rows * kScaleBytes, full, policy);
    }
  }
  __syncwarp();
}

DEVICE void run_weight_warp(const ExpertsParams& p, Shared& shared, Ring ring, int ticket) {
  int lane = threadIdx.x % 32, total = shared.schedule.phase[0].items + shared.schedule.phase[1].items;
  // Weights that several tiles of tokens read should stay in L2; otherwise nobody reads them again.
  u64 policy = shared.schedule.largest_tile < kTileTokens ? policy_evict_first() : policy_evict_normal();
  for (int i = 0, parity = 1;;) {
    ticket = __shfl_sync(~0u, ticket, 0);
    barrier_wait(&shared.item_empty[i], parity);
    if (lane == 0) {
      shared.item[i] = ticket < total ? ticket : -1;
      barrier_arrive(&shared.item_full[i]);
    }
    if (ticket >= total) return;
    if (++i == kItems) {
      i = 0;
      parity ^= 1;
    }
    for_each_segment(shared.schedule, p.num_experts, ticket, [&](const Segment& g) {
      for (int step = g.from; step < g.to; step++) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        load_weights(p, g, step, ring, &shared.full[ring.stage], policy);
        ring.advance();
      }
    });
    if (lane == 0) ticket = atomicAdd(p.sync, 1);
  }
}

// ---- the tokens' warps ----

DEVICE int input_row(const ExpertsParams& p, Schedule& s, int phase, int expert, int i) {
  if (phase == 1) return s.row_start(p.num_experts)[expert] + i;
  if (p.row_ids == nullptr) return expert * p.max_rows + i;
  i64 place = p.sorted ? s.row_start(p.num_experts)[expert] + i : (i64)expert * p.max_rows + i;
  return p.row_ids[place] / p.ids_divisor;
}

// One stage's columns of all rows of a tile; a thread copies the same 16-byte chunk of every sixth row.
DEVICE void load_tokens(const GemmParams& gemm, const int* rows, int num_rows, int step, Ring& ring, int thread) {
  constexpr int kChunks = kStepColumns / 8, kRowsAtOnce = kTokenWarps * 32 / kChunks, kBatch = 8;
  int chunk = thread % kChunks, column = step * kStepColumns + chunk * 8;
  u32 valid = column < gemm.columns ? 16 : 0;
  const u16* source = gemm.input + (valid ? column : 0);
  u32 to = shared_address(ring.tokens()) + chunk / 8 * ring.token_rows * 128;
  for (int first = thread / kChunks; first < num_rows; first += kRowsAtOnce * kBatch) {
    int row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) row[i] = rows[min(first + i * kRowsAtOnce, kTileTokens - 1)];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      int at = first + i * kRowsAtOnce;
      if (at < num_rows) {
        copy_async_16(to + at * 128 + ((chunk ^ at) % 8) * 16, source + (i64)row[i] * gemm.columns, valid);
      }
    }
  }
}

DEVICE void run_token_warps(const ExpertsParams& p, Shared& shared, Ring ring) {
  constexpr int kTokenThreads = kTokenWarps * 32;
  int thread = threadIdx.x - (kWeightWarp + 1) * 32;
  for_each_item(shared, p.num_experts, [&](const Segment& g) {
    named_barrier<2, kTokenThreads>();
    for (int i = thread; i < g.tokens; i += kTokenThreads) {
      shared.token_row[i] = input_row(p, shared.schedule, g.phase, g.expert, g.first_token + i);
    }
    if (g.phase == 1) {
      int* tiles = shared.schedule.tile_start(p.num_experts) + g.expert;
      if (thread % 32 == 0) {
        wait_at_least(ready_flag(p, g.expert), (tiles[1] - tiles[0]) * shared.schedule.phase[0].row_tiles);
      }
      __syncwarp();
    }
    named_barrier<2, kTokenThreads>();
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      load_tokens(p.gemm[g.phase], shared.token_row, g.tokens, step, ring, thread);
      barrier_arrive_on_copies(&shared.full[ring.stage]);
      ring.advance();
    }
  });
}

// ---- the consumers ----

// Read anew for every tile: what follows from it is then not kept in registers from tile to tile.
struct Lane {
  int half, warp, lane;  // strips half and half + 2 of 64 rows, 16 rows in them, lane of the warp
  DEVICE Lane() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    half = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  }
  DEVICE const u8* codes(Ring& ring) const {
    return ring.codes() + half * kStripBytes + warp * kPieceBytes + lane * (kPieceBytes / 32);
  }
  DEVICE int first_row(int i) const { return (half + 2 * i) * 64 + warp * 16; }  // of the tile
  DEVICE int place(int i) const { return first_row(i) + lane / 4 * 2; }          // of row g's scale
};

// One stage of a few tokens into the sums: products of one warp, which have less to wait for than a warpgroup's.
//
// The codes of integers go into the products as they are, and scales and offsets are applied to the sums of a group of
// columns: sums += scale * (sum of code * x) - scale * offset * (sum of x), where the sum of x is one more product, with
// a matrix of ones. That takes half the instructions of dequantizing every weight.
template <int kTokens>
DEVICE void multiply_stage_by_warp(const Lane& me, float (&sums)[2][kTokens / 2], Ring& ring) {
  constexpr bool kRaw = kTokens <= kRawTokens;
  constexpr int kEvery = 8 / SCALES_PER_STEP;  // products of 16 columns between new scales
  const u32 ones[4] = {kOnePair, kOnePair, kOnePair, kOnePair};
  const u8* codes = me.codes(ring);
  constexpr int kAhead = kBits == 4 ? 4 : 1;  // blocks of 32 columns whose codes are read together
  u32 words[2][kAhead][2 * kWords];
  u32 tokens = shared_address(ring.tokens()) + me.lane % 8 * 128;
  float products[2][kRaw ? kTokens / 2 : 1], inputs[kRaw ? kTokens / 2 : 1];
  float scale[2][2], offset[2][2];
  Scales s[2];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    u32 b[kTokens / 8][4];
    if (k % 2 == 0) {
      if (k / 2 % kAhead == 0) {
#pragma unroll
        for (int n = 0; n < 2 * kAhead; n++) {
          int block = k / 2 + n / 2;
          load_words(words[n % 2][n / 2], codes + n % 2 * 2 * kStripBytes + block * 4 * kPieceBytes);
        }
      }
      int chunk = k % 4 * 2 + me.lane / 8;
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        load_matrices(b[j], tokens + k / 4 * ring.token_rows * 128 + j * 1024 + (chunk ^ me.lane % 8) * 16);
      }
    }
    if (k % kEvery == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u8* row = ring.scales() + k / kEvery * kScaleRow;
        const u8* zeros = row + SCALES_PER_STEP * kScaleRow;
        if constexpr (kRaw) {
          load_raw_scales(row, zeros, me.place(i), scale[i], offset[i]);
        } else {
          s[i] = load_scales(row, zeros, me.place(i));
        }
      }
#pragma unroll
      for (int n = 0; n < (kRaw ? kTokens / 2 : 0); n++) products[0][n] = products[1][n] = inputs[n] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 a[4];
      if constexpr (kRaw) {
        raw_codes(&words[i][k / 2 % kAhead][k % 2 * kWords], a);
      } else {
        dequantize(&words[i][k / 2 % kAhead][k % 2 * kWords], s[i], a);
      }
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) {
        mma(kRaw ? &products[i][4 * j] : &sums[i][4 * j], a, b[j][k % 2 * 2], b[j][k % 2 * 2 + 1]);
      }
    }
    if constexpr (kRaw && kRawOffset != 0) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; j++) mma(&inputs[4 * j], ones, b[j][k % 2 * 2], b[j][k % 2 * 2 + 1]);
    }
    if (kRaw && k % kEvery == kEvery - 1) {
#pragma unroll
      for (int n = 0; n < kTokens; n++) {
        int i = n / (kTokens / 2), m = n % (kTokens / 2), h = m / 2 % 2;
        sums[i][m] += scale[i][h] * products[i][m];
        if constexpr (kRawOffset != 0) sums[i][m] -= offset[i][h] * inputs[m / 4 * 4 + m % 2];
      }
    }
  }
}

// One stage of many tokens into the sums; `previous` is released as soon as its products are done.
template <int kTokens>
DEVICE void multiply_stage(const Lane& me, float (&sums)[2][kTokens / 2], u32* a, Ring& ring, u64* previous) {
  constexpr int kEvery = 8 / SCALES_PER_STEP;
  constexpr int kGroup = kTokens <= 64 ? 4 : 2;  // products in flight while as many are prepared; more take registers
  const u8* codes = me.codes(ring);
  u64 tokens = wgmma_descriptor(shared_address(ring.tokens()));
  u64 half = (u64)ring.token_rows * 128 / 16;
  u32 words[2][2 * kWords];
  Scales s[2];
#pragma unroll
  for (int first = 0; first < 16; first += kGroup) {  // 16 columns of one of the two strips
    u32* group = a + first / kGroup % 2 * kGroup * 4;
#pragma unroll
    for (int n = first; n < first + kGroup; n++) {
      int k = n / 2, i = n % 2;
      if (k % 2 == 0) load_words(words[i], codes + i * 2 * kStripBytes + k / 2 * 4 * kPieceBytes);
      if (k % kEvery == 0) {
        const u8* row = ring.scales() + k / kEvery * kScaleRow;
        s[i] = load_scales(row, row + SCALES_PER_STEP * kScaleRow, me.place(i));
      }
      dequantize(&words[i][k % 2 * kWords], s[i], group + (n - first) * 4);
    }
    wgmma_fence();
#pragma unroll
    for (int n = first; n < first + kGroup; n++) {
      wgmma<kTokens>(sums[n % 2], group + (n - first) * 4, tokens + n / 8 * half + n / 2 % 4 * 2);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (first == 0 && previous != nullptr && me.lane == 0) barrier_arrive(previous);
  }
}

DEVICE float4* piece_sums(const ExpertsParams& p, int phase, int piece) {
  return reinterpret_cast<float4*>(p.partials) +
         (i64)(phase * gridDim.x + piece) * p.max_tile_tokens * (kTileRows / 4) + threadIdx.x;
}

// The sums of a tile's later pieces, left by other blocks, added in order.
template <int kTokens>
DEVICE void add_pieces(const ExpertsParams& p, Schedule& s, const Segment& g, float (&sums)[2][kTokens / 2]) {
  for (int piece = g.piece + 1; piece < (int)gridDim.x; piece++) {
    Position start = s.piece[g.phase][piece], end = s.piece[g.phase][piece + 1];
    if (start.tile > g.tile || start.step == 0) return;
    if (start.tile == end.tile && start.step == end.step) continue;
    if (threadIdx.x == 0) wait_at_least(piece_flag(p, g.phase, piece), 1);
    named_barrier<1, kConsumerThreads>();
    const float4* from = piece_sums(p, g.phase, piece);
#pragma unroll
    for (int r = 0; r < kTokens / 4; r++) {
      float4 v = __ldcg(from + r * kConsumerThreads);
      float* sum = &sums[r / (kTokens / 8)][r % (kTokens / 8) * 4];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
}

template <int kTokens>
DEVICE void leave_piece(const ExpertsParams& p, const Segment& g, float (&sums)[2][kTokens / 2]) {
  float4* to = piece_sums(p, g.phase, g.piece);
#pragma unroll
  for (int r = 0; r < kTokens / 4; r++) {
    const float* sum = &sums[r / (kTokens / 8)][r % (kTokens / 8) * 4];
    __stcg(to + r * kConsumerThreads, make_float4(sum[0], sum[1], sum[2], sum[3]));
  }
  named_barrier<1, kConsumerThreads>();
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(piece_flag(p, g.phase, g.piece), 1);
  }
}

DEVICE i64 output_row(const ExpertsParams& p, Schedule& s, int phase, int expert, int i) {
  int sorted = s.row_start(p.num_experts)[expert] + i;
  if (phase == 0) return sorted;
  return p.sorted ? p.row_ids[sorted] : (i64)expert * p.max_rows + i;
}

// Global scale, bias, activation, transposition to token-major, store: 16 weight rows of a warp.
template <int kTokens, bool kActivate>
DEVICE void store_rows(const ExpertsParams& p, Schedule& s, const Segment& g, int first, int lane, const float* sums) {
  constexpr bool kGate = kActivate && kGated;
  const GemmParams& gemm = p.gemm[kActivate ? 0 : 1];
  int width = kGate ? gemm.rows / 2 : gemm.rows;
  int row = lane / 4, low = kGate ? first / 2 + row : first + row / 2 * 4 + row % 2;
  int high = kGate ? width + low : low + 2;
  float alpha[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
  if (gemm.alphas != nullptr) {
    alpha[0] = gemm.alphas[g.expert * gemm.alphas_per_expert];
    alpha[1] = kGate ? gemm.alphas[(g.expert + 1) * gemm.alphas_per_expert - 1] : alpha[0];
  }
  if (gemm.bias != nullptr) {
    bias[0] = to_float(gemm.bias[(i64)g.expert * gemm.rows + low]);
    bias[1] = to_float(gemm.bias[(i64)g.expert * gemm.rows + high]);
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; j++) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = sums[4 * j + k] * alpha[k / 2] + bias[k / 2];
    u32 out[2];
    if constexpr (kGate) {
      out[0] = transpose_8x8(to_pair(activate(v[0], v[2]), activate(v[1], v[3])));
    } else {
      if constexpr (kActivate) {
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = activate(v[k], 0.0f);
      }
      out[0] = transpose_8x8(to_pair(v[0], v[1]));
      out[1] = transpose_8x8(to_pair(v[2], v[3]));
    }
    int token = 8 * j + lane / 4;
    if (token < g.tokens) {
      u16* to = gemm.output + output_row(p, s, g.phase, g.expert, g.first_token + token) * width;
      if constexpr (kGate) {
        *reinterpret_cast<u32*>(to + first / 2 + lane % 4 * 2) = out[0];
      } else {
        *reinterpret_cast<uint2*>(to + first + lane % 4 * 4) = make_uint2(out[0], out[1]);
      }
    }
  }
}

template <int kTokens, bool kActivate>
DEVICE void store_tile(const ExpertsParams& p, Schedule& s, const Segment& g, float (&sums)[2][kTokens / 2]) {
  Lane me;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int first = g.row_tile * kTileRows + me.first_row(i);
    if (first < p.gemm[kActivate ? 0 : 1].rows) store_rows<kTokens, kActivate>(p, s, g, first, me.lane, sums[i]);
  }
}

// All that a tile's sums go through once its steps are done here.
template <int kTokens>
DEVICE void finish_segment(const ExpertsParams& p, Shared& shared, const Segment& g, float (&sums)[2][kTokens / 2]) {
  if (g.from > 0) {
    leave_piece<kTokens>(p, g, sums);
    return;
  }
  if (g.to < shared.schedule.phase[g.phase].steps) add_pieces<kTokens>(p, shared.schedule, g, sums);
  if (g.phase == 1) {
    store_tile<kTokens, false>(p, shared.schedule, g, sums);
  } else {
    store_tile<kTokens, true>(p, shared.schedule, g, sums);
    named_barrier<1, kConsumerThreads>();
    if (threadIdx.x == 0) {
      __threadfence();
      add_release(ready_flag(p, g.expert), 1);
    }
  }
}

template <int kTokens>
DEVICE void compute_segment(const ExpertsParams& p, Shared& shared, Segment g, Ring& ring) {
  Lane me;
  float sums[2][kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens; i++) sums[i / (kTokens / 2)][i % (kTokens / 2)] = 0.0f;
  if constexpr (kTokens <= 32) {
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      multiply_stage_by_warp<kTokens>(me, sums, ring);
      __syncwarp();
      if (me.lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      ring.advance();
    }
  } else {
    u32 a[32];
    u64* previous = nullptr;
    for (int step = g.from; step < g.to; step++) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      fence_proxy_async();  // the tokens were written by ordinary copies and are read by the tensor cores
      multiply_stage<kTokens>(me, sums, a, ring, previous);
      previous = &shared.empty[ring.stage];
      ring.advance();
    }
    wgmma_wait<0>();
    if (me.lane == 0) barrier_arrive(previous);
  }
  // Found again rather than kept: the sums leave few registers for it.
  asm volatile("" : "+r"(g.tile));
  locate_tile(shared.schedule, p.num_experts, g);
  finish_segment<kTokens>(p, shared, g, sums);
}

DEVICE void run_consumers(const ExpertsParams& p, Shared& shared, Ring ring) {
  for_each_item(shared, p.num_experts, [&](const Segment& g) {
    switch (tile_tokens(g.tokens)) {
      case 8: compute_segment<8>(p, shared, g, ring); break;
      case 16: compute_segment<16>(p, shared, g, ring); break;
      case 32: compute_segment<32>(p, shared, g, ring); break;
      case 64: compute_segment<64>(p, shared, g, ring); break;
      default: compute_segment<128>(p, shared, g, ring);
    }
  });
}

// ---- the block ----

// The ring fills what is left of the block's shared memory behind the tables.
DEVICE Ring make_ring(u8* start, u32 free_bytes, int token_rows) {
  Ring ring;
  ring.base = start;
  ring.token_rows = token_rows;
  ring.stage_bytes = kCodeBytes + kScaleStage + token_rows * 2 * kStepColumns;
  ring.num_stages = min((int)(free_bytes / ring.stage_bytes), kMaxStages);
  return ring;
}

// The last block to finish leaves all flags zero for the next launch.
DEVICE void leave(const ExpertsParams& p, Shared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.item[0] = atomicAdd(p.sync + 1, 1) == (int)gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.item[0]) return;
  for (int i = threadIdx.x; i < 2 + p.num_experts + 2 * kMaxBlocks; i += blockDim.x) p.sync[i] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts(const __grid_constant__ ExpertsParams p) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int ticket = threadIdx.x == kWeightWarp * 32 ? atomicAdd(p.sync, 1) : 0;
  if (threadIdx.x < 32) {
    make_tables(shared.schedule, p, threadIdx.x);
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < kMaxStages; i++) {
      barrier_init(&shared.full[i], 1 + kTokenWarps * 32);
      barrier_init(&shared.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kItems; i++) {
      barrier_init(&shared.item_full[i], 1);
      barrier_init(&shared.item_empty[i], kTokenWarps + kConsumerWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  make_pieces(shared.schedule, p.num_experts);
  u32 dynamic_bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic_bytes));
  u32 used = (sizeof(Shared) + 4 * (p.num_experts + 1) * sizeof(int) + 1023) / 1024 * 1024;
  Ring ring = make_ring(memory + used, dynamic_bytes - used, shared.schedule.largest_tile);
  if (p.gemm[0].columns % kStepColumns || p.gemm[1].columns % kStepColumns) {
    // A last step of fewer columns multiplies what lies behind them by zero: it must be a number.
    uint4* words = reinterpret_cast<uint4*>(memory + used);
    for (u32 i = threadIdx.x; i < (dynamic_bytes - used) / 16; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerThreads) {
    registers_grow<216>();
    run_consumers(p, shared, ring);
  } else {
    registers_shrink<72>();
    if (threadIdx.x / 32 == kWeightWarp) {
      run_weight_warp(p, shared, ring, ticket);
    } else {
      run_token_warps(p, shared, ring);
    }
  }
  leave(p, shared);
}
