// Logical expert ids to physical ones, and the record of the load: the rule of moe_ep/eplb/filling.py in one launch.
//
// Before: ids [tokens, slots] (logical, -1 for none), table [experts, width] (replicas, -1 padded), counts [experts].
// After: out [tokens, slots] (physical), load [physical] grown by the number of each id of a row that is counted.
//
// A block does one tile of rows_per_tile rows: thread t has slots t, t + threads and so on, and expert t. What can go on
// meanwhile does: slots of experts with one replica are written before the others are divided, and while one warp
// divides (as many as the experts with several replicas fill), the rest finds out how many of its expert's slots come
// before each. The slots of an expert are bits, one word for 32 slots of the tile. All sums are of integers, so the
// order of the atomic additions does not show. The load gets one addition for each expert or replica of a tile, however
// hot it is. The kernel comes up while the one before it runs.
//
// Example: ids [[0, -1], [1, 0]], table [[0, 2], [1, -1]], counts [2, 1], one physical expert a rank. Expert 0 has two
// tokens, which are divided 1 and 1; ranks 0 and 2 are level, and it stays so. Its first token (row 0) goes to 0, the
// second (row 1) to 2: out [[0, -1], [1, 2]], load + [1, 1, 1].

#if IDS_64
typedef long long Id;
#else
typedef int Id;
#endif
#if MAP_64
typedef long long MapEntry;
#else
typedef int MapEntry;
#endif
#if OUT_64
typedef long long OutId;
#else
typedef int OutId;
#endif

constexpr int kCandidates = 4;
constexpr int kTurns = 6, kGroups = 3;
constexpr int kSlots = SLOTS;  // of a thread, at most
constexpr unsigned kExpertStep = 0x85EBCA6Bu;
constexpr unsigned short kSingle = 0xFFFF;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kNoLevel = 1 << 14;  // above every level and twice a tile

struct Params {
    const Id* ids;
    const int* num_counted_on_device;  // null where the host knows num_counted
    int* load;
    const MapEntry* table;
    const MapEntry* counts;
    OutId* out;
    int num_counted;
    int tokens, slots, rows_per_tile;
    int experts, width;
    int row_stride, column_stride;  // of the table
    int max_replicated;             // experts that can have several replicas
    int stride;                     // max_replicated made odd
    int words;                      // of 32 slots in a tile
    int ranks, ep_rank;
    unsigned rank_factor;  // ceil(2^32 / slots_per_rank), 0 where that is 1
    int dividing;          // threads that divide: max_replicated rounded up to whole warps, fewer than all
};

// Where things lie in shared memory. X is max_replicated.
struct Shared {
    int4* candidates;        // [X] physical experts, -1 behind the last
    uint2* ends;             // [X] tokens of the first candidate, of the first two, of the first three, 16 bits each
    unsigned* mine;          // [words, stride] which slots are an expert's
    int* spare;              // [32] where lanes add that have nothing to add
    int* num_replicated;     // experts with several replicas
    int* level;              // [ranks] tokens that this tile sends to each rank
    int* num_tokens;         // [experts] counted tokens
    int* first;              // [experts] the first replica
    unsigned short* before;  // [words, stride] an expert's slots in the words before
    unsigned short* expert;  // [X]
    unsigned short* label;   // [experts] place in the lists of X, kSingle for experts with one replica

    __device__ Shared(unsigned char* memory, const Params& p) {
        candidates = reinterpret_cast<int4*>(memory);
        ends = reinterpret_cast<uint2*>(candidates + p.max_replicated);
        mine = reinterpret_cast<unsigned*>(ends + p.max_replicated);
        spare = reinterpret_cast<int*>(mine + p.words * p.stride);
        num_replicated = spare + 32;
        level = num_replicated + 1;
        num_tokens = level + p.ranks + 1;
        first = num_tokens + p.experts;
        before = reinterpret_cast<unsigned short*>(first + p.experts);
        expert = before + p.words * p.stride;
        label = expert + p.max_replicated;
    }

    // What is counted in, `mine` to `num_tokens`, is one run of words. Behind the levels stands that of no rank.
    __device__ __forceinline__ void clear(const Params& p) const {
        int* none = level + p.ranks;
#pragma unroll 1
        for (int* at = reinterpret_cast<int*>(mine) + threadIdx.x; at < first; at += blockDim.x) {
            *at = at == none ? kNoLevel : 0;
        }
        for (int x = threadIdx.x; x < p.max_replicated; x += blockDim.x) {
            candidates[x] = make_int4(-1, -1, -1, -1);
            expert[x] = 0;
        }
    }
};

