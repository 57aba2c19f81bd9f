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
//     take turns at filling, add to the load               how many of an expert's slots come before each
//     ------------------------------------------------------------------------------------------------ divided
//                                                          write the other slots
//
// The slots of an expert are bits, one word for 32 slots of the tile. All sums are of integers, so the order of the
// atomic additions does not show. The load gets one addition for each expert or replica of a tile, however hot it is.
// The kernel comes up while the one before it runs, and reads the maps before that one has ended: whatever writes them
// must not be the kernel before, but a copy, or a kernel with another between.
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

// What follows from the maps alone: the lists of experts, and the division of the one that this thread has.
__device__ __forceinline__ Division list_experts(const Params& p, const Shared& s, int thread) {
#pragma unroll 1
    for (int expert = thread; expert - thread % 32 < p.experts; expert += p.expert_threads) {
        Row row;
        row.load(p, expert);
        enter_expert(p, s, expert, row);
    }
    sync_first(p.expert_threads);
    return Division(p, s, thread);
}

// Levels and loads of experts with one replica.
__device__ __forceinline__ void level_singles(const Params& p, const Shared& s, int thread) {
#pragma unroll 1
    for (int expert = thread; expert < p.experts; expert += p.expert_threads) {
        const int amount = s.label[expert] == kSingle ? s.num_tokens[expert] : 0, physical = s.first[expert];
        if (amount == 0) continue;
        atomicAdd(s.level + rank_of(p, physical), amount);
        atomicAdd(p.load + physical, amount);
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

// The slots of one of `threads` threads.
struct Slots {
    int thread, threads, num_slots;
    long long counted_slots;
    OutId* out;
    int id[kSlots], x[kSlots];

    // Reads the ids, and counts their experts' tokens.
    __device__ __forceinline__ void count(const Params& p, const Shared& s, int thread_, int threads_) {
        thread = thread_, threads = threads_;
        const int tile_slots = p.rows_per_tile * p.slots;
        const long long start = static_cast<long long>(blockIdx.x) * tile_slots;
        const long long all_slots = static_cast<long long>(p.tokens) * p.slots;
        num_slots = static_cast<int>(min(all_slots - start, static_cast<long long>(tile_slots)));
        const Id* ids = p.ids + start;
        out = p.out + start;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            const int slot = thread + j * threads;
            id[j] = slot < num_slots ? static_cast<int>(ids[slot]) : -1;
        }
        const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
        counted_slots = static_cast<long long>(num_counted) * p.slots - start;
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            if (id[j] >= 0 && thread + j * threads < counted_slots) atomicAdd(s.num_tokens + id[j], 1);
        }
    }

    // Writes slots of experts with one replica, and marks the others.
    __device__ __forceinline__ void write_singles(const Params& p, const Shared& s) {
        int first[kSlots];
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
                atomicOr(s.mine + slot / 32 * p.stride + x[j], 1u << thread % 32);
            }
        }
    }

    // Writes the slots that are marked.
    __device__ __forceinline__ void write_others(const Params& p, const Shared& s) const {
        int replica[kSlots];  // read for all of them at once
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            const int slot = thread + j * threads;
            const bool counted = x[j] != kSingle && slot < counted_slots;
            const int at = counted ? slot / 32 * p.stride + x[j] : 0;
            const int left = counted ? s.before[at] + __popc(s.mine[at] & ((1u << thread % 32) - 1)) : -1;
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
};

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x, slot_thread = thread - p.expert_threads;
    const int slot_threads = blockDim.x - p.expert_threads;
    const bool has_experts = slot_thread < 0, divides = thread < p.dividing;
    let_next_kernel_come_up();
    s.clear(p);
    __syncthreads();

    Division division;
    Slots slots;
    if (has_experts) {
        division = list_experts(p, s, thread);
        wait_for_previous_kernels();
    } else {
        wait_for_previous_kernels();
        slots.count(p, s, slot_thread, slot_threads);
    }
    __syncthreads();  // counted

    if (has_experts) {
        level_singles(p, s, thread);
        if (divides) division.begin(s);
    } else {
        slots.write_singles(p, s);
    }
    __syncthreads();  // levelled

    if (divides) {
        division.take_turns(p.dividing);
        if (thread < p.max_replicated) division.store(p, s, thread);
    } else if (!has_experts) {
        sum_before(p, s, slot_thread / 32, slot_threads / 32);
    }
    __syncthreads();  // divided

    if (!has_experts) slots.write_others(p, s);
}
