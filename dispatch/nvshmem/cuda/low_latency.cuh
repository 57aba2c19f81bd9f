// Buffers of one low-latency (decode) batch, and what dispatch and combine share.
//
// Every rank has the same buffers at the same offsets (low_latency.py computes them); part [s] of each is written by
// rank s. R ranks, capacity C tokens per rank, K = HIDDEN columns, TOPK slots per token, M lines of meta per token.
// Results, 8-bit rows, and rows of ranks with at most `row_packet_tokens` tokens are sent as flag-in-data packets
// (protocol.cuh), others as plain rows with a flag.
//
//   header          [2, R]         u64 {tokens of s, epoch}; even and odd epochs alternate
//   meta            [2, R, C, M]   lines, alternating likewise: first those with four local experts of 16 bits each
//                                  (0xffff for slots of other ranks), then those with two weights each
//   row_flags       [R, C, 2]      u32, the epoch once that half of the row has arrived
//   rows            [R, C]         row_bytes each; 8-bit codes, then scales, if quantized
//   row_packets     [R, L, ...]    rows as packets, L = row_packet_tokens; of 8-bit rows the eighth thread's line holds
//                                  the scales of the group that the packet's first code belongs to, and of the next
//   result_packets  [R, C, ...]    results as packets
//
// If the layer is batch-invariant (SLOT_RESULTS) a result is that of one slot, unweighted, and there are
//
//   result_packets  [TOPK, C, ...] part [k] is written by the rank of slot k's expert
//
// If some ranks are out of reach (DEVICE_API) nothing is sent as packets, and there are
//
//   result_flags    [R, C, 2]      u32, the epoch once that half of the result has arrived
//   results         [R, C]         2 K bytes each, beside f16 rows 4 K
//
// and, as sources of puts to those ranks,
//
//   meta_outbox     [2, R, C, M]   meta for rank s
//   outbox          [R, C]         as long as results: this rank's rows in its own part, results for rank s in the
//                   others
#pragma once

#include "device_api.cuh"
#include "numbers.cuh"

#ifndef SLOT_RESULTS
#define SLOT_RESULTS 0
#endif

constexpr int kThreads = 256;  // per group; a block has two, Senders and Receivers
constexpr int kWarps = kThreads / 32;
constexpr int kRowParts = 2;  // parts of a row with flags
constexpr int kRowBytes = EIGHT_BIT ? (HIDDEN + 4 * kGroups + 15) / 16 * 16 : 2 * HIDDEN;
// Packets that a warp moves at a time; rows are padded to a multiple.
constexpr int kWarpPackets = 32 / kPacketThreads, kGroupPackets = kThreads / kPacketThreads;
__device__ constexpr int packets_of(int vectors) {
  return (vectors + kWarpPackets * kPacketVectors - 1) / (kWarpPackets * kPacketVectors) * kWarpPackets;
}
constexpr int kResultPackets = packets_of(kResultVectors);
constexpr int kRowPackets = packets_of(EIGHT_BIT ? kVectors / 2 : kVectors);
constexpr int kLocalsOfLine = 4, kWeightsOfLine = 2;
constexpr int kLocalLines = (TOPK + kLocalsOfLine - 1) / kLocalsOfLine;
constexpr int kMetaLines = kLocalLines + (TOPK + kWeightsOfLine - 1) / kWeightsOfLine;
constexpr u32 kNotHere = 0xffff;
enum { SEND = 1, RECEIVE = 2 };

using Senders = Group<1, kThreads>;
using Receivers = Group<2, kThreads>;

// Ticket counters of a batch; each kernel resets the other's for the next round.
struct Counters {
  u64 dispatch, combine;
  u64 failed;  // failure_of(epoch) of the last batch whose dispatch was incomplete, where experts return results
};
DEVICE u64 failure_of(u32 epoch) { return static_cast<u64>(epoch) << 32 | 1; }

struct Buffers {
  u64 peers[RANKS];  // address of each rank's buffers, 0 if out of reach
  u64 header, meta, row_flags, result_flags, rows, results, row_packets, result_packets, meta_outbox, outbox;
  int pes[RANKS];  // NVSHMEM's numbers of the ranks
  u32 reachable;   // bit r: rank r is within reach
  int rank;
  int capacity;
  int row_packet_tokens;

