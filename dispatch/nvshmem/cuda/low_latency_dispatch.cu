// Low-latency (decode) dispatch: sends each token once to every rank that has one of its experts, and lists there which
// rows each expert has.
//
// Layout in:   rows [T, K], topk_ids and weights [T, TOPK] on each rank.
// Layout out:  on the rank of expert e: expert_num_tokens [El]; its rows in the order (source, token), either copied to
//              out [El, R * C, K], or by reference, as numbers s * C + t in expert_row_ids [El, R * C], of rows that
//              stay where they arrive (8-bit ones, dequantized, in out [R * C, K]); positions [R * C, TOPK]: the row of
//              its expert that each slot is, for the combine. Where the experts' kernel reads rows and meta itself
//              (positions == null, low_latency_layer.cuh) nothing: the dispatch has only waited for all of them.
// Warp roles:  16 warps. 0 to 7 send: they draw tasks by tickets (Tickets, protocol.cuh): meta of 16 tokens, or a part
//              of a token's row, as flag-in-data packets (as NCCL's LL128) or plain with a flag. 8 to 15 receive: they
//              read headers and meta, list the experts' rows, and wait for rows and copy them.
// Pipeline:    within a block both halves run at once, so waiting never delays sending. Launched as one kernel, or as
//              two (SEND, RECEIVE) with other work between. Programmatic dependent launch overlaps it with its
//              neighbours.
// Example:     two ranks of one expert each, C = 4; rank 0's token 0 goes to both experts, rank 1's token 0 to expert
//              0: rank 0 has expert_row_ids [[0, 4]], rank 1 [[0]].
#include "low_latency.cuh"

// 1: the tokens' experts are still to be chosen. Each block chooses those of the tokens that it sends, and who sends a
// token's meta writes them down, for the combine and for others.
#ifndef ROUTED
#define ROUTED 0
#endif
#if ROUTED
#include "router.cuh"
static_assert(TOP_K == TOPK && !DEVICE_API, "slots are those of the router, and every block sends");
#endif

// ==== Parameters and shared memory ====

using Waits = Wait<PHASE_DISPATCH>;

struct Params {
  Common common;
  const u8* rows;
  const float* weights;
  const int* locals;  // [num_ids]: local index of each id on its rank
  u8* out;            // rows for the experts, unless these read them where they arrive; else null
  int* expert_num_tokens;
  int* expert_row_ids;  // null: rows are copied per expert (expanded form)
  int* positions;       // null: rows stay in their packets, and nothing is listed
  int num_local_experts;
  int shares;      // groups that list the same expert and share the copying of its rows, in the expanded form
  int take_parts;  // most parts of a row that is copied
#if ROUTED
  RouterParams router;
#endif

  // Parts of a row, each copied by a warp.
  DEVICE int parts_of_row(int warps, int rows) const { return max(1, min(take_parts, warps / max(rows, 1))); }
};

constexpr int kMetaTokens = ROUTED ? kWarps : 16;  // tokens whose meta one task sends
constexpr int kListed = 2 * kThreads;
constexpr int kCachedLocations = 512;  // ids whose locations are kept in shared memory

// Packets whose codes a group makes together: whole groups of columns that share a scale.
constexpr int kStagedPackets = 16;
constexpr int kStagedVectors = kStagedPackets * kPacketVectors * 2;

struct Arrival {
  int source, token;
};

// Where an expert is: its rank, and its local index there.
struct ExpertLocation {
  unsigned short owner, local;
};

struct Shared {
#if EIGHT_BIT
  alignas(16) uint2 codes[kStagedVectors];
  float scales[kStagedVectors / kScaleVectors + 1];
#endif
  u64 ticket;
  ExpertLocation locations[kCachedLocations];
  int before[RANKS + 1];    // tokens of all ranks before each
  int warp_counts[kWarps];  // rows of the expert among the tokens that each warp has read
  Arrival arrivals[kListed];
#if ROUTED
  int ids[kMetaTokens * TOPK];  // of the tokens whose meta is sent
  float weights[kMetaTokens * TOPK];
#endif

  DEVICE int tokens_of(int source) const { return before[source + 1] - before[source]; }
};

DEVICE ExpertLocation load_location(const Params& p, int id) {
  return ExpertLocation{static_cast<unsigned short>(p.common.owners[id]), static_cast<unsigned short>(p.locals[id])};
}

DEVICE ExpertLocation location_of(const Params& p, const Shared& shared, int id) {
  return id < kCachedLocations ? shared.locations[id] : load_location(p, id);
}

