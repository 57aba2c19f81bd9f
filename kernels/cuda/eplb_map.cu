// Logical expert ids to physical ones, and the record of the load: the rule of moe_ep/eplb/filling.py in one launch.
//
// Before: ids [tokens, slots] (logical, -1 for none), table [experts, width] (replicas, -1 padded), counts [experts].
// After: out [tokens, slots] (physical), load [physical] grown by the number of each id of a row that is counted.
//
// A block does one tile of rows_per_tile rows, a thread a slot. All sums are of integers, so the order of the atomic
// additions does not show. The load gets one addition for each expert or replica of a tile, however hot it is.
//
// Example: ids [[0, -1], [1, 0]], table [[0, 2], [1, -1]], counts [2, 1], one physical expert a rank. Expert 0 has two
// tokens, which are divided 1 and 1; ranks 0 and 2 are level, and it stays so. Its first token (row 0) goes to 0, the
// second (row 1) to 2: out [[0, -1], [1, 2]], load + [1, 1, 1].

#if IDS_64
typedef long long Id;
#else
typedef int Id;
#endif
#if MAP_64
typedef long long MapEntry;
#else
typedef int MapEntry;
#endif
#if OUT_64
typedef long long OutId;
#else
typedef int OutId;
#endif

constexpr int kCandidates = 8;
constexpr int kTurns = 6, kGroups = 3;
constexpr unsigned kRankStep = 0xC2B2AE35u, kTileStep = 0x9E3779B1u, kExpertStep = 0x85EBCA6Bu;
constexpr unsigned short kSingle = 0xFFFF;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
    const Id* ids;
    const int* num_counted_on_device;  // null where the host knows num_counted
    int* load;
    const MapEntry* table;
    const MapEntry* counts;
    OutId* out;
    int num_counted;
    int tokens, slots, rows_per_tile;
    int experts, width;
    int max_replicated;  // experts that can have several replicas, rounded up to even
    int ranks, slots_per_rank, ep_rank;
};

// Where things lie in shared memory. X is max_replicated, W the warps of a block.
struct Shared {
    int* level;              // [ranks] tokens that this tile sends to each rank
    int* num_tokens;         // [experts] counted tokens of experts with one replica
    int* first;              // [experts] their only replica
    int* candidates;         // [X, kCandidates] physical experts
    unsigned short* share;   // [X, kCandidates] tokens that go there
    unsigned short* before;  // [W, X] tokens of an expert in a warp, then in the warps before it
    unsigned short* expert;  // [X]
    unsigned short* label;   // [experts] place in the lists of X, kSingle for experts with one replica

    __device__ Shared(unsigned char* memory, const Params& p) {
        level = reinterpret_cast<int*>(memory);
        num_tokens = level + p.ranks;
        first = num_tokens + p.experts;
        candidates = first + p.experts;
        share = reinterpret_cast<unsigned short*>(candidates + p.max_replicated * kCandidates);
        before = share + p.max_replicated * kCandidates;
        expert = before + p.max_replicated * (blockDim.x / 32);
        label = expert + p.max_replicated;
    }
};

// Chooses the candidates of an expert and divides its tokens evenly over them; returns how many candidates there are.
__device__ int divide_evenly(const Params& p, const Shared& s, int x, int total) {
    const int expert = s.expert[x];
    const unsigned count = static_cast<unsigned>(p.counts[expert]);
    const unsigned seed = p.ep_rank * kRankStep + blockIdx.x * kTileStep + expert * kExpertStep;
    const int width = min(static_cast<int>(count), kCandidates);
    int* candidates = s.candidates + x * kCandidates;
    unsigned column = __umulhi(seed, count);
    int own = 0;
    for (int i = width - 1; i >= 0; --i) {
        const int physical = static_cast<int>(p.table[expert * p.width + (column + i) % count]);
        candidates[i] = physical;
        if (physical / p.slots_per_rank == p.ep_rank) own = i;
    }
    const int here = candidates[own];
    candidates[own] = candidates[0];
    candidates[0] = here;
    for (int i = 0; i < width; ++i) {
        const int amount = total / width + (i < total % width);
        s.share[x * kCandidates + i] = static_cast<unsigned short>(amount);
        if (amount > 0) atomicAdd(s.level + candidates[i] / p.slots_per_rank, amount);
    }
    return width;
}

