// The receiving half of a dispatch: lists the rows of each expert, and brings them to where it reads them.
#pragma once

#include "low_latency_dispatch.cuh"

// The lines of a token's local experts.
struct Locals {
    Vec lines[kLocalLines];

    __device__ __forceinline__ u32 of(int slot) const {
        const Vec& line = lines[slot / kLocalsOfLine];
        return (slot % 4 < 2 ? line.x : line.z) >> (slot % 2 * 16) & 0xffff;
    }
};

__device__ __forceinline__ bool read_locals(const Buffers& b, Waits& wait, int source, int token, Locals& locals) {
    const u8* at = b.meta_of(b.rank, source, token, wait.epoch);
#pragma unroll
    for (int n = 0; n < kLocalLines; ++n) {
        locals.lines[n] = load_shared_vec(at + 16 * n);
    }
    bool came = true;
#pragma unroll
    for (int n = 0; n < kLocalLines; ++n) {
        came = came && (is_of(locals.lines[n], wait.epoch) || wait.for_line(at + 16 * n, source, locals.lines[n]));
    }
    return came;
}

// What is read of a row for one vector: itself, or its codes, and where it travelled as lines the second line.
struct Raw {
    Vec first, second;
};

template <bool kAsLines>
__device__ __forceinline__ Raw load_raw(const Buffers& b, int source, int token, int i) {
    Raw raw;
    if (kAsLines) {
        raw.first = load_shared_vec(b.row_line(b.rank, source, token, i));
        raw.second = load_shared_vec(b.row_line(b.rank, source, token, kVectors + (FP8 ? i / kScaleVectors : i)));
        return raw;
    }
    const u8* row = b.row(b.rank, source, token);
#if FP8
    const uint2 codes = __ldcv(reinterpret_cast<const uint2*>(row) + i);
    raw.first.x = codes.x;
    raw.first.z = codes.y;
    raw.second.x = __ldcv(reinterpret_cast<const u32*>(row + HIDDEN) + i / kScaleVectors);
#else
    raw.first = load_shared_vec(row + 16ull * i);
#endif
    return raw;
}

// The vector as the experts take it; false where it did not come in time.
template <bool kAsLines>
__device__ __forceinline__ bool finish_raw(const Buffers& b, Waits& wait, int source, int token, int i, Raw& raw,
                                           Vec& v) {
    if (kAsLines) {
        const u8* first = b.row_line(b.rank, source, token, i);
        const u8* second = b.row_line(b.rank, source, token, kVectors + (FP8 ? i / kScaleVectors : i));
        if ((!is_of(raw.first, wait.epoch) && !wait.for_line(first, source, raw.first)) ||
            (!is_of(raw.second, wait.epoch) && !wait.for_line(second, source, raw.second))) {
            return false;
        }
    }
#if FP8
    v = dequantize(Codes{raw.first.x, raw.first.z}, __uint_as_float(raw.second.x));
#else
    v = kAsLines ? Vec{raw.first.x, raw.first.z, raw.second.x, raw.second.z} : raw.first;
#endif
    return true;
}

