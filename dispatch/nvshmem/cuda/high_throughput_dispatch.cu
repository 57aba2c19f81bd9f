// High-throughput (prefill) dispatch: sends rows to the ranks of their experts. A warp reads a token once, quantizes it
// if asked, and writes it to every destination.
//
// Layout in:   rows [T, HIDDEN], topk_ids and weights [T, TOPK]; slots and placement of high_throughput_plan.cu.
// Layout out:  at each rank the rows of its tokens, by (source, token), with ids and weights. 16-bit rows are read
//              where they arrive. 8-bit rows, and rows that were put, are converted to 16 bits in `out` [R * C, HIDDEN]
//              as they arrive; a rank's own rows are written there at once.
// Warp roles:  32 warps per block. 16-bit rows: all send; the last block to finish notifies all ranks and waits for
//              them. Converted rows: in `sending` blocks, `senders` warps send and one releases their flags (Flag
//              queue); all others receive, and so do these when they have finished.
// Example:     2 ranks, owners [0, 1]; rank 0's tokens have ids [0], [1], [1]: its row 0 stays, rows 0 and 1 at rank 1
//              are tokens 1 and 2.
#include "high_throughput.cuh"

// ==== Wire format ====
//
// Converted rows (codes of 8 bits, or DEVICE_API) on the wire:
//
//   columns   HIDDEN codes, or HIDDEN columns of 16 bits
//   largest   of codes: the largest magnitude of each 128 columns in 16 bits, from which the scale is recomputed
//   ids       TOPK, each with its rank in the upper bits, -1 for none
//   weights   TOPK, f32
//
// Rows begin at multiples of 128 bytes, and all of a warp's stores but the last fill such lines, which is most
// efficient for the links. What follows the columns (the tail) is assembled in shared memory.

constexpr int kTailVectors = (kScaleWords + 2 * TOPK + 3) / 4;
constexpr int kIdBits = 24;
constexpr int kIdMask = (1 << kIdBits) - 1;

// What follows a row's columns.
struct alignas(16) Tail {
  u32 words[4 * kTailVectors];
};

// Stores the id and weight of one slot of a row as the experts read them: -1 and 0 if the expert is on another rank. A
// thread per slot.
DEVICE void store_slot(const Common& c, u64 row, u32 id, u32 weight) {
  const bool is_here = static_cast<int>(id) >> kIdBits == c.rank;
  const u64 at = 4 * (row * TOPK + threadIdx.x % 32);
  *reinterpret_cast<u32*>(c.at(c.rank, c.ids + at)) = is_here ? id & kIdMask : ~0u;
  *reinterpret_cast<u32*>(c.at(c.rank, c.weights + at)) = is_here ? weight : 0;
}

// Stores the tail to the rows at the addresses that the lanes of `ranks` hold.
DEVICE void store_tail(const Tail& tail, u32 ranks, u64 target) {
  for (int i = threadIdx.x % 32; i < (kTailVectors + 31) / 32 * 32; i += 32) {
    const Vec v = i < kTailVectors ? reinterpret_cast<const Vec*>(tail.words)[i] : Vec{};
    for (u32 left = ranks; left; left &= left - 1) {
      u8* to = reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
      if (i < kTailVectors) {
        reinterpret_cast<Vec*>(to + kColumnBytes)[i] = v;
      }
    }
  }
}

#if EIGHT_BIT
// Merges a thread's codes of two vectors, 32 apart, with its neighbour's: even threads return 16 bytes of the first two
// vectors, odd threads of the others.
DEVICE Vec merge_codes(Codes first, Codes second) {
  const bool is_odd = threadIdx.x % 2;
  const Codes kept = is_odd ? second : first, given = is_odd ? first : second;
  const u32 low = __shfl_xor_sync(kAllLanes, given.low, 1), high = __shfl_xor_sync(kAllLanes, given.high, 1);
  return is_odd ? Vec{low, high, kept.low, kept.high} : Vec{kept.low, kept.high, low, high};
}

// By a warp: stores a row to the addresses that the lanes of `ranks` hold, and, as the experts read it, to `plain`
// unless that is null.
DEVICE void store_row(const u8* row, Tail& tail, u32 ranks, u64 target, u8* plain) {
  constexpr int kPairs = kAtOnce / 2;
  const Vec* from = reinterpret_cast<const Vec*>(row);
  const int is_odd = threadIdx.x % 2;
  for (int start = threadIdx.x % 32; start < (kVectors + 31) / 32 * 32; start += 32 * kAtOnce) {
    Vec v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
    }
    Vec pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      Codes codes[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int vector = start + 32 * (2 * i + j);
        float scale;
        u32 largest;
        codes[j] = quantize(v[2 * i + j], scale, largest);
        if (vector < kVectors && vector % kScaleVectors == 0) {
          reinterpret_cast<u16*>(tail.words)[vector / kScaleVectors] = static_cast<u16>(largest);
        }
        if (vector < kVectors && plain) {
          reinterpret_cast<Vec*>(plain)[vector] = dequantize(codes[j], scale);
        }
      }
      pairs[i] = merge_codes(codes[0], codes[1]);
    }
    for (u32 left = ranks; left; left &= left - 1) {
      u64* to = reinterpret_cast<u64*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int vector = start + 32 * (2 * i + is_odd) - is_odd;
        if (vector < kVectors) {
          *reinterpret_cast<Vec*>(to + vector) = pairs[i];
        }
      }
    }
  }
  __syncwarp();
  store_tail(tail, ranks, target);
}

