// The communication part of the experts' kernel where that kernel combines a low-latency batch itself.
//
// Layout in:   what the dispatch received (positions == null): headers, meta, and rows, which stay in their packets.
//              Row s * M + t is token t of rank s, where M is the most tokens of a rank. There are up to 32 rows.
// Layout out:  output [T, K] of this rank's own tokens, with the bits of low_latency_combine.cu.
// Steps:       own_locals finds experts of this rank's own tokens before the dispatch has received the other rows.
//              read_rows finds the local experts of each row. The kernel then computes them and publishes the results
//              of slots.
//              return_sums adds up a row's slots and sends the sum to the token's rank, as packets.
//              receive_sums adds up the sums that the ranks return for this rank's own tokens.
//              Warps of any CTA execute these steps; the sums are distributed over `warps` of them.
// Failures:    The dispatch decides whether the batch is complete, so all CTAs see the same rows. Only receive_sums
//              waits for other ranks, after everything that other CTAs wait for.
#pragma once

#include "low_latency.cuh"

constexpr int kMostRows = 32;

struct Batch {
  Common common;
  u8* output;  // [T, K]
};

// The experts of all rows, in shared memory.
template <int kExperts>
struct Rows {
  u32 tokens[kExperts];                             // of each local expert: its rows, as bits
  alignas(16) unsigned short ids[kMostRows][TOPK];  // local experts; kNotHere where a slot has none on this rank
  float weights[kMostRows][TOPK];
  u32 ranks[kMostRows];  // that return a result of this rank's token, as bits
  u32 epoch;
  bool is_complete;  // the dispatch has received everything
};

DEVICE u32 epoch_of(const Batch& p) {
  return static_cast<u32>(*reinterpret_cast<volatile u64*>(&p.common.counters->combine) >> 32);
}

// The index of a row in the packet buffers.
DEVICE int packet_row(const Common& c, int row) {
  const int source = row / c.most_tokens;
  return source * c.buffers.row_packet_tokens + row - source * c.most_tokens;
}

// One thread calls this after it has waited for earlier kernels, before any thread of its block lets the next kernel
// start.
DEVICE void hand_over(const Batch& p) { hand_over(true, &p.common.counters->dispatch, epoch_of(p) + 1); }

// By a warp, once the dispatch has started: returns in each lane the local experts of four slots of this rank's own
// tokens, as in their line of meta, which the dispatch writes first. Returns none if the lines do not arrive soon.
DEVICE Vec own_locals(const Batch& p) {
  constexpr int kSpins = 16;
  const Common& c = p.common;
  const Buffers& b = c.buffers;
  const int lane = threadIdx.x % 32, lines = c.num_tokens * kLocalLines, line = min(lane, max(lines - 1, 0));
  const u32 epoch = epoch_of(p);
  const u8* at = b.meta_of(b.rank, b.rank, line / kLocalLines, epoch) + 16 * (line % kLocalLines);
  const Vec none{~0u, epoch, ~0u, epoch};
  for (int spin = 0; lines > 0 && spin < kSpins; ++spin) {
    const Vec v = load_volatile(at);
    if (__all_sync(kAllLanes, is_of(v, epoch))) {
      return lane < lines ? v : none;
    }
  }
  return none;
}

// A row's meta as the lane of each slot loads it, for even and for odd epochs, so that the loads need not wait for the
// epoch.
struct SlotLines {
  Vec locals[2], weights[2];

  SlotLines() = default;
  DEVICE SlotLines(const Common& c, int row) {
    const Buffers& b = c.buffers;
    const int slot = min(static_cast<int>(threadIdx.x % 32), TOPK - 1), source = row / c.most_tokens;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u8* meta = b.meta_of(b.rank, source, row - source * c.most_tokens, i);
      locals[i] = load_volatile(meta + 16 * (slot / kLocalsOfLine));
      weights[i] = load_volatile(meta + 16 * (kLocalLines + slot / kWeightsOfLine));
    }
  }
};

