// Logical expert ids to physical ones, and the record of the load: the rule of moe_ep/eplb/filling.py in one launch.
//
// Before: ids [tokens, slots] (logical, -1 for none), table [experts, width] (replicas, -1 padded), counts [experts].
// After: out [tokens, slots] (physical), load [physical] grown by the number of each id of a row that is counted.
//
// A block does one tile of rows_per_tile rows. Its first threads have the experts, the others the slots, and the two
// meet at three barriers:
//
//     experts                                              slots
//     read the maps, list experts with several replicas    wait for the kernel before, read ids, count them
//     ------------------------------------------------------------------------------------------------ counted
//     level what has one replica, divide the rest evenly   write slots of one replica, mark those of the others
//     ------------------------------------------------------------------------------------------------ levelled
//     take turns at filling                                how many of an expert's slots come before each
//     ------------------------------------------------------------------------------------------------ divided
//     add to the load                                      write the other slots
//
// The slots of an expert are bits, one word for 32 slots of the tile. All sums are of integers, so the order of the
// atomic additions does not show. The load gets one addition for each expert or replica of a tile, however hot it is.
// The kernel comes up while the one before it runs, and reads the maps before that one has ended: whatever writes them
// must not be the kernel before, but a copy, or a kernel with another between that waits for it before it lets this one
// come up.
//
// Example: ids [[0, -1], [1, 0]], table [[0, 2], [1, -1]], counts [2, 1], one physical expert a rank. Expert 0 has two
// tokens, which are divided 1 and 1; ranks 0 and 2 are level, and it stays so. Its first token (row 0) goes to 0, the
// second (row 1) to 2: out [[0, -1], [1, 2]], load + [1, 1, 1].

#include "eplb_division.cuh"
#include "eplb_tile.cuh"

constexpr int kSlots = SLOTS;  // of a thread, at most

__device__ __forceinline__ void let_next_kernel_come_up() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All that the kernels before have written is seen from here on.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void sync_block() {
    asm volatile("bar.sync 0;" ::: "memory");
}

__device__ __forceinline__ void serve_experts(const Params& p, const Shared& s, int thread) {
#pragma unroll 1
    for (int expert = thread; expert - thread % 32 < p.experts; expert += p.expert_threads) {
        Row row;
        row.load(p, expert);
        enter_expert(p, s, expert, row);
    }
    sync_first(p.expert_threads);
    Division division(p, s, thread);
    wait_for_previous_kernels();
    sync_block();  // counted

#pragma unroll 1
    for (int expert = thread; expert < p.experts; expert += p.expert_threads) {
        const int amount = s.label[expert] == kSingle ? s.num_tokens[expert] : 0, physical = s.first[expert];
        if (amount == 0 || physical < 0) continue;  // nobody's, or an expert that no slot holds
        atomicAdd(s.level + rank_of(p, physical), amount);
        s.load[physical] = amount;
    }
    if (thread < p.dividing) division.begin(s);
    sync_block();  // levelled

    if (thread < p.dividing) {
        if (p.dividing == 32) {
            division.take_turns<true>(p.dividing);
        } else {
            division.take_turns<false>(p.dividing);
        }
        if (thread < p.max_replicated) division.store(s, thread);
    }
    sync_block();  // divided

    // By neighbours to neighbours: what a warp adds goes to few lines of memory, where the tiles meet.
#pragma unroll 1
    for (int physical = thread; physical < p.physical; physical += p.expert_threads) {
        const int amount = s.load[physical];
        if (amount > 0) atomicAdd(p.load + physical, amount);
    }
}

// How many slots of experts first, first + step and so on come before each word; a warp together.
__device__ __forceinline__ void sum_before(const Params& p, const Shared& s, int first, int step) {
    const int lane = threadIdx.x % 32, num_replicated = *s.num_replicated;
    const bool has_word = lane < p.words;
    const int row = has_word ? lane * p.stride : 0;
#pragma unroll 1
    for (int x = first; x < num_replicated; x += step) {
        const int amount = has_word ? __popc(s.mine[row + x]) : 0;
        int sum = amount;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const int other = __shfl_up_sync(kAll, sum, far);
            sum += lane >= far ? other : 0;
        }
        if (has_word) s.before[row + x] = static_cast<unsigned short>(sum - amount);
    }
}

__device__ __forceinline__ void serve_slots(const Params& p, const Shared& s, int thread, int threads) {
    const int lane = thread % 32, tile_slots = p.rows_per_tile * p.slots;
    const long long start = static_cast<long long>(blockIdx.x) * tile_slots;
    const long long all_slots = static_cast<long long>(p.tokens) * p.slots;
    const int num_slots = static_cast<int>(min(all_slots - start, static_cast<long long>(tile_slots)));
    const Id* ids = p.ids + start;
    OutId* out = p.out + start;
    wait_for_previous_kernels();
    int id[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        id[j] = slot < num_slots ? static_cast<int>(ids[slot]) : -1;
    }
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    const long long counted_slots = static_cast<long long>(num_counted) * p.slots - start;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        if (id[j] >= 0 && thread + j * threads < counted_slots) atomicAdd(s.num_tokens + id[j], 1);
    }
    sync_block();  // counted

    int x[kSlots], first[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        x[j] = s.label[max(id[j], 0)];
        first[j] = id[j] >= 0 ? s.first[id[j]] : -1;
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        if (id[j] < 0) x[j] = kSingle;
        if (x[j] == kSingle) {
            if (slot < num_slots) out[slot] = first[j];
        } else if (slot < counted_slots) {
            atomicOr(s.mine + slot / 32 * p.stride + x[j], 1u << lane);
        }
    }
    sync_block();  // levelled

    sum_before(p, s, thread / 32, threads / 32);
    sync_block();  // divided

    int replica[kSlots];  // of a slot whose expert has several; read for all of them at once
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        const bool counted = x[j] != kSingle && slot < counted_slots;
        const int at = counted ? slot / 32 * p.stride + x[j] : 0;
        const int left = counted ? s.before[at] + __popc(s.mine[at] & ((1u << lane) - 1)) : -1;
        const uint2 ends = s.ends[counted ? x[j] : 0];
        const int end = ends.x & 0xFFFF, second = ends.x >> 16, third = ends.y;
        replica[j] = (left >= end) + (left >= second) + (left >= third);
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        if (x[j] != kSingle) out[slot] = reinterpret_cast<const int*>(s.candidates + x[j])[replica[j]];
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x;
    let_next_kernel_come_up();
    s.clear(p);
    __syncthreads();
    if (thread < p.expert_threads) {
        serve_experts(p, s, thread);
    } else {
        serve_slots(p, s, thread - p.expert_threads, blockDim.x - p.expert_threads);
    }
}
