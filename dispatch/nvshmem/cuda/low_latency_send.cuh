// The sending half of a dispatch: headers and slots of the tokens, then the rows, to ranks within reach and beyond it.
#pragma once

#include "low_latency_dispatch.cuh"
#include "low_latency_refresh.cuh"

#if FP8
__device__ __forceinline__ void store_codes(u8* row, Codes codes, float scale, int i) {
    reinterpret_cast<uint2*>(row)[i] = make_uint2(codes.low, codes.high);
    if (i % kScaleVectors == 0) {
        reinterpret_cast<float*>(row + HIDDEN)[i / kScaleVectors] = scale;
    }
}
#endif

// One vector of a row, in registers, to every rank that is to have it.
__device__ __forceinline__ void put(const Buffers& b, Vec v, int i, bool is_inside, int token, u32 ranks) {
#if FP8
    float scale;
    const Codes codes = quantize(v, scale);
#endif
#pragma unroll 1
    for (int step = 1; step <= RANKS; ++step) {
        const int peer = (b.rank + step) % RANKS;
        if (is_inside && ranks >> peer & 1) {
            u8* row = b.row(peer, b.rank, token);
#if FP8
            store_codes(row, codes, scale, i);
#else
            reinterpret_cast<Vec*>(row)[i] = v;
#endif
        }
    }
}

// A packet of each eight of threads to every rank that is to have it.
__device__ __forceinline__ void put_packets(const Buffers& b, Vec v, int packet, int token, u32 ranks) {
#pragma unroll 1
    for (int step = 1; step <= RANKS; ++step) {
        const int peer = (b.rank + step) % RANKS;
        if (ranks >> peer & 1) {
            store_packets(b.row_packet(peer, b.rank, token, packet), v);
        }
    }
}

// One line of what `peer` learns about a token: four local experts, or two weights.
__device__ __forceinline__ void store_meta(const Params& p, const Shared& shared, u8* at, int peer, int token, int line,
                                           u32 epoch) {
    const int first = token * TOPK;
    if (line >= kLocalLines) {
        const int slot = (line - kLocalLines) * kWeightsOfLine;
        const u32 next = slot + 1 < TOPK ? __float_as_uint(p.weights[first + slot + 1]) : 0;
        store_line(at, __float_as_uint(p.weights[first + slot]), next, epoch);
        return;
    }
    u32 locals[kLocalsOfLine];
#pragma unroll
    for (int i = 0; i < kLocalsOfLine; ++i) {
        const int slot = line * kLocalsOfLine + i;
        const int id = slot < TOPK ? p.common.topk_ids[first + slot] : -1;
        const Place place = id >= 0 && id < p.common.num_ids ? place_of(p, shared, id) : Place{kNotHere, kNotHere};
        locals[i] = place.owner == peer ? place.local : kNotHere;
    }
    store_line(at, locals[0] | locals[1] << 16, locals[2] | locals[3] << 16, epoch);
}

// The slots of some tokens to every rank within reach, ahead of the rows, so that they are listed when those come.
__device__ __forceinline__ void send_meta(const Params& p, const Shared& shared, int task, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int first = task * kMetaTokens, lines = (min(first + kMetaTokens, p.common.num_tokens) - first) * kMetaLines;
    for (int i = threadIdx.x; i < lines * RANKS; i += kThreads) {
        const int peer = i / lines, token = first + i % lines / kMetaLines, line = i % lines % kMetaLines;
        if (b.reaches(peer) && alive >> peer & 1) {
            store_meta(p, shared, b.meta_of(peer, b.rank, token, epoch) + 16 * line, peer, token, line, epoch);
        }
    }
}

// How many tokens this rank has, to a rank within reach.
__device__ __forceinline__ void send_header(const Common& c, int peer, u32 epoch) {
    store_shared_u64(c.buffers.header_of(peer, c.buffers.rank, epoch), static_cast<u64>(epoch) << 32 | c.num_tokens);
}

__device__ __forceinline__ const Vec* row_of(const Params& p, int token) {
    return reinterpret_cast<const Vec*>(p.rows + 2ull * HIDDEN * token);
}

// The ranks that have an expert of the token.
__device__ __forceinline__ u32 destinations(const Params& p, const Shared& shared, int token, u32 alive) {
    return p.common.destinations(token, alive, [&](int id) { return place_of(p, shared, id).owner; });
}

// Those within reach.
__device__ __forceinline__ u32 reached_by(const Params& p, const Shared& shared, int token, u32 alive) {
    return destinations(p, shared, token, alive) & (DEVICE_API ? p.common.buffers.reachable : ~0u);
}

