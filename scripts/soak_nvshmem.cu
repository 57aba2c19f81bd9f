// Batches whose every bit can be computed anywhere from (pair, rank, token, column), and kernels that check all of them.
//
// Rows are multiples of 1/16 that e4m3 codes hold exactly, with the same largest magnitude in each group of 128 columns,
// and expert e multiplies by (8 + e % 8) / 8: dispatched rows and experts' results have no rounding, in fp8 as in bf16.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Params {
    const u64* round;  // counted on the device, so that a graph may be replayed
    u64* counts;       // {wrong numbers, rows that were compared}
    u16* rows;         // [T, HIDDEN], of this rank
    int* topk_ids;     // [T, TOPK]
    float* weights;    // [T, TOPK]
    u16* output;       // [T, HIDDEN]
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

__device__ __forceinline__ u64 pair_of(const Params& p) { return p.seed + *p.round * STEPS + p.step; }

__device__ __forceinline__ int tokens_of(const Params& p, int rank) {
    return kTokens[mix(p.seed + *p.round, 1000 + rank) % kNumTokens];
}

__device__ __forceinline__ u64 token_key(u64 pair, int source, int token) {
    return (pair * RANKS + source) * CAPACITY + token;
}

// Some slots are -1, and now and then all tokens go to few experts.
__device__ __forceinline__ int id_of(u64 pair, int source, int token, int slot) {
    const u32 experts = mix(pair, 7) % 64 == 0 ? 8 : EXPERTS, drawn = mix(token_key(pair, source, token), 100 + slot);
    return drawn % 16 == 0 ? -1 : static_cast<int>(drawn / 16 % experts);
}

__device__ __forceinline__ float weight_of(u64 pair, int source, int token, int slot) {
    return static_cast<float>(mix(token_key(pair, source, token), 200 + slot) & 0xff) / 128.0f;
}

__device__ __forceinline__ float value_of(u64 pair, int source, int token, int column) {
    if (column % 128 == 0) {
        return 28.0f;
    }
    return static_cast<float>(static_cast<int>(mix(token_key(pair, source, token), 1000 + column) % 31) - 15) / 16.0f;
}

__device__ __forceinline__ float factor_of(int expert) { return static_cast<float>(8 + expert % 8) / 8.0f; }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Experts are placed in one piece, the first EXPERTS % RANKS ranks have one more.
__device__ __forceinline__ int first_expert_of(int rank) {
    return rank * (EXPERTS / RANKS) + min(rank, EXPERTS % RANKS);
}

__device__ __forceinline__ int owner_of(int expert) {
    int rank = 0;
    while (rank + 1 < RANKS && expert >= first_expert_of(rank + 1)) {
        ++rank;
    }
    return rank;
}

__device__ __forceinline__ void report(const Params& p, u32 wrong, u32 rows) {
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
    for (int column = threadIdx.x; column < HIDDEN; column += kThreads) {
        p.rows[static_cast<u64>(token) * HIDDEN + column] = to_bf16(value_of(pair, p.rank, token, column));
        p.output[static_cast<u64>(token) * HIDDEN + column] = 0xffff;
    }
    if (threadIdx.x < TOPK) {
        p.topk_ids[token * TOPK + threadIdx.x] = id_of(pair, p.rank, token, threadIdx.x);
        p.weights[token * TOPK + threadIdx.x] = weight_of(pair, p.rank, token, threadIdx.x);
    }
}

// The rows that expert `expert` must have, in order, as numbers source * CAPACITY + token; a block's. Returns how many.
__device__ __forceinline__ int expected_rows(const Params& p, u64 pair, int expert, int* list, int* counts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int listed = 0;
    for (int source = 0; source < RANKS; ++source) {
        const int tokens = tokens_of(p, source);
        for (int start = 0; start < tokens; start += kThreads) {
            const int token = start + threadIdx.x;
            bool has = false;
            for (int slot = 0; token < tokens && slot < TOPK; ++slot) {
                has |= id_of(pair, source, token, slot) == expert;
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
                list[before] = source * CAPACITY + token;
            }
            __syncthreads();
        }
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
        for (int column = threadIdx.x; column < HIDDEN; column += kThreads) {
            const float value = value_of(pair, source, token, column);
            const u16 came = p.received[row * HIDDEN + column];
            wrong += came != to_bf16(value);
            p.results[at * HIDDEN + column] = to_bf16(from_bf16(came) * factor_of(expert));
        }
    }
    const int rows = count > static_cast<int>(blockIdx.y) ? (count - 1 - blockIdx.y) / gridDim.y + 1 : 0;
    report(p, wrong, threadIdx.x == 0 ? rows : 0);
}

// Compares what came home. Grid: tokens.
extern "C" __global__ void __launch_bounds__(kThreads) soak_check(const __grid_constant__ Params p) {
    const u64 pair = pair_of(p);
    const int token = blockIdx.x;
    __shared__ int owners[TOPK];
    __shared__ float factors[TOPK], weights[TOPK];
    if (token >= p.num_tokens) {
        return;
    }
    if (threadIdx.x < TOPK) {
        const int id = id_of(pair, p.rank, token, threadIdx.x);
        owners[threadIdx.x] = id < 0 ? -1 : owner_of(id);
        factors[threadIdx.x] = factor_of(id);
        weights[threadIdx.x] = weight_of(pair, p.rank, token, threadIdx.x);
    }
    __syncthreads();
    u32 wrong = 0;
    for (int column = threadIdx.x; column < HIDDEN; column += kThreads) {
        const float value = value_of(pair, p.rank, token, column);
        float total = 0.0f;
        for (int rank = 0; rank < RANKS; ++rank) {
            float sum = 0.0f;
            bool any = false;
            for (int slot = 0; slot < TOPK; ++slot) {
                if (owners[slot] == rank) {
                    sum = __fadd_rn(sum, __fmul_rn(from_bf16(to_bf16(value * factors[slot])), weights[slot]));
                    any = true;
                }
            }
            total = any ? __fadd_rn(total, from_bf16(to_bf16(sum))) : total;
        }
        wrong += p.output[static_cast<u64>(token) * HIDDEN + column] != to_bf16(total);
    }
    report(p, wrong, threadIdx.x == 0);
}

// The next round.
extern "C" __global__ void soak_advance(const __grid_constant__ Params p) { ++*const_cast<u64*>(p.round); }
