// Batches whose every bit can be computed anywhere from (pair, rank, token, column), and kernels that check them all.
//
// Rows are multiples of 1/16 that e4m3 codes hold exactly, with the same largest magnitude in each group of 128
// columns, and expert e multiplies by (8 + e % 8) / 8: dispatched rows and experts' results have no rounding, in fp8
// as in bf16.
#include "ptx.cuh"

struct Params {
  const u64* round;           // counted on the device, so that a graph may be replayed
  u64* counts;                // {wrong numbers, rows that were compared}
  u16* rows;                  // [T, HIDDEN], of this rank
  int* topk_ids;              // [T, TOPK]
  float* weights;             // [T, TOPK]
  u16* output;                // [T, HIDDEN]
  const u16* received;        // as prepare returned them
  const int* expert_row_ids;  // null in the expanded form
  const int* expert_num_tokens;
  u16* results;  // [El, R * C, HIDDEN]
  u64 seed;
  int step;  // of the graph
  int rank, num_tokens, max_delay_ns;
};

constexpr int kThreads = 256;
constexpr int kMaxRows = RANKS * CAPACITY;
// Tokens of a rank in a round are one of these.
__constant__ const int kTokens[] = {TOKENS};
constexpr int kNumTokens = sizeof(kTokens) / sizeof(int);

__host__ __device__ __forceinline__ u32 mix(u64 a, u64 b) {
  u64 x = a * 0x9e3779b97f4a7c15ull + b;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return static_cast<u32>((x ^ x >> 31) >> 32);
}

DEVICE u64 pair_of(const Params& p) { return p.seed + *p.round * STEPS + p.step; }

DEVICE int tokens_of(const Params& p, int rank) { return kTokens[mix(p.seed + *p.round, 1000 + rank) % kNumTokens]; }

DEVICE u64 token_key(u64 pair, int source, int token) { return (pair * RANKS + source) * CAPACITY + token; }

// Now and then all tokens go to eight experts.
DEVICE u32 experts_of(u64 pair) { return mix(pair, 7) % 64 == 0 ? 8 : EXPERTS; }

// Some slots are -1.
DEVICE int id_of(u64 pair, u32 experts, int source, int token, int slot) {
  const u32 drawn = mix(token_key(pair, source, token), 100 + slot);
  return drawn % 16 == 0 ? -1 : static_cast<int>(drawn / 16 % experts);
}

DEVICE float weight_of(u64 pair, int source, int token, int slot) {
  return static_cast<float>(mix(token_key(pair, source, token), 200 + slot) & 0xff) / 128.0f;
}

DEVICE u32 seed_of(u64 pair, int source, int token) { return mix(token_key(pair, source, token), 1000); }

DEVICE float value_of(u32 row_seed, int column) {
  if (column % 128 == 0) {
    return 28.0f;
  }
  // One hash for the token, then a short one a column.
  u32 x = (row_seed ^ static_cast<u32>(column)) * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca6bu;
  return static_cast<float>(static_cast<int>((x >> 8) % 31) - 15) / 16.0f;
}

// Eight columns of a row at a time.
constexpr int kColumns = 8;
struct alignas(16) Bits {
  u16 v[kColumns];
};

DEVICE Bits& bits_at(const u16* rows, u64 row, int column) {
  return *reinterpret_cast<Bits*>(const_cast<u16*>(rows + row * HIDDEN + column));
}

DEVICE float factor_of(int expert) { return static_cast<float>(8 + expert % 8) / 8.0f; }

DEVICE u16 to_bf16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

DEVICE float from_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Experts are placed in one piece, the first EXPERTS % RANKS ranks have one more.
DEVICE int first_expert_of(int rank) { return rank * (EXPERTS / RANKS) + min(rank, EXPERTS % RANKS); }

DEVICE int owner_of(int expert) {
  int rank = 0;
  while (rank + 1 < RANKS && expert >= first_expert_of(rank + 1)) {
    ++rank;
  }
  return rank;
}

DEVICE void report(const Params& p, u32 wrong, u32 rows) {
  if (wrong) {
    atomicAdd(p.counts, static_cast<u64>(wrong));
  }
  if (rows) {
    atomicAdd(p.counts + 1, static_cast<u64>(rows));
  }
}

// This rank's tokens, some time after the pair before.
extern "C" __global__ void __launch_bounds__(kThreads) soak_make(const __grid_constant__ Params p) {
  const u64 pair = pair_of(p);
  const int token = blockIdx.x;
  if (token == 0 && threadIdx.x == 0 && p.max_delay_ns > 0 && mix(pair, 50 + p.rank) % 4 == 0) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    const u64 delay = mix(pair, 60 + p.rank) % p.max_delay_ns;
    do {
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < delay);
  }
  if (token >= p.num_tokens) {
    return;
  }
  const u32 seed = seed_of(pair, p.rank, token);
  for (int column = kColumns * threadIdx.x; column < HIDDEN; column += kColumns * kThreads) {
    Bits row, poison;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      row.v[i] = to_bf16(value_of(seed, column + i));
      poison.v[i] = 0xffff;
    }
    bits_at(p.rows, token, column) = row;
    bits_at(p.output, token, column) = poison;
  }
  if (threadIdx.x < TOPK) {
    p.topk_ids[token * TOPK + threadIdx.x] = id_of(pair, experts_of(pair), p.rank, token, threadIdx.x);
    p.weights[token * TOPK + threadIdx.x] = weight_of(pair, p.rank, token, threadIdx.x);
  }
}

