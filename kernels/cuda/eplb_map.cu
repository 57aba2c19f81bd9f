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

constexpr int kCandidates = 4;
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
    int* level;              // [1 + ranks] how many experts have several replicas; tokens that this tile sends to each rank
    int* num_tokens;         // [experts] counted tokens of experts with one replica; replicas of the others
    int* first;              // [experts] the first replica
    int* candidates;         // [X, kCandidates] physical experts
    unsigned short* share;   // [X, kCandidates] tokens that go there
    unsigned short* before;  // [W, X] tokens of an expert in a warp, then in the warps before it
    unsigned short* expert;  // [X]
    unsigned short* label;   // [experts] place in the lists of X, kSingle for experts with one replica

    __device__ int& num_replicated() const { return level[-1]; }

    __device__ Shared(unsigned char* memory, const Params& p) {
        level = reinterpret_cast<int*>(memory) + 1;
        num_tokens = level + p.ranks;
        first = num_tokens + p.experts;
        candidates = first + p.experts;
        share = reinterpret_cast<unsigned short*>(candidates + p.max_replicated * kCandidates);
        before = share + p.max_replicated * kCandidates;
        expert = before + p.max_replicated * (blockDim.x / 32);
        label = expert + p.max_replicated;
    }
};

// a / b, exact for 0 <= a < 2^21 and b > 0, without the dozens of instructions of an integer division.
__device__ __forceinline__ int divide(int a, int b) {
    return __float2int_rz(__fdividef(a + 0.5f, static_cast<float>(b)));
}

// Lists the candidates of an expert that has place x in the lists, one on this rank first.
__device__ void list_candidates(const Params& p, const Shared& s, int x, int expert, unsigned count) {
    const unsigned seed = p.ep_rank * kRankStep + blockIdx.x * kTileStep + expert * kExpertStep;
    unsigned column = __umulhi(seed, count);
    int candidate[kCandidates];
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {  // all loads under way at once
        candidate[i] = i < count ? static_cast<int>(p.table[expert * p.width + column]) : -1;
        column = column + 1 < count ? column + 1 : 0;
    }
    const int first_here = p.ep_rank * p.slots_per_rank;
    int own = 0;
#pragma unroll
    for (int i = kCandidates - 1; i >= 0; --i) {
        const int behind = candidate[i] - first_here;
        if (i < count && behind >= 0 && behind < p.slots_per_rank) own = i;
    }
    int* list = s.candidates + x * kCandidates;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) list[i] = candidate[i];
    const int here = list[own];
    list[own] = list[0];
    list[0] = here;
}

// Turns levels[i] into the shares that leave the fullest level as low as can be. A level is filled at all if raising the
// others to it takes no more than there is.
__device__ __forceinline__ void fill(int width, int total, int (&levels)[kCandidates]) {
    bool active[kCandidates];
    int sum = total, filled = 0;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        int needed = 0;
#pragma unroll
        for (int k = 0; k < kCandidates; ++k) needed += k < width ? max(levels[i] - levels[k], 0) : 0;
        active[i] = i < width && needed <= total;
        sum += active[i] ? levels[i] : 0;
        filled += active[i];
    }
    const int surface = divide(sum, filled);
    int rest = sum - surface * filled;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        levels[i] = active[i] ? surface - levels[i] + (rest > 0) : 0;
        rest -= active[i];
    }
}

// A barrier of the first `threads` threads, whole warps.
__device__ __forceinline__ void sync_first(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Divides the tokens of the expert with place x over its candidates; `working` threads, one an expert, do so together.
__device__ void divide_tokens(const Params& p, const Shared& s, int x, int total, int working) {
    const bool exists = x < s.num_replicated();
    const int expert = exists ? s.expert[x] : 0;
    const int width = exists ? min(static_cast<int>(s.num_tokens[expert]), kCandidates) : 0;
    const int even = width > 0 ? divide(total, width) : 0;
    int rank[kCandidates], share[kCandidates];
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        rank[i] = share[i] = 0;
        if (i >= width) continue;
        rank[i] = divide(s.candidates[x * kCandidates + i], p.slots_per_rank);
        share[i] = even + (i < total - even * width);
        if (share[i] > 0) atomicAdd(s.level + rank[i], share[i]);
    }
    sync_first(working);
    for (int turn = 0; turn < kTurns; ++turn) {
        const bool on = total > 0 && (expert + turn) % kGroups == 0;
        int next[kCandidates];
        if (on) {
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) next[i] = i < width ? s.level[rank[i]] - share[i] : 0;
            fill(width, total, next);
        }
        sync_first(working);
        if (on) {
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int change = i < width ? next[i] - share[i] : 0;
                if (change != 0) atomicAdd(s.level + rank[i], change);
                share[i] += change;
            }
        }
        sync_first(working);
    }
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        if (i >= width) continue;
        s.share[x * kCandidates + i] = static_cast<unsigned short>(share[i]);
        if (share[i] > 0) atomicAdd(p.load + s.candidates[x * kCandidates + i], share[i]);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x, threads = blockDim.x, warps = threads / 32;
    const int warp = thread / 32, lane = thread % 32;

    const int row = blockIdx.x * p.rows_per_tile + thread / p.slots;
    const bool exists = thread < p.rows_per_tile * p.slots && row < p.tokens;
    const long long slot = static_cast<long long>(blockIdx.x) * p.rows_per_tile * p.slots + thread;
    const int id = exists ? static_cast<int>(p.ids[slot]) : -1;
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    const bool counted = id >= 0 && row < num_counted;

    if (thread == 0) s.num_replicated() = 0;
    for (int rank = thread; rank < p.ranks; rank += threads) s.level[rank] = 0;
    for (int i = thread; i < p.max_replicated * warps; i += threads) s.before[i] = 0;
    __syncthreads();
    for (int expert = thread; expert < p.experts; expert += threads) {
        const unsigned count = static_cast<unsigned>(p.counts[expert]);
        s.first[expert] = static_cast<int>(p.table[expert * p.width]);
        // The number of replicas stands in for the tokens of an expert that has several.
        s.num_tokens[expert] = count == 1 ? 0 : count;
        s.label[expert] = kSingle;
        if (count > 1) {
            const int x = atomicAdd(&s.num_replicated(), 1);
            s.label[expert] = static_cast<unsigned short>(x);
            s.expert[x] = static_cast<unsigned short>(expert);
            list_candidates(p, s, x, expert, count);
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
        const int amount = s.label[expert] == kSingle ? s.num_tokens[expert] : 0;
        if (amount > 0) {
            atomicAdd(s.level + divide(s.first[expert], p.slots_per_rank), amount);
            atomicAdd(p.load + s.first[expert], amount);
        }
    }
    int total = 0;
    if (thread < s.num_replicated()) {
        for (int w = 0; w < warps; w += 8) {  // warps is a multiple of 8
            int amount[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) amount[i] = s.before[(w + i) * p.max_replicated + thread];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                s.before[(w + i) * p.max_replicated + thread] = static_cast<unsigned short>(total);
                total += amount[i];
            }
        }
    }
    __syncthreads();
    // From here on the thread with an expert's place in the lists works for it.
    const int working = (s.num_replicated() + 31) / 32 * 32;
    if (thread < working) divide_tokens(p, s, thread, total, working);
    __syncthreads();

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
}
