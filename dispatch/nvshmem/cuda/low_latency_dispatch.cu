// Sends each token once to every rank that has one of its experts, and lists there which rows each expert has.
//
// Before: rows [T, K], topk_ids and weights [T, TOPK] on each rank. After, on the rank of an expert e: its rows in the
// order (source, token), as numbers s * C + t in expert_row_ids [El, R * C] (by reference; the row lies where its sender
// put it) or copied to out [El, R * C, K]; expert_num_tokens [El]; positions [R * C, TOPK]: which row of its expert each
// slot is, for the combine.
// Example: two ranks of one expert each, C = 4; rank 0's token 0 goes to both experts, rank 1's token 0 to expert 0:
// rank 0 has expert_row_ids [[0, 4]], rank 1 [[0]].
#include "low_latency.cuh"

using Waits = Wait<PHASE_DISPATCH>;

struct Params {
    Common common;
    const u8* rows;
    const float* weights;
    const int* locals;  // [num_ids]: index of each id on its rank
    u8* out;            // rows for the experts where they are not read from where they arrive; else null
    int* expert_num_tokens;
    int* expert_row_ids;  // null for the expanded form
    int* positions;
    int num_local_experts;
    int split;  // blocks that list the same expert and share the copying of its rows
};

constexpr int kMetaTokens = 16;  // whose slots one task sends
constexpr int kListed = 2 * kThreads;

struct Arrival {
    int source, token, position;  // position: its row of the expert
};

struct Shared {
    u64 ticket;
    int before[RANKS + 1];   // tokens of the ranks before each
    int warp_counts[kWarps];  // rows of the expert, and in the upper half those that this group takes
    Arrival arrivals[kListed];
    int begins[RANKS + 1];  // of each source in arrivals
};

// One vector of a row, in registers, to every rank that is to have it.
__device__ __forceinline__ void put(const Buffers& b, Vec v, int i, bool is_inside, bool as_lines, int token, u32 ranks,
                                    u32 epoch) {
#if FP8
    float scale;
    const Codes codes = quantize(unpack(v), scale);
    const bool has_scale = i % kScaleVectors == 0;
#endif
#pragma unroll
    for (int step = 1; step <= RANKS; ++step) {
        const int peer = (b.rank + step) % RANKS;
        if (!is_inside || !(ranks >> peer & 1)) {
            continue;
        }
        if (as_lines) {
#if FP8
            store_line(b.row_line(peer, b.rank, token, i), codes.low, codes.high, epoch);
            if (has_scale) {
                const int line = kVectors + i / kScaleVectors;
                store_line(b.row_line(peer, b.rank, token, line), __float_as_uint(scale), 0, epoch);
            }
#else
            store_line(b.row_line(peer, b.rank, token, i), v.x, v.y, epoch);
            store_line(b.row_line(peer, b.rank, token, kVectors + i), v.z, v.w, epoch);
#endif
        } else {
            u8* row = b.row(peer, b.rank, token);
#if FP8
            reinterpret_cast<uint2*>(row)[i] = make_uint2(codes.low, codes.high);
            if (has_scale) {
                reinterpret_cast<float*>(row + HIDDEN)[i / kScaleVectors] = scale;
            }
#else
            reinterpret_cast<Vec*>(row)[i] = v;
#endif
        }
    }
}

// The slots of some tokens to every rank, ahead of the rows, so that they are listed when those come.
__device__ __forceinline__ void send_meta(const Params& p, int task, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int first = task * kMetaTokens * TOPK, slots = min((task + 1) * kMetaTokens, p.common.num_tokens) * TOPK - first;
    for (int i = threadIdx.x; i < slots * RANKS; i += kThreads) {
        const int peer = i / slots, slot = first + i % slots, id = p.common.topk_ids[slot];
        const u32 weight = __float_as_uint(p.weights[slot]);
        const bool is_here = id >= 0 && id < p.common.num_ids && p.common.owners[id] == peer;
        if (alive >> peer & 1) {
            u8* lines = b.meta_of(peer, b.rank, slot / TOPK, epoch);
            store_line(lines + 16 * (slot % TOPK), weight, is_here ? p.locals[id] : -1, epoch);
        }
    }
}