// The shares that leave the fullest of the candidates' ranks as low as can be, into next.
__device__ void fill(const Params& p, const Shared& s, int x, int width, int total, int (&next)[kCandidates]) {
    unsigned active = (1u << width) - 1;
    int surface, rest;
    for (;;) {
        int sum = total;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i)
            if (active >> i & 1) sum += next[i];
        const int filled = __popc(active);
        surface = sum / filled;
        rest = sum - surface * filled;
        unsigned above = 0;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i)
            if ((active >> i & 1) && next[i] > surface) above |= 1u << i;
        if (above == 0) break;
        active &= ~above;
    }
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        const bool is_active = active >> i & 1;
        const int more = __popc(active & ((1u << i) - 1)) < rest;
        next[i] = is_active ? surface - next[i] + more : 0;
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ int num_replicated;
    const Shared s(memory, p);
    const int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, lane = thread % 32;

    const int row = blockIdx.x * p.rows_per_tile + thread / p.slots;
    const bool exists = thread < p.rows_per_tile * p.slots && row < p.tokens;
    const long long slot = static_cast<long long>(blockIdx.x) * p.rows_per_tile * p.slots + thread;
    const int id = exists ? static_cast<int>(p.ids[slot]) : -1;
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    const bool counted = id >= 0 && row < num_counted;

    if (thread == 0) num_replicated = 0;
    for (int rank = thread; rank < p.ranks; rank += threads) s.level[rank] = 0;
    for (int i = thread; i < p.max_replicated * (threads / 32); i += threads) s.before[i] = 0;
    __syncthreads();
    for (int expert = thread; expert < p.experts; expert += threads) {
        const bool single = p.counts[expert] == 1;
        s.num_tokens[expert] = 0;
        s.first[expert] = static_cast<int>(p.table[expert * p.width]);
        s.label[expert] = kSingle;
        if (!single) {
            const int x = atomicAdd(&num_replicated, 1);
            s.label[expert] = static_cast<unsigned short>(x);
            s.expert[x] = static_cast<unsigned short>(expert);
        }
    }
    __syncthreads();

    const int x = id >= 0 ? s.label[id] : kSingle;
    const int key = counted ? x : kSingle;
    const unsigned same = __match_any_sync(kAll, key);
    const int place = __popc(same & ((1u << lane) - 1));
    if (key != kSingle && place == 0) s.before[warp * p.max_replicated + x] = static_cast<unsigned short>(__popc(same));
    if (counted && x == kSingle) atomicAdd(s.num_tokens + id, 1);
    __syncthreads();

    for (int expert = thread; expert < p.experts; expert += threads) {
        const int amount = s.num_tokens[expert];
        if (amount > 0) {
            atomicAdd(s.level + s.first[expert] / p.slots_per_rank, amount);
            atomicAdd(p.load + s.first[expert], amount);
        }
    }
    // From here on the thread with an expert's place in the lists works for it.
    int total = 0, width = 0;
    if (thread < num_replicated) {
        for (int w = 0; w < threads / 32; ++w) {
            unsigned short& entry = s.before[w * p.max_replicated + thread];
            const int amount = entry;
            entry = static_cast<unsigned short>(total);
            total += amount;
        }
        width = divide_evenly(p, s, thread, total);
    }
    __syncthreads();

    for (int turn = 0; turn < kTurns; ++turn) {
        const bool on = total > 0 && (s.expert[thread] + turn) % kGroups == 0;
        int next[kCandidates] = {};
        if (on) {
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int at = thread * kCandidates + i;
                if (i < width) next[i] = s.level[s.candidates[at] / p.slots_per_rank] - s.share[at];
            }
            fill(p, s, thread, width, total, next);
        }
        __syncthreads();
        if (on) {
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int at = thread * kCandidates + i;
                if (i >= width || next[i] == s.share[at]) continue;
                atomicAdd(s.level + s.candidates[at] / p.slots_per_rank, next[i] - s.share[at]);
                s.share[at] = static_cast<unsigned short>(next[i]);
            }
        }
        __syncthreads();
    }

    if (exists) {
        int physical = id;
        if (id >= 0 && x == kSingle) {
            physical = s.first[id];
        } else if (id >= 0) {
            int at = x * kCandidates;
            if (counted) {
                int left = s.before[warp * p.max_replicated + x] + place;
                while (left >= s.share[at]) left -= s.share[at++];
            }
            physical = s.candidates[at];
        }
        p.out[slot] = physical;
    }
    for (int i = 0; i < (total > 0 ? width : 0); ++i) {
        const int at = thread * kCandidates + i;
        if (s.share[at] > 0) atomicAdd(p.load + s.candidates[at], static_cast<int>(s.share[at]));
    }
}
