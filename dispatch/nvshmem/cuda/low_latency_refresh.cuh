// Flags that no batch has written for long are written with the number of the batch before.
//
// Lines, packets and flags hold 32 bits of their batch's number, which begins again behind 2^32 of them; what a batch of
// that number left then would be taken for new. So in two batches of each 2^20 (headers and slots have two parts) a
// rank writes an old number wherever its own parts get nothing of that batch. It may: what follows in its place is its
// own as well, nobody reads there in this batch, and of earlier ones it had the answer (channel.py).
#pragma once

#include "low_latency.cuh"

constexpr u32 kBatchesRefreshed = 1u << 20;

// A task for each of `capacity` slots is due, behind all others of a batch.
__device__ __forceinline__ bool refresh_is_due(u32 epoch) { return epoch % kBatchesRefreshed < 2; }

__device__ __forceinline__ Vec old_line(u32 epoch) { return Vec{0, epoch - 1, 0, epoch - 1}; }

// The lines of all packets of a row, whose addresses at(packet) gives to each thread for its vector.
template <typename At>
__device__ __forceinline__ void refresh_packets(const At& at, int packets, u32 epoch) {
    for (int packet = threadIdx.x / kPacketThreads; packet < packets; packet += kGroupPackets) {
        if (packet_slot() == kPacketVectors) {
            store_shared_vec(at(packet), old_line(epoch));
        }
    }
}

// A flag at `there` on a rank, which may be out of reach.
__device__ __forceinline__ void refresh_flag(const Buffers& b, int peer, u64* there, u64* own, u32 epoch) {
    if (threadIdx.x != 0) {
        return;
    }
    if (b.reaches(peer)) {
        store_shared_u64(there, both(epoch - 1));
    }
#if DEVICE_API
    else {
        put_flag(own, both(epoch - 1), b.pes[peer]);
    }
#endif
}

// Behind a task: nothing that it put can come behind what the next batch puts there.
__device__ __forceinline__ void end_refresh() {
#if DEVICE_API
    if (threadIdx.x == 0) {
        wait_for_puts();
    }
#endif
}

// Slots and row of a token that goes to `ranks`.
__device__ __forceinline__ void refresh_row(const Common& c, int token, u32 ranks, u32 epoch, u32 alive) {
    const Buffers& b = c.buffers;
    const bool as_packets = b.rows_are_packets(c.num_tokens);
    for (int peer = 0; peer < RANKS; ++peer) {
        if (!(alive >> peer & 1)) {
            continue;
        }
        const bool is_sent = ranks >> peer & 1;
        if (!is_sent || as_packets) {
            u64* there = b.row_flags_of(peer, b.rank, token);
            refresh_flag(b, peer, there, b.row_flags_of(b.rank, b.rank, token), epoch);
        }
        if (!b.reaches(peer)) {
            continue;  // slots come behind a flag that every batch has
        }
        if (token < b.row_packet_tokens && !(is_sent && as_packets)) {
            const auto at = [&](int packet) { return b.row_packet(peer, b.rank, token, packet); };
            refresh_packets(at, kRowPackets, epoch);
        }
        if (token >= c.num_tokens && threadIdx.x < kMetaLines) {
            store_shared_vec(b.meta_of(peer, b.rank, token, epoch) + 16 * threadIdx.x, old_line(epoch));
        }
    }
    end_refresh();
}

// A result that is not sent to `owner`.
__device__ __forceinline__ void refresh_result(const Buffers& b, int owner, int token, u32 epoch) {
#if DEVICE_API
    u64* there = b.result_flags_of(owner, b.rank, token);
    refresh_flag(b, owner, there, b.result_flags_of(b.rank, b.rank, token), epoch);
#else
    refresh_packets([&](int packet) { return b.result_packet(owner, b.rank, token, packet); }, kResultPackets, epoch);
#endif
}
