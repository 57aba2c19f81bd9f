// Logical expert ids to physical ones, and the record of the load: the rule of moe_ep/eplb/levelling.py in one launch.
//
// Before: ids [tokens, slots] (logical, others than 0 to experts - 1 for none), table [experts, width] (replicas, -1 padded), counts [experts].
// After: out [tokens, slots] (physical), load [physical] grown by the number of each id of a row that is counted.
//
// A block does one tile of rows_per_tile rows. Some of its threads have the experts that have several replicas, some all
// experts, some the slots. Who waits at a barrier stands in brackets:
//
//     divide                        experts                           slots
//                                   read the maps, list the experts   read ids, count them
//     ------------- listed [divide, slots]                    counted [divide, experts] -------------
//     divide evenly                 add up the levels of what has     write slots of one replica, mark those of the
//                                   one replica                       others; how many of an expert's come before each
//     ------------- levelled [divide]
//     take turns at passing
//     ------------- divided [experts, slots]
//                                   add to the load                   write the other slots
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

__device__ __forceinline__ void serve_division(const Params& p, const Shared& s, int thread) {
    wait_at(Barrier::kListed, blockDim.x);
    Division division(p, s, thread);
    wait_at(Barrier::kCounted, blockDim.x);
    division.begin(s);
    wait_at(Barrier::kLevelled, p.dividing + p.expert_threads);
    if (p.dividing == 32) {
        division.take_turns<true>(p.dividing);
    } else {
        division.take_turns<false>(p.dividing);
    }
    if (thread < p.max_replicated) division.store(s, thread);
    arrive_at(Barrier::kDivided, blockDim.x);
}

// Of an expert that is there; others are none, so that a wrong id reads and counts nowhere else.
__device__ __forceinline__ int id_of(const Params& p, Id id) {
    return id >= 0 && id < p.experts ? static_cast<int>(id) : kNone;
}

// row is that of the thread's first expert.
__device__ __forceinline__ void serve_experts(const Params& p, const Shared& s, int thread, Row& row) {
    enter_expert(p, s, thread, row);
#pragma unroll 1
    for (int expert = thread + p.expert_threads; expert - thread % 32 < p.experts; expert += p.expert_threads) {
        row.load(p, expert);
        enter_expert(p, s, expert, row);
    }
    arrive_at(Barrier::kListed, blockDim.x);
    wait_for_previous_kernels();
    wait_at(Barrier::kCounted, blockDim.x);

#pragma unroll 1
    for (int expert = thread; expert < p.experts; expert += p.expert_threads) {
        const int amount = s.num_tokens[expert], physical = s.entry[expert];
        if (amount == 0 || physical < 0) continue;  // of several replicas, nobody's, or an expert that no slot holds
        atomicAdd(s.level + rank_of(p, physical), amount);
        s.load[physical] = amount;
    }
    arrive_at(Barrier::kLevelled, p.dividing + p.expert_threads);
    wait_at(Barrier::kDivided, blockDim.x);

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
        id[j] = slot < num_slots ? id_of(p, ids[slot]) : kNone;
    }
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    const long long counted_slots = static_cast<long long>(num_counted) * p.slots - start;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        if (id[j] >= 0 && thread + j * threads < counted_slots) atomicAdd(s.num_tokens + id[j], 1);
    }
    arrive_at(Barrier::kCounted, blockDim.x);
    wait_at(Barrier::kListed, blockDim.x);

    int entry[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) entry[j] = id[j] >= 0 ? s.entry[id[j]] : kNone;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        if (entry[j] >= kNone) {
            if (slot < num_slots) out[slot] = entry[j];
        } else if (slot < counted_slots) {
            atomicOr(s.mine + slot / 32 * p.stride + place_of(entry[j]), 1u << lane);
        }
    }
    wait_at(Barrier::kMarked, threads);
    sum_before(p, s, thread / 32, threads / 32);
    wait_at(Barrier::kMarked, threads);

    // Of slots whose expert has several replicas: how many of its come before this one, and where they may go.
    int left[kSlots];
    int4 candidates[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads, x = entry[j] < kNone ? place_of(entry[j]) : 0;
        const bool counted = entry[j] < kNone && slot < counted_slots;
        const int at = counted ? slot / 32 * p.stride + x : 0;
        left[j] = counted ? s.before[at] + __popc(s.mine[at] & ((1u << lane) - 1)) : -1;
        candidates[j] = s.candidates[x];
    }
    wait_at(Barrier::kDivided, blockDim.x);

#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        if (entry[j] >= kNone) continue;
        const uint2 ends = s.ends[place_of(entry[j])];
        const int end = ends.x & 0xFFFF, second = ends.x >> 16, third = ends.y;
        const int4 all = candidates[j];
        out[thread + j * threads] = left[j] < end ? all.x : left[j] < second ? all.y : left[j] < third ? all.z : all.w;
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x, expert = thread - p.dividing, slot = expert - p.expert_threads;
    let_next_kernel_come_up();
    Row row;
    if (expert >= 0 && slot < 0) row.load(p, expert);
    s.clear(p);
    __syncthreads();
    if (expert < 0) {
        serve_division(p, s, thread);
    } else if (slot < 0) {
        serve_experts(p, s, expert, row);
    } else {
        serve_slots(p, s, slot, blockDim.x - p.dividing - p.expert_threads);
    }
}
