// The sending half of a dispatch: headers and slots of the tokens, then the rows, to ranks within reach and beyond it.
#pragma once

#include "low_latency_dispatch.cuh"

#if FP8
__device__ __forceinline__ void store_codes(u8* row, Codes codes, float scale, int i) {
    reinterpret_cast<uint2*>(row)[i] = make_uint2(codes.low, codes.high);
    if (i % kScaleVectors == 0) {
        reinterpret_cast<float*>(row + HIDDEN)[i / kScaleVectors] = scale;
    }
}
#endif

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
            store_codes(row, codes, scale, i);
#else
            reinterpret_cast<Vec*>(row)[i] = v;
#endif
        }
    }
}

// One line of what `peer` learns about a token: four local experts, or two weights.
__device__ __forceinline__ void store_meta(const Params& p, u8* at, int peer, int token, int line, u32 epoch) {
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
        const bool is_here = id >= 0 && id < p.common.num_ids && p.common.owners[id] == peer;
        locals[i] = is_here ? static_cast<u32>(p.locals[id]) : kNotHere;
    }
    store_line(at, locals[0] | locals[1] << 16, locals[2] | locals[3] << 16, epoch);
}

// The slots of some tokens to every rank within reach, ahead of the rows, so that they are listed when those come.
__device__ __forceinline__ void send_meta(const Params& p, int task, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int first = task * kMetaTokens, lines = (min(first + kMetaTokens, p.common.num_tokens) - first) * kMetaLines;
    for (int i = threadIdx.x; i < lines * RANKS; i += kThreads) {
        const int peer = i / lines, token = first + i % lines / kMetaLines, line = i % lines % kMetaLines;
        if (b.reaches(peer) && alive >> peer & 1) {
            store_meta(p, b.meta_of(peer, b.rank, token, epoch) + 16 * line, peer, token, line, epoch);
        }
    }
}

// How many tokens this rank has, to a rank within reach.
__device__ __forceinline__ void send_header(const Common& c, int peer, u32 epoch) {
    store_shared_u64(c.buffers.header_of(peer, c.buffers.rank, epoch), static_cast<u64>(epoch) << 32 | c.num_tokens);
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
    const u32 ranks = p.common.destinations(token, alive, owner) & (DEVICE_API ? b.reachable : ~0u);
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

#if DEVICE_API
// Header and slots of all tokens to one rank out of reach.
__device__ __forceinline__ void put_meta(const Params& p, int peer, u32 epoch) {
    const Buffers& b = p.common.buffers;
    const int lines = p.common.num_tokens * kMetaLines;
    u8* from = b.at(b.rank, b.meta_outbox + b.meta_at(peer, 0, epoch));
    for (int i = threadIdx.x; i < lines; i += kThreads) {
        store_meta(p, from + 16 * i, peer, i / kMetaLines, i % kMetaLines, epoch);
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
__device__ __forceinline__ void put_row(const Params& p, int token, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    int owner;
    const u32 ranks = p.common.destinations(token, alive, owner) & ~b.reachable;
    if (!ranks) {
        return;
    }
    const Vec* row = reinterpret_cast<const Vec*>(p.rows + 2ull * HIDDEN * token);
    u8* from = b.out_of(b.rank, token);
    for (int base = 0; base < kVectors; base += kThreads) {
        const int i = base + threadIdx.x;
        const Vec v = i < kVectors ? row[i] : Vec{0, 0, 0, 0};
#if FP8
        float scale;
        const Codes codes = quantize(unpack(v), scale);
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
__device__ __forceinline__ bool put_task(const Params& p, int& task, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    if (task < RANKS) {
        if (!b.reaches(task) && alive >> task & 1) {
            put_meta(p, task, epoch);
        }
        return true;
    }
    task -= RANKS;
    if (task < p.common.num_tokens) {
        put_row(p, task, epoch, alive);
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
    const int parts = c.num_tokens <= b.line_tokens ? c.line_parts : kRowParts;
    const int meta_tasks = (c.num_tokens + kMetaTokens - 1) / kMetaTokens;
#if DEVICE_API
    const u32 total = put_tasks(c) + meta_tasks + c.num_tokens * parts;
#else
    const u32 total = meta_tasks + c.num_tokens * parts;
#endif
    for (;;) {
        const u64 ticket = tickets.next();
        const u32 epoch = static_cast<u32>(ticket >> 32), task = static_cast<u32>(ticket);
        if (task == 0) {
            if (threadIdx.x < RANKS && b.reaches(threadIdx.x) && alive >> threadIdx.x & 1) {
                send_header(c, threadIdx.x, epoch);
            }
            if (threadIdx.x == 0) {
                c.counters->combine = static_cast<u64>(epoch) << 32;
            }
        }
        if (task >= total) {
            return;
        }
        int left = static_cast<int>(task);
#if DEVICE_API
        if (put_task(p, left, epoch, alive)) {
            continue;
        }
#endif
        if (left < meta_tasks) {
            send_meta(p, left, epoch, alive);
        } else {
            send(p, left - meta_tasks, parts, epoch, alive);
        }
    }
}