  // Whether rows of a rank with so many tokens are packets. 8-bit rows always are: they are copied to be dequantized
  // anyway.
  DEVICE bool rows_are_packets(int tokens) const { return !DEVICE_API && (EIGHT_BIT || tokens <= row_packet_tokens); }
  DEVICE bool reaches(int peer) const { return !DEVICE_API || (reachable >> peer & 1); }
  DEVICE u8* at(int peer, u64 offset) const { return reinterpret_cast<u8*>(peers[peer]) + offset; }
  DEVICE u64 index(int source, int token) const { return static_cast<u64>(source) * capacity + token; }
  DEVICE u64* header_of(int peer, int source, u32 epoch) const {
    return reinterpret_cast<u64*>(at(peer, header + 8ull * (epoch % 2 * RANKS + source)));
  }
  DEVICE u64 meta_at(int source, int token, u32 epoch) const {
    return 16ull * kMetaLines * index(epoch % 2 * RANKS + source, token);
  }
  DEVICE u8* meta_of(int peer, int source, int token, u32 epoch) const {
    return at(peer, meta + meta_at(source, token, epoch));
  }
  DEVICE u64* row_flags_of(int peer, int source, int token) const {
    return reinterpret_cast<u64*>(at(peer, row_flags + 8 * index(source, token)));
  }
  DEVICE u64* result_flags_of(int peer, int source, int token) const {
    return reinterpret_cast<u64*>(at(peer, result_flags + 8 * index(source, token)));
  }
  DEVICE u8* row(int peer, int source, int token) const { return at(peer, rows + kRowBytes * index(source, token)); }
  DEVICE u8* result(int peer, int source, int token) const {
    return at(peer, results + static_cast<u64>(kResultBytes) * index(source, token));
  }
  // This thread's vector of a packet.
  DEVICE u8* row_packet(int peer, int source, int token, int packet) const {
    const u64 row = static_cast<u64>(source) * row_packet_tokens + token;
    return at(peer, row_packets + kPacketBytes * (row * kRowPackets + packet) + sizeof(Vec) * packet_slot());
  }
  // `part`: the rank that it is from, or its slot.
  DEVICE u8* result_packet(int peer, int part, int token, int packet) const {
    const u64 first = index(part, token) * kResultPackets;
    return at(peer, result_packets + kPacketBytes * (first + packet) + sizeof(Vec) * packet_slot());
  }
  DEVICE u8* out_of(int part, int token) const {
    return at(rank, outbox + static_cast<u64>(kResultBytes) * index(part, token));
  }
};

struct Common {
  Buffers buffers;
  Limits limits;
  Counters* counters;
  const int* topk_ids;  // [T, TOPK], global
  const int* owners;    // [num_ids]: the rank of each id
  int num_ids;
  int num_tokens;
  int phases;
  int packet_parts, packet_tasks;  // parts of a row sent as packets, and about how many tasks to make of all
  int most_tokens;                 // no rank has more: of a batch that experts combine (low_latency_layer.cuh)

  DEVICE int packet_parts_of(int rows) const { return max(1, min(packet_parts, packet_tasks / max(rows, 1))); }

  DEVICE u32 alive() const { return limits.status->alive; }

  // The expert of this lane's slot, -1 for none.
  DEVICE int id_of_slot(int token) const {
    const int lane = threadIdx.x % 32;
    return lane < TOPK ? topk_ids[token * TOPK + lane] : -1;
  }

  // The ranks of a token's experts, as bits: `id` is that of this lane's slot, owner_of(id) its rank.
  template <typename OwnerOf>
  DEVICE u32 destinations(int id, u32 alive, const OwnerOf& owner_of) const {
    int owner = id >= 0 && id < num_ids ? owner_of(id) : -1;
    if (owner >= 0 && !(alive >> owner & 1)) {
      owner = -1;
    }
    u32 ranks = 0;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
      ranks |= __any_sync(kAllLanes, owner == rank) ? 1u << rank : 0u;
    }
    return ranks;
  }
};

#if SLOT_RESULTS
// By whole warps: the rank of a token's slot in each lane, -1 for none; `due` gets the bits of those that have one.
DEVICE int owner_of_slot(const Common& c, int token, u32 alive, u32& due) {
  const int lane = threadIdx.x % 32;
  const int id = lane < TOPK && token < c.num_tokens ? c.topk_ids[token * TOPK + lane] : -1;
  int owner = id >= 0 && id < c.num_ids ? c.owners[id] : -1;
  if (owner >= 0 && !(alive >> owner & 1)) {
    owner = -1;
  }
  due = __ballot_sync(kAllLanes, owner >= 0);
  return owner;
}
#endif

// ==== Sums of results ====

DEVICE void add_weighted(Sums& sum, Vec v, float weight) {
  const Sums f = unpack_result(v);
#pragma unroll
  for (int i = 0; i < kResultColumns; ++i) {
    sum.v[i] = __fadd_rn(sum.v[i], __fmul_rn(f.v[i], weight));
  }
}

// Adds the results of `ranks` in rank order; load(rank) loads one, came(rank, v) tells whether it has arrived.
template <typename Load, typename Came>
DEVICE OutputVec sum_of(u32 ranks, const Load& load, const Came& came) {
  constexpr int kAtOnce = RANKS < 4 ? RANKS : 4;  // loaded at a time
  Sums sum{};
#pragma unroll 1
  for (int from = 0; from < RANKS; from += kAtOnce) {
    Vec v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (from + j < RANKS && ranks >> (from + j) & 1) {
        v[j] = load(from + j);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (from + j < RANKS && ranks >> (from + j) & 1 && came(from + j, v[j])) {
        add_result(sum, v[j]);
      }
    }
  }
  return pack_output(sum);
}

// ==== Halves of a block ====