// A part of a token to every rank that has one of its experts; what it needs is read before it is known who that is.
__device__ __forceinline__ void send(const Params& p, int task, int parts, u32 epoch, u32 alive) {
    constexpr int kAhead = 2;
    const Buffers& b = p.common.buffers;
    const int part = task % parts, token = task / parts;
    const int begin = part_begin(part, parts), end = part_begin(part + 1, parts);
    const Vec* row = reinterpret_cast<const Vec*>(p.rows + 2ull * HIDDEN * token);
    const bool as_lines = p.common.num_tokens <= b.line_tokens;
    Vec v[kAhead];
    auto load = [&](int base) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads + threadIdx.x;
            v[j] = i < end ? row[i] : Vec{0, 0, 0, 0};
        }
    };
    load(begin);
    int owner;
    const u32 ranks = p.common.destinations(token, alive, owner);
    for (int base = begin; base < end; base += kAhead * kThreads) {
        if (base > begin) {
            load(base);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads + threadIdx.x;
            put(b, v[j], i, i < end, as_lines, token, ranks, epoch);
        }
    }
    if (!as_lines) {
        Senders::sync();
        if (threadIdx.x < RANKS && ranks >> threadIdx.x & 1) {
            u64* flags = b.row_flags_of(threadIdx.x, b.rank, token);
            store_release(reinterpret_cast<u32*>(flags) + part, epoch);
        }
    }
}

// Which of the token's slots are for `expert`, as bits; `first` is set where it is the first expert here at all.
__device__ __forceinline__ u32 slots_of(const Params& p, Waits& wait, int source, int token, int expert, bool& first) {
    const Buffers& b = p.common.buffers;
    const u8* lines = b.meta_of(b.rank, source, token, wait.epoch);
    constexpr int kBatch = TOPK < 4 ? TOPK : 4;
    u32 slots = 0;
    bool any = false;
    first = false;
#pragma unroll 1
    for (int start = 0; start < TOPK; start += kBatch) {
        Vec line[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            line[k] = load_shared_vec(lines + 16 * min(start + k, TOPK - 1));
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            if (start + k < TOPK && (is_of(line[k], wait.epoch) ||
                                     wait.for_line(lines + 16 * (start + k), source, line[k]))) {
                const int local = static_cast<int>(line[k].z);
                slots |= local == expert ? 1u << (start + k) : 0u;
                first |= !any && local == expert;
                any |= local >= 0;
            }
        }
    }
    return slots;
}

// One vector of a received row as the experts take it; false where it did not come in time.
__device__ __forceinline__ bool received(const Buffers& b, Waits& wait, bool as_lines, const Arrival& a, int i, Vec& v) {
    if (as_lines) {
        const int other = FP8 ? kVectors + i / kScaleVectors : kVectors + i;
        const u8* at_first = b.row_line(b.rank, a.source, a.token, i);
        const u8* at_second = b.row_line(b.rank, a.source, a.token, other);
        Vec first = load_shared_vec(at_first), second = load_shared_vec(at_second);
        if ((!is_of(first, wait.epoch) && !wait.for_line(at_first, a.source, first)) ||
            (!is_of(second, wait.epoch) && !wait.for_line(at_second, a.source, second))) {
            return false;
        }
#if FP8
        v = dequantize(Codes{first.x, first.z}, __uint_as_float(second.x));
#else
        v = Vec{first.x, first.z, second.x, second.z};
#endif
        return true;
    }
    const u8* row = b.row(b.rank, a.source, a.token);
#if FP8
    const uint2 codes = __ldcv(reinterpret_cast<const uint2*>(row) + i);
    v = dequantize(Codes{codes.x, codes.y}, __ldcv(reinterpret_cast<const float*>(row + HIDDEN) + i / kScaleVectors));
#else
    v = load_shared_vec(row + 16ull * i);
#endif
    return true;
}

