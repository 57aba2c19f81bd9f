// What the sending and the receiving half of a dispatch's blocks have in common.
#pragma once

#include "low_latency.cuh"

using Waits = Wait<PHASE_DISPATCH>;

struct Params {
    Common common;
    const u8* rows;
    const float* weights;
    const int* locals;  // [num_ids]: index of each id on its rank
    u8* out;            // rows for the experts where they are not read from where they arrive; else null
    int* expert_num_tokens;
    int* expert_row_ids;  // null for the expanded form
    int* positions;
    int num_local_experts;
    int shares;      // groups that list the same expert and share bringing its rows, in the expanded form
    int take_parts;  // of a row that is brought to where the experts read it, at most

    // Each by a warp.
    __device__ __forceinline__ int parts_of_row(int warps, int rows) const {
        return max(1, min(take_parts, warps / max(rows, 1)));
    }
};

constexpr int kMetaTokens = 16;  // whose slots one task sends
constexpr int kListed = 2 * kThreads;
constexpr int kPlaces = 512;  // ids whose places are kept in shared memory

// Packets whose codes a group makes together: of whole groups of columns that share a scale.
constexpr int kStagedPackets = 16;
constexpr int kStagedVectors = kStagedPackets * kPacketVectors * 2;

struct Arrival {
    int source, token;
};

// Where an expert is: its rank, and its number there.
struct Place {
    unsigned short owner, local;
};

struct Shared {
#if FP8
    alignas(16) uint2 codes[kStagedVectors];
    float scales[kStagedVectors / kScaleVectors + 1];
#endif
    u64 ticket;
    Place places[kPlaces];
    int before[RANKS + 1];    // tokens of the ranks before each
    int warp_counts[kWarps];  // rows of the expert among the tokens that each warp has read
    Arrival arrivals[kListed];

    __device__ __forceinline__ int tokens_of(int source) const { return before[source + 1] - before[source]; }
};

__device__ __forceinline__ Place load_place(const Params& p, int id) {
    return Place{static_cast<unsigned short>(p.common.owners[id]), static_cast<unsigned short>(p.locals[id])};
}

__device__ __forceinline__ Place place_of(const Params& p, const Shared& shared, int id) {
    return id < kPlaces ? shared.places[id] : load_place(p, id);
}