// By a warp: converts a row from the wire to the form that the experts read.
DEVICE void load_row(const u8* row, u8* out) {
  constexpr int kOfLane = (kVectors + 31) / 32, kRounds = (kOfLane + 6) / 7;
  constexpr int kLoads = (kOfLane + kRounds - 1) / kRounds;  // at a time: at most 7, for the fewest rounds
  const u64* from = reinterpret_cast<const u64*>(row);
  const u16* largest = reinterpret_cast<const u16*>(row + kColumnBytes);
  Vec* to = reinterpret_cast<Vec*>(out);
  const int lane = threadIdx.x % 32;
  for (int begin = 0; begin < kVectors; begin += 32 * kLoads) {
    const int group = begin / kScaleVectors + lane;
    const float all = scale_of(lane < 2 * kLoads && group < kGroups ? largest[group] : 0);
    u64 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      v[i] = begin + 32 * i + lane < kVectors ? from[begin + 32 * i + lane] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float scale = __shfl_sync(kAllLanes, all, 2 * i + lane / kScaleVectors);
      if (begin + 32 * i + lane < kVectors) {
        to[begin + 32 * i + lane] = dequantize(Codes{static_cast<u32>(v[i]), static_cast<u32>(v[i] >> 32)}, scale);
      }
    }
  }
}

#else
DEVICE void store_row(const u8* row, Tail& tail, u32 ranks, u64 target, u8* plain) {
  for (u32 left = ranks; left; left &= left - 1) {
    copy_row(row, reinterpret_cast<u8*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1)));
  }
  if (plain) {
    copy_row(row, plain);
  }
  __syncwarp();
  store_tail(tail, ranks, target);
}

DEVICE void load_row(const u8* row, u8* out) { copy_row(row, out); }
#endif

// ==== Kernel ====

struct Params {
  Common common;
  const u8* rows;        // [T, HIDDEN]
  const int* topk_ids;   // [T, TOPK]
  const float* weights;  // [T, TOPK]
  const int* owners;     // [num_ids], -1 for ranks that take no part
  const int* slots;      // [T, RANKS]: number of the row among all that this rank sends, -1 for none
  u8* out;               // [R * C, HIDDEN], converted rows
  int num_ids;
  int num_tokens;
  int max_rows;          // ids of rows from the last that arrives to this one become -1
  int sending, senders;  // blocks that send, and sending warps of each, if rows are converted
};

constexpr int kRowsPerTask = 2;  // rows of one source that a warp receives before the next source

#if EIGHT_BIT || DEVICE_API
constexpr int kMostSenders = kWarps - 1;  // of a block; one more releases their flags

// One token: converted at once for this rank, in wire format to the others.
DEVICE void send(const Params& p, Tail& tail, FlagQueue<kMostSenders>& due, int token) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const Rows rows = rows_of(p, token);
  const u32 others = rows.ranks & ~(1u << c.rank);
  u32 id = 0, weight = 0;
  if (lane < TOPK) {
    const int of_slot = p.topk_ids[static_cast<u64>(token) * TOPK + lane], owner = owner_of(p, of_slot);
    id = owner >= 0 ? owner << kIdBits | of_slot : -1;
    weight = __float_as_uint(p.weights[static_cast<u64>(token) * TOPK + lane]);
    tail.words[kScaleWords + lane] = id;
    tail.words[kScaleWords + TOPK + lane] = weight;
  }
  const u64 own = __shfl_sync(kAllLanes, rows.index, c.rank);
  u8* plain = nullptr;
  if (others != rows.ranks) {
    plain = p.out + kPlainBytes * own;
    if (lane < TOPK) {
      store_slot(c, own, id, weight);
    }
  }
  const u8* row = p.rows + static_cast<u64>(token) * kPlainBytes;
#if DEVICE_API
  u8* staged = c.at(c.rank, c.staged_rows + static_cast<u64>(kRowBytes) * token);
  store_row(row, tail, others ? 1 : 0, reinterpret_cast<u64>(staged), plain);
  for (u32 left = others; left; left &= left - 1) {
    const int rank = __ffs(left) - 1;
    const u64 index = __shfl_sync(kAllLanes, rows.index, rank);
    u64* flag = c.flag_of(c.rank, c.row_flags, index);
    put_row(c, rank, c.rows + kRowBytes * index, staged, kRowBytes, flag, c.current_epoch());
  }