// A part of a token to every rank that has one of its experts; what it needs is read before it is known who that is.
// The next ticket is drawn behind the stores: where there are as many such tasks as blocks, a block that comes up a
// little later than the others would else find its own taken by one that is still busy.
__device__ __forceinline__ void send_plain(const Params& p, const Shared& shared, Tickets<Senders>& tickets, int token,
                                           int part, u32 epoch, u32 alive) {
    constexpr int kAhead = 2;
    const Buffers& b = p.common.buffers;
    const int begin = part_begin(part, kRowParts), end = part_begin(part + 1, kRowParts);
    const Vec* row = row_of(p, token);
    Vec v[kAhead];
    auto load = [&](int base) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads + threadIdx.x;
            v[j] = i < end ? row[i] : Vec{0, 0, 0, 0};
        }
    };
    load(begin);
    const u32 ranks = reached_by(p, shared, token, alive);
    for (int base = begin; base < end; base += kAhead * kThreads) {
        if (base > begin) {
            load(base);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads + threadIdx.x;
            put(b, v[j], i, i < end, token, ranks);
        }
    }
    Senders::sync();
    tickets.draw_ahead();
    if (threadIdx.x < RANKS && ranks >> threadIdx.x & 1) {
        u64* flags = b.row_flags_of(threadIdx.x, b.rank, token);
        store_release(reinterpret_cast<u32*>(flags) + part, epoch);
    }
}

#if FP8
// The same as packets: the codes are made a vector a thread, and put together from shared memory.
__device__ __forceinline__ void send_packets(const Params& p, Shared& shared, int token, int part, int parts, u32 epoch,
                                             u32 alive) {
    const int end = packet_begin<kStagedPackets / 2>(part + 1, parts, kRowPackets);
    const Vec* row = row_of(p, token);
    u32 ranks = 0;
    for (int base = packet_begin<kStagedPackets / 2>(part, parts, kRowPackets); base < end; base += kStagedPackets) {
        const int i = 2 * kPacketVectors * base + threadIdx.x;
        const bool is_staged = threadIdx.x < kStagedVectors;
        const Vec v = is_staged && i < min(kVectors, 2 * kPacketVectors * end) ? row[i] : Vec{0, 0, 0, 0};
        ranks = ranks ? ranks : reached_by(p, shared, token, alive);
        float scale;
        const Codes codes = quantize(v, scale);
        Senders::sync();
        if (is_staged) {
            shared.codes[threadIdx.x] = make_uint2(codes.low, codes.high);
            if (threadIdx.x % kScaleVectors == 0) {
                shared.scales[threadIdx.x / kScaleVectors] = scale;
            }
        }
        Senders::sync();
        const int packet = threadIdx.x / kPacketThreads, vector = packet * kPacketVectors + packet_slot();
        if (packet < kStagedPackets && base + packet < end) {
            const int group = packet * kPacketVectors / (kScaleVectors / 2);
            Vec out{__float_as_uint(shared.scales[group]), epoch, __float_as_uint(shared.scales[group + 1]), epoch};
            if (packet_slot() < kPacketVectors) {
                out = reinterpret_cast<const Vec*>(shared.codes)[vector];
            }
            put_packets(p.common.buffers, out, base + packet, token, ranks);
        }
    }
}
#else
__device__ __forceinline__ void send_packets(const Params& p, const Shared& shared, int token, int part, int parts,
                                             u32 epoch, u32 alive) {
    const int begin = packet_begin<kWarpPackets>(part, parts, kRowPackets);
    const int end = packet_begin<kWarpPackets>(part + 1, parts, kRowPackets);
    const Vec* row = row_of(p, token);
    u32 ranks = 0;
    for (int packet = begin + threadIdx.x / kPacketThreads; packet < end; packet += kGroupPackets) {
        const int i = packet * kPacketVectors + packet_slot();
        const bool is_data = packet_slot() < kPacketVectors && i < kVectors;
        const Vec v = is_data ? row[i] : Vec{0, epoch, 0, epoch};
        ranks = ranks ? ranks : reached_by(p, shared, token, alive);
        put_packets(p.common.buffers, v, packet, token, ranks);
    }
}
#endif

#if DEVICE_API
// Header and slots of all tokens to one rank out of reach.
__device__ __forceinline__ void put_meta(const Params& p, const Shared& shared, int peer, u32 epoch) {
    const Buffers& b = p.common.buffers;
    const int lines = p.common.num_tokens * kMetaLines;
    u8* from = b.at(b.rank, b.meta_outbox + b.meta_at(peer, 0, epoch));
    for (int i = threadIdx.x; i < lines; i += kThreads) {
        store_meta(p, shared, from + 16 * i, peer, i / kMetaLines, i % kMetaLines, epoch);
    }
    u64* header = b.header_of(b.rank, b.rank, epoch);
    const u64 value = static_cast<u64>(epoch) << 32 | p.common.num_tokens;
    if (lines > 0) {
        u8* there = b.meta_of(b.rank, b.rank, 0, epoch);
        put_from_outbox<Senders>(b, 1u << peer, there, from, 16ull * lines, header, value);
    } else if (threadIdx.x == 0) {
        put_flag(header, value, b.pes[peer]);
    }
}