// Brings one row to where the experts read it.
__device__ __forceinline__ void take_row(const Params& p, Waits& wait, const Arrival& a, bool as_lines, int expert) {
    const Buffers& b = p.common.buffers;
    const u64 row = p.expert_row_ids ? static_cast<u64>(a.source) * b.capacity + a.token
                                     : static_cast<u64>(expert) * RANKS * b.capacity + a.position;
    Vec* there = reinterpret_cast<Vec*>(p.out ? p.out + 2 * HIDDEN * row : b.row(b.rank, a.source, a.token));
    constexpr int kAhead = 2;
    for (int base = threadIdx.x % kThreads; base < kVectors; base += kAhead * kThreads) {
        Vec v[kAhead];
        bool is_there[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads;
            is_there[j] = i < kVectors && received(b, wait, as_lines, a, i, v[j]);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (is_there[j]) {
                there[base + j * kThreads] = v[j];
            }
        }
    }
}

// Waits for the rows on the list, and takes those that are not where the experts read them; the sources in turns, since
// each sends in the order of its tokens.
__device__ __forceinline__ void take(const Params& p, Waits& wait, Shared& shared, int count, int expert) {
    const Buffers& b = p.common.buffers;
    const int thread = threadIdx.x % kThreads;
    const auto as_lines = [&](int source) {
        return shared.before[source + 1] - shared.before[source] <= b.line_tokens;
    };
    for (int n = thread; n < count; n += kThreads) {
        const Arrival a = shared.arrivals[n];
        for (int s = n == 0 ? 0 : shared.arrivals[n - 1].source + 1; s <= a.source; ++s) {
            shared.begins[s] = n;
        }
        for (int s = a.source + 1; n == count - 1 && s <= RANKS; ++s) {
            shared.begins[s] = count;
        }
        if (p.out == nullptr && !as_lines(a.source)) {
            wait.for_flags(b.row_flags_of(b.rank, a.source, a.token), a.source);
        }
    }
    Receivers::sync();
    bool is_more = count > 0;
    for (int turn = 0; is_more; ++turn) {
        is_more = false;
        for (int source = 0; source < RANKS; ++source) {
            const int n = shared.begins[source] + turn;
            const bool lines = as_lines(source);
            if (n >= shared.begins[source + 1] || (p.out == nullptr && !lines)) {
                continue;
            }
            is_more = true;
            const Arrival a = shared.arrivals[n];
            if (lines || wait.for_flags(b.row_flags_of(b.rank, a.source, a.token), a.source)) {
                take_row(p, wait, a, lines, expert);
            }
        }
    }
    Receivers::sync();
}

// Learns from every source how many tokens it has.
__device__ __forceinline__ void read_headers(const Params& p, Waits& wait, Shared& shared, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int thread = threadIdx.x % kThreads;
    if (thread < 32) {
        int tokens = 0;
        Vec line;
        if (thread < RANKS && alive >> thread & 1 && wait.for_line(b.header_of(b.rank, thread, wait.epoch), thread, line)) {
            tokens = static_cast<int>(line.x);
        }
        __syncwarp();
        int before = 0;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            const int of_rank = __shfl_sync(kAllLanes, tokens, rank);
            before += rank < thread ? of_rank : 0;
        }
        if (thread <= RANKS) {
            shared.before[thread] = before;
        }
    }
    Receivers::sync();
}

