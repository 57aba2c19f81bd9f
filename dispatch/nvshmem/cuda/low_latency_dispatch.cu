// Sends each token once to every rank that has one of its experts, and lists there which rows each expert has.
//
// Before: rows [T, K], topk_ids and weights [T, TOPK] on each rank. After, on the rank of an expert e: its rows in the
// order (source, token), as numbers s * C + t in expert_row_ids [El, R * C] (by reference; the row lies where its sender
// put it) or copied to out [El, R * C, K]; expert_num_tokens [El]; positions [R * C, TOPK]: which row of its expert each
// slot is, for the combine.
// Example: two ranks of one expert each, C = 4; rank 0's token 0 goes to both experts, rank 1's token 0 to expert 0:
// rank 0 has expert_row_ids [[0, 4]], rank 1 [[0]].
#include "low_latency.cuh"

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

// A row from a block's registers and memory to one peer.
class RowSender {
public:
    __device__ __forceinline__ RowSender(const u8* row, int begin, int end) : row_(row), begin_(begin), end_(end) { load(begin); }

    template <typename Put>
    __device__ __forceinline__ void send(const Put& put) {
        for (int base = begin_;;) {
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                put(base + j * kThreads + static_cast<int>(threadIdx.x), vectors_[j], end_);
            }
            base += kAhead * kThreads;
            if (base >= end_) {
                return;
            }
            load(base);
        }
    }

private:
    static constexpr int kAhead = 4;

    __device__ __forceinline__ void load(int base) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int i = base + j * kThreads + threadIdx.x;
            vectors_[j] = i < end_ ? reinterpret_cast<const Vec*>(row_)[i] : Vec{0, 0, 0, 0};
        }
    }

    const u8* row_;
    int begin_, end_;
    Vec vectors_[kAhead];
};

__device__ __forceinline__ void send_as_lines(const Buffers& b, RowSender& row, int peer, int token, u32 epoch) {
    row.send([&](int i, Vec v, int end) {
#if FP8
        float scale;
        const Codes codes = quantize(unpack(v), scale);
        if (i < end) {
            store_line(b.row_line(peer, b.rank, token, i), codes.low, codes.high, epoch);
            if (i % kScaleVectors == 0) {
                const int line = kVectors + i / kScaleVectors;
                store_line(b.row_line(peer, b.rank, token, line), __float_as_uint(scale), 0, epoch);
            }
        }
#else
        if (i < end) {
            store_line(b.row_line(peer, b.rank, token, i), v.x, v.y, epoch);
            store_line(b.row_line(peer, b.rank, token, kVectors + i), v.z, v.w, epoch);
        }
#endif
    });
}

__device__ __forceinline__ void send_as_row(const Buffers& b, RowSender& row, int peer, int token, u32 epoch) {
    u8* there = b.row(peer, b.rank, token);
    row.send([&](int i, Vec v, int end) {
#if FP8
        float scale;
        const Codes codes = quantize(unpack(v), scale);
        if (i < end) {
            reinterpret_cast<uint2*>(there)[i] = make_uint2(codes.low, codes.high);
            if (i % kScaleVectors == 0) {
                reinterpret_cast<float*>(there + HIDDEN)[i / kScaleVectors] = scale;
            }
        }
#else
        if (i < end) {
            reinterpret_cast<Vec*>(there)[i] = v;
        }
#endif
    });
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release(b.row_flag(peer, b.rank, token), epoch);
    }
}

__device__ __forceinline__ void send(const Params& p, int task, int parts, u32 epoch, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int part = task % parts, peer_step = task / parts % RANKS, token = task / parts / RANKS;
    const int peer = (b.rank + peer_step) % RANKS;
    const bool as_lines = p.common.num_tokens <= b.line_tokens;
    RowSender row(p.rows + 2ull * HIDDEN * token, part_begin(part, parts), part_begin(part + 1, parts));
    int owner;
    const u32 ranks = p.common.destinations(token, alive, owner);
    if (!(alive >> peer & 1)) {
        return;
    }
    if (part == 0 && threadIdx.x < TOPK) {
        const int slot = token * TOPK + threadIdx.x;
        const int local = owner == peer ? p.locals[p.common.topk_ids[slot]] : -1;
        store_line(b.meta_of(peer, b.rank, token, epoch) + 16 * threadIdx.x, __float_as_uint(p.weights[slot]), local, epoch);
    }
    if (ranks >> peer & 1) {
        if (as_lines) {
            send_as_lines(b, row, peer, token, epoch);
        } else {
            send_as_row(b, row, peer, token, epoch);
        }
    }
}

