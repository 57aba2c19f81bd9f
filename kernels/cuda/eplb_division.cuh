// How the tokens of an expert are divided over its candidates, for all experts with several replicas at once.

#pragma once

#include "eplb_tile.cuh"

constexpr int kVisits = 4, kGroups = 3;

// a / b for 0 <= a < 2^15 and 1 <= b <= 4.
__device__ __forceinline__ int divide_by_few(int a, int b) {
    const int factor = b == 3 ? 21846 : 65536 >> (b >> 1);
    return a * factor >> 16;
}

// Thread x has the expert of place x in the lists; those behind the last take part and have no tokens.
struct Division {
    int expert, group, width;
    int4 candidates;
    int* spare;
    int* level[kCandidates];  // of each candidate's rank, the spare word where there is no candidate
    int share[kCandidates];

    // What follows from the maps alone. Nothing here branches: lanes without work add to words of their own.
    __device__ __forceinline__ Division(const Params& p, const Shared& s, int x) {
        const bool exists = x < p.max_replicated;
        expert = exists ? s.expert[x] : 0;
        candidates = exists ? s.candidates[x] : make_int4(-1, -1, -1, -1);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
        group = (kGroups - expert % kGroups) % kGroups;  // the first of its turns
        spare = s.spare + x % 32;
        width = 0;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            width += candidate[i] >= 0;
            level[i] = candidate[i] >= 0 ? s.level + rank_of(p, candidate[i]) : spare;
        }
    }

    // Divides the tokens evenly, and adds that to the levels.
    __device__ __forceinline__ void begin(const Shared& s) {
        const int total = width > 0 ? s.num_tokens[expert] : 0;
        const int even = divide_by_few(total, max(width, 1)), rest = total - even * width;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            share[i] = i < width ? even + (i < rest) : 0;
            atomicAdd(level[i], share[i]);
        }
    }

    // The turns, together with the other `dividing` threads. In every kGroups of them an expert passes tokens between two
    // of its candidates once, from the fuller rank to the other.
    template <bool kOneWarp>
    __device__ __forceinline__ void take_turns(int dividing) {
#pragma unroll
        for (int visit = 0; visit < kVisits; ++visit) {
            const int one = of_pair(visit, 0x1020, 0x0010, 0), other = of_pair(visit, 0x3231, 0x1221, 1);
            const int least = -pick(share, one), most = pick(share, other);
            int* const here = pick(level, one);
            int* const there = pick(level, other);
            int passed = 0;
#pragma unroll
            for (int turn = 0; turn < kGroups; ++turn) {
                const bool on = group == turn;
                const int change = min(max((*there - *here + 1) >> 1, least), most);
                sync<kOneWarp>(dividing);
                atomicAdd(on ? here : spare, change);
                atomicAdd(on ? there : spare, -change);
                if (on) passed = change;
                sync<kOneWarp>(dividing);
            }
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) share[i] += i == one ? passed : i == other ? -passed : 0;
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
            wait_at(Barrier::kTurn, threads);
        }
    }

    // A candidate of the pair of a visit (PAIRS in levelling.py), one digit for each visit: of four candidates, of three, of two.
    __device__ __forceinline__ int of_pair(int visit, int of_four, int of_three, int of_two) const {
        return width == 4 ? of_four >> 4 * visit & 3 : width == 3 ? of_three >> 4 * visit & 3 : of_two;
    }

    template <typename T>
    __device__ __forceinline__ static T pick(const T (&values)[kCandidates], int i) {
        return i < 2 ? (i == 0 ? values[0] : values[1]) : (i == 2 ? values[2] : values[3]);
    }
};
