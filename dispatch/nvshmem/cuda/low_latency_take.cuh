// The receiving half of a dispatch: lists the rows of each expert, and brings them to where it reads them.
#pragma once

#include "low_latency_dispatch.cuh"

// The slots, as bits, of a token whose local expert `is_wanted`; none where they did not come in time.
template <typename Wanted>
__device__ __forceinline__ u32 slots_where(const Buffers& b, Waits& wait, int source, int token,
                                           const Wanted& is_wanted) {
    constexpr int kAtOnce = kLocalLines == 2 ? 2 : 1;  // lines on their way
    const u8* at = b.meta_of(b.rank, source, token, wait.epoch);
    u32 slots = 0;
#pragma unroll 1
    for (int first = 0; first < kLocalLines; first += kAtOnce) {
        Vec lines[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            lines[n] = load_shared_vec(at + 16 * min(first + n, kLocalLines - 1));
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const int line = min(first + n, kLocalLines - 1);
            if (!is_of(lines[n], wait.epoch) && !wait.for_line(at + 16 * line, source, lines[n])) {
                return 0;
            }
            const Vec& v = lines[n];
            const u32 four[kLocalsOfLine] = {v.x & 0xffff, v.x >> 16, v.z & 0xffff, v.z >> 16};
#pragma unroll
            for (int i = 0; i < kLocalsOfLine; ++i) {
                slots |= is_wanted(four[i]) ? 1u << (line * kLocalsOfLine + i) : 0u;
            }
        }
    }
    return slots;
}

// What is read of a row for one vector: itself, or its codes and their scale.
struct Raw {
    Vec data;

    Raw() = default;
    __device__ __forceinline__ Raw(const u8* row, int i) {
#if FP8
        const uint2 codes = __ldcv(reinterpret_cast<const uint2*>(row) + i);
        data.x = codes.x;
        data.y = codes.y;
        data.z = __ldcv(reinterpret_cast<const u32*>(row + HIDDEN) + i / kScaleVectors);
#else
        data = load_shared_vec(row + 16ull * i);
#endif
    }

    // As the experts take it.
    __device__ __forceinline__ Vec plain() const {
        return FP8 ? dequantize(Codes{data.x, data.y}, __uint_as_float(data.z)) : data;
    }
};

