// Low-latency (decode) combine: sums the results of each rank's experts with the router's weights, sends one row per
// token and rank to the token's rank, and adds these there.
//
// SLOT_RESULTS: of batch-invariant layers. Every slot's result returns as it is, and the token's rank weights and adds
//              them in slot order, wherever the experts are.
// Layout in:   results [El, R * C, K] of this rank's experts, in the rows that the dispatch listed; its positions.
// Layout out:  output [T, K] on the tokens' own rank. Slots of one rank are summed in slot order, ranks in rank order,
//              in f32 without fused multiply-add, rounded in between to bf16 beside bf16 rows: same input, same bits.
// Warp roles:  16 warps. 0 to 7 send: they draw tasks by tickets, each a part of one token's weighted sum, stored as
//              flag-in-data packets (as NCCL's LL128). 8 to 15 receive: they wait for the rows of each token and add
//              them.
// Pipeline:    as in low_latency_dispatch.cu.
// Example:     a token with slots of ranks 1, 0, 1 and weights a, b, c: out = r(b y0) + r(a y1 + c y1'), r(): rounding.
#include "low_latency.cuh"

using Waits = Wait<PHASE_COMBINE>;

struct Params {
  Common common;
  const u8* results;
  const int* positions;  // as the dispatch wrote them
  u8* output;
  const float* weights;  // [T, TOPK] of this rank's tokens, for SLOT_RESULTS
  int weighted;          // 0: the weights were applied to the input
  int output_parts;      // parts of a token, each added up by its own group
};

struct Shared {
  u64 ticket;
  int tokens[RANKS];  // of each rank whose header is of this epoch
  u32 ranks[2];       // ranks whose result of a token has arrived; two tokens alternate
};

// A received token's slots on this rank: lane k of each warp holds slot k.
struct Slots {
  u32 present;  // bits of the slots that have a result here
  u32 late;     // of those whose weights have not arrived yet
  u64 offset;   // of this lane's result, in bytes
  float weight;
};

DEVICE Slots slots_of(const Params& p, int source, int token, u32 epoch) {
  const Buffers& b = p.common.buffers;
  const int lane = threadIdx.x % 32;
  Slots slots{0, 0, 0, 1.0f};
  bool present = false, late = false;
  if (lane < TOPK) {
    const int row = source * b.capacity + token;
    const u8* meta = b.meta_of(b.rank, source, token, epoch);
    const Vec locals = load_volatile(meta + 16 * (lane / kLocalsOfLine));
    const Vec weights = load_volatile(meta + 16 * (kLocalLines + lane / kWeightsOfLine));
    const int position = p.positions[row * TOPK + lane];
    const u32 local = (lane % kLocalsOfLine < 2 ? locals.x : locals.z) >> (lane % 2 * 16) & 0xffff;
    present = is_of(locals, epoch) && local != kNotHere;
    late = present && !is_of(weights, epoch);
    slots.offset = static_cast<u64>(kResultBytes) * (static_cast<u64>(local) * RANKS * b.capacity + position);
    slots.weight = p.weighted ? __uint_as_float(lane % kWeightsOfLine ? weights.z : weights.x) : 1.0f;
  }
  slots.present = __ballot_sync(kAllLanes, present);
  slots.late = __ballot_sync(kAllLanes, late);
  return slots;
}

// Waits for the weights of a token's slots, which the dispatch does not wait for; false if they do not arrive in time.
// By whole warps.
__device__ __noinline__ bool await_weights(const Params& p, int source, int token, u32 epoch) {
  const Buffers& b = p.common.buffers;
  const int lane = threadIdx.x % 32;
  Waits wait(p.common.limits, epoch);
  Vec line;
  const u8* at = b.meta_of(b.rank, source, token, epoch) + 16 * (kLocalLines + lane / kWeightsOfLine);
  const bool came = lane >= TOPK || wait.for_line(at, source, line);
  __syncwarp();
  return __all_sync(kAllLanes, came);
}

// The weighted sum of vector i, kDeep results loaded at a time. By whole warps.
DEVICE Vec weighted_sum(const Params& p, const Slots& slots, int i, bool is_inside) {
  constexpr int kDeep = 4;
  Sums sum{};
  for (u32 left = slots.present; left;) {
    Vec v[kDeep];
    float weight[kDeep];
    bool is_there[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      is_there[d] = left != 0;
      const int slot = is_there[d] ? __ffs(left) - 1 : 0;
      left &= left - 1;
      const u64 offset = __shfl_sync(kAllLanes, slots.offset, slot);
      weight[d] = __shfl_sync(kAllLanes, slots.weight, slot);
      v[d] = is_there[d] && is_inside ? reinterpret_cast<const Vec*>(p.results + offset)[i] : Vec{0, 0, 0, 0};
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (is_there[d]) {
        add_weighted(sum, v[d], weight[d]);
      }
    }
  }
  return pack_result(sum);
}