// The first half of the block's warps sends and the second receives, each if the launch asks for it.
template <typename Params, typename Shared>
DEVICE void send_and_receive(const Params& p, Shared& shared) {
  const int phases = p.common.phases;
  if (threadIdx.x < kThreads) {
    if (phases & SEND) {
      send_all(p, shared);
    }
  } else if (phases & RECEIVE) {
    grid_dependency_wait();
    if (!(phases & SEND)) {
      grid_dependency_launch();
    }
    receive_all(p, shared);
  }
}

// ==== Parts ====

// First vector of a part of a row; parts are multiples of a scale's group.
DEVICE int part_begin(int part, int parts) {
  return min(kVectors, (kGroups * part + parts - 1) / parts * kScaleVectors);
}

// First packet of a part of a row; parts are multiples of kStep.
template <int kStep>
DEVICE int packet_begin(int part, int parts, int packets) {
  return min(packets, (packets + kStep - 1) / kStep * part / parts * kStep);
}

DEVICE u64 both(u32 epoch) { return static_cast<u64>(epoch) << 32 | epoch; }

// Waits for the flags of a row or result from `source`.
template <typename Waits>
DEVICE bool wait_for_row(const Buffers& b, Waits& wait, u64* flags, int source) {
  const bool came = wait.for_flag(flags, both(wait.epoch), source);
#if DEVICE_API
  if (came && !b.reaches(source)) {
    settle(flags, both(wait.epoch));
  }
#endif
  return came;
}

#if DEVICE_API
// Puts what the group has just written to an outbox to the unreachable ranks of `ranks`, one warp each.
template <typename Sync>
DEVICE void put_from_outbox(const Buffers& b, u32 ranks, void* there, const void* from, u64 bytes, u64* flags,
                            u64 value) {
  __threadfence_system();
  Sync::sync();
  const int warp = threadIdx.x % kThreads / 32;
  for (int peer = warp; peer < RANKS; peer += kWarps) {
    if (ranks >> peer & 1) {
      put_with_flag(there, from, bytes, flags, value, b.pes[peer]);
    }
  }
}
#endif

// ==== Refresh ====
//
// Overwrites flags that have not been written for long with the previous epoch.
//
// Lines, packets and flags hold the lower 32 bits of their batch's number, so a flag left from 2^32 batches ago would
// be taken for new. Therefore in two batches of every 2^20 (headers and meta have two parts) a rank writes an old epoch
// wherever its own parts receive nothing of that batch. This is safe: it is the only writer of its parts, peers do not
// read them in this batch, and it has had their answers for earlier ones (low_latency.py).

constexpr u32 kBatchesRefreshed = 1u << 20;

// A refresh task for each of `capacity` tokens follows all other tasks of such a batch.
DEVICE bool refresh_is_due(u32 epoch) { return epoch % kBatchesRefreshed < 2; }

DEVICE Vec old_line(u32 epoch) { return Vec{0, epoch - 1, 0, epoch - 1}; }

// The lines of all packets of a row; at(packet) is the address of each thread's vector.
template <typename At>
DEVICE void refresh_packets(const At& at, int packets, u32 epoch) {
  for (int packet = threadIdx.x / kPacketThreads; packet < packets; packet += kGroupPackets) {
    if (packet_slot() == kPacketVectors) {
      store_volatile(at(packet), old_line(epoch));
    }
  }
}

// The flag `there` on a rank, which may be out of reach (then `own` is its symmetric address).
DEVICE void refresh_flag(const Buffers& b, int peer, u64* there, u64* own, u32 epoch) {
  if (threadIdx.x != 0) {
    return;
  }
  if (b.reaches(peer)) {
    store_volatile(there, both(epoch - 1));
  }
#if DEVICE_API
  else {
    put_flag(own, both(epoch - 1), b.pes[peer]);
  }
#endif
}

// After a task: its puts must arrive before those of the next batch.
DEVICE void end_refresh() {
#if DEVICE_API
  if (threadIdx.x == 0) {
    wait_for_puts();
  }
#endif
}

// Meta and row of a token that is sent to `ranks`.
DEVICE void refresh_row(const Common& c, int token, u32 ranks, u32 epoch, u32 alive) {
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
      continue;  // its meta follows a flag that every batch writes
    }
    if (token < b.row_packet_tokens && !(is_sent && as_packets)) {
      const auto at = [&](int packet) { return b.row_packet(peer, b.rank, token, packet); };
      refresh_packets(at, kRowPackets, epoch);
    }
    if (token >= c.num_tokens && threadIdx.x < kMetaLines) {
      store_volatile(b.meta_of(peer, b.rank, token, epoch) + 16 * threadIdx.x, old_line(epoch));
    }
  }
  end_refresh();
}

// A result that is not sent to `owner`.
DEVICE void refresh_result(const Buffers& b, int owner, int token, u32 epoch) {
#if DEVICE_API
  u64* there = b.result_flags_of(owner, b.rank, token);
  refresh_flag(b, owner, there, b.result_flags_of(b.rank, b.rank, token), epoch);
#else
  refresh_packets([&](int packet) { return b.result_packet(owner, b.rank, token, packet); }, kResultPackets, epoch);
#endif
}