// ==== Send ====
//
// Headers and meta of the tokens, then the rows, to ranks within reach and, by puts, to others.

#if EIGHT_BIT
DEVICE void store_codes(u8* row, Codes codes, float scale, int i) {
  reinterpret_cast<uint2*>(row)[i] = make_uint2(codes.low, codes.high);
  if (i % kScaleVectors == 0) {
    reinterpret_cast<float*>(row + HIDDEN)[i / kScaleVectors] = scale;
  }
}
#endif

// Stores one vector of a row to every destination.
DEVICE void store_vector(const Buffers& b, Vec v, int i, bool is_inside, int token, u32 ranks) {
#if EIGHT_BIT
  float scale;
  const Codes codes = quantize(v, scale);
#endif
#pragma unroll 1
  for (int step = 1; step <= RANKS; ++step) {
    const int peer = (b.rank + step) % RANKS;
    if (is_inside && ranks >> peer & 1) {
      u8* row = b.row(peer, b.rank, token);
#if EIGHT_BIT
      store_codes(row, codes, scale, i);
#else
      reinterpret_cast<Vec*>(row)[i] = v;
#endif
    }
  }
}

// Stores a packet per eight threads to every destination.
DEVICE void put_packets(const Buffers& b, Vec v, int packet, int token, u32 ranks) {
#pragma unroll 1
  for (int step = 1; step <= RANKS; ++step) {
    const int peer = (b.rank + step) % RANKS;
    if (ranks >> peer & 1) {
      store_packets(b.row_packet(peer, b.rank, token, packet), v);
    }
  }
}

// One line of a token's meta for `peer`: four local experts, or two weights, of those from slot number `first` on.
DEVICE void store_meta(const Params& p, const Shared& shared, u8* at, int peer, int first, int line, u32 epoch) {
#if ROUTED
  const int* ids = shared.ids;
  const float* weights = shared.weights;
#else
  const int* ids = p.common.topk_ids;
  const float* weights = p.weights;
#endif
  if (line >= kLocalLines) {
    const int slot = (line - kLocalLines) * kWeightsOfLine;
    const u32 next = slot + 1 < TOPK ? __float_as_uint(weights[first + slot + 1]) : 0;
    store_line(at, __float_as_uint(weights[first + slot]), next, epoch);
    return;
  }
  u32 locals[kLocalsOfLine];
#pragma unroll
  for (int i = 0; i < kLocalsOfLine; ++i) {
    const int slot = line * kLocalsOfLine + i;
    const int id = slot < TOPK ? ids[first + slot] : -1;
    const ExpertLocation location =
        id >= 0 && id < p.common.num_ids ? location_of(p, shared, id) : ExpertLocation{kNotHere, kNotHere};
    locals[i] = location.owner == peer ? location.local : kNotHere;
  }
  store_line(at, locals[0] | locals[1] << 16, locals[2] | locals[3] << 16, epoch);
}

// The meta of some tokens to every rank within reach, ahead of the rows, so that these are listed when they arrive.
DEVICE void send_meta(const Params& p, Shared& shared, int task, u32 epoch, u32 alive) {
  const Buffers& b = p.common.buffers;
  const int first = task * kMetaTokens, lines = (min(first + kMetaTokens, p.common.num_tokens) - first) * kMetaLines;
#if ROUTED
  const int routed = first + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (routed < p.common.num_tokens) {
    const Choice choice = choose_experts(p.router, routed);
    if (lane < TOPK) {
      const int slot = (routed - first) * TOPK + lane;
      p.router.ids[first * TOPK + slot] = shared.ids[slot] = choice.id;
      p.router.weights[first * TOPK + slot] = shared.weights[slot] = choice.weight;
    }
  }
  Senders::sync();
  const int before = first;
#else
  const int before = 0;
#endif
  for (int i = threadIdx.x; i < lines * RANKS; i += kThreads) {
    const int peer = i / lines, token = first + i % lines / kMetaLines, line = i % lines % kMetaLines;
    if (b.reaches(peer) && alive >> peer & 1) {
      u8* at = b.meta_of(peer, b.rank, token, epoch) + 16 * line;
      store_meta(p, shared, at, peer, (token - before) * TOPK, line, epoch);
    }
  }
}

// The number of this rank's tokens, to a rank within reach.
DEVICE void send_header(const Common& c, int peer, u32 epoch) {
  store_volatile(c.buffers.header_of(peer, c.buffers.rank, epoch), static_cast<u64>(epoch) << 32 | c.num_tokens);
}

DEVICE const Vec* row_of(const Params& p, int token) {
  return reinterpret_cast<const Vec*>(p.rows + 2ull * HIDDEN * token);
}

