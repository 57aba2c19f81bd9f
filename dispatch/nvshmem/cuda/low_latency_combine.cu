// Brings results home: sums the experts of one rank with the router's weights, one row to each token's rank, added there.
//
// Before: results [El, R * C, K] of each rank's experts, in the rows that the dispatch listed. After: output [T, K] on
// the tokens' own ranks. Slots of one rank are summed in slot order and ranks in rank order, all in f32 without fused
// multiply-add, with one rounding to the activations' dtype between: the same bits whatever arrives first.
// Example: a token with slots of ranks 1, 0, 1 and weights a, b, c: out = r(b y0) + r(a y1 + c y1').
#include "low_latency.cuh"

struct Params {
    Common common;
    const u8* results;
    const int* positions;  // as the dispatch wrote them
    u8* output;
    int weighted;  // 0 where the weights were applied to the input
    int output_parts;
};

struct Shared {
    u64 ticket;
    int tokens[RANKS];
};

__device__ __forceinline__ void accumulate(Floats& sum, Vec v, float weight) {
    const Floats f = unpack(v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        sum.v[i] = __fadd_rn(sum.v[i], __fmul_rn(f.v[i], weight));
    }
}

// A received token's slots here: lane k of each warp holds slot k.
struct Slots {
    u32 present;  // bits of the slots that have a result here
    u64 offset;   // of this lane's result, in bytes
    float weight;
};

__device__ __forceinline__ Slots slots_of(const Params& p, int source, int token, u32 epoch) {
    const Buffers& b = p.common.buffers;
    const int lane = threadIdx.x % 32;
    Slots slots{0, 0, 1.0f};
    bool present = false;
    if (lane < TOPK) {
        const int row = source * b.capacity + token;
        const Vec line = load_shared_vec(b.meta_of(b.rank, source, token, epoch) + 16 * lane);
        const int position = p.positions[row * TOPK + lane], local = static_cast<int>(line.z);
        present = is_of(line, epoch) && local >= 0;
        slots.offset = 2ull * HIDDEN * (static_cast<u64>(local) * RANKS * b.capacity + position);
        slots.weight = p.weighted ? __uint_as_float(line.x) : 1.0f;
    }
    slots.present = __ballot_sync(kAllLanes, present);
    return slots;
}

// The weighted sums of kWide vectors, kThreads apart, from `first` on; kDeep results are on their way at a time.
template <int kWide, int kDeep>
__device__ __forceinline__ void weighted_sums(const Params& p, const Slots& slots, int first, int end,
                                              Floats (&sums)[kWide]) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
        sums[j] = Floats{};
    }
    u32 left = slots.present;
    while (left) {
        Vec v[kDeep][kWide];
        float weight[kDeep];
        bool is_there[kDeep];
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
            is_there[d] = left != 0;
            const int slot = is_there[d] ? __ffs(left) - 1 : 0;
            left &= left - 1;
            const u64 offset = __shfl_sync(kAllLanes, slots.offset, slot);
            weight[d] = __shfl_sync(kAllLanes, slots.weight, slot);
            const Vec* row = reinterpret_cast<const Vec*>(p.results + offset);
#pragma unroll
            for (int j = 0; j < kWide; ++j) {
                const int i = first + j * kThreads;
                v[d][j] = is_there[d] && i < end ? row[i] : Vec{0, 0, 0, 0};
            }
        }
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
            if (is_there[d]) {
#pragma unroll
                for (int j = 0; j < kWide; ++j) {
                    accumulate(sums[j], v[d][j], weight[d]);
                }
            }
        }
    }
}

__device__ __forceinline__ void send(const Params& p, const Shared& shared, int task, int parts, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int part = task % parts, token = task / parts / RANKS;
    const int source = (b.rank + task / parts) % RANKS;
    if (token >= shared.tokens[source] || !(alive >> source & 1)) {
        return;
    }
    const Slots slots = slots_of(p, source, token, epoch);
    if (!slots.present) {
        return;
    }
    const int begin = part_begin(part, parts), end = part_begin(part + 1, parts);
    const int lane = threadIdx.x;
    if (shared.tokens[source] <= b.line_tokens) {
        for (int base = begin; base < end; base += kThreads) {
            Floats sums[1];
            weighted_sums<1, 4>(p, slots, base + lane, end, sums);
            const Vec v = pack(sums[0]);
            const int i = base + lane;
            if (i < end) {
                store_line(b.result_line(source, b.rank, token, i), v.x, v.y, epoch);
                store_line(b.result_line(source, b.rank, token, kVectors + i), v.z, v.w, epoch);
            }
        }
        return;
    }
    constexpr int kWide = 2;
    Vec* there = reinterpret_cast<Vec*>(b.result(source, b.rank, token));
    for (int base = begin; base < end; base += kWide * kThreads) {
        Floats sums[kWide];
        weighted_sums<kWide, 2>(p, slots, base + lane, end, sums);
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
            const int i = base + lane + j * kThreads;
            if (i < end) {
                there[i] = pack(sums[j]);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release(b.result_flag(source, b.rank, token), epoch);
    }
}

// One half of a vector of each rank's result that travelled as lines, added in rank order.
__device__ __forceinline__ void add_lines(const Params& p, const Wait& wait, int token, u32 ranks, int i, int half, float (&sum)[4]) {
    const Buffers& b = p.common.buffers;
    Vec line[RANKS];
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        if (ranks >> rank & 1) {
            line[rank] = load_shared_vec(b.result_line(b.rank, rank, token, half * kVectors + i));
        }
    }
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        if (ranks >> rank & 1 &&
            (is_of(line[rank], wait.epoch) ||
             wait.for_line(b.result_line(b.rank, rank, token, half * kVectors + i), rank, line[rank]))) {
            sum[0] = __fadd_rn(sum[0], low_half(line[rank].x));
            sum[1] = __fadd_rn(sum[1], high_half(line[rank].x));
            sum[2] = __fadd_rn(sum[2], low_half(line[rank].z));
            sum[3] = __fadd_rn(sum[3], high_half(line[rank].z));
        }
    }
}

