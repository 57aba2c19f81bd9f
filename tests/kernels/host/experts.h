// Instructions of the kernels with 8-bit rows, on the emulated GPU of tests/dispatch/emulated: what stands for ptx.cuh,
// number.cuh, mma.cuh and wgmma.cuh, and the bodies of the kernels' own functions in assembly.
//
// Emulated from the PTX manual: fragments of mma and wgmma (with A in registers or unswizzled, the 128-byte swizzle of B),
// ldmatrix, movmatrix, prmt, mbarriers with bytes to come, bulk and tensor copies, cp.async that lands no earlier than
// it is waited for. Shared addresses are offsets in the block's dynamic memory. Sums of 8-bit floats have the bits of an
// H200's tensor cores (tensor_core.py). Not emulated: registers, time.
#pragma once
#include <climits>

#include "gpu.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define __align__(n)

#define blockDim (emulated::Dim{(unsigned)emulated::running->block->num_threads})

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline u32 __funnelshift_l(u32 low, u32 high, int by) { return (u64(high) << 32 | low) << by % 32 >> 32; }

namespace emulated {
constexpr int kDynamicNumber = 1000, kVoteNumber = 1001, kDynamicBytes = 232448;

inline u8* dynamic() {
  u8* memory = static_cast<u8*>(shared(kDynamicNumber, kDynamicBytes + 1024));
  return memory + (1024 - reinterpret_cast<u64>(memory) % 1024) % 1024;
}

template <typename T>
T* at(u32 address) {
  if (address + sizeof(T) > kDynamicBytes) abort();
  return reinterpret_cast<T*>(dynamic() + address);
}

// An mbarrier: arrivals and bytes that the current phase waits for.
struct Barrier {
  u16 count, pending;
  int bytes : 31;
  unsigned phase : 1;

  void change(int arrivals, int more_bytes) {
    pending -= arrivals, bytes += more_bytes;
    if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
  }
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier_of(u64* barrier) { return *reinterpret_cast<Barrier*>(barrier); }

inline void wait_for(Barrier& barrier, u32 parity) {
  while (barrier.phase == parity) yield();
}

// Copies that a thread issued and did not wait for, in groups.
struct Copy {
  void* to;
  const void* from;
  int bytes, valid;
};
inline std::map<Thread*, std::vector<std::vector<Copy>>> copies;

inline std::vector<std::vector<Copy>>& own_copies() {
  auto& own = copies[running];
  if (own.empty()) own.emplace_back();
  return own;
}

inline void land_copies(size_t left) {
  auto& own = own_copies();
  while (own.size() > left) {
    for (const Copy& copy : own.front()) {
      memset(copy.to, 0, copy.bytes);
      memcpy(copy.to, copy.from, copy.valid);
    }
    own.erase(own.begin());
  }
  if (own.empty()) own.emplace_back();
}

// A tensor map: a matrix of bytes, whose boxes have 32 rows of 128.
struct Matrix {
  const u8* data;
  i64 rows, columns;
};

inline float e4m3(u8 code) {
  const int exponent = code >> 3 & 15, digits = code & 7;
  const float size =
      (code & 127) == 127 ? NAN : std::ldexp(exponent ? 8.0f + digits : digits, std::max(exponent, 1) - 10);
  return code & 128 ? -size : size;
}

inline u8 to_e4m3(float f) {
  if (f != f) return 0x7f;
  const u8 sign = std::signbit(f) ? 0x80 : 0;
  const float size = std::fmin(std::fabs(f), 448.0f);
  const int exponent = size == 0 ? -6 : std::max(std::ilogb(size), -6);
  return sign | (u8)(((exponent + 6) << 3) + (int)std::nearbyint(std::ldexp(size, 3 - exponent)));
}

inline u8 to_int8(float f) {
  return f != f ? 0 : (u8)(signed char)std::fmax(std::fmin(std::nearbyint(f), 127.0f), -128.0f);
}

// The number of a code, of e4m3 or (operand A alone) e5m2, the high byte of f16.
#if ROWS_INT8
template <bool kIsE5m2 = false>
int value(u8 code) {
  return (signed char)code;
}
#else
template <bool kIsE5m2 = false>
float value(u8 code) {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int i = 0; i < 256; i++) all.push_back(kIsE5m2 ? of_f16(i << 8) : e4m3(i));
    return all;
  }();
  return values[code];
}
#endif

