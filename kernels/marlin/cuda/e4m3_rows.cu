// Quantizes the rows of all experts to e4m3 with one scale per row: the input of e4m3_sm90.cu's w13.
//
//   scale[r] = max(max|x[r]| / 448, 2^-60);  code[r, k] = round(x[r, k] / scale[r])      for every row r of sorted ids
//
// Layout in:  rows of K 16-bit numbers, row ids sorted by expert.  Layout out: codes [capacity, K] and scales
//             [capacity], by expert, with columns in the tensor cores' order (e4m3_layout.cuh).
// Warps:      each takes a row, which it reads twice: for its scale, then (from L2) for its codes.
// Example:    a row of 1, 2, 3, ... 128: scale 128 / 448, codes of 3.5, 7, 10.5 (rounded to 10), ... 448.
#include "e4m3_layout.cuh"
#include "number.cuh"

constexpr int kThreads = 256;
constexpr int kColumnsOfLane = 16;
constexpr int kColumnsOfWarp = 32 * kColumnsOfLane;

struct RowsParams {
  ExpertsParams experts;
  u8* codes;      // [capacity, columns]
  float* scales;  // [capacity]
};

// A lane's sixteen columns of a row.
struct Columns {
  float x[kColumnsOfLane];
  DEVICE explicit Columns(const u16* from) {
    const uint4* words = reinterpret_cast<const uint4*>(from);
    uint4 both[2] = {__ldg(words), __ldg(words + 1)};
    const u32* pairs = reinterpret_cast<const u32*>(both);
#pragma unroll
    for (int i = 0; i < kColumnsOfLane; i++) x[i] = to_float(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff);
  }

  DEVICE float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumnsOfLane; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
  }

  // For 16-bit numbers, the code is that of the correctly rounded quotient (kernels/quantize.py says why).
  DEVICE float code(int i, float scale, float inverse) const {
    float q = x[i] * inverse;
    return fmaf(fmaf(-q, scale, x[i]), inverse, q);
  }

  DEVICE u32 codes(int i, float scale, float inverse) const {
    return e4m3_codes(code(i, scale, inverse), code(i + 1, scale, inverse));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads) e4m3_rows(const __grid_constant__ RowsParams params) {
  const ExpertsParams& p = params.experts;
  extern __shared__ int memory[];
  Tables tables(memory, p.num_experts);
  if (threadIdx.x < 32) tables.make(p, threadIdx.x);
  __syncthreads();
  constexpr int kWarps = kThreads / 32;
  int columns = p.gemm[0].columns, total = tables.positions[p.num_experts];
  int first = threadIdx.x % 32 * kColumnsOfLane;
  for (int position = blockIdx.x * kWarps + threadIdx.x / 32; position < total; position += gridDim.x * kWarps) {
    int expert = find_expert(tables.positions, p.num_experts, 1, position);
    i64 row = tables.starts[expert] + position - tables.positions[expert];
    const u16* from = p.gemm[0].input + (i64)(p.row_ids[position] / p.ids_divisor) * columns;
    float largest = 0.0f;
#pragma unroll 4
    for (int c = first; c < columns; c += kColumnsOfWarp) largest = fmaxf(largest, Columns(from + c).largest());
    for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    float scale = fmaxf(__fdiv_rn(largest, kMaxCode), kMinScale), inverse = __frcp_rn(scale);
    if (threadIdx.x % 32 == 0) params.scales[row] = scale;
    u8* to = params.codes + row * columns;
#pragma unroll 2
    for (int c = first; c < columns; c += kColumnsOfWarp) {
      Columns x(from + c);
      u32 out[4];
#pragma unroll
      for (int t = 0; t < 4; t++) {
        out[t] = x.codes(2 * t, scale, inverse) | x.codes(8 + 2 * t, scale, inverse) << 16;
      }
      *reinterpret_cast<uint4*>(to + c) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}