__device__ __forceinline__ void receive(const Params& p, const Wait& wait, int task, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int part = task % p.output_parts, token = task / p.output_parts, lane = threadIdx.x % 32;
    int owner;
    u32 ranks = p.common.destinations(token, alive, owner);
    const int begin = part_begin(part, p.output_parts), end = part_begin(part + 1, p.output_parts);
    Vec* output = reinterpret_cast<Vec*>(p.output + 2ull * HIDDEN * token);
    if (p.common.num_tokens <= b.line_tokens) {
        for (int i = begin + threadIdx.x; i < end; i += kThreads) {
            float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
            add_lines(p, wait, token, ranks, i, 0, low);
            add_lines(p, wait, token, ranks, i, 1, high);
            output[i] = Vec{pack_halves(low[0], low[1]), pack_halves(low[2], low[3]), pack_halves(high[0], high[1]),
                            pack_halves(high[2], high[3])};
        }
        return;
    }
    bool in_time = true;
    if (lane < RANKS && ranks >> lane & 1) {
        in_time = wait.for_flag(b.result_flag(b.rank, lane, token), lane);
    }
    ranks &= __ballot_sync(kAllLanes, in_time) | ~((1u << RANKS) - 1);
    for (int i = begin + threadIdx.x; i < end; i += kThreads) {
        Vec v[RANKS];
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            if (ranks >> rank & 1) {
                v[rank] = load_shared_vec(b.result(b.rank, rank, token) + 16ull * i);
            }
        }
        Floats sum{};
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            if (ranks >> rank & 1) {
                accumulate(sum, v[rank], 1.0f);
            }
        }
        output[i] = pack(sum);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) low_latency_combine(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    const Common& c = p.common;
    const Buffers& b = c.buffers;
    const bool sends = c.phases & SEND;
    Tickets tickets(sends ? &c.counters->combine_send : &c.counters->combine_receive, &shared.ticket);
    const u32 alive = c.status->alive;
    // Headers of even and odd epochs, before it is known which it is.
    Vec headers[2] = {};
    if (threadIdx.x < RANKS) {
        headers[0] = load_shared_vec(b.header_of(b.rank, threadIdx.x, 0));
        headers[1] = load_shared_vec(b.header_of(b.rank, threadIdx.x, 1));
    }
    __syncthreads();
    u64 ticket = tickets.first();
    const u32 epoch = static_cast<u32>(ticket >> 32);
    const Wait wait = c.wait(PHASE_COMBINE, epoch);
    // The dispatch has waited for every header; one of another epoch never came.
    if (threadIdx.x < RANKS) {
        const Vec header = epoch % 2 ? headers[1] : headers[0];
        shared.tokens[threadIdx.x] = is_of(header, epoch) ? static_cast<int>(header.x) : 0;
    }
    if (sends && static_cast<u32>(ticket) == 0 && threadIdx.x == 0) {
        c.counters->dispatch_send = c.counters->dispatch_receive = static_cast<u64>(epoch + 1) << 32;
    }
    __syncthreads();
    int most = 0;
    for (int rank = 0; rank < RANKS; ++rank) {
        most = max(most, shared.tokens[rank]);
    }
    const int parts = most <= b.line_tokens ? c.parts : 1;
    const int to_send = sends ? most * RANKS * parts : 0;
    const int total = to_send + (c.phases & RECEIVE ? c.num_tokens * p.output_parts : 0);
    for (int task = static_cast<int>(static_cast<u32>(ticket)); task < total;) {
        if (task < to_send) {
            send(p, shared, task, parts, epoch, alive);
        } else {
            receive(p, wait, task - to_send, alive);
        }
        task = static_cast<int>(static_cast<u32>(tickets.next()));
    }
}
