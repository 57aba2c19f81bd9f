// The rows of all experts as e4m3, side by side, each with one scale: what e4m3_sm90.cu multiplies with w13.
//
// code = row / scale, rounded, and scale = max |row| / 448, at least 2^-60. A warp takes a row, which it reads twice: for
// its scale, then for its codes. Where rows and scales go, and in which order columns lie: e4m3_layout.cuh.
//
// Example: a row of 1, 2, 3, ... 128: scale 128 / 448, codes of 3.5, 7, 10.5 (rounded to 10), ... 448.
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

// Sixteen columns of a row.
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

  // Rounded like a division as far as codes of 16-bit numbers tell (triton_quantize.py says why).
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
  int columns = p.gemm[0].columns, total = tables.places[p.num_experts];
  int first = threadIdx.x % 32 * kColumnsOfLane;
  for (int place = blockIdx.x * kWarps + threadIdx.x / 32; place < total; place += gridDim.x * kWarps) {
    int expert = expert_at(tables.places, p.num_experts, place);
    i64 row = tables.starts[expert] + place - tables.places[expert];
    const u16* from = p.gemm[0].input + (i64)(p.row_ids[place] / p.ids_divisor) * columns;
    float largest = 0.0f;
#pragma unroll 4
    for (int c = first; c < columns; c += kColumnsOfWarp) largest = fmaxf(largest, Columns(from + c).largest());
    for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    float scale = fmaxf(__fdiv_rn(largest, kLargestCode), kLeastScale), inverse = __frcp_rn(scale);
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