// Where a physical expert is; the place behind the last rank for none.
__device__ __forceinline__ int rank_of(const Params& p, int physical) {
    const int rank = p.rank_factor == 0 ? physical : static_cast<int>(__umulhi(physical, p.rank_factor));
    return physical < 0 ? p.ranks : rank;
}

// a / b for 0 <= a < 2^15 and 1 <= b <= 4.
__device__ __forceinline__ int divide_by_few(int a, int b) {
    const int factor = b == 3 ? 21846 : 65536 >> (b >> 1);
    return a * factor >> 16;
}

// A row of the table as if it had at most kCandidates replicas, all loads under way at once.
struct Row {
    const MapEntry* entries;
    int count;
    int leading[kCandidates];

    __device__ __forceinline__ void load(const Params& p, int expert) {
        if (expert >= p.experts) return;
        entries = p.table + static_cast<long long>(expert) * p.row_stride;
        count = static_cast<int>(p.counts[expert]);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            leading[i] = i < p.width ? static_cast<int>(entries[i * p.column_stride]) : -1;
        }
    }
};

// Writes what the tile has to know of an expert; if it has several replicas, its candidates, one on this rank first. A
// warp together, experts behind the last included.
__device__ __forceinline__ void enter_expert(const Params& p, const Shared& s, int expert, const Row& row) {
    const bool exists = expert < p.experts;
    const int count = exists ? row.count : 0, lane = threadIdx.x % 32;
    const unsigned replicated = __ballot_sync(kAll, count > 1);
    int x = 0;
    if (lane == 0 && replicated != 0) x = atomicAdd(s.num_replicated, __popc(replicated));
    x = __shfl_sync(kAll, x, 0) + __popc(replicated & ((1u << lane) - 1));
    if (exists) s.first[expert] = row.leading[0];
    if (exists) s.label[expert] = count > 1 ? static_cast<unsigned short>(x) : kSingle;
    if (count <= 1) return;
    s.expert[x] = static_cast<unsigned short>(expert);
    const int start = static_cast<int>((p.ep_rank + blockIdx.x + __umulhi(expert * kExpertStep, count)) % count);
    int* list = reinterpret_cast<int*>(s.candidates + x);
    int own = kCandidates, own_candidate = -1, first_candidate = -1;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
        if (i >= count) continue;
        int candidate = row.leading[i], place = i < start ? i - start + count : i - start;
        if (count > kCandidates) {
            const int column = start + i < count ? start + i : start + i - count;
            candidate = static_cast<int>(row.entries[column * p.column_stride]);
            place = i;
        }
        list[place] = candidate;
        if (place == 0) first_candidate = candidate;
        if (rank_of(p, candidate) == p.ep_rank && place < own) own = place, own_candidate = candidate;
    }
    if (own == kCandidates) return;
    list[own] = first_candidate;
    list[0] = own_candidate;
}

// A barrier of the first `threads` threads, whole warps.
template <bool kOneWarp>
__device__ __forceinline__ void sync_first(int threads) {
    if (kOneWarp) {
        __syncwarp();
    } else {
        asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    }
}

// How an expert's tokens are divided over its candidates; thread x has the expert of place x in the lists.
struct Division {
    int total, group;
    int4 candidates;
    int* spare;
    int* level[kCandidates];   // of each candidate's rank, to read
    int* target[kCandidates];  // the same to add to, the spare word where there is no candidate
    int share[kCandidates];