// The ranks that have an expert of the token, as bits.
DEVICE u32 destinations(const Params& p, const Shared& shared, int token, u32 alive) {
#if ROUTED
  const Choice choice = choose_experts(p.router, token);
  const int id = threadIdx.x % 32 < TOPK ? choice.id : -1;
#else
  const int id = p.common.id_of_slot(token);
#endif
  return p.common.destinations(id, alive, [&](int id) { return location_of(p, shared, id).owner; });
}

// Those within reach.
DEVICE u32 reached_by(const Params& p, const Shared& shared, int token, u32 alive) {
  return destinations(p, shared, token, alive) & (DEVICE_API ? p.common.buffers.reachable : ~0u);
}

// A part of a token's row, plain, to every destination. The row is loaded before the destinations are known. The next
// ticket is drawn behind the stores: if there are as many such tasks as blocks, a block that starts a little later
// would otherwise find its task taken by one that is still busy.
DEVICE void send_plain(const Params& p, const Shared& shared, Tickets<Senders>& tickets, int token, int part, u32 epoch,
                       u32 alive) {
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
      store_vector(b, v[j], i, i < end, token, ranks);
    }
  }
  Senders::sync();
  tickets.draw_ahead();
  if (threadIdx.x < RANKS && ranks >> threadIdx.x & 1) {
    u64* flags = b.row_flags_of(threadIdx.x, b.rank, token);
    store_release_sys(reinterpret_cast<u32*>(flags) + part, epoch);
  }
}