// A warp brings a part of a row to where the experts read it.
template <bool kAsLines>
__device__ __forceinline__ void move_row(const Buffers& b, Waits& wait, int source, int token, int begin, int end,
                                         Vec* there) {
    constexpr int kAhead = kAsLines ? 2 : 4;
    for (int base = begin + threadIdx.x % 32; base < end; base += kAhead * 32) {
        Raw raw[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (base + j * 32 < end) {
                raw[j] = load_raw<kAsLines>(b, source, token, base + j * 32);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * 32;
            Vec v;
            if (i < end && finish_raw<kAsLines>(b, wait, source, token, i, raw[j], v)) {
                there[i] = v;
            }
        }
    }
    __syncwarp();
}

// A warp waits for a row, and moves a part of it to `there` unless that is null and it lies where it is read.
__device__ __forceinline__ void take_row(const Buffers& b, Waits& wait, bool as_lines, int source, int token, int part,
                                         int parts, u8* there) {
    const int begin = part_begin(part, parts), end = part_begin(part + 1, parts);
    if (as_lines) {
        u8* to = there ? there : b.row(b.rank, source, token);
        move_row<true>(b, wait, source, token, begin, end, reinterpret_cast<Vec*>(to));
    } else if (__all_sync(kAllLanes, wait_for_row(b, wait, b.row_flags_of(b.rank, source, token), source)) && there) {
        move_row<false>(b, wait, source, token, begin, end, reinterpret_cast<Vec*>(there));
    }
}

// The rows on the group's list, each by a warp, or by several where there are few; the sources in turns, since each sends
// in the order of its tokens.
__device__ __forceinline__ void take_listed(const Params& p, Waits& wait, Shared& shared, int count, int expert) {
    const Buffers& b = p.common.buffers;
    const int thread = threadIdx.x % kThreads;
    for (int n = thread; n < count; n += kThreads) {
        const int source = shared.arrivals[n].source;
        for (int s = n == 0 ? 0 : shared.arrivals[n - 1].source + 1; s <= source; ++s) {
            shared.begins[s] = n;
        }
        for (int s = source + 1; n == count - 1 && s <= RANKS; ++s) {
            shared.begins[s] = count;
        }
    }
    Receivers::sync();
    int most = 0;
    for (int source = 0; count > 0 && source < RANKS; ++source) {
        most = max(most, shared.begins[source + 1] - shared.begins[source]);
    }
    const u64 first = static_cast<u64>(expert) * RANKS * b.capacity;
    const int parts = max(1, kWarps / max(count, 1));
    for (int task = thread / 32; task < most * RANKS * parts; task += kWarps) {
        const int part = task % parts, source = task / parts % RANKS;
        const int n = shared.begins[source] + task / parts / RANKS;
        if (n < shared.begins[source + 1]) {
            const Arrival a = shared.arrivals[n];
            const bool as_lines = shared.tokens_of(source) <= b.line_tokens;
            take_row(b, wait, as_lines, source, a.token, part, parts, p.out + 2 * HIDDEN * (first + a.position));
        }
    }
    Receivers::sync();
}

// All rows that arrive, each part by a warp, for experts that take rows by reference.
__device__ __forceinline__ void take_all(const Params& p, Waits& wait, const Shared& shared) {
    const Buffers& b = p.common.buffers;
    int most = 0;
    bool moves = p.out != nullptr;
    for (int source = 0; source < RANKS; ++source) {
        most = max(most, shared.tokens_of(source));
        moves |= shared.tokens_of(source) <= b.line_tokens;
    }
    const int parts = moves ? p.take_parts : 1;
    // Groups that have no expert to list go first.
    const int groups = gridDim.x, group = (blockIdx.x + groups - p.num_local_experts % groups) % groups;
    const int first = threadIdx.x % kThreads / 32 * groups + group;
    for (int task = first; task < most * parts * RANKS; task += groups * kWarps) {
        const int source = task % RANKS, part = task / RANKS % parts, token = task / RANKS / parts;
        Locals locals;
        if (token >= shared.tokens_of(source) || !read_locals(b, wait, source, token, locals)) {
            continue;
        }
        bool has_expert = false;
#pragma unroll
        for (int slot = 0; slot < TOPK; ++slot) {
            has_expert |= locals.of(slot) != kNotHere;
        }
        if (has_expert) {
            u8* there = p.out ? p.out + 2 * HIDDEN * b.index(source, token) : nullptr;
            take_row(b, wait, shared.tokens_of(source) <= b.line_tokens, source, token, part, parts, there);
        }
    }
}

// Learns from every source how many tokens it has.
__device__ __forceinline__ void read_headers(const Params& p, Waits& wait, Shared& shared, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int thread = threadIdx.x % kThreads;
    if (thread < 32) {
        u32 tokens = 0;
        if (thread < RANKS && alive >> thread & 1) {
            u64* header = b.header_of(b.rank, thread, wait.epoch);
            if (!wait.for_number(header, thread, tokens)) {
                tokens = 0;
            }
#if DEVICE_API
            else if (!b.reaches(thread)) {
                settle(header, static_cast<u64>(wait.epoch) << 32 | tokens);
            }
#endif
        }
        __syncwarp();
        int before = 0;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            const int of_rank = __shfl_sync(kAllLanes, static_cast<int>(tokens), rank);
            before += rank < thread ? of_rank : 0;
        }
        if (thread <= RANKS) {
            shared.before[thread] = before;
        }
    }
    Receivers::sync();
}

// Reads every source's slots and lists the rows of one expert; in the expanded form also takes them.
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
        u32 slots = 0;
        Locals locals;
        if (i < total && read_locals(b, wait, source, token, locals)) {
#pragma unroll
            for (int slot = 0; slot < TOPK; ++slot) {
                slots |= locals.of(slot) == static_cast<u32>(expert) ? 1u << slot : 0u;
            }
        }
        __syncwarp();
        const bool is_mine = slots && p.expert_row_ids == nullptr && token % p.split == part;
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
            take_listed(p, wait, shared, to_take, expert);
            to_take = 0;
        }
    }
    if (p.expert_row_ids == nullptr) {
        take_listed(p, wait, shared, to_take, expert);
    }
    if (thread == 0 && part == 0) {
        p.expert_num_tokens[expert] = listed;
    }
}

__device__ __forceinline__ void receive_all(const Params& p, Shared& shared) {
    const Common& c = p.common;
    const bool by_reference = p.expert_row_ids != nullptr;
    const int lists = p.num_local_experts * p.split;
    if (!by_reference && static_cast<int>(blockIdx.x) >= lists) {
        return;
    }
    const u32 epoch = static_cast<u32>(*reinterpret_cast<volatile u64*>(&c.counters->dispatch) >> 32);
    Waits wait(c.limits, epoch);
    read_headers(p, wait, shared, c.alive());
    for (int task = blockIdx.x; task < lists; task += gridDim.x) {
        list_expert(p, wait, shared, task / p.split, task % p.split);
    }
    if (by_reference) {
        take_all(p, wait, shared);
    }
}