#if SLOT_RESULTS
static_assert(!DEVICE_API, "results of slots are sent as packets");

// A part of each slot's result as packets.
DEVICE void send_result(const Params& p, const Slots& slots, int source, int token, int part, int parts, u32 epoch) {
  const Buffers& b = p.common.buffers;
  const int end = packet_begin<kWarpPackets>(part + 1, parts, kResultPackets);
  const int begin = packet_begin<kWarpPackets>(part, parts, kResultPackets);
  for (u32 left = slots.present; left; left &= left - 1) {
    const int slot = __ffs(left) - 1;
    const Vec* result = reinterpret_cast<const Vec*>(p.results + __shfl_sync(kAllLanes, slots.offset, slot));
    for (int packet = begin + threadIdx.x / kPacketThreads; packet < end; packet += kGroupPackets) {
      const int i = packet * kPacketVectors + packet_slot();
      const bool is_data = packet_slot() < kPacketVectors;
      const Vec v = is_data && i < kResultVectors ? result[i] : Vec{0, 0, 0, 0};
      store_packets(b.result_packet(source, slot, token, packet), is_data ? v : Vec{0, epoch, 0, epoch});
    }
  }
}
#elif DEVICE_API
// First vector of a part of a result; the parts have the columns of those of a row.
DEVICE int result_begin(int part, int parts) { return part_begin(part, parts) * (kColumns / kResultColumns); }

// A part of a result, to memory that a flag or a put follows.
DEVICE void store_part(const Params& p, const Slots& slots, int begin, int end, Vec* there) {
  for (int base = begin; base < end; base += kThreads) {
    const int i = base + threadIdx.x;
    const Vec v = weighted_sum(p, slots, i, i < end);
    if (i < end) {
      there[i] = v;
    }
  }
}

DEVICE void send_result(const Params& p, const Slots& slots, int source, int token, int part, int, u32 epoch) {
  const Buffers& b = p.common.buffers;
  if (!b.reaches(source)) {
    if (part == 0) {
      u8* from = b.out_of(source, token);
      store_part(p, slots, 0, kResultVectors, reinterpret_cast<Vec*>(from));
      u64* flags = b.result_flags_of(b.rank, b.rank, token);
      void* there = b.result(b.rank, b.rank, token);
      put_from_outbox<Senders>(b, 1u << source, there, from, kResultBytes, flags, both(epoch));
    }
    return;
  }
  const int begin = result_begin(part, kRowParts), end = result_begin(part + 1, kRowParts);
  store_part(p, slots, begin, end, reinterpret_cast<Vec*>(b.result(source, b.rank, token)));
  Senders::sync();
  if (threadIdx.x == 0) {
    u64* flags = b.result_flags_of(source, b.rank, token);
    store_release_sys(reinterpret_cast<u32*>(flags) + part, epoch);
  }
}
#else
// A part of a result as packets.
DEVICE void send_result(const Params& p, const Slots& slots, int source, int token, int part, int parts, u32 epoch) {
  const Buffers& b = p.common.buffers;
  const int end = packet_begin<kWarpPackets>(part + 1, parts, kResultPackets);
  const int begin = packet_begin<kWarpPackets>(part, parts, kResultPackets);
  for (int packet = begin + threadIdx.x / kPacketThreads; packet < end; packet += kGroupPackets) {
    const int i = packet * kPacketVectors + packet_slot();
    const bool is_data = packet_slot() < kPacketVectors;
    const Vec v = weighted_sum(p, slots, i, is_data && i < kResultVectors);
    store_packets(b.result_packet(source, b.rank, token, packet), is_data ? v : Vec{0, epoch, 0, epoch});
  }
}
#endif

DEVICE int parts_of(const Common& c, int tokens) { return DEVICE_API ? kRowParts : c.packet_parts_of(tokens * RANKS); }

// The task of a ticket: a part of the result of a token of `source`. Each rank begins with its own tokens.
struct Task {
  int source, token, part;

  DEVICE Task(const Params& p, u32 number, int parts) {
    const int rows = static_cast<int>(number) / parts;
    part = static_cast<int>(number) % parts;
    source = (p.common.buffers.rank + rows) % RANKS;
    token = rows / RANKS;
  }
};

