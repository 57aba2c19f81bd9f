// Logical expert ids to physical ones, and the record of the load: the rule of moe_ep/eplb/filling.py in one launch.
//
// Before: ids [tokens, slots] (logical, -1 for none), table [experts, width] (replicas, -1 padded), counts [experts].
// After: out [tokens, slots] (physical), load [physical] grown by the number of each id of a row that is counted.
//
// A block does one tile of rows_per_tile rows, the first threads a slot each, the last ones an expert each. What can go
// on meanwhile does: slots of experts with one replica are written before the others are divided, and while one warp
// divides (as many as the experts with several replicas fill), the rest finds out which of its expert's slots each is.
// All sums are of integers, so the order of the atomic additions does not show. The load gets one addition for each
// expert or replica of a tile, however hot it is.
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
constexpr int kWarpsAtOnce = 8;
constexpr unsigned kRankStep = 0xC2B2AE35u, kTileStep = 0x9E3779B1u, kExpertStep = 0x85EBCA6Bu;
constexpr unsigned short kSingle = 0xFFFF;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kNoLevel = 1 << 20;  // above every level

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
    int ranks, ep_rank;
    unsigned rank_factor;  // ceil(2^32 / slots_per_rank), 0 where that is 1
    int slot_warps;        // warps that have slots, rounded up to kWarpsAtOnce
    int dividing;          // threads that divide: max_replicated rounded up to whole warps
    int id_bits;           // experts - 1 has no more
    int label_bits;        // max_replicated - 1 has no more
};

// Where things lie in shared memory. X is max_replicated.
struct Shared {
    int4* candidates;        // [X] physical experts, -1 behind the last
    uint2* ends;             // [X] tokens of the first candidate, of the first two, of the first three, 16 bits each
    unsigned short* before;  // [slot_warps, X] tokens of an expert in a warp, then in the warps before it
    int* spare;              // [32] where lanes add that have nothing to add
    int* num_replicated;     // experts with several replicas
    int* level;              // [ranks] tokens that this tile sends to each rank
    int* num_tokens;         // [experts] counted tokens
    int* first;              // [experts] the first replica
    unsigned short* expert;  // [X]
    unsigned short* label;   // [experts] place in the lists of X, kSingle for experts with one replica

    __device__ Shared(unsigned char* memory, const Params& p) {
        candidates = reinterpret_cast<int4*>(memory);
        ends = reinterpret_cast<uint2*>(candidates + p.max_replicated);
        before = reinterpret_cast<unsigned short*>(ends + p.max_replicated);
        spare = reinterpret_cast<int*>(before + p.max_replicated * p.slot_warps);
        num_replicated = spare + 32;
        level = num_replicated + 1;
        num_tokens = level + p.ranks + 1;
        first = num_tokens + p.experts;
        expert = reinterpret_cast<unsigned short*>(first + p.experts);
        label = expert + p.max_replicated;
    }

    // What is counted in, `before` to `num_tokens`, is one run of words. Behind the levels stands that of no rank.
    __device__ __forceinline__ void clear(const Params& p) const {
        int* word = reinterpret_cast<int*>(before);
        const int* none = level + p.ranks;
#pragma unroll 1
        for (int* at = word + threadIdx.x; at < first; at += blockDim.x) *at = at == none ? kNoLevel : 0;
        if (threadIdx.x >= p.max_replicated) return;
        candidates[threadIdx.x] = make_int4(-1, -1, -1, -1);
        expert[threadIdx.x] = 0;
    }
};

// Where a physical expert is; the place behind the last rank for none.
__device__ __forceinline__ int rank_of(const Params& p, int physical) {
    const int rank = p.rank_factor == 0 ? physical : static_cast<int>(__umulhi(physical, p.rank_factor));
    return physical < 0 ? p.ranks : rank;
}

// a / b for 0 <= a < 2^15 and 1 <= b <= 4.
__device__ __forceinline__ int divide_by_few(int a, int b) {
    const int factor = b == 3 ? 21846 : 65536 >> (b >> 1);
    return a * factor >> 16;
}

// A row of the table as if it had at most kCandidates replicas, all loads under way at once.
struct Row {
    const MapEntry* entries;
    int count;
    int leading[kCandidates];

    __device__ __forceinline__ void load(const Params& p, int expert) {
        if (expert >= p.experts) return;
        entries = p.table + static_cast<long long>(expert) * p.width;
        count = static_cast<int>(p.counts[expert]);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) leading[i] = i < p.width ? static_cast<int>(entries[i]) : -1;
    }
};