// Reads every source's slots, and lists and takes the rows of one expert.
__device__ __forceinline__ void list_expert(const Params& p, Waits& wait, Shared& shared, int expert, int part) {
    const Buffers& b = p.common.buffers;
    const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32;
    const u32 lanes_before = (1u << lane) - 1;
    const int total = shared.before[RANKS], max_rows = RANKS * b.capacity;
    int listed = 0, to_take = 0;
    for (int start = 0; start < total; start += kThreads) {
        const int i = start + thread;
        int source = 0;
#pragma unroll
        for (int rank = 1; rank < RANKS; ++rank) {
            source = i >= shared.before[rank] ? rank : source;
        }
        const int token = i - shared.before[source], row = source * b.capacity + token;
        bool first = false;
        const u32 slots = i < total ? slots_of(p, wait, source, token, expert, first) : 0;
        __syncwarp();
        // A row that is read by reference is taken by its first expert alone, the rows of an expert by its groups in turns.
        const bool is_mine = slots && (first || p.expert_row_ids == nullptr) && token % p.split == part;
        const u32 have = __ballot_sync(kAllLanes, slots != 0), mine = __ballot_sync(kAllLanes, is_mine);
        if (lane == 0) {
            shared.warp_counts[warp] = __popc(mine) << 16 | __popc(have);
        }
        Receivers::sync();
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            before += w < warp ? shared.warp_counts[w] : 0;
            all += shared.warp_counts[w];
        }
        const int position = listed + (before & 0xffff) + __popc(have & lanes_before);
        if (slots && part == 0) {
            if (p.expert_row_ids) {
                p.expert_row_ids[static_cast<u64>(expert) * max_rows + position] = row;
            }
            for (u32 left = slots; left; left &= left - 1) {
                p.positions[row * TOPK + __ffs(left) - 1] = position;
            }
        }
        if (is_mine) {
            shared.arrivals[to_take + (before >> 16) + __popc(mine & lanes_before)] = Arrival{source, token, position};
        }
        listed += all & 0xffff;
        to_take += all >> 16;
        Receivers::sync();
        if (to_take > kListed - kThreads) {
            take(p, wait, shared, to_take, expert);
            to_take = 0;
        }
    }
    take(p, wait, shared, to_take, expert);
    if (thread == 0 && part == 0) {
        p.expert_num_tokens[expert] = listed;
    }
}

__device__ __forceinline__ void send_all(const Params& p, Shared& shared) {
    const Common& c = p.common;
    const Buffers& b = c.buffers;
    Tickets<Senders> tickets(&c.counters->dispatch, &shared.ticket);
    const u32 alive = c.alive();
    const int parts = c.num_tokens <= b.line_tokens ? c.line_parts : kRowParts;
    const int meta_tasks = (c.num_tokens + kMetaTokens - 1) / kMetaTokens;
    const u32 total = meta_tasks + c.num_tokens * parts;
    for (;;) {
        const u64 ticket = tickets.next();
        const u32 epoch = static_cast<u32>(ticket >> 32), task = static_cast<u32>(ticket);
        if (task == 0) {
            if (threadIdx.x < RANKS && alive >> threadIdx.x & 1) {
                store_line(b.header_of(threadIdx.x, b.rank, epoch), c.num_tokens, 0, epoch);
            }
            if (threadIdx.x == 0) {
                c.counters->combine = static_cast<u64>(epoch) << 32;
            }
        }
        if (task >= total) {
            return;
        }
        if (static_cast<int>(task) < meta_tasks) {
            send_meta(p, static_cast<int>(task), epoch, alive);
        } else {
            send(p, static_cast<int>(task) - meta_tasks, parts, epoch, alive);
        }
    }
}

__device__ __forceinline__ void receive_all(const Params& p, Shared& shared) {
    const Common& c = p.common;
    const int total = p.num_local_experts * p.split;
    if (static_cast<int>(blockIdx.x) >= total) {
        return;
    }
    const u32 epoch = static_cast<u32>(*reinterpret_cast<volatile u64*>(&c.counters->dispatch) >> 32);
    Waits wait(c.limits, epoch);
    read_headers(p, wait, shared, c.alive());
    for (int task = blockIdx.x; task < total; task += gridDim.x) {
        list_expert(p, wait, shared, task / p.split, task % p.split);
    }
}

extern "C" __global__ void __launch_bounds__(2 * kThreads, 2) low_latency_dispatch(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    wait_for_kernels_before();
    let_next_kernel_come_up();
    if (threadIdx.x < kThreads) {
        if (p.common.phases & SEND) {
            send_all(p, shared);
        }
    } else if (p.common.phases & RECEIVE) {
        receive_all(p, shared);
    }
}
