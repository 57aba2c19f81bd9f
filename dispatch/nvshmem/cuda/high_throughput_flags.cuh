// Flags of rows that a block sends are released by one of its warps for all others: the fence before a flag takes until
// the links have taken what is on its way, and the warps that send go on meanwhile.
//
// A warp that has stored a row leaves the flags' addresses in shared memory, a place of its own for each rank, where it
// waits for the place to be empty. The releasing warp takes what lies there and behind one fence sets those flags. It
// waits for nobody, so nobody waits for long.
#pragma once

#include "high_throughput.cuh"

template <int kMostSenders>
struct FlagsDue {
    u64 flags[kMostSenders][RANKS];  // addresses, 0 where there is none
    u32 through;                     // warps that leave no more
};

// By the whole block, before it sends.
template <int kMostSenders>
__device__ __forceinline__ void clear_flags(FlagsDue<kMostSenders>& due) {
    for (int i = threadIdx.x; i < kMostSenders * RANKS; i += kThreads) {
        due.flags[i / RANKS][i % RANKS] = 0;
    }
    if (threadIdx.x == 0) {
        due.through = 0;
    }
    __syncthreads();
}

// Of a row that the warp has stored; a lane below RANKS may have a flag, null for none.
template <int kMostSenders>
__device__ __forceinline__ void leave_flags(FlagsDue<kMostSenders>& due, u64* flag) {
    __syncwarp();
    if (flag != nullptr) {
        __threadfence_block();
        u64* place = &due.flags[threadIdx.x / 32][threadIdx.x % 32];
        while (atomicCAS(place, 0ull, reinterpret_cast<u64>(flag)) != 0) {
            __nanosleep(kPauseNs);
        }
    }
    __syncwarp();
}

// By each warp that sends, behind its last row.
template <int kMostSenders>
__device__ __forceinline__ void leave_no_more(FlagsDue<kMostSenders>& due) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence_block();
        atomicAdd(&due.through, 1u);
    }
}

// The releasing warp, until all `senders` are through.
template <int kMostSenders>
__device__ __forceinline__ void release_flags(FlagsDue<kMostSenders>& due, int senders, u64 epoch) {
    constexpr int kOfLane = (kMostSenders * RANKS + 31) / 32;
    const int places = senders * RANKS;
    for (;;) {
        // Read before the places are: what the others left before they were through is found then.
        const bool is_last = __any_sync(kAllLanes, atomicAdd(&due.through, 0u) == static_cast<u32>(senders));
        __threadfence_block();
        __syncwarp();
        u64 flags[kOfLane];
        bool found = false;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const int place = threadIdx.x % 32 + 32 * i;
            flags[i] = place < places ? atomicExch(&due.flags[place / RANKS][place % RANKS], 0ull) : 0;
            found |= flags[i] != 0;
        }
        if (__any_sync(kAllLanes, found)) {
            __threadfence_system();
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                if (flags[i] != 0) {
                    store_shared_u64(reinterpret_cast<u64*>(flags[i]), epoch);
                }
            }
        } else if (is_last) {
            return;
        } else {
            __nanosleep(kPauseNs);
        }
    }
}
