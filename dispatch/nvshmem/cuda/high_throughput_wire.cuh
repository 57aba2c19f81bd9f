// Rows of a prefill batch that do not stay where they arrive, since they come as e4m3 codes or are put: how they look
// on the wire, and how each side makes them.
//
//   columns   HIDDEN codes, or HIDDEN columns of 16 bits
//   largest   of codes: the largest magnitude of each 128 columns in 16 bits, which the scale is made of again
//   ids       TOPK, each with its rank in the upper bits, -1 for none
//   weights   TOPK, f32
//
// Rows begin at multiples of 128 bytes, and all but the last of a warp's stores fill such lines, which is what links
// carry best: what is behind the columns is put together in shared memory.
#pragma once

#include "high_throughput.cuh"

constexpr int kTailVectors = (kScaleWords + 2 * TOPK + 3) / 4;
constexpr int kIdBits = 24;
constexpr int kIdMask = (1 << kIdBits) - 1;

// What is behind a row's columns.
struct alignas(16) Tail {
    u32 words[4 * kTailVectors];
};

// Ids and weights of a row of the batch, as the experts read them: of this rank's alone. A thread has a slot.
__device__ __forceinline__ void keep_slot(const Common& c, u64 row, u32 id, u32 weight) {
    const bool is_here = static_cast<int>(id) >> kIdBits == c.rank;
    const u64 at = 4 * (row * TOPK + threadIdx.x % 32);
    *reinterpret_cast<u32*>(c.at(c.rank, c.ids + at)) = is_here ? id & kIdMask : ~0u;
    *reinterpret_cast<u32*>(c.at(c.rank, c.weights + at)) = is_here ? weight : 0;
}

// The tail to the rows at the addresses that the lanes of `ranks` hold.
__device__ __forceinline__ void store_tail(const Tail& tail, u32 ranks, u64 target) {
    for (int i = threadIdx.x % 32; i < (kTailVectors + 31) / 32 * 32; i += 32) {
        const Vec v = i < kTailVectors ? reinterpret_cast<const Vec*>(tail.words)[i] : Vec{};
        for (u32 left = ranks; left; left &= left - 1) {
            u8* to = reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
            if (i < kTailVectors) {
                reinterpret_cast<Vec*>(to + kColumnBytes)[i] = v;
            }
        }
    }
}

#if FP8
// Of a thread's codes of two vectors, 32 apart, and its neighbour's: the sixteen bytes of the first two vectors in even
// threads, of the others in odd ones.
__device__ __forceinline__ Vec put_together(Codes first, Codes second) {
    const bool is_odd = threadIdx.x % 2;
    const Codes kept = is_odd ? second : first, given = is_odd ? first : second;
    const u32 low = __shfl_xor_sync(kAllLanes, given.low, 1), high = __shfl_xor_sync(kAllLanes, given.high, 1);
    return is_odd ? Vec{low, high, kept.low, kept.high} : Vec{kept.low, kept.high, low, high};
}

// A warp's row to the addresses that the lanes of `ranks` hold, and as the experts read it to `plain` where that is not
// null.
__device__ __forceinline__ void store_row(const u8* row, Tail& tail, u32 ranks, u64 target, u8* plain) {
    constexpr int kPairs = kAtOnce / 2;
    const Vec* from = reinterpret_cast<const Vec*>(row);
    const int is_odd = threadIdx.x % 2;
    for (int start = threadIdx.x % 32; start < (kVectors + 31) / 32 * 32; start += 32 * kAtOnce) {
        Vec v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
        }
        Vec pairs[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            Codes codes[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int vector = start + 32 * (2 * i + j);
                float scale;
                u32 largest;
                codes[j] = quantize(v[2 * i + j], scale, largest);
                if (vector < kVectors && vector % kScaleVectors == 0) {
                    reinterpret_cast<u16*>(tail.words)[vector / kScaleVectors] = static_cast<u16>(largest);
                }
                if (vector < kVectors && plain) {
                    reinterpret_cast<Vec*>(plain)[vector] = dequantize(codes[j], scale);
                }
            }
            pairs[i] = put_together(codes[0], codes[1]);
        }
        for (u32 left = ranks; left; left &= left - 1) {
            u64* to = reinterpret_cast<u64*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const int vector = start + 32 * (2 * i + is_odd) - is_odd;
                if (vector < kVectors) {
                    *reinterpret_cast<Vec*>(to + vector) = pairs[i];
                }
            }
        }
    }
    __syncwarp();
    store_tail(tail, ranks, target);
}

// A warp's row from the wire to where the experts read it.
__device__ __forceinline__ void load_row(const u8* row, u8* out) {
    constexpr int kLoads = at_once(7);
    const u64* from = reinterpret_cast<const u64*>(row);
    const u16* largest = reinterpret_cast<const u16*>(row + kColumnBytes);
    Vec* to = reinterpret_cast<Vec*>(out);
    const int lane = threadIdx.x % 32;
    for (int begin = 0; begin < kVectors; begin += 32 * kLoads) {
        const int group = begin / kScaleVectors + lane;
        const float all = scale_of(lane < 2 * kLoads && group < kGroups ? largest[group] : 0);
        u64 v[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            v[i] = begin + 32 * i + lane < kVectors ? from[begin + 32 * i + lane] : 0;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const float scale = __shfl_sync(kAllLanes, all, 2 * i + lane / kScaleVectors);
            if (begin + 32 * i + lane < kVectors) {
                to[begin + 32 * i + lane] =
                    dequantize(Codes{static_cast<u32>(v[i]), static_cast<u32>(v[i] >> 32)}, scale);
            }
        }
    }
}

#else
__device__ __forceinline__ void store_row(const u8* row, Tail& tail, u32 ranks, u64 target, u8* plain) {
    for (u32 left = ranks; left; left &= left - 1) {
        copy_row(row, reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1)));
    }
    if (plain) {
        copy_row(row, plain);
    }
    __syncwarp();
    store_tail(tail, ranks, target);
}

__device__ __forceinline__ void load_row(const u8* row, u8* out) { copy_row(row, out); }
#endif
