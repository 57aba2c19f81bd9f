// A tile of the EPLB mapping: the parameters of a launch, what a block keeps in shared memory, and what it reads of the
// maps before any ids are there.

#pragma once

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
constexpr unsigned kExpertStep = 0x85EBCA6Bu;
constexpr int kNone = -1;
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
    int row_stride, column_stride;  // of the table
    int max_replicated;             // experts that can have several replicas
    int stride;                     // max_replicated made odd
    int words;                      // of 32 slots in a tile
    int ranks, ep_rank;
    unsigned rank_factor;  // ceil(2^32 / slots_per_rank), 0 where that is 1
    int dividing;          // the first threads of a block: max_replicated rounded up to whole warps
    int expert_threads;    // the threads behind them; the others have slots
    int physical;          // experts of all ranks
};

// Where things lie in shared memory. X is max_replicated.
struct Shared {
    int4* candidates;        // [X] physical experts, -1 behind the last
    uint2* ends;             // [X] tokens of the first candidate, of the first two, of the first three, 16 bits each
    unsigned* mine;          // [words, stride] which slots are an expert's
    int* spare;              // [32] where lanes add that have nothing to add
    int* num_replicated;     // experts with several replicas
    int* level;              // [ranks] tokens that this tile sends to each rank
    int* num_tokens;         // [experts] counted tokens
    int* load;               // [physical] tokens that this tile sends to each
    int* entry;              // [experts] the only replica, kNone if there is none; of several, see `place_of`
    unsigned short* before;  // [words, stride] an expert's slots in the words before
    unsigned short* expert;  // [X]

    __device__ Shared(unsigned char* memory, const Params& p) {
        candidates = reinterpret_cast<int4*>(memory);
        ends = reinterpret_cast<uint2*>(candidates + p.max_replicated);
        mine = reinterpret_cast<unsigned*>(ends + p.max_replicated);
        spare = reinterpret_cast<int*>(mine + p.words * p.stride);
        num_replicated = spare + 32;
        level = num_replicated + 1;
        num_tokens = level + p.ranks;
        load = num_tokens + p.experts;
        entry = load + p.physical;
        before = reinterpret_cast<unsigned short*>(entry + p.experts);
        expert = before + p.words * p.stride;
    }

    // What is counted in, `mine` to `load`, is one run of words.
    __device__ __forceinline__ void clear(const Params& p) const {
#pragma unroll 1
        for (int* at = reinterpret_cast<int*>(mine) + threadIdx.x; at < entry; at += blockDim.x) {
            *at = 0;
        }
        for (int x = threadIdx.x; x < p.max_replicated; x += blockDim.x) {
            candidates[x] = make_int4(-1, -1, -1, -1);
            expert[x] = 0;
        }
    }
};

// The place in the lists of X of an expert with several replicas, and the entry for a place.
__device__ __forceinline__ int place_of(int entry) {
    return kNone - 1 - entry;
}

// Barriers of so many threads, whole warps. Whoever waits sees what all have written before they arrived.
enum class Barrier { kListed = 1, kCounted, kLevelled, kTurn, kMarked, kDivided };

__device__ __forceinline__ void wait_at(Barrier barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_at(Barrier barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

// Where a physical expert is.
__device__ __forceinline__ int rank_of(const Params& p, int physical) {
    return p.rank_factor == 0 ? physical : static_cast<int>(__umulhi(physical, p.rank_factor));
}

// A row of the table as if it had at most kCandidates replicas, all loads under way at once.
struct Row {
    const MapEntry* entries;
    int count;
    int leading[kCandidates];

    __device__ __forceinline__ void load(const Params& p, int expert) {
        if (expert >= p.experts) return;
        entries = p.table + static_cast<long long>(expert) * p.row_stride;
        count = static_cast<int>(p.counts[expert]);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            leading[i] = i < p.width ? static_cast<int>(entries[i * p.column_stride]) : -1;
        }
    }
};

// Writes what the tile has to know of an expert; if it has several replicas, its candidates, one on this rank first. A
// warp together, experts behind the last included.
__device__ __forceinline__ void enter_expert(const Params& p, const Shared& s, int expert, const Row& row) {
    const bool exists = expert < p.experts;
    const int count = exists ? row.count : 0, lane = threadIdx.x % 32;
    const unsigned replicated = __ballot_sync(kAll, count > 1);
    int x = 0;
    if (lane == 0 && replicated != 0) x = atomicAdd(s.num_replicated, __popc(replicated));
    x = __shfl_sync(kAll, x, 0) + __popc(replicated & ((1u << lane) - 1));
    if (exists) s.entry[expert] = count > 1 ? place_of(x) : max(row.leading[0], kNone);
    if (count <= 1) return;
    s.expert[x] = static_cast<unsigned short>(expert);
    const int start = static_cast<int>((p.ep_rank + blockIdx.x + __umulhi(expert * kExpertStep, count)) % count);
    int* list = reinterpret_cast<int*>(s.candidates + x);
    int own = kCandidates, own_candidate = -1, first_candidate = -1;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        if (i >= count) continue;
        int candidate = row.leading[i], place = i < start ? i - start + count : i - start;
        if (count > kCandidates) {
            const int column = start + i < count ? start + i : start + i - count;
            candidate = static_cast<int>(row.entries[column * p.column_stride]);
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
