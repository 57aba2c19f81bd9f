// Rows to the ranks of their experts: a warp reads a token once, quantizes it where asked, and writes it to each of them.
#include "high_throughput.cuh"

struct Params {
    Common common;
    const u8* rows;          // [T, HIDDEN]
    const int* topk_ids;     // [T, TOPK]
    const float* weights;    // [T, TOPK]
    const int* owners;       // [num_ids]
    const int* slots;        // [T, RANKS]: as which row of all that this rank sends, -1 for none
    int num_ids;
    int num_tokens;
    int max_rows;            // ids of rows from the last that arrives to this one become -1
};

__device__ __forceinline__ void send_plain(const u8* row, u32 ranks, u64 target) {
    const int lane = threadIdx.x % 32;
    const Vec* from = reinterpret_cast<const Vec*>(row);
    for (int begin = 0; begin < kVectors; begin += 32 * kAtOnce) {
        const int start = begin + lane;
        Vec v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
        }
        for (u32 left = ranks; left; left &= left - 1) {
            Vec* to = reinterpret_cast<Vec*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (start + 32 * i < kVectors) {
                    to[start + 32 * i] = v[i];
                }
            }
        }
    }
}

__device__ __forceinline__ void send_quantized(const u8* row, u32 ranks, u64 target) {
    const int lane = threadIdx.x % 32;
    const Vec* from = reinterpret_cast<const Vec*>(row);
    for (int start = 0; start < kVectors; start += 32) {
        const int vector = start + lane;
        float scale;
        const Codes codes = quantize(unpack(vector < kVectors ? from[vector] : Vec{}), scale);
        for (u32 left = ranks; left; left &= left - 1) {
            u8* to = reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
            if (vector < kVectors) {
                reinterpret_cast<u64*>(to)[vector] = static_cast<u64>(codes.high) << 32 | codes.low;
                if (vector % kScaleVectors == 0) {
                    reinterpret_cast<float*>(to + HIDDEN)[vector / kScaleVectors] = scale;
                }
            }
        }
    }
}

__device__ __forceinline__ void send(const Params& p, int token) {
    const Common& c = p.common;
    const int lane = threadIdx.x % 32;
    const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
    const u32 ranks = __ballot_sync(kAllLanes, slot >= 0);
    const u64 index = slot >= 0 ? static_cast<u64>(slot + c.placement->send[lane]) : 0;
    const u64 target = slot >= 0 ? reinterpret_cast<u64>(c.at(lane, c.rows + kRowBytes * index)) : 0;
    const int id = lane < TOPK ? p.topk_ids[static_cast<u64>(token) * TOPK + lane] : -1;
    const int owner = id >= 0 && id < p.num_ids ? p.owners[id] : -1;
    for (u32 left = ranks; left; left &= left - 1) {
        const int rank = __ffs(left) - 1;
        const u64 at = 4ull * (__shfl_sync(kAllLanes, index, rank) * TOPK + lane);
        if (lane < TOPK) {
            *reinterpret_cast<int*>(c.at(rank, c.ids + at)) = owner == rank ? id : -1;
            *reinterpret_cast<float*>(c.at(rank, c.weights + at)) =
                owner == rank ? p.weights[static_cast<u64>(token) * TOPK + lane] : 0.0f;
        }
    }
    const u8* row = p.rows + static_cast<u64>(token) * kResultBytes;
#if FP8
    send_quantized(row, ranks, target);
#else
    send_plain(row, ranks, target);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_dispatch(const __grid_constant__ Params p) {
    const Common& c = p.common;
    const int warps = gridDim.x * kWarps, first = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    const u32 epoch = *reinterpret_cast<volatile u32*>(c.epoch);
    const bool failed = c.failed();
    int* ids = reinterpret_cast<int*>(c.at(c.rank, c.ids));
    const u64 end = static_cast<u64>(p.max_rows) * TOPK, threads = static_cast<u64>(gridDim.x) * kThreads;
    for (u64 i = static_cast<u64>(c.placement->total) * TOPK + blockIdx.x * kThreads + threadIdx.x; i < end; i += threads) {
        ids[i] = -1;
    }
    for (int token = first; token < p.num_tokens && !failed; token += warps) {
        send(p, token);
    }
    finish<PHASE_DISPATCH>(c, ROWS_DONE, epoch);
}
