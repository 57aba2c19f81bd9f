// Results home: a row for every one that came, to the place that the owner of the token has for it.
#include "high_throughput.cuh"

struct Params {
    Common common;
    const u8* results;  // [received rows, HIDDEN]
};

__device__ __forceinline__ void copy_row(const u8* row, u8* target) {
    const Vec* from = reinterpret_cast<const Vec*>(row);
    Vec* to = reinterpret_cast<Vec*>(target);
    for (int start = threadIdx.x % 32; start < kVectors; start += 32 * kAtOnce) {
        Vec v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (start + 32 * i < kVectors) {
                to[start + 32 * i] = v[i];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_combine(const __grid_constant__ Params p) {
    const Common& c = p.common;
    const Placement& place = *c.placement;
    const int warps = gridDim.x * kWarps, first = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    const u32 epoch = *reinterpret_cast<volatile u32*>(c.epoch);
    int most = 0;
    for (int source = 0; source < RANKS; ++source) {
        most = max(most, place.count[source]);
    }
    most = c.failed() ? 0 : most;
    // Sources take turns, and each rank begins with another, so that no rank's links are everybody's target.
    for (int turn = first; turn < most * RANKS; turn += warps) {
        const int source = (turn + c.rank) % RANKS, index = turn / RANKS;
        if (index < place.count[source]) {
            const u64 row = place.begin[source] + index, home = row + place.home[source];
            copy_row(p.results + kResultBytes * row, c.at(source, c.results + kResultBytes * home));
        }
    }
    finish<PHASE_COMBINE>(c, RESULTS_DONE, epoch);
}
