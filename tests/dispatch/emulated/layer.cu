// Stands for the decode kernel of packed experts that combines a batch (kernels/marlin/cuda/decode_sm90.cu with PEERS) on
// the emulated GPU: it reads rows and returns sums as that does, through low_latency_layer.cuh, and computes what
// backend_cases.expert does. Blocks claim slots by tickets, and publish results as flag-in-data packets.
#include "low_latency_layer.cuh"

struct Params {
  Batch batch;
  const int* numbers;  // [num_experts]: the id of each
  u64* results;        // [rows * TOPK, HIDDEN / 2]: {launch, two columns}
  int* ticket;         // of slots, and of blocks that have sent their sums; 0
  int num_experts;
  int launch;
};

struct SlotResults {
  struct Loaded {
    u64 pairs[4];
  };
  const Params& p;
  Loaded load(int slot, int vector) const {
    Loaded v;
    for (int i = 0; i < 4; ++i) {
      v.pairs[i] = emulated::load(p.results + static_cast<u64>(slot) * (HIDDEN / 2) + 4 * vector + i);
    }
    return v;
  }
  bool is_here(const Loaded& v) const {
    bool all = true;
    for (u64 pair : v.pairs) all &= pair >> 32 == static_cast<u64>(p.launch);
    return all;
  }
  Vec vector(const Loaded& v) const {
    return {static_cast<u32>(v.pairs[0]), static_cast<u32>(v.pairs[1]), static_cast<u32>(v.pairs[2]),
            static_cast<u32>(v.pairs[3])};
  }
};

DEVICE u32 result_of(const Params& p, int expert, int row, int pair) {
  const Buffers& b = p.batch.common.buffers;
  const int vector = pair / 4, packets = vector / kPacketVectors;
  const u8* at =
      b.at(b.rank, b.row_packets) + kPacketBytes * static_cast<u64>(packet_row(p.batch.common, row)) * kRowPackets;
  const u32 columns = reinterpret_cast<const u32*>(at + 16 * (vector + packets))[pair % 4];
  const float number = p.numbers[expert];
  const auto compute = [=](float x) { return emulated::half(x * (1.0f + number / 8.0f) + number); };
  return compute(emulated::of_half(columns & 0xffff)) | compute(emulated::of_half(columns >> 16)) << 16;
}

// Whether what a lane found early is what the rows have, or nothing was found.
DEVICE bool is_own(const Params& p, const Rows<EXPERTS>& rows, Vec line) {
  const Common& c = p.batch.common;
  const int lane = threadIdx.x % 32, token = lane / kLocalLines, row = c.buffers.rank * c.most_tokens + token;
  const u32 locals[4] = {line.x & 0xffff, line.x >> 16, line.z & 0xffff, line.z >> 16};
  for (int i = 0; i < 4; ++i) {
    const int slot = lane % kLocalLines * kLocalsOfLine + i;
    if (locals[i] != kNotHere && (token >= c.num_tokens || slot >= TOPK || rows.ids[row][slot] != locals[i])) {
      return false;
    }
  }
  return true;
}

extern "C" __global__ void layer(const __grid_constant__ Params p) {
  __shared__ Rows<EXPERTS> rows;
  __shared__ int ticket;
  const int warp = threadIdx.x / 32, num_rows = RANKS * p.batch.common.most_tokens;
  for (int e = threadIdx.x; e < EXPERTS; e += kThreads) {
    rows.tokens[e] = 0;
  }
  __syncthreads();
  const Vec own = warp == 0 ? own_locals(p.batch) : Vec{~0u, 0, ~0u, 0};
  grid_dependency_wait();
  if (blockIdx.x > 0) {
    grid_dependency_launch();
  } else if (threadIdx.x == 0) {
    hand_over(p.batch);
  }
  read_rows<kWarps>(p.batch, rows, warp, [] { __syncthreads(); });
  for (int row = warp; row < num_rows; row += kWarps) {
    read_ranks(p.batch, rows, row);
  }
  __syncthreads();
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      ticket = atomicAdd(p.ticket, 1);
    }
    __syncthreads();
    if (ticket >= p.num_experts * num_rows) break;
    const int e = ticket / num_rows, row = ticket % num_rows;
    if (!(rows.tokens[e] >> row & 1)) continue;
    for (u32 left = slots_of(rows, row, e); left; left &= left - 1) {
      const int k = __ffs(left) - 1;
      for (int pair = threadIdx.x; pair < HIDDEN / 2; pair += kThreads) {
        const u64 found = static_cast<u64>(p.launch) << 32 | result_of(p, e, row, pair);
        emulated::store(p.results + static_cast<u64>(row * TOPK + k) * (HIDDEN / 2) + pair, found);
      }
    }
  }
  if (rows.is_complete && !__all_sync(kAllLanes, is_own(p, rows, own))) {
    return;  // so that sums are missing
  }
  return_sums(p.batch, rows, blockIdx.x * kWarps + warp, gridDim.x * kWarps, SlotResults{p});
  // As few blocks as may wait for other ranks: the one whose sums are the last to be sent.
  __syncthreads();
  if (threadIdx.x == 0) {
    ticket = atomicAdd(p.ticket + 1, 1);
  }
  __syncthreads();
  if (ticket == static_cast<int>(gridDim.x) - 1) {
    receive_sums(p.batch, rows, warp, kWarps);
  }
}
