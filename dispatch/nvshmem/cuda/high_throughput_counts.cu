// The first kernel of a prefill batch: ranks tell each other how many rows they send, and each finds where its own begin.
#include "high_throughput.cuh"

struct Params {
    Common common;
    const int* counts;  // [RANKS]: rows for each rank
};

extern "C" __global__ void __launch_bounds__(64) high_throughput_counts(const __grid_constant__ Params p) {
    const Common& c = p.common;
    __shared__ int counts[RANKS][2 * kLinesOfCounts];
    __shared__ int all_came;
    const u32 epoch = *reinterpret_cast<volatile u32*>(c.epoch) + 1;
    const int peer = static_cast<int>(threadIdx.x) / kLinesOfCounts, line = static_cast<int>(threadIdx.x) % kLinesOfCounts;
    if (threadIdx.x == 0) {
        all_came = 1;
    }
    __syncthreads();
    if (peer < RANKS) {
        const u32 a = 2 * line < RANKS ? p.counts[2 * line] : 0, b = 2 * line + 1 < RANKS ? p.counts[2 * line + 1] : 0;
        store_line(c.counts_of(peer, c.rank, line), a, b, epoch);
        Wait<PHASE_DISPATCH> wait(c.limits, epoch);
        Vec came{};
        if (!wait.for_line(c.counts_of(c.rank, peer, line), peer, came)) {
            all_came = 0;
        }
        counts[peer][2 * line] = static_cast<int>(came.x);
        counts[peer][2 * line + 1] = static_cast<int>(came.z);
        __threadfence_system();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *c.epoch = epoch;
    }
    if (threadIdx.x < RANKS) {
        const int other = static_cast<int>(threadIdx.x);
        int there = 0, sent = 0, here = 0, home = 0, total = 0;
        for (int rank = 0; rank < RANKS; ++rank) {
            there += rank < c.rank ? counts[rank][other] : 0;
            sent += rank < other ? counts[c.rank][rank] : 0;
            here += rank < other ? counts[rank][c.rank] : 0;
            home += rank < c.rank ? counts[other][rank] : 0;
            total += counts[rank][c.rank];
        }
        c.placement->send[other] = there - sent;
        c.placement->begin[other] = all_came ? here : 0;
        c.placement->count[other] = all_came ? counts[other][c.rank] : 0;
        c.placement->home[other] = home - here;
        if (other == 0) {
            c.placement->total = all_came ? total : 0;
        }
    }
}