// By a warp: stores the slots of a row. All tokens that were sent have lines of this epoch, and no others do.
template <int kExperts>
DEVICE void read_row(Rows<kExperts>& rows, int row, const SlotLines& lines) {
  const int slot = threadIdx.x % 32;
  const bool is_odd = rows.epoch % 2;
  const Vec line = is_odd ? lines.locals[1] : lines.locals[0], pair = is_odd ? lines.weights[1] : lines.weights[0];
  const u32 local = (slot % kLocalsOfLine < 2 ? line.x : line.z) >> (slot % 2 * 16) & 0xffff;
  const bool is_here = rows.is_complete && is_of(line, rows.epoch) && local != kNotHere;
  if (slot < TOPK) {
    rows.ids[row][slot] = is_here ? local : kNotHere;
    rows.weights[row][slot] = __uint_as_float(slot % kWeightsOfLine ? pair.z : pair.x);
    if (is_here) {
      atomicOr(&rows.tokens[local], 1u << row);
    }
  }
}

// By kReaders warps, of which this is number `warp`: stores the slots of all rows. If many warps of every block loaded
// the epoch, their accesses to one address would serialize, so one warp loads it for all; sync() is their barrier.
template <int kReaders, int kExperts, typename Sync>
DEVICE void read_rows(const Batch& p, Rows<kExperts>& rows, int warp, const Sync& sync) {
  constexpr int kEach = (kMostRows + kReaders - 1) / kReaders;
  const Counters& counters = *p.common.counters;
  const int num_rows = RANKS * p.common.most_tokens;
  if (warp == 0 && threadIdx.x % 32 == 0) {
    const u64 failed = *reinterpret_cast<const volatile u64*>(&counters.failed);
    rows.epoch = epoch_of(p);
    rows.is_complete = failed != failure_of(rows.epoch);
  }
  __syncwarp();
  SlotLines lines[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (warp + i * kReaders < num_rows) {
      lines[i] = SlotLines(p.common, warp + i * kReaders);
    }
  }
  sync();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (warp + i * kReaders < num_rows) {
      read_row(rows, warp + i * kReaders, lines[i]);
    }
  }
}

// Returns the slots of a row that have this expert, as bits.
template <int kExperts>
DEVICE u32 slots_of(const Rows<kExperts>& rows, int row, u32 expert) {
  u32 slots = 0;
  if (TOPK == 8) {  // in one load
    const Vec ids = *reinterpret_cast<const Vec*>(rows.ids[row]);
    const u32 pairs[4] = {ids.x, ids.y, ids.z, ids.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      slots |= ((pairs[i] & 0xffff) == expert ? 1u : 0u) << (2 * i);
      slots |= (pairs[i] >> 16 == expert ? 2u : 0u) << (2 * i);
    }
    return slots;
  }
#pragma unroll
  for (int k = 0; k < TOPK; ++k) {
    slots |= (rows.ids[row][k] == expert ? 1u : 0u) << k;
  }
  return slots;
}

// By a warp, after read_rows: stores which ranks return a result for a row of this rank's own tokens.
template <int kExperts>
DEVICE void read_ranks(const Batch& p, Rows<kExperts>& rows, int row) {
  const Common& c = p.common;
  const int token = row - c.buffers.rank * c.most_tokens;
  if (token >= 0 && token < c.num_tokens) {
    const u32 ranks = c.destinations(c.id_of_slot(token), c.alive(), [&](int id) { return c.owners[id]; });
    if (threadIdx.x % 32 == 0) {
      rows.ranks[token] = ranks;
    }
  }
}

// By whole warps: returns the rows that have an expert on this rank, as bits.
template <int kExperts>
DEVICE u32 rows_here(const Batch& p, const Rows<kExperts>& rows) {
  const int row = threadIdx.x % 32;
  bool is_here = false;
  if (row < RANKS * p.common.most_tokens) {
#pragma unroll
    for (int k = 0; k < TOPK; ++k) {
      is_here |= rows.ids[row][k] != kNotHere;
    }
  }
  return __ballot_sync(kAllLanes, is_here);
}

constexpr int kWarpsPerResult = kResultPackets / kWarpPackets;  // each has four packets

// This thread's vector of a result, and whether it is data.
struct ResultPlace {
  int packet, vector;
  bool is_data;

