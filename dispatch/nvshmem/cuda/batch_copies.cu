// Copies the experts that a plan names into this rank's scratch slots, out of its peers' weights.
//
// Layout in:   sources [RANKS, spare], the resident slot that is copied into each scratch slot, -1 for none; parts, the
//              tensors of an expert on each rank, a slot's bytes each.
// Layout out:  scratch slots of `parts`; told, in host memory: epoch << 32 | copies of all ranks << 16 | copies here.
// Warp roles:  all threads of a few blocks copy each tensor together. The last block to finish tells all peers that
//              this rank reads none of their experts any more, or the host that there are no copies. No thread waits.
// Example:     rank 1 of 2 with two slots a rank, sources [[-1], [0]]: slot 0 of rank 0 goes to scratch slot 0.
#include "batch_balance.cuh"

constexpr int kThreads = THREADS;
constexpr int kAtOnce = 4;  // vectors that a thread loads before it stores the first

struct Part {
  u64 slots[RANKS];  // address of slot 0 of each rank
  u64 scratch;       // of scratch slot 0 here
  u64 bytes;         // of a slot
};

struct Params {
  Common common;
  const int* sources;
  const Part* parts;
  u64* told;
  u32* finished;  // blocks
  int num_parts, num_slots, spare;
};

// By the whole grid.
DEVICE void copy_bytes(const u8* from, u8* to, u64 bytes) {
  const u64 stride = static_cast<u64>(gridDim.x) * kThreads, first = blockIdx.x * kThreads + threadIdx.x;
  u64 done = 0;
  if ((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) % sizeof(Vec) == 0) {
    const u64 num = bytes / sizeof(Vec);
    const Vec* source = reinterpret_cast<const Vec*>(from);
    Vec* target = reinterpret_cast<Vec*>(to);
    for (u64 i = first; i < num; i += stride * kAtOnce) {
      Vec v[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        v[j] = i + stride * j < num ? source[i + stride * j] : Vec{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + stride * j < num) {
          target[i + stride * j] = v[j];
        }
      }
    }
    done = num * sizeof(Vec);
  }
  for (u64 i = done + first; i < bytes; i += stride) {
    to[i] = from[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) batch_copies(const __grid_constant__ Params p) {
  const Common& c = p.common;
  __shared__ int is_last;
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_failed = *reinterpret_cast<volatile u32*>(&c.limits.status->failed);
  int all = 0, here = 0;
  for (int i = 0; i < RANKS * p.spare && !has_failed; ++i) {
    const bool is_copy = p.sources[i] >= 0;
    all += is_copy;
    here += is_copy && i / p.spare == c.rank;
  }
  const u64 told = static_cast<u64>(c.epoch) << 32 | static_cast<u32>(all << 16 | here);
  if (all > 0 && blockIdx.x == 0 && thread == 0) {
    *reinterpret_cast<volatile u64*>(p.told) = told;
  }
  for (int scratch = 0; scratch < p.spare && all > 0; ++scratch) {
    const int slot = p.sources[c.rank * p.spare + scratch];
    if (slot >= 0) {
      // The first ranks have one slot more.
      const int each = p.num_slots / RANKS, larger = p.num_slots % RANKS * (each + 1);
      const int owner = slot < larger ? slot / (each + 1) : p.num_slots % RANKS + (slot - larger) / max(each, 1);
      const int local = slot - owner * each - min(owner, p.num_slots % RANKS);
      for (int i = 0; i < p.num_parts; ++i) {
        const Part& part = p.parts[i];
        copy_bytes(reinterpret_cast<const u8*>(part.slots[owner] + local * part.bytes),
                   reinterpret_cast<u8*>(part.scratch + scratch * part.bytes), part.bytes);
      }
    }
  }
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    is_last = atomicAdd(p.finished, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last && thread == 0) {
    *p.finished = 0;
    // Where there are no copies nobody waits for the kernel's end, after which what it reads is freed.
    *reinterpret_cast<volatile u64*>(p.told) = told;
  }
  if (is_last && all > 0 && thread < RANKS) {
    store_line(c.copied_of(thread, c.rank), 0, 0, c.epoch);
  }
}