    // Begins evenly, and adds that to the levels. Nothing here branches: lanes without work add to words of their own.
    __device__ __forceinline__ Division(const Params& p, const Shared& s, int x) {
        const bool exists = x < p.max_replicated;
        const int expert = exists ? s.expert[x] : 0;
        candidates = exists ? s.candidates[x] : make_int4(-1, -1, -1, -1);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
        total = candidate[0] >= 0 ? s.num_tokens[expert] : 0;
        group = expert % kGroups;
        spare = s.spare + x % 32;
        int width = 1;
#pragma unroll
        for (int i = 1; i < kCandidates; ++i) width += candidate[i] >= 0;
        const int even = divide_by_few(total, width), rest = total - even * width;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            level[i] = s.level + rank_of(p, candidate[i]);
            target[i] = candidate[i] >= 0 ? level[i] : spare;
            share[i] = candidate[i] >= 0 ? even + (i < rest) : 0;
            atomicAdd(target[i], share[i]);
        }
    }

    // The shares that leave the fullest level as low as can be, given what else is at each. Water over the lowest k levels
    // alone would stand at (total + their sum) / k; it stands at the least of these, and covers what is not above it.
    __device__ __forceinline__ void fill(int (&levels)[kCandidates]) const {
        const int low = min(levels[0], levels[1]), high = max(levels[0], levels[1]);
        const int low2 = min(levels[2], levels[3]), high2 = max(levels[2], levels[3]);
        const int least = min(low, low2), most = max(high, high2);
        const int middle = max(low, low2), middle2 = min(high, high2);
        const int one = total + least, two = one + min(middle, middle2), three = two + max(middle, middle2);
        const int surface = min(min(one, two >> 1), min(divide_by_few(three, 3), (three + most) >> 2));
        int rest = total;
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) rest -= max(surface - levels[i], 0);
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            const int room = surface - levels[i];
            levels[i] = max(room, 0) + (room >= 0 && rest > 0);
            rest -= room >= 0;
        }
    }

    // The turns, together with the other `dividing` threads.
    template <bool kOneWarp>
    __device__ __forceinline__ void take_turns(int dividing) {
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
            const bool on = group == 0 && total > 0;
            int next[kCandidates];
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) next[i] = *level[i] - share[i];
            fill(next);
            sync_first<kOneWarp>(dividing);
#pragma unroll
            for (int i = 0; i < kCandidates; ++i) {
                const int change = on ? next[i] - share[i] : 0;
                atomicAdd(on ? target[i] : spare, change);
                share[i] += change;
            }
            group = group == kGroups - 1 ? 0 : group + 1;
            sync_first<kOneWarp>(dividing);
        }
    }

    // For the slots of the expert to see, and adds its tokens to the load.
    __device__ __forceinline__ void store(const Params& p, const Shared& s, int x) const {
        const int second = share[0] + share[1], third = second + share[2];
        s.ends[x] = make_uint2(share[0] | second << 16, third);
        const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            if (share[i] > 0) atomicAdd(p.load + candidate[i], share[i]);
        }
    }
};

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

// The next kernel may come up; all that the kernels before have written is seen from here on.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Shared s(memory, p);
    const int thread = threadIdx.x, threads = blockDim.x, lane = thread % 32;
    s.clear(p);
    __syncthreads();
    wait_for_previous_kernels();

    const int tile_slots = p.rows_per_tile * p.slots;
    const long long start = static_cast<long long>(blockIdx.x) * tile_slots;
    const long long all_slots = static_cast<long long>(p.tokens) * p.slots;
    const int num_slots = static_cast<int>(min(all_slots - start, static_cast<long long>(tile_slots)));
    const Id* ids = p.ids + start;
    OutId* out = p.out + start;
    int id[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        const int slot = thread + j * threads;
        id[j] = slot < num_slots ? static_cast<int>(ids[slot]) : -1;
    }
    const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
    const long long counted_slots = static_cast<long long>(num_counted) * p.slots - start;
#pragma unroll 1
    for (int expert = thread; expert - lane < p.experts; expert += threads) {
        Row row;
        row.load(p, expert);
        enter_expert(p, s, expert, row);
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
        if (id[j] >= 0 && thread + j * threads < counted_slots) atomicAdd(s.num_tokens + id[j], 1);
    }
    __syncthreads();

#pragma unroll 1
    for (int expert = thread; expert < p.experts; expert += threads) {
        const int amount = s.label[expert] == kSingle ? s.num_tokens[expert] : 0, physical = s.first[expert];
        if (amount == 0) continue;
        atomicAdd(s.level + rank_of(p, physical), amount);
        atomicAdd(p.load + physical, amount);
    }
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
    if (thread < p.dividing) {
        Division division(p, s, thread);
        __syncthreads();  // the levels are complete
        if (p.dividing == 32) {
            division.take_turns<true>(p.dividing);
        } else {
            division.take_turns<false>(p.dividing);
        }
        if (thread < p.max_replicated) division.store(p, s, thread);
    } else {
        __syncthreads();
        sum_before(p, s, (thread - p.dividing) / 32, (threads - p.dividing) / 32);
    }
    __syncthreads();

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
