// The buffers of one batch of low-latency dispatch and combine, and what both kernels know of them.
//
// Every rank has the same buffers at the same offsets (layout.py computes them); part [s] of each belongs to the rank s
// that writes it. R ranks, capacity C tokens a rank, H slots a token (HIDDEN columns K, TOPK experts). Tokens of a rank
// that has at most `line_tokens` of them travel as lines (protocol.cuh), those of the others as plain rows with a flag.
//
//   header         [2, R]           line {tokens of s, 0}; even and odd epochs take turns
//   meta           [2, R, C, TOPK]  line {weight, local expert or -1}, likewise
//   row_flags      [R, C, 2]      u32, the epoch when that half of the row is there
//   result_flags   [R, C, 2]      u32, the same for results on their way home
//   rows           [R, C]         row_bytes each, codes with scales behind them in fp8
//   results        [R, C]         2 K bytes each
//   row_lines      [R, L, ...]    rows as lines: vector i is lines i and K/8 + i in bf16; in fp8 line i, and line
//                                 K/8 + g holds the scale of group g
//   result_lines   [R, L, ...]    results as lines, as in bf16
#pragma once

#include "numbers.cuh"

constexpr int kThreads = 256;  // of a group; blocks have two
constexpr int kWarps = kThreads / 32;
constexpr int kRowParts = 2;  // of a row with flags
constexpr int kVectors = HIDDEN / kColumns;
constexpr int kGroups = (kVectors + kScaleVectors - 1) / kScaleVectors;
constexpr int kRowBytes = FP8 ? (HIDDEN + 4 * kGroups + 15) / 16 * 16 : 2 * HIDDEN;
constexpr int kRowLines = FP8 ? kVectors + kGroups : 2 * kVectors;
constexpr u32 kAllLanes = 0xffffffffu;
enum { SEND = 1, RECEIVE = 2 };

using Senders = Group<1, kThreads>;
using Receivers = Group<2, kThreads>;

// Tickets of one batch's kernels; the kernel of the other direction sets them for the next round.
struct Counters {
    u64 dispatch, combine;
};

struct Buffers {
    u64 peers[RANKS];  // address of each rank's buffers
    u64 header, meta, row_flags, result_flags, rows, results, row_lines, result_lines;
    int rank;
    int capacity;
    int line_tokens;

    __device__ __forceinline__ u8* at(int peer, u64 offset) const { return reinterpret_cast<u8*>(peers[peer]) + offset; }
    __device__ __forceinline__ u8* header_of(int peer, int source, u32 epoch) const {
        return at(peer, header + 16ull * (epoch % 2 * RANKS + source));
    }
    __device__ __forceinline__ u8* meta_of(int peer, int source, int token, u32 epoch) const {
        return at(peer, meta + 16ull * TOPK * (static_cast<u64>(epoch % 2 * RANKS + source) * capacity + token));
    }
    __device__ __forceinline__ u64* row_flags_of(int peer, int source, int token) const {
        return reinterpret_cast<u64*>(at(peer, row_flags + 8ull * (static_cast<u64>(source) * capacity + token)));
    }
    __device__ __forceinline__ u64* result_flags_of(int peer, int source, int token) const {
        return reinterpret_cast<u64*>(at(peer, result_flags + 8ull * (static_cast<u64>(source) * capacity + token)));
    }
    __device__ __forceinline__ u8* row(int peer, int source, int token) const {
        return at(peer, rows + static_cast<u64>(kRowBytes) * (static_cast<u64>(source) * capacity + token));
    }
    __device__ __forceinline__ u8* result(int peer, int source, int token) const {
        return at(peer, results + 2ull * HIDDEN * (static_cast<u64>(source) * capacity + token));
    }
    __device__ __forceinline__ u8* row_line(int peer, int source, int token, int line) const {
        return at(peer, row_lines + 16ull * ((static_cast<u64>(source) * line_tokens + token) * kRowLines + line));
    }
    __device__ __forceinline__ u8* result_line(int peer, int source, int token, int line) const {
        return at(peer, result_lines + 16ull * ((static_cast<u64>(source) * line_tokens + token) * 2 * kVectors + line));
    }
};

struct Common {
    Buffers buffers;
    Limits limits;
    Counters* counters;
    const int* topk_ids;  // [T, TOPK], global
    const int* owners;    // [num_ids]: the rank of each id
    int num_ids;
    int num_tokens;
    int phases;
    int line_parts;  // of a row that travels as lines

    __device__ __forceinline__ u32 alive() const { return limits.status->alive; }

    // The ranks of a token's experts as bits; lane k of each warp has slot k's rank in `owner`, -1 for none.
    __device__ __forceinline__ u32 destinations(int token, u32 alive, int& owner) const {
        const int lane = threadIdx.x % 32;
        const int id = lane < TOPK ? topk_ids[token * TOPK + lane] : -1;
        owner = id >= 0 && id < num_ids ? owners[id] : -1;
        if (owner >= 0 && !(alive >> owner & 1)) {
            owner = -1;
        }
        u32 ranks = 0;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            ranks |= __any_sync(kAllLanes, owner == rank) ? 1u << rank : 0u;
        }
        return ranks;
    }
};

// Where the part of a row begins that one block moves, in vectors; a whole scale's group at least.
__device__ __forceinline__ int part_begin(int part, int parts) {
    return min(kVectors, (kGroups * part + parts - 1) / parts * kScaleVectors);
}