struct Arrival {
    int source, token, position;  // its row of the expert, -1 where it is another expert's to take
};

struct Shared {
    u64 ticket;
    int before[RANKS + 1];  // tokens of the ranks before each
    int warp_counts[kWarps];
    Arrival arrivals[kThreads];
};

// Which of the token's slots are for `expert`, as bits; `first` is set where it is the first expert here at all.
__device__ __forceinline__ u32 slots_of(const Params& p, const Wait& wait, int source, int token, int expert, bool& first) {
    const u8* lines = p.common.buffers.meta_of(p.common.buffers.rank, source, token, wait.epoch);
    constexpr int kBatch = TOPK < 8 ? TOPK : 8;
    u32 slots = 0;
    bool any = false;
    first = false;
    for (int start = 0; start < TOPK; start += kBatch) {
        Vec line[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            line[k] = start + k < TOPK ? load_shared_vec(lines + 16 * (start + k)) : Vec{0, wait.epoch, 0, wait.epoch};
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
__device__ __forceinline__ bool received(const Buffers& b, const Wait& wait, bool as_lines, const Arrival& a, int i, Vec& v) {
    if (as_lines) {
        Vec first, second;
#if FP8
        const int other = kVectors + i / kScaleVectors;
#else
        const int other = kVectors + i;
#endif
        const u8* at_first = b.row_line(b.rank, a.source, a.token, i);
        const u8* at_second = b.row_line(b.rank, a.source, a.token, other);
        first = load_shared_vec(at_first);
        second = load_shared_vec(at_second);
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

// Brings the rows on the list to where the experts read them; nothing but waiting where they are there already.
__device__ __forceinline__ void take(const Params& p, const Wait& wait, const Shared& shared, int count, int expert, int part) {
    const Buffers& b = p.common.buffers;
    const int max_rows = RANKS * b.capacity;
    const int width = count < kWarps ? kThreads : 32;
    const int lane = threadIdx.x % width;
    for (int n = threadIdx.x / width; n < count; n += kThreads / width) {
        const Arrival a = shared.arrivals[n];
        const int tokens = shared.before[a.source + 1] - shared.before[a.source];
        const bool as_lines = tokens <= b.line_tokens;
        if (a.position < 0 || a.position % p.split != part ||
            (!as_lines && !wait.for_flag(b.row_flag(b.rank, a.source, a.token), a.source))) {
            continue;
        }
        u8* there = p.out == nullptr ? b.row(b.rank, a.source, a.token)
                    : p.expert_row_ids
                        ? p.out + 2ull * HIDDEN * (static_cast<u64>(a.source) * b.capacity + a.token)
                        : p.out + 2ull * HIDDEN * (static_cast<u64>(expert) * max_rows + a.position);
        if (p.out == nullptr && !as_lines) {
            continue;
        }
        constexpr int kAhead = 4;
        for (int base = lane; base < kVectors; base += kAhead * width) {
            Vec v[kAhead];
            bool there_in_time[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                const int i = base + j * width;
                there_in_time[j] = i < kVectors && received(b, wait, as_lines, a, i, v[j]);
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                if (there_in_time[j]) {
                    reinterpret_cast<Vec*>(there)[base + j * width] = v[j];
                }
            }
        }
    }
}

// Reads every source's slots, and lists and takes the rows of one expert.
__device__ __forceinline__ void list_expert(const Params& p, const Wait& wait, Shared& shared, int expert, int part, u32 alive) {
    const Buffers& b = p.common.buffers;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        int tokens = 0;
        Vec line;
        if (lane < RANKS && alive >> lane & 1 && wait.for_line(b.header_of(b.rank, lane, wait.epoch), lane, line)) {
            tokens = static_cast<int>(line.x);
        }
        int before = 0;
        for (int rank = 0; rank < RANKS; ++rank) {
            const int of_rank = __shfl_sync(kAllLanes, tokens, rank);
            before += rank < lane ? of_rank : 0;
        }
        if (lane <= RANKS) {
            shared.before[lane] = before;
        }
    }
    __syncthreads();
    const int total = shared.before[RANKS], max_rows = RANKS * b.capacity;
    int base = 0;
    for (int start = 0; start < total; start += kThreads) {
        const int i = start + threadIdx.x;
        int source = 0;
        for (int rank = 1; rank < RANKS; ++rank) {
            source = i >= shared.before[rank] ? rank : source;
        }
        const int token = i - shared.before[source];
        bool first = false;
        u32 slots = i < total ? slots_of(p, wait, source, token, expert, first) : 0;
        const u32 have = __ballot_sync(kAllLanes, slots != 0);
        if (lane == 0) {
            shared.warp_counts[warp] = __popc(have);
        }
        // A row that is read by reference is taken by its first expert alone.
        const bool mine = slots != 0 && (first || p.expert_row_ids == nullptr);
        const int to_take = __syncthreads_count(mine);
        int position = base + __popc(have & ((1u << lane) - 1));
        for (int w = 0; w < warp; ++w) {
            position += shared.warp_counts[w];
        }
        const int row = source * b.capacity + token;
        if (slots && part == 0) {
            if (p.expert_row_ids) {
                p.expert_row_ids[static_cast<u64>(expert) * max_rows + position] = row;
            }
            for (u32 left = slots; left; left &= left - 1) {
                p.positions[row * TOPK + __ffs(left) - 1] = position;
            }
        }
        int listed = 0;
        for (int w = 0; w < kWarps; ++w) {
            listed += shared.warp_counts[w];
        }
        if (slots) {
            shared.arrivals[position - base] = Arrival{source, token, mine ? position : -1};
        }
        __syncthreads();
        if (to_take) {
            take(p, wait, shared, listed, expert, part);
        }
        base += listed;
        __syncthreads();
    }
    if (threadIdx.x == 0 && part == 0) {
        p.expert_num_tokens[expert] = base;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) low_latency_dispatch(const __grid_constant__ Params p) {
    __shared__ Shared shared;
    const Common& c = p.common;
    const Buffers& b = c.buffers;
    const bool sends = c.phases & SEND;
    Tickets tickets(sends ? &c.counters->dispatch_send : &c.counters->dispatch_receive, &shared.ticket);
    const u32 alive = c.status->alive;
    __syncthreads();
    u64 ticket = tickets.first();
    const u32 epoch = static_cast<u32>(ticket >> 32);
    const Wait wait = c.wait(PHASE_DISPATCH, epoch);
    if (sends && static_cast<u32>(ticket) == 0) {
        if (threadIdx.x < RANKS && alive >> threadIdx.x & 1) {
            store_line(b.header_of(threadIdx.x, b.rank, epoch), c.num_tokens, 0, epoch);
        }
        if (threadIdx.x == 0) {
            c.counters->combine_send = c.counters->combine_receive = static_cast<u64>(epoch) << 32;
        }
    }
    const int parts = c.num_tokens <= b.line_tokens ? c.parts : 1;
    const int to_send = sends ? c.num_tokens * RANKS * parts : 0;
    const int total = to_send + (c.phases & RECEIVE ? p.num_local_experts * p.split : 0);
    for (int task = static_cast<int>(static_cast<u32>(ticket)); task < total;) {
        if (task < to_send) {
            send(p, task, parts, epoch, alive);
        } else {
            list_expert(p, wait, shared, (task - to_send) / p.split, (task - to_send) % p.split, alive);
        }
        task = static_cast<int>(static_cast<u32>(tickets.next()));
    }
}