// Whether wgmma takes e5m2 for operand A: "f32.e5m2.e4m3".
constexpr bool is_e5m2(const char* types) { return types[4] == 'e' && types[5] == '5'; }

// The sums of two pairs of signed numbers in 16 bits, or 0 where that is more.
inline u32 add_relu(u32 a, u32 b) {
  const int low = (short)a + (short)b, high = (short)(a >> 16) + (short)(b >> 16);
  return u32(std::max(low, 0)) | u32(std::max(high, 0)) << 16;
}

// Operand A of 16 rows x 32 columns, of which a lane gets its rows g and g + 8; the others have brought theirs.
struct Rows {
  u8 row[2][32];
};
inline Rows rows_of_lane(const u32* a) {
  struct Brought {
    union {
      u32 a[4];
      Rows rows;
    };
  } mine;
  memcpy(mine.a, a, sizeof mine.a);
  return meet(mine,
              [](Brought* all) {
                Rows rows[kLanes];
                for (int lane = 0; lane < kLanes; lane++) {
                  for (int t = 0; t < 4; t++) {
                    const u32* from = all[lane / 4 * 4 + t].a;
                    for (int i = 0; i < 4; i++) memcpy(&rows[lane].row[i % 2][i / 2 * 16 + 4 * t], &from[i], 4);
                  }
                }
                for (int lane = 0; lane < kLanes; lane++) all[lane].rows = rows[lane];
              })
      .rows;
}

// Adds the products of 32 columns to a sum: integers exactly, floats as tensor_core.py says.
#if ROWS_INT8
template <bool kIsE5m2 = false>
int product(int sum, const u8* a, const u8* b) {
  for (int k = 0; k < 32; k++) sum += value(a[k]) * value(b[k]);
  return sum;
}
#else
template <bool kIsE5m2 = false>
float product(float sum, const u8* a, const u8* b) {
  constexpr int kFractionBits = 13;
  float terms[33];
  terms[32] = sum;
  int largest = sum == 0 ? INT_MIN : std::ilogb(sum);
  for (int k = 0; k < 32; k++) {
    const float x = value<kIsE5m2>(a[k]), y = value(b[k]);
    terms[k] = x * y;
    if (terms[k] != terms[k]) return NAN;
    if (terms[k] == 0) continue;
    largest = std::max(largest, std::max(std::ilogb(x), kIsE5m2 ? -14 : -6) + std::max(std::ilogb(y), -6));
  }
  if (largest == INT_MIN) return 0;
  float total = 0;
  for (float term : terms) total += std::trunc(std::ldexp(term, kFractionBits - largest));
  if (total == 0) return 0;
  const int cut = std::ilogb(total) - kFractionBits;
  return std::ldexp(std::trunc(std::ldexp(total, -cut)), cut + largest - kFractionBits);
}
#endif
}  // namespace emulated

// ==== ptx.cuh ====

inline bool __syncthreads_or(bool vote) {
  auto* any = static_cast<int*>(emulated::shared(emulated::kVoteNumber, sizeof(int)));
  __syncthreads();
  *any = 0;
  __syncthreads();
  if (vote) *any = 1;
  __syncthreads();
  return *any != 0;
}