// Writes what the tile has to know of an expert; if it has several replicas, its candidates, one on this rank first.
__device__ __forceinline__ void enter_expert(const Params& p, const Shared& s, int expert, const Row& row) {
    const int count = row.count;
    s.first[expert] = row.leading[0];
    s.label[expert] = kSingle;
    if (count <= 1) return;
    const int x = atomicAdd(s.num_replicated, 1);
    s.label[expert] = static_cast<unsigned short>(x);
    s.expert[x] = static_cast<unsigned short>(expert);
    const unsigned seed = p.ep_rank * kRankStep + blockIdx.x * kTileStep + expert * kExpertStep;
    const int start = static_cast<int>(__umulhi(seed, count));
    int* list = reinterpret_cast<int*>(s.candidates + x);
    int own = kCandidates, own_candidate = -1, first_candidate = -1;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        if (i >= count) continue;
        int candidate = row.leading[i], place = i < start ? i - start + count : i - start;
        if (count > kCandidates) {
            candidate = static_cast<int>(row.entries[start + i < count ? start + i : start + i - count]);
            place = i;
        }
        list[place] = candidate;
        if (place == 0) first_candidate = candidate;
        if (rank_of(p, candidate) == p.ep_rank && place < own) own = place, own_candidate = candidate;
    }
    if (own == kCandidates) return;
    list[own] = first_candidate;
    list[0] = own_candidate;
}

// A barrier of the first `threads` threads, whole warps.
template <bool kOneWarp>
__device__ __forceinline__ void sync_first(int threads) {
    if (kOneWarp) {
        __syncwarp();
    } else {
        asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    }
}

// A barrier of all threads but the first.
__device__ __forceinline__ void sync_rest(int threads) { asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); }

// How an expert's tokens are divided over its candidates; thread x has the expert of place x in the lists.
struct Division {
    int total, group;
    int* spare;
    int* level[kCandidates];   // of each candidate's rank, to read
    int* target[kCandidates];  // the same to add to, the spare word where there is no candidate
    int share[kCandidates];

    // Begins evenly, and adds that to the levels. Nothing here branches: lanes without work add to words of their own.
    __device__ __forceinline__ Division(const Params& p, const Shared& s, int x) {
        const bool exists = x < p.max_replicated;
        const int expert = exists ? s.expert[x] : 0;
        const int4 candidates = exists ? s.candidates[x] : make_int4(-1, -1, -1, -1);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
        total = candidate[0] >= 0 ? s.num_tokens[expert] : 0;
        group = expert % kGroups;
        spare = s.spare + x % 32;
        int width = 1;
#pragma unroll
        for (int i = 1; i < kCandidates; ++i) width += candidate[i] >= 0;
        const int even = divide_by_few(total, width), rest = total - even * width;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            level[i] = s.level + rank_of(p, candidate[i]);
            target[i] = candidate[i] >= 0 ? level[i] : spare;
            share[i] = candidate[i] >= 0 ? even + (i < rest) : 0;
            atomicAdd(target[i], share[i]);
        }
    }

    // The shares that leave the fullest level as low as can be, given what else is at each. A level is filled at all if
    // raising the others to it takes no more than there is, which is never so for kNoLevel.
    __device__ __forceinline__ void fill(int (&levels)[kCandidates]) const {
        bool active[kCandidates];
        int sum = total, filled = 0;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            int needed = 0;
#pragma unroll
            for (int k = 0; k < kCandidates; ++k) needed += max(levels[i] - levels[k], 0);
            active[i] = needed <= total;
            sum += active[i] ? levels[i] : 0;
            filled += active[i];
        }
        const int surface = divide_by_few(sum, filled);
        int rest = sum - surface * filled;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            levels[i] = active[i] ? surface - levels[i] + (rest > 0) : 0;
            rest -= active[i];
        }
    }

    // The turns, together with the other `dividing` threads.
    template <bool kOneWarp>
    __device__ __forceinline__ void take_turns(int dividing) {
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
            const bool on = group == 0 && total > 0;
            int next[kCandidates];
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) next[i] = *level[i] - share[i];
            fill(next);
            sync_first<kOneWarp>(dividing);
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int change = on ? next[i] - share[i] : 0;
                atomicAdd(on ? target[i] : spare, change);
                share[i] += change;
            }
            group = group == kGroups - 1 ? 0 : group + 1;
            sync_first<kOneWarp>(dividing);
        }
    }

    __device__ __forceinline__ void store(const Shared& s, int x) const {
        const int second = share[0] + share[1], third = second + share[2];
        s.ends[x] = make_uint2(share[0] | second << 16, third);
    }
};

