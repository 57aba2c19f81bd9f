// Rows to the ranks of their experts: a warp reads a token once, quantizes it where asked, and writes it to each rank.
//
// Before: rows [T, HIDDEN]. After: at each rank the rows of its tokens, by (source, token), with their ids and weights.
// Plain rows are read where they arrive. Quantized ones, and such as were put, are turned into plain ones in `out` as
// they come.
#include "high_throughput.cuh"

struct Params {
    Common common;
    const u8* rows;          // [T, HIDDEN]
    const int* topk_ids;     // [T, TOPK]
    const float* weights;    // [T, TOPK]
    const int* owners;       // [num_ids], -1 for ranks that take no part
    const int* slots;        // [T, RANKS]: as which row of all that this rank sends, -1 for none
    u8* out;                 // [R * C, HIDDEN], of quantized rows
    int num_ids;
    int num_tokens;
    int max_rows;            // ids of rows from the last that arrives to this one become -1
};

constexpr int kCodesAtOnce = 6;  // vectors of codes that are loaded before the first is stored
constexpr int kIdBits = 24;  // of an id on its way behind a row; its rank is above
constexpr int kIdMask = (1 << kIdBits) - 1;

#if FP8
__device__ __forceinline__ void send_row(const u8* row, u32 ranks, u64 target) {
    const Vec* from = reinterpret_cast<const Vec*>(row);
    for (int start = threadIdx.x % 32; start < (kVectors + 31) / 32 * 32; start += 32 * kAtOnce) {
        Vec v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
        }
        u64 codes[kAtOnce];
        float scale[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const Codes both = quantize(unpack(v[i]), scale[i]);
            codes[i] = static_cast<u64>(both.high) << 32 | both.low;
        }
        for (u32 left = ranks; left; left &= left - 1) {
            u8* to = reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int vector = start + 32 * i;
                if (vector < kVectors) {
                    reinterpret_cast<u64*>(to)[vector] = codes[i];
                    if (vector % kScaleVectors == 0) {
                        reinterpret_cast<float*>(to + HIDDEN)[vector / kScaleVectors] = scale[i];
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void dequantize_row(const u8* row, u8* out) {
    const u64* from = reinterpret_cast<const u64*>(row);
    const float* scales = reinterpret_cast<const float*>(row + HIDDEN);
    Vec* to = reinterpret_cast<Vec*>(out);
    for (int start = threadIdx.x % 32; start < kVectors; start += 32 * kCodesAtOnce) {
        u64 v[kCodesAtOnce];
        float scale[kCodesAtOnce];
#pragma unroll
        for (int i = 0; i < kCodesAtOnce; ++i) {
            const bool inside = start + 32 * i < kVectors;
            v[i] = inside ? __ldcv(from + start + 32 * i) : 0;
            scale[i] = inside ? __ldcv(scales + (start + 32 * i) / kScaleVectors) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kCodesAtOnce; ++i) {
            if (start + 32 * i < kVectors) {
                to[start + 32 * i] = dequantize(Codes{static_cast<u32>(v[i]), static_cast<u32>(v[i] >> 32)}, scale[i]);
            }
        }
    }
}

#else
__device__ __forceinline__ void send_row(const u8* row, u32 ranks, u64 target) {
    const Vec* from = reinterpret_cast<const Vec*>(row);
    for (int begin = 0; begin < kVectors; begin += 32 * kAtOnce) {
        const int start = begin + threadIdx.x % 32;
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
#endif

// The row of the batch that has come, as the experts read it.
__device__ __forceinline__ void take_row(const Params& p, u64 row) {
    const Common& c = p.common;
    const u8* wire = c.at(c.rank, c.rows + kWireBytes * row);
    u8* out = p.out + kResultBytes * row;
#if FP8
    dequantize_row(wire, out);
#else
    copy_row(wire, out);
#endif
#if DEVICE_API
    const int lane = threadIdx.x % 32;
    if (lane < TOPK) {
        const int* ids = reinterpret_cast<const int*>(wire + kRowBytes);
        const bool is_here = __ldcv(ids + lane) >> kIdBits == c.rank;
        const u64 at = 4 * (row * TOPK + lane);
        *reinterpret_cast<int*>(c.at(c.rank, c.ids + at)) = is_here ? __ldcv(ids + lane) & kIdMask : -1;
        *reinterpret_cast<int*>(c.at(c.rank, c.weights + at)) = is_here ? __ldcv(ids + TOPK + lane) : 0;
    }
#endif
}

// Sources take turns, as their rows come.
__device__ __forceinline__ void take_rows(const Params& p, u32 epoch) {
    const Common& c = p.common;
    int most = 0;
    for (int source = 0; source < RANKS; ++source) {
        most = max(most, c.placement->count[source]);
    }
    Wait<PHASE_DISPATCH> wait(c.limits, epoch);
    Turns turns(c.taken + ROWS_TAKEN);
    for (int turn = turns.next(); turn < most * RANKS; turn = turns.next()) {
        const int source = turn % RANKS, index = turn / RANKS;
        if (index < c.placement->count[source]) {
            const u64 row = c.placement->begin[source] + index;
            if (__all_sync(kAllLanes, await_flag(wait, c.flag_of(c.rank, c.row_flags, row), source))) {
                take_row(p, row);
            }
        }
    }
}
// The block that finishes last tells all ranks, and waits for all of them: what comes behind the kernel may read.
__device__ __forceinline__ void finish(const Common& c, u32 epoch) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        last = atomicAdd(c.finished, 1u) == gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (last && peer < RANKS) {
        if (peer == 0) {
            *c.finished = 0;
        }
        if (c.alive(peer)) {
            if (!c.failed()) {
                __threadfence_system();
                store_line(c.done_of(peer, c.rank), 0, 0, epoch);
            }
            Wait<PHASE_DISPATCH> wait(c.limits, epoch);
            Vec line;
            wait.for_line(c.done_of(c.rank, peer), peer, line);
        }
        __threadfence_system();
    }
}

#if DEVICE_API
// The token, all of its ids with their ranks in the upper bits, and its weights: staged once, put to each rank.
__device__ __forceinline__ void send(const Params& p, int token, u32 epoch) {
    const Common& c = p.common;
    const int lane = threadIdx.x % 32;
    const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
    const u64 index = slot >= 0 ? static_cast<u64>(slot + c.placement->send[lane]) : 0;
    u8* staged = c.at(c.rank, c.staged_rows + static_cast<u64>(kWireBytes) * token);
    send_row(p.rows + static_cast<u64>(token) * kResultBytes, 1, reinterpret_cast<u64>(staged));
    if (lane < TOPK) {
        const int id = p.topk_ids[static_cast<u64>(token) * TOPK + lane];
        const int owner = id >= 0 && id < p.num_ids ? p.owners[id] : -1;
        int* ids = reinterpret_cast<int*>(staged + kRowBytes);
        ids[lane] = owner >= 0 ? owner << kIdBits | id : -1;
        reinterpret_cast<float*>(ids)[TOPK + lane] = p.weights[static_cast<u64>(token) * TOPK + lane];
    }
    for (u32 left = __ballot_sync(kAllLanes, slot >= 0); left; left &= left - 1) {
        const int rank = __ffs(left) - 1;
        const u64 row = __shfl_sync(kAllLanes, index, rank);
        put_row(c, rank, c.rows + kWireBytes * row, staged, kWireBytes, c.flag_of(c.rank, c.row_flags, row), epoch);
    }
}
#else
__device__ __forceinline__ void send(const Params& p, int token, u32 epoch) {
    const Common& c = p.common;
    const int lane = threadIdx.x % 32;
    const int slot = lane < RANKS ? p.slots[static_cast<u64>(token) * RANKS + lane] : -1;
    const u32 ranks = __ballot_sync(kAllLanes, slot >= 0);
    const u64 index = slot >= 0 ? static_cast<u64>(slot + c.placement->send[lane]) : 0;
    const u64 target = slot >= 0 ? reinterpret_cast<u64>(c.at(lane, c.rows + kWireBytes * index)) : 0;
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
    send_row(p.rows + static_cast<u64>(token) * kResultBytes, ranks, target);
    if (kTakesRows) {
        __syncwarp();
        if (slot >= 0) {
            release_flag(c.flag_of(lane, c.row_flags, index), epoch);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_dispatch(const __grid_constant__ Params p) {
    const Common& c = p.common;
    constexpr int kOfBlock = kTakesRows ? kSenders : kWarps;
    const int warp = threadIdx.x / 32, warps = gridDim.x * kOfBlock, first = warp * gridDim.x + blockIdx.x;
    const u32 epoch = c.current_epoch();
    int* ids = reinterpret_cast<int*>(c.at(c.rank, c.ids));
    const u64 begin = static_cast<u64>(c.placement->total) * TOPK, end = static_cast<u64>(p.max_rows) * TOPK;
    for (u64 i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
        ids[i] = -1;
    }
    const bool sends = warp < kOfBlock && !c.failed();
    for (int token = first; sends && token < p.num_tokens; token += warps) {
        send(p, token, epoch);
    }
    if (kTakesRows) {
        take_rows(p, epoch);
    } else {
        finish(c, epoch);
    }
}
