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
constexpr unsigned short kSingle = 0xFFFF;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kNoLevel = 1 << 14;  // above every level and twice a tile

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
    int dividing;          // threads that divide: max_replicated rounded up to whole warps
    int expert_threads;    // the first threads of a block, dividing or more; the others have slots
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
    int* first;              // [experts] the first replica
    unsigned short* before;  // [words, stride] an expert's slots in the words before
    unsigned short* expert;  // [X]
    unsigned short* label;   // [experts] place in the lists of X, kSingle for experts with one replica

    __device__ Shared(unsigned char* memory, const Params& p) {
        candidates = reinterpret_cast<int4*>(memory);
        ends = reinterpret_cast<uint2*>(candidates + p.max_replicated);
        mine = reinterpret_cast<unsigned*>(ends + p.max_replicated);
        spare = reinterpret_cast<int*>(mine + p.words * p.stride);
        num_replicated = spare + 32;
        level = num_replicated + 1;
        num_tokens = level + p.ranks + 1;
        load = num_tokens + p.experts;
        first = load + p.physical;
        before = reinterpret_cast<unsigned short*>(first + p.experts);
        expert = before + p.words * p.stride;
        label = expert + p.max_replicated;
    }

    // What is counted in, `mine` to `load`, is one run of words. Behind the levels stands that of no rank.
    __device__ __forceinline__ void clear(const Params& p) const {
        int* none = level + p.ranks;
#pragma unroll 1
        for (int* at = reinterpret_cast<int*>(mine) + threadIdx.x; at < first; at += blockDim.x) {
            *at = at == none ? kNoLevel : 0;
        }
        for (int x = threadIdx.x; x < p.max_replicated; x += blockDim.x) {
            candidates[x] = make_int4(-1, -1, -1, -1);
            expert[x] = 0;
        }
    }
};

// Where a physical expert is; the place behind the last rank for none.
__device__ __forceinline__ int rank_of(const Params& p, int physical) {
    const int rank = p.rank_factor == 0 ? physical : static_cast<int>(__umulhi(physical, p.rank_factor));
    return physical < 0 ? p.ranks : rank;
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
    if (exists) s.first[expert] = row.leading[0];
    if (exists) s.label[expert] = count > 1 ? static_cast<unsigned short>(x) : kSingle;
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
