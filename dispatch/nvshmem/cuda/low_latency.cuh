// The buffers of one batch of low-latency dispatch and combine, and what both kernels know of them.
//
// Every rank has the same buffers at the same offsets (layout.py computes them); part [s] of each belongs to the rank s
// that writes it. R ranks, capacity C tokens a rank, H slots a token (HIDDEN columns K, TOPK experts). Results, rows in
// e4m3, and rows of a rank that has at most `row_packet_tokens` tokens, travel as packets (protocol.cuh); others as
// plain rows with a flag.
//
//   header          [2, R]         u64 {tokens of s, epoch}; even and odd epochs take turns
//   meta            [2, R, C, M]   lines, likewise: four local experts of 16 bits in each of the first, two weights in
//                                  each of the others; 0xffff for slots that are not for this rank
//   row_flags       [R, C, 2]      u32, the epoch when that half of the row is there
//   rows            [R, C]         row_bytes each, codes with scales behind them in fp8
//   row_packets     [R, L, ...]    rows as packets, L = row_packet_tokens; in fp8 the words of a packet's line are the
//                                  scales of the group that its first code belongs to, and of the next
//   result_packets  [R, C, ...]    results as packets
//
// Where some ranks are out of reach nothing travels as packets. Then there are
//
//   result_flags    [R, C, 2]      u32, the epoch when that half of the result is there
//   results         [R, C]         2 K bytes each
//
// and what goes to those ranks is put from
//
//   meta_outbox     [2, R, C, M]   meta for rank s
//   outbox          [R, C]         2 K bytes each: rows of this rank in its own part, results for rank s in the others
#pragma once

#include "device_api.cuh"
#include "numbers.cuh"

constexpr int kThreads = 256;  // of a group; blocks have two
constexpr int kWarps = kThreads / 32;
constexpr int kRowParts = 2;  // of a row with flags
constexpr int kVectors = HIDDEN / kColumns;
constexpr int kGroups = (kVectors + kScaleVectors - 1) / kScaleVectors;
constexpr int kRowBytes = FP8 ? (HIDDEN + 4 * kGroups + 15) / 16 * 16 : 2 * HIDDEN;
// A warp moves so many packets at a time; rows have a multiple of that.
constexpr int kWarpPackets = 32 / kPacketThreads, kGroupPackets = kThreads / kPacketThreads;
__device__ constexpr int packets_of(int vectors) {
  return (vectors + kWarpPackets * kPacketVectors - 1) / (kWarpPackets * kPacketVectors) * kWarpPackets;
}
constexpr int kResultPackets = packets_of(kVectors);
constexpr int kRowPackets = packets_of(FP8 ? kVectors / 2 : kVectors);
constexpr int kLocalsOfLine = 4, kWeightsOfLine = 2;
constexpr int kLocalLines = (TOPK + kLocalsOfLine - 1) / kLocalsOfLine;
constexpr int kMetaLines = kLocalLines + (TOPK + kWeightsOfLine - 1) / kWeightsOfLine;
constexpr u32 kNotHere = 0xffff;
constexpr u32 kAllLanes = 0xffffffffu;
enum { SEND = 1, RECEIVE = 2 };

using Senders = Group<1, kThreads>;
using Receivers = Group<2, kThreads>;

// Tickets of one batch's kernels; the kernel of the other direction sets them for the next round.
struct Counters {
  u64 dispatch, combine;
};

struct Buffers {
  u64 peers[RANKS];  // address of each rank's buffers, 0 where it is out of reach
  u64 header, meta, row_flags, result_flags, rows, results, row_packets, result_packets, meta_outbox, outbox;
  int pes[RANKS];  // NVSHMEM's numbers
  u32 reachable;   // bit r: rank r is within reach
  int rank;
  int capacity;
  int row_packet_tokens;

  // Of a rank with so many tokens. All of those in e4m3 do: they have to be made plain anyway.
  DEVICE bool rows_are_packets(int tokens) const { return !DEVICE_API && (FP8 || tokens <= row_packet_tokens); }
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
    return at(peer, results + 2ull * HIDDEN * index(source, token));
  }
  // This thread's vector of a packet.
  DEVICE u8* row_packet(int peer, int source, int token, int packet) const {
    const u64 row = static_cast<u64>(source) * row_packet_tokens + token;
    return at(peer, row_packets + kPacketBytes * (row * kRowPackets + packet) + sizeof(Vec) * packet_slot());
  }
  DEVICE u8* result_packet(int peer, int source, int token, int packet) const {
    const u64 first = index(source, token) * kResultPackets;
    return at(peer, result_packets + kPacketBytes * (first + packet) + sizeof(Vec) * packet_slot());
  }
  DEVICE u8* out_of(int part, int token) const { return at(rank, outbox + 2ull * HIDDEN * index(part, token)); }
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
  int packet_parts, packet_tasks;  // parts of a row that is sent as packets, and tasks that all of them are about

  DEVICE int packet_parts_of(int rows) const { return max(1, min(packet_parts, packet_tasks / max(rows, 1))); }

  DEVICE u32 alive() const { return limits.status->alive; }

  // The ranks of a token's experts as bits; owner_of gives that of an id.
  template <typename OwnerOf>
  DEVICE u32 destinations(int token, u32 alive, const OwnerOf& owner_of) const {
    const int lane = threadIdx.x % 32;
    const int id = lane < TOPK ? topk_ids[token * TOPK + lane] : -1;
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

// Where the part of a row begins that one group or warp moves, in vectors; a whole scale's group at least.
DEVICE int part_begin(int part, int parts) {
  return min(kVectors, (kGroups * part + parts - 1) / parts * kScaleVectors);
}

// The same in packets, in steps of kStep.
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
// Puts what the group has just written to an outbox to the ranks of `ranks` that are out of reach, each with a warp.
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

// Flags that no batch has written for long are written with the number of the batch before.
//
// Lines, packets and flags hold 32 bits of their batch's number, which begins again behind 2^32 of them; what a batch
// of that number left then would be taken for new. So in two batches of each 2^20 (headers and slots have two parts) a
// rank writes an old number wherever its own parts get nothing of that batch. It may: what follows in its place is its
// own as well, nobody reads there in this batch, and of earlier ones it had the answer (channel.py).

constexpr u32 kBatchesRefreshed = 1u << 20;

// A task for each of `capacity` slots is due, behind all others of a batch.
DEVICE bool refresh_is_due(u32 epoch) { return epoch % kBatchesRefreshed < 2; }

DEVICE Vec old_line(u32 epoch) { return Vec{0, epoch - 1, 0, epoch - 1}; }

// The lines of all packets of a row, whose addresses at(packet) gives to each thread for its vector.
template <typename At>
DEVICE void refresh_packets(const At& at, int packets, u32 epoch) {
  for (int packet = threadIdx.x / kPacketThreads; packet < packets; packet += kGroupPackets) {
    if (packet_slot() == kPacketVectors) {
      store_volatile(at(packet), old_line(epoch));
    }
  }
}

// A flag at `there` on a rank, which may be out of reach.
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

// Behind a task: nothing that it put can come behind what the next batch puts there.
DEVICE void end_refresh() {
#if DEVICE_API
  if (threadIdx.x == 0) {
    wait_for_puts();
  }
#endif
}

// Slots and row of a token that goes to `ranks`.
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
      continue;  // slots come behind a flag that every batch has
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