// Overwrites old flags of results that are not sent; those of slots on the rank that they are for, since any rank may
// write them in a later batch.
DEVICE void refresh(const Params& p, const Shared& shared, int token, u32 epoch, u32 alive) {
#if SLOT_RESULTS
  const Buffers& b = p.common.buffers;
  u32 due;
  owner_of_slot(p.common, token, alive, due);
  for (int slot = 0; slot < TOPK; ++slot) {
    if (!(due >> slot & 1)) {
      refresh_packets([&](int packet) { return b.result_packet(b.rank, slot, token, packet); }, kResultPackets, epoch);
    }
  }
#else
  for (int source = 0; source < RANKS; ++source) {
    if (alive >> source & 1) {
      const bool is_sent = token < shared.tokens[source] && slots_of(p, source, token, epoch).present;
      if (!is_sent) {
        refresh_result(p.common.buffers, source, token, epoch);
      }
    }
  }
  end_refresh();
#endif
}

#if SLOT_RESULTS
// A part of one token: every warp waits for what it adds, in slot order; `due`: the bits of the slots, `owner` and
// `weight`: of this lane's slot.
DEVICE void receive(const Params& p, Waits& wait, int token, int part, u32 due, int owner, float weight) {
  constexpr int kAtOnce = TOPK < 4 ? TOPK : 4;  // loaded at a time
  const Buffers& b = p.common.buffers;
  OutputVec* output = reinterpret_cast<OutputVec*>(p.output + 2ull * HIDDEN * token);
  const int end = packet_begin<kWarpPackets>(part + 1, p.output_parts, kResultPackets);
  const int begin = packet_begin<kWarpPackets>(part, p.output_parts, kResultPackets);
  for (int packet = begin + threadIdx.x % kThreads / kPacketThreads; packet < end; packet += kGroupPackets) {
    Sums sum{};
#pragma unroll 1
    for (int from = 0; from < TOPK; from += kAtOnce) {
      Vec v[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (from + j < TOPK && due >> (from + j) & 1) {
          v[j] = load_packets(b.result_packet(b.rank, from + j, token, packet));
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int slot = from + j;
        if (slot < TOPK && due >> slot & 1) {
          const int rank = __shfl_sync(kAllLanes, owner, slot);
          const float factor = __shfl_sync(kAllLanes, weight, slot);
          if (wait.for_packets(b.result_packet(b.rank, slot, token, packet), rank, v[j])) {
            add_weighted(sum, v[j], factor);
          }
        }
      }
    }
    const int i = packet * kPacketVectors + packet_slot();
    if (packet_slot() < kPacketVectors && i < kResultVectors) {
      output[i] = pack_output(sum);
    }
  }
}
#elif DEVICE_API
// A part of one token: one warp waits for the group. Tokens alternate between the two elements of shared.ranks.
DEVICE void receive(const Params& p, Waits& wait, Shared& shared, int turn, int token, int part, u32 ranks) {
  const Buffers& b = p.common.buffers;
  const int thread = threadIdx.x % kThreads;
  if (thread < 32) {
    const bool is_due = thread < RANKS && ranks >> thread & 1;
    const bool came = is_due && wait_for_row(b, wait, b.result_flags_of(b.rank, thread, token), thread);
    __syncwarp();
    const u32 there = __ballot_sync(kAllLanes, came);
    if (thread == 0) {
      shared.ranks[turn % 2] = there;
    }
  }
  Receivers::sync();
  ranks = shared.ranks[turn % 2];
  OutputVec* output = reinterpret_cast<OutputVec*>(p.output + 2ull * HIDDEN * token);
  const int begin = result_begin(part, p.output_parts), end = result_begin(part + 1, p.output_parts);
  for (int i = begin + thread; i < end; i += kThreads) {
    output[i] = sum_of(
        ranks, [&](int rank) { return load_volatile(b.result(b.rank, rank, token) + 16ull * i); },
        [](int, const Vec&) { return true; });
  }
  __syncwarp();
}
#else
// A part of one token: every warp waits for what it adds, in rank order.
DEVICE void receive(const Params& p, Waits& wait, Shared&, int, int token, int part, u32 ranks) {
  const Buffers& b = p.common.buffers;
  OutputVec* output = reinterpret_cast<OutputVec*>(p.output + 2ull * HIDDEN * token);
  const int end = packet_begin<kWarpPackets>(part + 1, p.output_parts, kResultPackets);
  const int begin = packet_begin<kWarpPackets>(part, p.output_parts, kResultPackets);
  for (int packet = begin + threadIdx.x % kThreads / kPacketThreads; packet < end; packet += kGroupPackets) {
    const auto at = [&](int rank) { return b.result_packet(b.rank, rank, token, packet); };
    const OutputVec v = sum_of(
        ranks, [&](int rank) { return load_packets(at(rank)); },
        [&](int rank, Vec& v) { return wait.for_packets(at(rank), rank, v); });
    const int i = packet * kPacketVectors + packet_slot();
    if (packet_slot() < kPacketVectors && i < kResultVectors) {
      output[i] = v;
    }
  }
}
#endif

DEVICE void send_all(const Params& p, Shared& shared) {
  const Common& c = p.common;
  const Buffers& b = c.buffers;
  Tickets<Senders> tickets(&c.counters->combine, &shared.ticket);
  const u32 alive = c.alive();
  u64 ticket = tickets.next();
  const u32 epoch = static_cast<u32>(ticket >> 32);
  grid_dependency_wait();
  u64 header = 0;
  bool failed = false;
  if (threadIdx.x < RANKS) {  // the dispatch has waited for it; if that timed out, there are no results
    header = *reinterpret_cast<volatile u64*>(b.header_of(b.rank, threadIdx.x, epoch));
    failed = *reinterpret_cast<volatile u32*>(&c.limits.status->failed);
  }
  // Loads what the first task needs if all ranks have as many tokens as this one, before that is known.
  const int guess = c.num_tokens;
  const Task first(p, static_cast<u32>(ticket), parts_of(c, guess));
  Slots slots = slots_of(p, first.source, min(first.token, b.capacity - 1), epoch);
  if (threadIdx.x < RANKS) {
    shared.tokens[threadIdx.x] = static_cast<u32>(header >> 32) == epoch && !failed ? static_cast<int>(header) : 0;
  }
  if (threadIdx.x == kThreads - 1) {
    hand_over(static_cast<u32>(ticket) == 0, &c.counters->dispatch, epoch + 1);
  }
  Senders::sync();
  int most = 0;
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    most = max(most, shared.tokens[rank]);
  }
  const int parts = parts_of(c, most);
  const u32 total = most * RANKS * parts;
  for (bool has_slots = most == guess; static_cast<u32>(ticket) < total; ticket = tickets.next(), has_slots = false) {
    tickets.draw_ahead();
    const Task task(p, static_cast<u32>(ticket), parts);
    if (task.token >= shared.tokens[task.source] || !(alive >> task.source & 1)) {
      continue;
    }
    if (!has_slots) {
      slots = slots_of(p, task.source, task.token, epoch);
    }
    // Results of slots are weighted by the token's rank.
    bool came = SLOT_RESULTS || !slots.late || await_weights(p, task.source, task.token, epoch);
#if DEVICE_API
    came = Senders::all(came);  // send_result has a barrier
#endif
    if (!came) {
      continue;
    }
    if (!SLOT_RESULTS && slots.late) {
      slots = slots_of(p, task.source, task.token, epoch);
    }
    if (slots.present) {
      send_result(p, slots, task.source, task.token, task.part, parts, epoch);
    }
  }
  for (; refresh_is_due(epoch) && static_cast<u32>(ticket) - total < static_cast<u32>(b.capacity);
       ticket = tickets.next()) {
    refresh(p, shared, static_cast<int>(static_cast<u32>(ticket) - total), epoch, alive);
  }
}

DEVICE void receive_all(const Params& p, Shared& shared) {
  const Common& c = p.common;
  const int total = c.num_tokens * p.output_parts;
  const u32 epoch = static_cast<u32>(*reinterpret_cast<volatile u64*>(&c.counters->combine) >> 32);
  Waits wait(c.limits, epoch);
  const u32 alive = c.alive();
  int turn = 0;
  for (int task = blockIdx.x; task < total; task += gridDim.x, ++turn) {
    const int token = task / p.output_parts;
#if SLOT_RESULTS
    u32 due;
    const int owner = owner_of_slot(c, token, alive, due);
    const int lane = threadIdx.x % 32;
    const float weight = p.weighted && lane < TOPK ? p.weights[token * TOPK + lane] : 1.0f;
    receive(p, wait, token, task % p.output_parts, due, owner, weight);
#else
    const u32 ranks = c.destinations(c.id_of_slot(token), alive, [&](int id) { return c.owners[id]; });
    receive(p, wait, shared, turn, token, task % p.output_parts, ranks);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(2 * kThreads, 2) low_latency_combine(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  send_and_receive(p, shared);
}