inline u32 shared_address(const void* p) { return static_cast<const u8*>(p) - emulated::dynamic(); }
inline void barrier_init(u64* barrier, u32 arrivals) {
  emulated::barrier_of(barrier) = {(u16)arrivals, (u16)arrivals, 0, 0};
}
inline void barrier_arrive(u64* barrier) { emulated::barrier_of(barrier).change(1, 0); }
inline void barrier_arrive_expecting(u64* barrier, u32 bytes) { emulated::barrier_of(barrier).change(1, bytes); }
inline void barrier_wait(u64* barrier, u32 parity) { emulated::wait_for(emulated::barrier_of(barrier), parity); }
template <int kOffset>
void barrier_arrive_at(u32 address) {
  barrier_arrive(emulated::at<u64>(address + kOffset));
}
template <int kOffset>
void barrier_wait_at(u32 address, u32 parity) {
  barrier_wait(emulated::at<u64>(address + kOffset), parity);
}
template <int kId, int kThreads>
void named_barrier() {
  emulated::barrier(kId, kThreads);
}
inline bool elected() { return emulated::lane() == 0; }
inline u64 policy_evict_normal() { return 0; }
inline void bulk_copy(u32 to, const void* from, u32 num_bytes, u64* barrier, u64) {
  if (to % 16 || num_bytes % 16 || (u64)from % 16) abort();
  memcpy(emulated::at<u8>(to), from, num_bytes);
  emulated::barrier_of(barrier).change(0, -(int)num_bytes);
}
inline u32 load_shared_u32(u32 address) { return *emulated::at<u32>(address); }
inline void load_shared_pair(u32 address, u32* words) {
  if (address % 8) abort();
  memcpy(words, emulated::at<u32>(address), 8);
}
inline u32 load_shared_u16(u32 address) { return *emulated::at<u16>(address); }
inline void copy_async_16(u32 to, const void* from, u32 valid) {
  if (to % 16 || (u64)from % 16) abort();
  emulated::own_copies().back().push_back({emulated::at<uint4>(to), from, 16, (int)valid});
}
inline void copy_async_4(u32 to, const void* from) {
  emulated::own_copies().back().push_back({emulated::at<u32>(to), from, 4, 4});
}
inline void copies_async_wait() { emulated::land_copies(0); }
inline void commit_copies() { emulated::own_copies().emplace_back(); }
// The last group is the one that is not committed yet.
template <int kPending>
void wait_for_copies() {
  emulated::land_copies(kPending + 1);
}
inline void tensor_copy(u32 to, const void* map, int column, int row, u64* barrier) {
  const auto& matrix = *static_cast<const emulated::Matrix*>(map);
  for (int r = 0; r < 32; r++) {
    for (int c = 0; c < 128; c++) {
      const bool inside = row + r < matrix.rows && column + c < matrix.columns;
      *emulated::at<u8>(to + r * 128 + (c ^ r % 8 * 16)) =
          inside ? matrix.data[(row + r) * matrix.columns + column + c] : 0;
    }
  }
  emulated::barrier_of(barrier).change(0, -32 * 128);
}
// Of packed codes: 4 blocks of 32 columns, each of 2 strips of 64 rows.
inline void tensor_copy(u32 to, const void* map, int, int strip, int block, u64* barrier) {
  const auto& matrix = *static_cast<const emulated::Matrix*>(map);
  for (int b = 0; b < 4; b++) {
    for (int s = 0; s < 2; s++, to += 64 * 32) {
      const i64 from = ((strip + s) * (matrix.columns / 32) + block + b) * 64 * 32;
      const bool inside = strip + s < matrix.rows / 64 && block + b < matrix.columns / 32;
      if (inside) {
        memcpy(emulated::at<u8>(to), matrix.data + from, 64 * 32);
      } else {
        memset(emulated::at<u8>(to), 0, 64 * 32);
      }
    }
  }
  emulated::barrier_of(barrier).change(0, -128 * 128);
}
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline void add_release_gpu(int* p, int value) { atomicAdd(p, value); }
inline int add_acquire_release_gpu(int* p, int value) { return atomicAdd(p, value); }
inline u64 load_acquire_sys(const u64* at) { return emulated::load(at); }
inline u64 global_timer_ns() { return emulated::now_ns(); }
inline void grid_dependency_wait() { emulated::wait_for_kernel_before(); }
inline void grid_dependency_launch() { emulated::running->block->lets_next_come_up = true; }
inline void wait_at_least(const int* p, int value) {
  while (*p < value) emulated::yield();
}
template <int kCount>
void registers_grow() {}
template <int kCount>
void registers_shrink() {}
inline u32 transpose_8x8(u32 pair) {
  return emulated::meet(pair, [](u32* pairs) {
    u16 matrix[8][8], turned[8][8];
    memcpy(matrix, pairs, sizeof matrix);
    for (int r = 0; r < 8; r++) {
      for (int c = 0; c < 8; c++) turned[c][r] = matrix[r][c];
    }
    memcpy(pairs, turned, sizeof turned);
  });
}
inline int sum_of_lanes(int sum, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  return sum;
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = selector >> 4 * i & 15;
    u8 byte = bytes >> 8 * (which & 7);
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= u32(byte) << 8 * i;
  }
  return out;
}
inline u32 and_or(u32 value, u32 mask, u32 bits) { return (value & mask) | bits; }

// ==== number.cuh; of pairs, what no kernel with 8-bit rows computes ====