// A warp brings a part of a row that is there to where the experts read it.
__device__ __forceinline__ void move_plain(const u8* row, int begin, int end, Vec* there) {
    constexpr int kAhead = 3;  // as many as there are registers for
    for (int base = begin + threadIdx.x % 32; base < end; base += kAhead * 32) {
        Raw raw[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (base + j * 32 < end) {
                raw[j] = Raw(row, base + j * 32);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (base + j * 32 < end) {
                there[base + j * 32] = raw[j].plain();
            }
        }
    }
    __syncwarp();
}

// This thread's vector of a packet as the experts take it.
__device__ __forceinline__ void unpack_packet(Vec v, int packet, Vec* there) {
    const int vector = packet * kPacketVectors + packet_slot();
#if FP8
    constexpr int kGroupVectors = kScaleVectors / 2;  // of sixteen codes
    const u32 first = __shfl_sync(kAllLanes, v.x, threadIdx.x % 32 | kPacketVectors);
    const u32 next = __shfl_sync(kAllLanes, v.z, threadIdx.x % 32 | kPacketVectors);
    const bool is_of_first = vector / kGroupVectors == packet * kPacketVectors / kGroupVectors;
    const float scale = __uint_as_float(is_of_first ? first : next);
    if (packet_slot() < kPacketVectors && vector < kVectors / 2) {
        there[2 * vector] = dequantize(Codes{v.x, v.y}, scale);
        there[2 * vector + 1] = dequantize(Codes{v.z, v.w}, scale);
    }
#else
    if (packet_slot() < kPacketVectors && vector < kVectors) {
        there[vector] = v;
    }
#endif
}

// A warp waits for packets of a row, and brings them to where the experts read it.
__device__ __forceinline__ void move_packets(const Buffers& b, Waits& wait, int source, int token, int begin, int end,
                                             Vec* there) {
    constexpr int kAhead = 4;
    const int in_warp = threadIdx.x % 32 / kPacketThreads;
    const u8* at = b.row_packet(b.rank, source, token, begin + in_warp);
    for (int base = begin; base < end; base += kAhead * kWarpPackets, at += kAhead * kWarpPackets * kPacketBytes) {
        Vec v[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (base + j * kWarpPackets < end) {
                v[j] = load_packets(at + j * kWarpPackets * kPacketBytes);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (base + j * kWarpPackets < end && wait.for_packets(at + j * kWarpPackets * kPacketBytes, source, v[j])) {
                unpack_packet(v[j], base + j * kWarpPackets + in_warp, there);
            }
        }
    }
}

// A warp waits for a row, and moves a part of it to `there` unless that is null and it lies where it is read.
__device__ __forceinline__ void take_row(const Buffers& b, Waits& wait, bool as_packets, int source, int token,
                                         int part, int parts, u8* there) {
    if (as_packets) {
        const int begin = packet_begin<kWarpPackets>(part, parts, kRowPackets);
        const int end = packet_begin<kWarpPackets>(part + 1, parts, kRowPackets);
        u8* to = there ? there : b.row(b.rank, source, token);
        move_packets(b, wait, source, token, begin, end, reinterpret_cast<Vec*>(to));
    } else if (__all_sync(kAllLanes, wait_for_row(b, wait, b.row_flags_of(b.rank, source, token), source)) && there) {
        const int begin = part_begin(part, parts), end = part_begin(part + 1, parts);
        move_plain(b.row(b.rank, source, token), begin, end, reinterpret_cast<Vec*>(there));
    }
}

// The group's share of the rows on its list, `count` of the expert's from number `first` on; the warps of all groups of
// the expert have turns at them.
__device__ __forceinline__ void take_listed(const Params& p, Waits& wait, const Shared& shared, int expert, int share,
                                            int first, int count) {
    const Buffers& b = p.common.buffers;
    const int warps = p.shares * kWarps, parts = p.parts_of_row(warps, count);
    for (int task = threadIdx.x % kThreads / 32 * p.shares + share; task < count * parts; task += warps) {
        const int part = task % parts, n = task / parts;
        const Arrival a = shared.arrivals[n];
        const bool as_packets = b.rows_are_packets(shared.tokens_of(a.source));
        u8* there = p.out + 2ull * HIDDEN * (expert * RANKS * b.capacity + first + n);
        take_row(b, wait, as_packets, a.source, a.token, part, parts, there);
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
        moves |= shared.tokens_of(source) > 0 && b.rows_are_packets(shared.tokens_of(source));
    }
    // Groups that have no expert to list go first.
    const int groups = gridDim.x, group = (blockIdx.x + groups - p.num_local_experts % groups) % groups;
    const int parts = moves ? p.parts_of_row(groups * kWarps, most * RANKS) : 1;
    const int first = threadIdx.x % kThreads / 32 * groups + group;
    for (int task = first; task < most * parts * RANKS; task += groups * kWarps) {
        const int source = task % RANKS, part = task / RANKS % parts, token = task / RANKS / parts;
        const auto is_here = [](u32 local) { return local != kNotHere; };
        const bool is_listed = token < shared.tokens_of(source) && slots_where(b, wait, source, token, is_here);
        if (__all_sync(kAllLanes, is_listed)) {
            u8* there = p.out ? p.out + 2 * HIDDEN * b.index(source, token) : nullptr;
            take_row(b, wait, b.rows_are_packets(shared.tokens_of(source)), source, token, part, parts, there);
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

// Reads every source's slots and lists the rows of one expert; in the expanded form also takes a share of them.
__device__ __forceinline__ void list_expert(const Params& p, Waits& wait, Shared& shared, int expert, int share) {
    const Buffers& b = p.common.buffers;
    const bool expands = p.expert_row_ids == nullptr;
    const int thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32;
    const int total = shared.before[RANKS], max_rows = RANKS * b.capacity;
    int listed = 0, taken = 0;
    for (int start = 0; start < total; start += kThreads) {
        const int i = start + thread;
        int source = 0;
#pragma unroll
        for (int rank = 1; rank < RANKS; ++rank) {
            source = i >= shared.before[rank] ? rank : source;
        }
        const int token = i - shared.before[source], row = source * b.capacity + token;
        const auto is_its = [=](u32 local) { return local == static_cast<u32>(expert); };
        const u32 slots = i < total ? slots_where(b, wait, source, token, is_its) : 0;
        __syncwarp();
        const u32 have = __ballot_sync(kAllLanes, slots != 0);
        if (lane == 0) {
            shared.warp_counts[warp] = __popc(have);
        }
        Receivers::sync();
        int position = listed + __popc(have & ((1u << lane) - 1));
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            position += w < warp ? shared.warp_counts[w] : 0;
            listed += shared.warp_counts[w];
        }
        if (slots && share == 0) {
            if (!expands) {
                p.expert_row_ids[static_cast<u64>(expert) * max_rows + position] = row;
            }
            for (u32 left = slots; left; left &= left - 1) {
                p.positions[row * TOPK + __ffs(left) - 1] = position;
            }
        }
        if (slots && expands) {
            shared.arrivals[position - taken] = Arrival{source, token};
        }
        Receivers::sync();
        const bool is_last = start + kThreads >= total;
        if (expands && (is_last || listed - taken > kListed - kThreads)) {
            take_listed(p, wait, shared, expert, share, taken, listed - taken);
            taken = listed;
        }
    }
    if (thread == 0 && share == 0) {
        p.expert_num_tokens[expert] = listed;
    }
}

__device__ __forceinline__ void receive_all(const Params& p, Shared& shared) {
    const Common& c = p.common;
    const bool by_reference = p.expert_row_ids != nullptr;
    const int lists = p.num_local_experts * p.shares;
    // A rank without experts waits for the headers, too: it must not be two batches ahead of anybody.
    if (!by_reference && static_cast<int>(blockIdx.x) >= max(lists, 1)) {
        return;
    }
    const u32 epoch = static_cast<u32>(*reinterpret_cast<volatile u64*>(&c.counters->dispatch) >> 32);
    Waits wait(c.limits, epoch);
    read_headers(p, wait, shared, c.alive());
    for (int task = blockIdx.x; task < lists; task += gridDim.x) {
        list_expert(p, wait, shared, task / p.shares, task % p.shares);
    }
    if (by_reference) {
        take_all(p, wait, shared);
    }
}
