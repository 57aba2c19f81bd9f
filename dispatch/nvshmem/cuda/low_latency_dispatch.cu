// Sends each token once to every rank that has one of its experts, and lists there which rows each expert has.
//
// Before: rows [T, K], topk_ids and weights [T, TOPK] on each rank. After, on the rank of an expert e: its rows in the
// order (source, token), copied to out [El, R * C, K], or by reference: as numbers s * C + t in expert_row_ids
// [El, R * C], of rows that lie where their senders put them (in fp8, dequantized in out [R * C, K]); the experts'
// expert_num_tokens [El]; positions [R * C, TOPK]: which row of its expert each slot is, for the combine.
// Example: two ranks of one expert each, C = 4; rank 0's token 0 goes to both experts, rank 1's token 0 to expert 0:
// rank 0 has expert_row_ids [[0, 4]], rank 1 [[0]].
#include "low_latency_send.cuh"
#include "low_latency_take.cuh"

extern "C" __global__ void __launch_bounds__(2 * kThreads, 2) low_latency_dispatch(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    const int phases = p.common.phases;
    if (threadIdx.x < kThreads) {
        if (phases & SEND) {
            send_all(p, shared);
        }
    } else if (phases & RECEIVE) {
        wait_for_kernels_before();
        if (!(phases & SEND)) {
            let_next_kernel_come_up();
        }
        receive_all(p, shared);
    }
}