constexpr u32 kMinusZeroPair = 0x80008000u;
inline u32 fma_pair(u32, u32, u32) { abort(); }
inline u32 fma_low(u32, u32, u32) { abort(); }
inline u32 fma_high(u32, u32, u32) { abort(); }
inline u32 mul_pair(u32, u32) { abort(); }
inline u32 add_pair(u32, u32) { abort(); }
inline u32 to_pair(float low, float high) { return emulated::half(low) | emulated::half(high) << 16; }
inline float to_float(u16 value) { return emulated::of_half(value); }

// ==== mma.cuh ====

inline void load_shared(float* out, u32 address) { memcpy(out, emulated::at<uint4>(address), 16); }
inline void load_matrices(u32* out, u32 address) {
  struct Brought {
    union {
      u32 address;
      u32 out[4];
    };
  } mine;
  mine.address = address;
  auto found = emulated::meet(mine, [](Brought* all) {
    u32 places[32];
    for (int i = 0; i < 32; i++) places[i] = all[i].address;
    for (int lane = 0; lane < 32; lane++) {
      for (int m = 0; m < 4; m++) all[lane].out[m] = *emulated::at<u32>(places[8 * m + lane / 4] + lane % 4 * 4);
    }
  });
  memcpy(out, found.out, 16);
}
// mma.m16n8k32: of B a lane brings token g, columns 4 t to 4 t + 3, then 16 further on, and gets tokens 2 t, 2 t + 1.
inline void mma_int8(int* d, const u32* a, u32 b0, u32 b1) {
  const emulated::Rows rows = emulated::rows_of_lane(a);
  struct Brought {
    union {
      u32 b[2];
      u8 tokens[2][32];
    };
  } mine;
  mine.b[0] = b0, mine.b[1] = b1;
  auto found = emulated::meet(mine, [](Brought* all) {
    u8 tokens[8][32];
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 2; i++) memcpy(&tokens[lane / 4][16 * i + lane % 4 * 4], &all[lane].b[i], 4);
    }
    for (int lane = 0; lane < 32; lane++) memcpy(all[lane].tokens, tokens[lane % 4 * 2], 64);
  });
  for (int i = 0; i < 4; i++) d[i] = emulated::product(d[i], rows.row[i / 2], found.tokens[i % 2]);
}

// ==== wgmma.cuh ====

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kLeft>
void wgmma_wait() {}
constexpr u64 kDescriptorHigh = 0x40000040;
inline u32 wgmma_descriptor(u32 address) { return (address & 0x3ffff) >> 4 | 1u << 16; }
// 32 columns of a row of an operand. Without swizzle: core matrices of 8 rows x 16 bytes, whose distances along K and rows
// the descriptor has. Swizzled: rows are 128 bytes apart, 16-byte chunks swizzled by the row.
inline void row_at(u64 descriptor, int row, u8* columns) {
  const u32 start = (descriptor & 0x3fff) << 4, along_k = (descriptor >> 16 & 0x3fff) << 4,
            along_rows = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 46 == 0) {
    for (int chunk = 0; chunk < 2; chunk++) {
      memcpy(columns + 16 * chunk, emulated::at<u8>(start + row / 8 * along_rows + chunk * along_k + row % 8 * 16), 16);
    }
    return;
  }
  if (descriptor >> 32 != kDescriptorHigh) abort();
  for (int k = 0; k < 32; k++) {
    const u32 address = start + row * 128 + k;
    columns[k] = *emulated::at<u8>(address ^ (address >> 7 & 7) << 4);
  }
}
// A lane's two rows of operand A.
inline emulated::Rows rows_at(u64 descriptor) {
  emulated::Rows rows;
  for (int h = 0; h < 2; h++) {
    row_at(descriptor, threadIdx.x % 128 / 32 * 16 + 8 * h + emulated::lane() / 4, rows.row[h]);
  }
  return rows;
}
// A warp's 16 rows of wgmma.m64nNk32.
template <int kColumns, bool kIsE5m2, typename Sum>
void emulated_wgmma(Sum* d, const emulated::Rows& rows, u64 descriptor, bool adds) {
  for (int j = 0; j < kColumns / 8; j++) {
    for (int i = 0; i < 2; i++) {
      u8 column[32];
      row_at(descriptor, 8 * j + emulated::lane() % 4 * 2 + i, column);
      for (int h = 0; h < 2; h++) {
        Sum& sum = d[4 * j + 2 * h + i];
        sum = emulated::product<kIsE5m2>(adds ? sum : Sum(0), rows.row[h], column);
      }
    }
  }
}