  DEVICE explicit ResultPlace(int part) {
    packet = part * kWarpPackets + threadIdx.x % 32 / kPacketThreads;
    vector = packet * kPacketVectors + packet_slot();
    is_data = packet_slot() < kPacketVectors && vector < kResultVectors;
  }
};

// Refreshes the flags of results that are not sent, as low_latency_combine.cu does.
DEVICE void refresh_results(const Batch& p, u32 here, u32 epoch, int warp, int warps) {
  const Buffers& b = p.common.buffers;
  for (int task = warp; task < RANKS * b.capacity; task += warps) {
    const int source = task % RANKS, token = task / RANKS;
    const bool is_sent = token < p.common.most_tokens && here >> (source * p.common.most_tokens + token) & 1;
    if (is_sent || !(p.common.alive() >> source & 1)) {
      continue;
    }
    for (int part = 0; part < kWarpsPerResult; ++part) {
      const ResultPlace place(part);
      if (packet_slot() == kPacketVectors) {
        store_volatile(b.result_packet(source, b.rank, token, place.packet), old_line(epoch));
      }
    }
  }
}

// By warp `warp` of `warps`: sends the sums of rows that have an expert here. results.load(slot, i) requests vector i
// of a slot's result, results.is_here(loaded) tells whether it was there, and results.vector(loaded) what it is.
template <int kExperts, typename Results>
DEVICE void return_sums(const Batch& p, const Rows<kExperts>& rows, int warp, int warps, const Results& results) {
  constexpr int kDeep = TOPK < 4 ? TOPK : 4;  // requested at a time
  const Buffers& b = p.common.buffers;
  const u32 epoch = rows.epoch, here = rows_here(p, rows);
  for (int task = warp; task < __popc(here) * kWarpsPerResult; task += warps) {
    u32 left = here;
    for (int i = task / kWarpsPerResult; i > 0; --i) {
      left &= left - 1;
    }
    const int row = __ffs(left) - 1, source = row / p.common.most_tokens, lane = threadIdx.x % 32;
    const ResultPlace place(task % kWarpsPerResult);
    Sums sum{};
    left = __ballot_sync(kAllLanes, lane < TOPK && rows.ids[row][min(lane, TOPK - 1)] != kNotHere);
    while (left && place.is_data) {
      typename Results::Loaded loaded[kDeep];
      int slots[kDeep];  // -1: none
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        slots[d] = __ffs(left) - 1;
        left &= left - 1;
      }
      bool all_here;
      do {
        all_here = true;
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
          loaded[d] = results.load(row * TOPK + max(slots[d], slots[0]), place.vector);
        }
#pragma unroll
        for (int d = 0; d < kDeep; ++d) {
          all_here &= results.is_here(loaded[d]);
        }
      } while (!all_here);
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        if (slots[d] >= 0) {
          add_weighted(sum, results.vector(loaded[d]), rows.weights[row][slots[d]]);
        }
      }
    }
    const bool is_flag = packet_slot() == kPacketVectors;
    store_packets(b.result_packet(source, b.rank, row - source * p.common.most_tokens, place.packet),
                  is_flag ? Vec{0, epoch, 0, epoch} : pack_result(sum));
  }
  if (refresh_is_due(epoch)) {
    refresh_results(p, here, epoch, warp, warps);
  }
}

// By warp `warp` of `warps`: adds up the results of this rank's own tokens.
template <int kExperts>
DEVICE void receive_sums(const Batch& p, const Rows<kExperts>& rows, int warp, int warps) {
  const Buffers& b = p.common.buffers;
  Wait<PHASE_COMBINE> wait(p.common.limits, rows.epoch);
  for (int task = warp; task < p.common.num_tokens * kWarpsPerResult; task += warps) {
    const int token = task / kWarpsPerResult;
    const ResultPlace place(task % kWarpsPerResult);
    const auto at = [&](int rank) { return b.result_packet(b.rank, rank, token, place.packet); };
    const OutputVec v = sum_of(
        rows.ranks[token], [&](int rank) { return load_packets(at(rank)); },
        [&](int rank, Vec& v) { return wait.for_packets(at(rank), rank, v); });
    if (place.is_data) {
      reinterpret_cast<OutputVec*>(p.output + 2ull * HIDDEN * token)[place.vector] = v;
    }
  }
}
