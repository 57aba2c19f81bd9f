// Quantizes the rows of all experts to 8 bits, one scale a row: the input of w13 in eight_bit_sm90.cu and _sm80.cu.
//
//   scale[r] = max(max |x[r]| / kLargestCode, 2^-60);  codes[r, permuted k] = round(x[r, k] / scale[r])
//
// In: rows of 16-bit numbers, gathered by sorted ids. Out: codes and scales in the layout of eight_bit_layout.cuh.
// With SENT_ROWS, rows arrive as codes with one scale, and both are copied bit for bit.
// A block quantizes one row at a time and reads it once: each thread keeps 32 columns in registers while the block
// reduces the largest magnitude. The host launches columns / 32 threads, rounded up to whole warps.
//
// Example (e4m3): a row of 1, 2, 3, ... 128: scale 128 / 448, codes of 3.5, 7, 10.5 (rounded to 10), ... 448.
#include "eight_bit_layout.cuh"
#include "number.cuh"

// 1: the rows arrive in 8 bits.
#ifndef SENT_ROWS
#define SENT_ROWS 0
#endif

constexpr int kChunk = 16;  // columns that a thread reads together
constexpr int kChunks = 2;  // per thread
constexpr int kMaxWarps = 32;

struct RowsParams {
  ExpertsParams experts;
  u8* codes;      // [capacity, columns]
  float* scales;  // [capacity]
  // With SENT_ROWS, codes are at gemm[0].input; the strides of rows are in bytes (codes) and in floats (scales).
  const float* sent_scales;
  i64 sent_stride, sent_scale_stride;
  int capacity;
};

// Sixteen columns of a row.
struct Columns {
  uint4 pairs[2];

  DEVICE float at(int i) const {
    const u32* words = reinterpret_cast<const u32*>(pairs);
    return to_float(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
  }

  DEVICE float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; i++) most = max_or_nan(most, fabsf(at(i)));
    return most;
  }

  // x / scale. For 16-bit x, the resulting code is that of a correctly rounded division.
  DEVICE float quotient_at(int i, float scale, float inverse) const {
    float x = at(i), q = x * inverse;
    return fmaf(fmaf(-q, scale, x), inverse, q);
  }

  DEVICE u32 codes_at(int i, float scale, float inverse) const {
    return code_pair(quotient_at(i, scale, inverse), quotient_at(i + 8, scale, inverse));
  }
};

// Permutes sixteen columns of a sent row to the order of eight_bit_layout.cuh.
DEVICE uint4 in_packed_order(const u32* words) {
  return make_uint4(permute_bytes(words[0], words[2], 0x5140), permute_bytes(words[0], words[2], 0x7362),
                    permute_bytes(words[1], words[3], 0x5140), permute_bytes(words[1], words[3], 0x7362));
}

// The block copies the sent row `row_id` to `row`.
DEVICE void copy_sent_row(const RowsParams& params, i64 row_id, i64 row) {
  int columns = params.experts.gemm[0].columns, thread = threadIdx.x, threads = blockDim.x;
  const u8* from = reinterpret_cast<const u8*>(params.experts.gemm[0].input) + row_id * params.sent_stride;
  u8* to = params.codes + row * columns;
  bool aligned = reinterpret_cast<u64>(from) % 16 == 0;
  for (int first = thread * kChunk; first < columns; first += threads * kChunk) {
    u32 words[4];
    if (aligned) {
      *reinterpret_cast<uint4*>(words) = __ldg(reinterpret_cast<const uint4*>(from + first));
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = __ldg(reinterpret_cast<const u32*>(from + first) + i);
    }
    *reinterpret_cast<uint4*>(to + first) = in_packed_order(words);
  }
  if (thread == 0) params.scales[row] = params.sent_scales[row_id * params.sent_scale_stride];
}

// The block quantizes a row. `largest_of` holds one number for each warp; rows alternate between two such buffers, so
// one barrier per row suffices.
DEVICE void quantize_row(const RowsParams& params, i64 row_id, i64 row, float* largest_of) {
  int columns = params.experts.gemm[0].columns, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const u16* from = params.experts.gemm[0].input + row_id * columns;
  Columns x[kChunks];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    int first = (i * blockDim.x + threadIdx.x) * kChunk;
    bool valid = first < columns;
    const uint4* words = reinterpret_cast<const uint4*>(from + first);
    x[i].pairs[0] = valid ? __ldg(words) : make_uint4(0, 0, 0, 0);
    x[i].pairs[1] = valid ? __ldg(words + 1) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kChunks; i++) largest = max_or_nan(largest, x[i].largest());
  for (int d = 1; d < 32; d *= 2) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, d));
  if (threadIdx.x % 32 == 0) largest_of[warp] = largest;
  __syncthreads();
  for (int w = 0; w < num_warps; w++) largest = max_or_nan(largest, largest_of[w]);
  float scale = max_or_nan(__fdiv_rn(largest, kLargestCode), kLeastScale), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) params.scales[row] = scale;
  u8* to = params.codes + row * columns;
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    int first = (i * blockDim.x + threadIdx.x) * kChunk;
    u32 out[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      out[t] = x[i].codes_at(2 * t, scale, inverse) | x[i].codes_at(2 * t + 1, scale, inverse) << 16;
    }
    if (first < columns) *reinterpret_cast<uint4*>(to + first) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

extern "C" __global__ void eight_bit_rows(const __grid_constant__ RowsParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ int memory[];
  __shared__ float largest_of[2][kMaxWarps];
  Tables tables(memory, p.num_experts);
  if (threadIdx.x < 32) tables.make(p, threadIdx.x);
  __syncthreads();
  int total = tables.firsts[p.num_experts], parity = 0;
  for (int place = blockIdx.x; place < total; place += gridDim.x, parity ^= 1) {
    int expert = find_expert(tables.firsts, p.num_experts, 1, place);
    int row = tables.starts[expert] + place - tables.firsts[expert];
    i64 row_id = p.row_ids[place] / p.ids_divisor;
    if constexpr (SENT_ROWS) {
      copy_sent_row(params, row_id, row);
    } else {
      quantize_row(params, row_id, row, largest_of[parity]);
    }
  }
}