// The rows that expert `expert` must have, in order, as numbers source * CAPACITY + token; a block's. Returns how many.
DEVICE int expected_rows(const Params& p, u64 pair, int expert, int* list, int* counts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 experts = experts_of(pair);
  int before_source[RANKS + 1] = {};
#pragma unroll
  for (int source = 0; source < RANKS; ++source) {
    before_source[source + 1] = before_source[source] + tokens_of(p, source);
  }
  int listed = 0;
  for (int start = 0; start < before_source[RANKS]; start += kThreads) {
    const int i = start + static_cast<int>(threadIdx.x);
    int source = 0, first = 0;
#pragma unroll
    for (int rank = 1; rank < RANKS; ++rank) {
      source = i >= before_source[rank] ? rank : source;
      first = i >= before_source[rank] ? before_source[rank] : first;
    }
    bool has = false;
    for (int slot = 0; i < before_source[RANKS] && slot < TOPK; ++slot) {
      has |= id_of(pair, experts, source, i - first, slot) == expert;
    }
    const u32 which = __ballot_sync(~0u, has);
    if (lane == 0) {
      counts[warp] = __popc(which);
    }
    __syncthreads();
    int before = listed + __popc(which & ((1u << lane) - 1));
    for (int w = 0; w < kThreads / 32; ++w) {
      before += w < warp ? counts[w] : 0;
      listed += counts[w];
    }
    if (has) {
      list[before] = source * CAPACITY + i - first;
    }
    __syncthreads();
  }
  return listed;
}

// Compares every row that each local expert got, and writes its results. Grid: local experts x blocks that share them.
extern "C" __global__ void __launch_bounds__(kThreads) soak_experts(const __grid_constant__ Params p) {
  __shared__ int list[kMaxRows], counts[kThreads / 32];
  const u64 pair = pair_of(p);
  const int local = blockIdx.x, expert = first_expert_of(p.rank) + local;
  const int count = expected_rows(p, pair, expert, list, counts);
  u32 wrong = threadIdx.x == 0 && p.expert_num_tokens[local] != count;
  for (int i = blockIdx.y; i < count; i += gridDim.y) {
    const int source = list[i] / CAPACITY, token = list[i] % CAPACITY;
    const u64 at = static_cast<u64>(local) * kMaxRows + i;
    u64 row = at;
    if (p.expert_row_ids != nullptr) {
      row = list[i];
      wrong += threadIdx.x == 0 && p.expert_row_ids[at] != list[i];
    }
    const u32 seed = seed_of(pair, source, token);
    for (int column = kColumns * threadIdx.x; column < HIDDEN; column += kColumns * kThreads) {
      const Bits came = bits_at(p.received, row, column);
      Bits result;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        wrong += came.v[j] != to_bf16(value_of(seed, column + j));
        result.v[j] = to_bf16(from_bf16(came.v[j]) * factor_of(expert));
      }
      bits_at(p.results, at, column) = result;
    }
  }
  const int rows = count > static_cast<int>(blockIdx.y) ? (count - 1 - blockIdx.y) / gridDim.y + 1 : 0;
  report(p, wrong, threadIdx.x == 0 ? rows : 0);
}

// A token's experts in the order in which they are added up: by rank, then by slot.
struct Terms {
  int count, ranks[TOPK];
  float factors[TOPK], weights[TOPK];
};

DEVICE void list_terms(const Params& p, u64 pair, int token, int* owners, Terms& terms) {
  const int slot = threadIdx.x, id = slot < TOPK ? id_of(pair, experts_of(pair), p.rank, token, slot) : -1;
  if (slot < TOPK) {
    owners[slot] = id < 0 ? RANKS : owner_of(id);
  }
  __syncthreads();
  int before = 0, count = 0;
  const int owner = owners[min(slot, TOPK - 1)];
  for (int other = 0; other < TOPK; ++other) {
    before += owners[other] < owner || (owners[other] == owner && other < slot);
    count += owners[other] < RANKS;
  }
  if (slot < TOPK) {
    terms.count = count;
    terms.ranks[before] = owners[slot];
    terms.factors[before] = factor_of(id);
    terms.weights[before] = weight_of(pair, p.rank, token, slot);
  }
  __syncthreads();
}

// The expected sum of one number: over the experts of each rank with their weights, then over the ranks.
DEVICE u16 expected_output(float value, const Terms& terms) {
  float total = 0.0f, sum = 0.0f;
  for (int n = 0; n < terms.count; ++n) {
    sum = __fadd_rn(sum, __fmul_rn(from_bf16(to_bf16(value * terms.factors[n])), terms.weights[n]));
    if (n + 1 == terms.count || terms.ranks[n + 1] != terms.ranks[n]) {
      total = __fadd_rn(total, from_bf16(to_bf16(sum)));
      sum = 0.0f;
    }
  }
  return to_bf16(total);
}

// Compares the combined output. Grid: tokens.
extern "C" __global__ void __launch_bounds__(kThreads) soak_check(const __grid_constant__ Params p) {
  __shared__ int owners[TOPK];
  __shared__ Terms terms;
  const u64 pair = pair_of(p);
  const int token = blockIdx.x;
  if (token >= p.num_tokens) {
    return;
  }
  list_terms(p, pair, token, owners, terms);
  const u32 seed = seed_of(pair, p.rank, token);
  u32 wrong = 0;
  for (int column = kColumns * threadIdx.x; column < HIDDEN; column += kColumns * kThreads) {
    const Bits came = bits_at(p.output, token, column);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      wrong += came.v[i] != expected_output(value_of(seed, column + i), terms);
    }
  }
  report(p, wrong, threadIdx.x == 0);
}

// The next round.
extern "C" __global__ void soak_advance(const __grid_constant__ Params p) { ++*const_cast<u64*>(p.round); }
