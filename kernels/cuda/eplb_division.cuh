// How the tokens of an expert are divided over its candidates, for all experts with several replicas at once.

#pragma once

#include "eplb_tile.cuh"

constexpr int kTurns = 6, kGroups = 3;

// A barrier of the first `threads` threads, whole warps.
__device__ __forceinline__ void sync_first(int threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// a / b for 0 <= a < 2^15 and 1 <= b <= 4.
__device__ __forceinline__ int divide_by_few(int a, int b) {
    const int factor = b == 3 ? 21846 : 65536 >> (b >> 1);
    return a * factor >> 16;
}

// Thread x has the expert of place x in the lists; those behind the last take part and have no tokens.
struct Division {
    int expert, total, group, width;
    int4 candidates;
    int* spare;
    int* level[kCandidates];   // of each candidate's rank, to read
    int* target[kCandidates];  // the same to add to, the spare word where there is no candidate
    int share[kCandidates];

    // What follows from the maps alone. Nothing here branches: lanes without work add to words of their own.
    __device__ __forceinline__ Division(const Params& p, const Shared& s, int x) {
        const bool exists = x < p.max_replicated;
        expert = exists ? s.expert[x] : 0;
        candidates = exists ? s.candidates[x] : make_int4(-1, -1, -1, -1);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
        group = expert % kGroups;
        spare = s.spare + x % 32;
        width = 0;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            width += candidate[i] >= 0;
            level[i] = s.level + rank_of(p, candidate[i]);
            target[i] = candidate[i] >= 0 ? level[i] : spare;
        }
    }

    // Divides the tokens evenly, and adds that to the levels.
    __device__ __forceinline__ void begin(const Shared& s) {
        total = width > 0 ? s.num_tokens[expert] : 0;
        const int even = divide_by_few(total, max(width, 1)), rest = total - even * width;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            share[i] = i < width ? even + (i < rest) : 0;
            atomicAdd(target[i], share[i]);
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
            sync<kOneWarp>(dividing);
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int change = on ? next[i] - share[i] : 0;
                atomicAdd(on ? target[i] : spare, change);
                share[i] += change;
            }
            group = group == kGroups - 1 ? 0 : group + 1;
            sync<kOneWarp>(dividing);
        }
    }

    // For the slots of the expert to see, and what the tile adds to the load.
    __device__ __forceinline__ void store(const Shared& s, int x) const {
        const int second = share[0] + share[1], third = second + share[2];
        s.ends[x] = make_uint2(share[0] | second << 16, third);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            if (share[i] > 0) s.load[candidate[i]] = share[i];
        }
    }

private:
    template <bool kOneWarp>
    __device__ __forceinline__ static void sync(int threads) {
        if (kOneWarp) {
            __syncwarp();
        } else {
            sync_first(threads);
        }
    }

    // The shares that leave the fullest level as low as can be, given what else is at each. Water over the lowest k levels
    // alone would stand at (total + their sum) / k; it stands at the least of these, and covers what is not above it.
    __device__ __forceinline__ void fill(int (&levels)[kCandidates]) const {
        const int low = min(levels[0], levels[1]), high = max(levels[0], levels[1]);
        const int low2 = min(levels[2], levels[3]), high2 = max(levels[2], levels[3]);
        const int least = min(low, low2), most = max(high, high2);
        const int middle = max(low, low2), middle2 = min(high, high2);
        const int one = total + least, two = one + min(middle, middle2), three = two + max(middle, middle2);
        const int surface = min(min(one, two >> 1), min(divide_by_few(three, 3), (three + most) >> 2));
        int rest = total;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) rest -= max(surface - levels[i], 0);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            const int room = surface - levels[i];
            levels[i] = max(room, 0) + (room >= 0 && rest > 0);
            rest -= room >= 0;
        }
    }
};