// A token to every rank out of reach that has one of its experts.
__device__ __forceinline__ void put_row(const Params& p, const Shared& shared, int token, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const u32 ranks = destinations(p, shared, token, alive) & ~b.reachable;
    if (!ranks) {
        return;
    }
    const Vec* row = row_of(p, token);
    u8* from = b.out_of(b.rank, token);
    for (int base = 0; base < kVectors; base += kThreads) {
        const int i = base + threadIdx.x;
        const Vec v = i < kVectors ? row[i] : Vec{0, 0, 0, 0};
#if FP8
        float scale;
        const Codes codes = quantize(v, scale);
        if (i < kVectors) {
            store_codes(from, codes, scale, i);
        }
#else
        if (i < kVectors) {
            reinterpret_cast<Vec*>(from)[i] = v;
        }
#endif
    }
    u64* flags = b.row_flags_of(b.rank, b.rank, token);
    put_from_outbox<Senders>(b, ranks, b.row(b.rank, b.rank, token), from, kRowBytes, flags, both(epoch));
}

// The tasks for ranks out of reach; false where `task` is behind them.
__device__ __forceinline__ bool put_task(const Params& p, const Shared& shared, int& task, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    if (task < RANKS) {
        if (!b.reaches(task) && alive >> task & 1) {
            put_meta(p, shared, task, epoch);
        }
        return true;
    }
    task -= RANKS;
    if (task < p.common.num_tokens) {
        put_row(p, shared, task, epoch, alive);
        return true;
    }
    task -= p.common.num_tokens;
    return false;
}

__device__ __forceinline__ int put_tasks(const Common& c) { return RANKS + c.num_tokens; }
#endif

__device__ __forceinline__ void send_all(const Params& p, Shared& shared) {
    const Common& c = p.common;
    const Buffers& b = c.buffers;
    Tickets<Senders> tickets(&c.counters->dispatch, &shared.ticket);
    const u32 alive = c.alive();
    for (int id = threadIdx.x; id < min(c.num_ids, kPlaces); id += kThreads) {
        shared.places[id] = load_place(p, id);
    }
    u64 ticket = tickets.next();
    const u32 epoch = static_cast<u32>(ticket >> 32);
    wait_for_kernels_before();
    const bool as_packets = b.rows_are_packets(c.num_tokens);
    const int parts = as_packets ? c.packet_parts_of(c.num_tokens) : kRowParts;
    const int meta_tasks = (c.num_tokens + kMetaTokens - 1) / kMetaTokens;
#if DEVICE_API
    const u32 total = put_tasks(c) + meta_tasks + c.num_tokens * parts;
#else
    const u32 total = meta_tasks + c.num_tokens * parts;
#endif
    const bool is_first = static_cast<u32>(ticket) == 0;
    if (is_first && threadIdx.x < RANKS && b.reaches(threadIdx.x) && alive >> threadIdx.x & 1) {
        send_header(c, threadIdx.x, epoch);
    }
    if (threadIdx.x == kThreads - 1) {
        hand_over(is_first, &c.counters->combine, epoch);
    }
    for (; static_cast<u32>(ticket) < total; ticket = tickets.next()) {
        int left = static_cast<int>(static_cast<u32>(ticket));
#if DEVICE_API
        if (put_task(p, shared, left, epoch, alive)) {
            continue;
        }
#endif
        if (left < meta_tasks) {
            tickets.draw_ahead();
            send_meta(p, shared, left, epoch, alive);
            continue;
        }
        const int part = (left - meta_tasks) % parts, token = (left - meta_tasks) / parts;
        if (as_packets) {
            tickets.draw_ahead();
            send_packets(p, shared, token, part, parts, epoch, alive);
        } else {
            send_plain(p, shared, tickets, token, part, epoch, alive);
        }
    }
    for (; refresh_is_due(epoch) && static_cast<u32>(ticket) - total < static_cast<u32>(b.capacity);
         ticket = tickets.next()) {
        const int slot = static_cast<int>(static_cast<u32>(ticket) - total);
        const u32 ranks = slot < c.num_tokens ? destinations(p, shared, slot, alive) : 0;
        refresh_row(c, slot, ranks, epoch, alive);
    }
}