#if EIGHT_BIT
// The same as packets: each thread quantizes a vector, and packets are put together through shared memory.
DEVICE void send_packets(const Params& p, Shared& shared, int token, int part, int parts, u32 epoch, u32 alive) {
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
DEVICE void send_packets(const Params& p, const Shared& shared, int token, int part, int parts, u32 epoch, u32 alive) {
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
// Header and meta of all tokens to one unreachable rank.
DEVICE void put_meta(const Params& p, const Shared& shared, int peer, u32 epoch) {
  const Buffers& b = p.common.buffers;
  const int lines = p.common.num_tokens * kMetaLines;
  u8* from = b.at(b.rank, b.meta_outbox + b.meta_at(peer, 0, epoch));
  for (int i = threadIdx.x; i < lines; i += kThreads) {
    store_meta(p, shared, from + 16 * i, peer, i / kMetaLines * TOPK, i % kMetaLines, epoch);
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

// A token's row to every unreachable destination.
DEVICE void put_row(const Params& p, const Shared& shared, int token, u32 epoch, u32 alive) {
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
#if EIGHT_BIT
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

// Tasks for unreachable ranks; returns false, with their number subtracted from `task`, if it is not one of them.
DEVICE bool put_task(const Params& p, const Shared& shared, int& task, u32 epoch, u32 alive) {
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

DEVICE int put_tasks(const Common& c) { return RANKS + c.num_tokens; }
#endif

DEVICE void send_all(const Params& p, Shared& shared) {
  const Common& c = p.common;
  const Buffers& b = c.buffers;
  Tickets<Senders> tickets(&c.counters->dispatch, &shared.ticket);
  const u32 alive = c.alive();
  for (int id = threadIdx.x; id < min(c.num_ids, kCachedLocations); id += kThreads) {
    shared.locations[id] = load_location(p, id);
  }
  u64 ticket = tickets.next();
  const u32 epoch = static_cast<u32>(ticket >> 32);
  grid_dependency_wait();
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

// ==== Receive ====
//
// Lists the rows of each expert, and copies them to where it reads them.

// Slots of a token, as bits, whose local expert `is_wanted`; none if its meta did not arrive in time.
template <typename Wanted>
DEVICE u32 slots_where(const Buffers& b, Waits& wait, int source, int token, const Wanted& is_wanted) {
  constexpr int kAtOnce = kLocalLines == 2 ? 2 : 1;  // lines loaded at a time
  const u8* at = b.meta_of(b.rank, source, token, wait.epoch);
  u32 slots = 0;
#pragma unroll 1
  for (int first = 0; first < kLocalLines; first += kAtOnce) {
    Vec lines[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      lines[n] = load_volatile(at + 16 * min(first + n, kLocalLines - 1));
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

// What is loaded for one vector of a row: itself, or its codes and their scale.
struct WireVector {
  Vec data;

  WireVector() = default;
  DEVICE WireVector(const u8* row, int i) {
#if EIGHT_BIT
    const uint2 codes = __ldcv(reinterpret_cast<const uint2*>(row) + i);
    data.x = codes.x;
    data.y = codes.y;
    data.z = __ldcv(reinterpret_cast<const u32*>(row + HIDDEN) + i / kScaleVectors);
#else
    data = load_volatile(row + 16ull * i);
#endif
  }

  // As the experts read it.
  DEVICE Vec plain() const { return EIGHT_BIT ? dequantize(Codes{data.x, data.y}, __uint_as_float(data.z)) : data; }
};

// By a warp: copies a part of a row that has arrived to where the experts read it.
DEVICE void copy_row_part(const u8* row, int begin, int end, Vec* there) {
  constexpr int kAhead = 3;  // as many as registers allow
  for (int base = begin + threadIdx.x % 32; base < end; base += kAhead * 32) {
    WireVector wire[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (base + j * 32 < end) {
        wire[j] = WireVector(row, base + j * 32);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (base + j * 32 < end) {
        there[base + j * 32] = wire[j].plain();
      }
    }
  }
  __syncwarp();
}

// Stores this thread's vector of a packet as the experts read it.
DEVICE void unpack_packet(Vec v, int packet, Vec* there) {
  const int vector = packet * kPacketVectors + packet_slot();
#if EIGHT_BIT
  constexpr int kGroupVectors = kScaleVectors / 2;  // vectors of sixteen codes per scale
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

// By a warp: waits for packets of a row and copies them to where the experts read it.
DEVICE void copy_packets(const Buffers& b, Waits& wait, int source, int token, int begin, int end, Vec* there) {
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

// By a warp: waits for a row and copies a part of it to `there`, unless that is null: then it stays.
DEVICE void receive_row(const Buffers& b, Waits& wait, bool as_packets, int source, int token, int part, int parts,
                        u8* there) {
  if (as_packets) {
    const int begin = packet_begin<kWarpPackets>(part, parts, kRowPackets);
    const int end = packet_begin<kWarpPackets>(part + 1, parts, kRowPackets);
    u8* to = there ? there : b.row(b.rank, source, token);
    copy_packets(b, wait, source, token, begin, end, reinterpret_cast<Vec*>(to));
  } else if (__all_sync(kAllLanes, wait_for_row(b, wait, b.row_flags_of(b.rank, source, token), source)) && there) {
    const int begin = part_begin(part, parts), end = part_begin(part + 1, parts);
    copy_row_part(b.row(b.rank, source, token), begin, end, reinterpret_cast<Vec*>(there));
  }
}

// This group's share of the listed rows, `count` of the expert's from number `first` on; all groups of the expert share
// them, warp by warp.
DEVICE void receive_listed(const Params& p, Waits& wait, const Shared& shared, int expert, int share, int first,
                           int count) {
  const Buffers& b = p.common.buffers;
  const int warps = p.shares * kWarps, parts = p.parts_of_row(warps, count);
  for (int task = threadIdx.x % kThreads / 32 * p.shares + share; task < count * parts; task += warps) {
    const int part = task % parts, n = task / parts;
    const Arrival a = shared.arrivals[n];
    const bool as_packets = b.rows_are_packets(shared.tokens_of(a.source));
    u8* there = p.out + 2ull * HIDDEN * (expert * RANKS * b.capacity + first + n);
    receive_row(b, wait, as_packets, a.source, a.token, part, parts, there);
  }
  Receivers::sync();
}

// All rows that arrive, each part by a warp, if experts read rows by reference.
DEVICE void receive_rows(const Params& p, Waits& wait, const Shared& shared) {
  const Buffers& b = p.common.buffers;
  int most = 0;
  bool moves = p.out != nullptr;
  for (int source = 0; source < RANKS; ++source) {
    most = max(most, shared.tokens_of(source));
    moves |= shared.tokens_of(source) > 0 && b.rows_are_packets(shared.tokens_of(source));
  }
  // Groups that have no expert to list begin.
  const int groups = gridDim.x, group = (blockIdx.x + groups - p.num_local_experts % groups) % groups;
  const int parts = moves ? p.parts_of_row(groups * kWarps, most * RANKS) : 1;
  const int first = threadIdx.x % kThreads / 32 * groups + group;
  for (int task = first; task < most * parts * RANKS; task += groups * kWarps) {
    const int source = task % RANKS, part = task / RANKS % parts, token = task / RANKS / parts;
    const auto is_here = [](u32 local) { return local != kNotHere; };
    const bool is_listed = token < shared.tokens_of(source) && slots_where(b, wait, source, token, is_here);
    if (__all_sync(kAllLanes, is_listed)) {
      u8* there = p.out ? p.out + 2 * HIDDEN * b.index(source, token) : nullptr;
      receive_row(b, wait, b.rows_are_packets(shared.tokens_of(source)), source, token, part, parts, there);
    }
  }
}

// Reads how many tokens every source has.
DEVICE void read_headers(const Params& p, Waits& wait, Shared& shared, u32 alive) {
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

// Reads every source's meta and lists the rows of one expert; in the expanded form also copies a share of them.
DEVICE void list_expert(const Params& p, Waits& wait, Shared& shared, int expert, int share) {
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
      receive_listed(p, wait, shared, expert, share, taken, listed - taken);
      taken = listed;
    }
  }
  if (thread == 0 && share == 0) {
    p.expert_num_tokens[expert] = listed;
  }
}

// By a warp: waits for a rank's header, for the meta of one of its tokens, and for the packets of its row if that has
// an expert here. Everything is requested before the first wait.
DEVICE bool await_row(const Common& c, Waits& wait, int source, int token) {
  constexpr int kEach = (kRowPackets + 31) / 32;
  const Buffers& b = c.buffers;
  const int lane = threadIdx.x % 32;
  const u8* meta = b.meta_of(b.rank, source, token, wait.epoch) + 16 * min(lane, kMetaLines - 1);
  const u64 row = static_cast<u64>(source) * b.row_packet_tokens + token;
  const u8* packets = b.at(b.rank, b.row_packets) + kPacketBytes * row * kRowPackets + sizeof(Vec) * kPacketVectors;
  const auto packet = [=](int j) { return packets + kPacketBytes * min(lane + 32 * j, kRowPackets - 1); };
  Vec line = load_volatile(meta), flags[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    flags[j] = load_volatile(packet(j));
  }
  u32 tokens = 0;
  const bool has_header = wait.for_number(b.header_of(b.rank, source, wait.epoch), source, tokens);
  if (!__all_sync(kAllLanes, has_header)) {
    return false;
  }
  if (token >= static_cast<int>(tokens)) {
    return true;
  }
  if (static_cast<int>(tokens) > c.most_tokens) {
    return false;
  }
  bool came = is_of(line, wait.epoch) || wait.for_line(meta, source, line);
  const u32 four[kLocalsOfLine] = {line.x & 0xffff, line.x >> 16, line.z & 0xffff, line.z >> 16};
  bool is_here = false;
#pragma unroll
  for (int i = 0; i < kLocalsOfLine; ++i) {
    is_here |= lane < kLocalLines && four[i] != kNotHere;
  }
  if (__any_sync(kAllLanes, came && is_here)) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      came = came && (is_of(flags[j], wait.epoch) || wait.for_line(packet(j), source, flags[j]));
    }
  }
  return __all_sync(kAllLanes, came);
}

// All rows that arrive, each by a warp. Whoever misses something notes it, so that the kernel behind leaves the batch
// out.
DEVICE void await_rows(const Common& c, Waits& wait, u32 alive) {
  const int most = c.most_tokens, first = threadIdx.x % kThreads / 32 * gridDim.x + blockIdx.x;
  for (int row = first; row < RANKS * most; row += kWarps * gridDim.x) {
    const int source = row / most;
    if (alive >> source & 1 && !await_row(c, wait, source, row % most) && threadIdx.x % 32 == 0) {
      store_volatile(&c.counters->failed, failure_of(wait.epoch));
    }
    __syncwarp();
  }
}

DEVICE void receive_all(const Params& p, Shared& shared) {
  const Common& c = p.common;
  const bool by_reference = p.expert_row_ids != nullptr;
  const int lists = p.num_local_experts * p.shares;
  // A rank without experts waits for the headers, too: it must not get two batches ahead of any rank.
  const bool is_listed = p.positions != nullptr;
  if (is_listed && !by_reference && static_cast<int>(blockIdx.x) >= max(lists, 1)) {
    return;
  }
  const u32 epoch = static_cast<u32>(*reinterpret_cast<volatile u64*>(&c.counters->dispatch) >> 32);
  Waits wait(c.limits, epoch);
  if (!is_listed) {
    await_rows(c, wait, c.alive());
    return;
  }
  read_headers(p, wait, shared, c.alive());
  for (int task = blockIdx.x; task < lists; task += gridDim.x) {
    list_expert(p, wait, shared, task / p.shares, task % p.shares);
  }
  if (by_reference) {
    receive_rows(p, wait, shared);
  }
}

// ==== Kernel ====

extern "C" __global__ void __launch_bounds__(2 * kThreads, 2) low_latency_dispatch(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  send_and_receive(p, shared);
}