#else
  const bool has = others >> lane & 1;
  const u64 target = has ? reinterpret_cast<u64>(c.at(lane, c.rows + kRowBytes * rows.index)) : 0;
  store_row(row, tail, others, target, plain);
  enqueue_flags(due, has ? c.flag_of(lane, c.row_flags, rows.index) : nullptr);
#endif
  __syncwarp();
}

// Converts a row of the batch that has arrived.
DEVICE void receive_row(const Params& p, u64 row) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const u8* wire = c.at(c.rank, c.rows + kRowBytes * row);
  const u32* tail = reinterpret_cast<const u32*>(wire + kColumnBytes);
  if (lane < TOPK) {
    store_slot(c, row, tail[kScaleWords + lane], tail[kScaleWords + TOPK + lane]);
  }
  load_row(wire, p.out + kPlainBytes * row);
}

// The other sources alternate.
DEVICE void receive_rows(const Params& p) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const int total = (most_rows(c) + kRowsPerTask - 1) / kRowsPerTask * kOthers;
  Wait<PHASE_DISPATCH> wait(c.limits, c.current_epoch());
  TaskCounter tasks(c.taken + ROWS_TAKEN);
  for (int task = tasks.next(); task < total; task = tasks.next()) {
    const int source = (c.rank + 1 + task % kOthers) % RANKS, index = task / kOthers * kRowsPerTask + lane;
    const u64 row = c.placement->begin[source] + index;
    const bool is_due = lane < kRowsPerTask && index < c.placement->count[source];
    // The epoch is read again: there are no registers for it.
    const bool came = is_due && await_flag(wait, c.flag_of(c.rank, c.row_flags, row), c.current_epoch(), source);
    __syncwarp();
    for (u32 left = __ballot_sync(kAllLanes, came); left; left &= left - 1) {
      receive_row(p, __shfl_sync(kAllLanes, row, __ffs(left) - 1));
    }
  }
}

#else
// By a warp: stores a 16-bit row to the addresses that the lanes of `ranks` hold.
DEVICE void send_row(const u8* row, u32 ranks, u64 target) {
  const Vec* from = reinterpret_cast<const Vec*>(row);
  for (int begin = 0; begin < kVectors; begin += 32 * kAtOnce) {
    const int start = begin + threadIdx.x % 32;
    Vec v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = start + 32 * i < kVectors ? from[start + 32 * i] : Vec{};
    }
    for (u32 left = ranks; left; left &= left - 1) {
      Vec* to = reinterpret_cast<Vec*>(__shfl_sync(kAllLanes, target, __ffs(left) - 1));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (start + 32 * i < kVectors) {
          to[start + 32 * i] = v[i];
        }
      }
    }
  }
}

DEVICE void send(const Params& p, int token) {
  const Common& c = p.common;
  const int lane = threadIdx.x % 32;
  const Rows rows = rows_of(p, token);
  send_ids(p, token, rows);
  const bool has = rows.ranks >> lane & 1;
  const u64 target = has ? reinterpret_cast<u64>(c.at(lane, c.rows + kRowBytes * rows.index)) : 0;
  send_row(p.rows + static_cast<u64>(token) * kPlainBytes, rows.ranks, target);
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1) high_throughput_dispatch(const __grid_constant__ Params p) {
  const Common& c = p.common;
#if EIGHT_BIT || DEVICE_API
  __shared__ Tail tails[kMostSenders];
  __shared__ FlagQueue<kMostSenders> due;
  clear_queue(due);
#endif
  grid_dependency_wait();
  const int warp = threadIdx.x / 32;
  int* ids = reinterpret_cast<int*>(c.at(c.rank, c.ids));
  const u64 begin = static_cast<u64>(c.placement->total) * TOPK, end = static_cast<u64>(p.max_rows) * TOPK;
  for (u64 i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    ids[i] = -1;
  }
#if EIGHT_BIT || DEVICE_API
  const int block = static_cast<int>(blockIdx.x);
  if (block < p.sending && warp < p.senders) {
    if (!c.failed()) {
      for (int token = warp * p.sending + block; token < p.num_tokens; token += p.sending * p.senders) {
        send(p, tails[warp], due, token);
      }
    }
    finish_enqueuing(due);
  } else if (block < p.sending && warp == p.senders) {
    release_flags(due, p.senders, c.current_epoch());
  }
  receive_rows(p);
#else
  if (!c.failed()) {
    for (int token = warp * gridDim.x + blockIdx.x; token < p.num_tokens; token += gridDim.x * kWarps) {
      send(p, token);
    }
  }
  finish(c, c.current_epoch());
#endif
}
