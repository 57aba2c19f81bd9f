// Slots by expert, each expert's list padded to whole blocks: a stable counting sort by one block of threads.
//
// Before: ids [numel], key_map [experts] (the list of each id, -1 for none; null: its own), names [experts] (what stands
// for an expert in expert_ids; null: its number). After: num_tokens [experts], sorted [length] with the sentinel numel
// between and behind the lists, expert_ids [num_blocks] with -1 behind them (null: not wanted), used [1].
//
// Every warp has a run of the slots. It counts them by key, 32 at a time: lanes of one key find each other, and their
// first adds for all. Sums over warps, then over experts, turn counts into places, and a second pass over the run puts
// every slot where its warp and key stand. No atomics: the same ids give the same lists.
//
// Example: ids [1, 0, 1, -1], 3 experts, block size 2: counts 1, 2, 0, lists from 0, 2 and 4: sorted [1, 4, 0, 2, 4...],
// expert_ids [0, 1, -1...], used 4.

#if IDS_64
typedef long long Id;
#else
typedef int Id;
#endif

constexpr unsigned kAll = 0xFFFFFFFFu;

struct AlignParams {
    const Id* ids;
    const int* key_map;
    const int* names;
    int* num_tokens;
    int* sorted;
    int* expert_ids;
    int* used;
    int numel, experts, length, num_blocks, block_size;
};

// The list that an id belongs to, p.experts where it belongs to none.
__device__ __forceinline__ int key_of(const AlignParams& p, Id id) {
    if (id < 0 || id >= p.experts) return p.experts;
    if (p.key_map == nullptr) return (int)id;
    int key = p.key_map[id];
    return key < 0 ? p.experts : key;
}

// Calls visit(slot, key, lanes of that key) for 32 slots of the run at a time, in order, with the whole warp.
template <typename Visit>
__device__ __forceinline__ void for_run(const AlignParams& p, int first, int last, int lane, Visit visit) {
    Id next = first + lane < last ? p.ids[first + lane] : -1;
    for (int base = first; base < last; base += 32) {
        int slot = base + lane;
        int key = key_of(p, slot < last ? next : (Id)-1);
        if (slot + 32 < last) next = p.ids[slot + 32];
        visit(slot, key, __match_any_sync(kAll, key));
        __syncwarp();
    }
}

// Inclusive sums of one number a thread, and the sum of all of them.
__device__ __forceinline__ int block_scan(int value, int* warp_sums, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(kAll, value, step);
        if (lane >= step) value += below;
    }
    if (lane == 31) warp_sums[warp] = value;
    __syncthreads();
    int sum = lane < warps ? warp_sums[lane] : 0, before = 0;
    total = 0;
    for (int i = 0; i < warps; i++) {
        int part = __shfl_sync(kAll, sum, i);
        if (i < warp) before += part;
        total += part;
    }
    __syncthreads();
    return before + value;
}

extern "C" __global__ void __launch_bounds__(1024) align(const __grid_constant__ AlignParams p) {
    extern __shared__ int memory[];
    __shared__ int warp_sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    int* starts = memory;
    int* totals = starts + p.experts;
    int* counts = totals + p.experts;
    int* mine = counts + warp * p.experts;
    int run = ((p.numel + warps - 1) / warps + 31) / 32 * 32;
    int first = min(warp * run, p.numel), last = min(first + run, p.numel);

    for (int i = threadIdx.x; i < warps * p.experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for_run(p, first, last, lane, [&](int, int key, unsigned same) {
        if (key < p.experts && lane == __ffs(same) - 1) mine[key] += __popc(same);
    });
    __syncthreads();

    int used = 0;
    for (int base = 0; base < p.experts; base += blockDim.x) {
        int expert = base + threadIdx.x, total = 0;
        if (expert < p.experts) {
            for (int w = 0; w < warps; w++) {
                int part = counts[w * p.experts + expert];
                counts[w * p.experts + expert] = total;
                total += part;
            }
        }
        int padded = (total + p.block_size - 1) / p.block_size * p.block_size, all;
        int end = used + block_scan(padded, warp_sums, all);
        if (expert < p.experts) {
            starts[expert] = end - padded;
            totals[expert] = total;
            p.num_tokens[expert] = total;
        }
        used += all;
    }
    if (threadIdx.x == 0) *p.used = used;
    __syncthreads();

    for_run(p, first, last, lane, [&](int slot, int key, unsigned same) {
        int place = key < p.experts ? starts[key] + mine[key] + __popc(same & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (key < p.experts) {
            p.sorted[place] = slot;
            if (lane == __ffs(same) - 1) mine[key] += __popc(same);
        }
    });

    for (int expert = warp; expert < p.experts; expert += warps) {
        int start = starts[expert], total = totals[expert];
        int end = start + (total + p.block_size - 1) / p.block_size * p.block_size;
        for (int i = start + total + lane; i < end; i += 32) p.sorted[i] = p.numel;
        if (p.expert_ids == nullptr) continue;
        int name = p.names == nullptr ? expert : p.names[expert];
        for (int i = start / p.block_size + lane; i < end / p.block_size; i += 32) p.expert_ids[i] = name;
    }
    for (int i = used + threadIdx.x; i < p.length; i += blockDim.x) p.sorted[i] = p.numel;
    if (p.expert_ids == nullptr) return;
    for (int i = used / p.block_size + threadIdx.x; i < p.num_blocks; i += blockDim.x) p.expert_ids[i] = -1;
}