// Which lanes have the same key, of those where it counts.
__device__ __forceinline__ unsigned lanes_alike(int key, bool counts, int bits) {
    unsigned same = __ballot_sync(kAll, counts);
    if (same == 0) return 0;
#pragma unroll 1
    for (int bit = 0; bit < bits; ++bit) {
        const bool one = key >> bit & 1;
        const unsigned ones = __ballot_sync(kAll, one);
        same &= one ? ones : ~ones;
    }
    return same;
}

// Turns the tokens of an expert in each warp into those in the warps before it.
__device__ __forceinline__ void sum_before(const Params& p, const Shared& s, int x) {
    unsigned short* entry = s.before + x;
    int total = 0;
#pragma unroll 1
    for (int warp = 0; warp < p.slot_warps; warp += kWarpsAtOnce) {
        int amount[kWarpsAtOnce];
#pragma unroll
        for (int i = 0; i < kWarpsAtOnce; ++i) amount[i] = entry[i * p.max_replicated];
#pragma unroll
        for (int i = 0; i < kWarpsAtOnce; ++i) {
            entry[i * p.max_replicated] = static_cast<unsigned short>(total);
            total += amount[i];
        }
        entry += kWarpsAtOnce * p.max_replicated;
    }
}

// Adds an expert's tokens to the load of each candidate.
__device__ __forceinline__ void record(const Params& p, const Shared& s, int x) {
    const uint2 ends = s.ends[x];
    const int end[kCandidates] = {
        static_cast<int>(ends.x & 0xFFFF), static_cast<int>(ends.x >> 16), static_cast<int>(ends.y),
        s.num_tokens[s.expert[x]]};
    const int* candidate = reinterpret_cast<const int*>(s.candidates + x);
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        const int share = end[i] - (i > 0 ? end[i - 1] : 0);
        if (share > 0) atomicAdd(p.load + candidate[i], share);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x, threads = blockDim.x, last = threads - 1 - thread, lane = thread % 32;

    const int tile_slots = p.rows_per_tile * p.slots;
    const long long slot = static_cast<long long>(blockIdx.x) * tile_slots + thread;
    const bool exists = thread < tile_slots && slot < static_cast<long long>(p.tokens) * p.slots;
    const int id = exists ? static_cast<int>(p.ids[slot]) : -1;
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    Row row;
    row.load(p, last);
    s.clear(p);
    __syncthreads();

#pragma unroll 1
    for (int expert = last; expert < p.experts;) {
        enter_expert(p, s, expert, row);
        expert += threads;
        row.load(p, expert);
    }
    const bool counted = id >= 0 && slot < static_cast<long long>(num_counted) * p.slots;
    if (counted) atomicAdd(s.num_tokens + id, 1);
    const bool divides = thread < p.dividing;
    unsigned same = divides ? lanes_alike(id, counted, p.id_bits) : 0;
    __syncthreads();

    const unsigned short x = id >= 0 ? s.label[id] : kSingle;
    if (exists && x == kSingle) p.out[slot] = id >= 0 ? s.first[id] : -1;
#pragma unroll 1
    for (int expert = last; expert < p.experts; expert += threads) {
        const int amount = s.label[expert] == kSingle ? s.num_tokens[expert] : 0, physical = s.first[expert];
        if (amount == 0) continue;
        atomicAdd(s.level + rank_of(p, physical), amount);
        atomicAdd(p.load + physical, amount);
    }
    const bool ranked = counted && x != kSingle;
    unsigned short* in_warp = s.before + thread / 32 * p.max_replicated + x;
    if (divides) {
        if (ranked && same >> lane == 1) *in_warp = static_cast<unsigned short>(__popc(same));
        Division division(p, s, thread);
        __syncthreads();  // the levels are complete
        if (p.dividing == 32) {
            division.take_turns<true>(p.dividing);
        } else {
            division.take_turns<false>(p.dividing);
        }
        if (thread < p.max_replicated) division.store(s, thread);
    } else {
        __syncthreads();
        same = lanes_alike(x, ranked, p.label_bits);
        if (ranked && same >> lane == 1) *in_warp = static_cast<unsigned short>(__popc(same));
        sync_rest(threads - p.dividing);
        for (int i = last; i < *s.num_replicated; i += threads - p.dividing) sum_before(p, s, i);
    }
    __syncthreads();

    for (int i = last; i < *s.num_replicated; i += threads) record(p, s, i);
    if (x == kSingle) return;
    int at = 0;
    if (counted) {
        const int left = *in_warp + __popc(same & ((1u << lane) - 1));
        const uint2 ends = s.ends[x];
        at = (left >= (ends.x & 0xFFFF)) + (left >= ends.x >> 16) + (left >= ends.y);
    }
    p.out[slot] = reinterpret_cast<const int*>(s.candidates + x)[at];
}
