// Index lists of grouped GEMMs: sorts slots by expert, each expert's list padded to whole blocks; a stable counting
// sort.
//
// Layout in:   ids [numel]; key_map [experts]: the list of each id, -1 for none (null: its own); names [experts]: what
//              stands for an expert in expert_ids (null: its number).
// Layout out:  num_tokens [experts]; sorted [length], with the sentinel numel between and behind the lists; expert_ids
//              [num_blocks], with -1 behind them; used [1]. The last two may be null: not wanted.
// Warps:       one block, or a cluster of BLOCKS blocks from sm_90 on. Each warp has a run of slots and takes 32 at a
//              time: one ballot per bit of the keys shows each lane which lanes have the same key, and so how many come
//              before it. Prefix sums over warps, blocks and experts turn the counts into positions; meanwhile the
//              lists are filled with the sentinel. No atomics: the same ids give the same lists.
// Example:     ids [1, 0, 1, -1], 3 experts, block size 2: counts 1, 2, 0, lists from 0, 2 and 4: sorted [1, 4, 0, 2,
//              4...], expert_ids [0, 1, -1...], used 4.
#include "ptx.cuh"

#if IDS_64
typedef long long Id;
#else
typedef int Id;
#endif

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kRounds = 4;  // of 32 slots each, that a warp keeps in registers

struct AlignParams {
  const Id* ids;
  const int* key_map;
  const int* names;
  int* num_tokens;
  int* sorted;
  int* expert_ids;
  int* used;
  int numel, experts, length, num_blocks, block_size;
  int run;       // slots of a warp, a multiple of 32
  int key_bits;  // bits of experts - 1
};

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Reads the same variable in another block's shared memory of the cluster.
DEVICE int read_peer(const int* place, int block) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(place));
  int value;
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.s32 %0, [there];}"
               : "=r"(value)
               : "r"(address), "r"(block)
               : "memory");
  return value;
}

// kRounds x 32 slots from `first` on: their keys; `experts` stands for none.
struct Slots {
  int key[kRounds];

  __device__ Slots(const AlignParams& p, int first, int last) {
    Id id[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      int slot = first + 32 * i + threadIdx.x % 32;
      id[i] = slot < last ? p.ids[slot] : (Id)-1;
    }
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      bool valid = id[i] >= 0 && id[i] < p.experts;
      int list = valid ? (p.key_map == nullptr ? (int)id[i] : p.key_map[id[i]]) : -1;
      key[i] = list < 0 ? p.experts : list;
    }
  }

  // Position of each slot among the warp's slots of the same key, after those counted before; updates the counts.
  __device__ void rank(const AlignParams& p, int* counts, int (&place)[kRounds]) const {
    unsigned same[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; i++) same[i] = __ballot_sync(kAll, key[i] < p.experts);
    for (int bit = 0; bit < p.key_bits; bit++) {
#pragma unroll
      for (int i = 0; i < kRounds; i++) {
        bool one = key[i] >> bit & 1;
        unsigned ones = __ballot_sync(kAll, one);
        same[i] &= one ? ones : ~ones;
      }
    }
    unsigned below = (1u << threadIdx.x % 32) - 1;
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      bool valid = key[i] < p.experts;
      int before = valid ? counts[key[i]] : 0;
      place[i] = before + __popc(same[i] & below);
      __syncwarp();
      if (valid && (same[i] & below) == 0) counts[key[i]] = before + __popc(same[i]);
      __syncwarp();
    }
  }
};

// Writes value into list[0, length), by all threads of the grid; the list is aligned to 16 bytes.
DEVICE void fill(int* list, int length, int value) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (int i = thread; i < length / 4; i += threads) {
    reinterpret_cast<int4*>(list)[i] = make_int4(value, value, value, value);
  }
  if (thread < length % 4) list[length / 4 * 4 + thread] = value;
}

// Inclusive prefix sums of one number per thread, and the total; numbers of threads from `count` on are zero.
DEVICE int block_scan(int value, int count, int* warp_sums, int& total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = min((count + 31) / 32, (int)blockDim.x / 32);
  for (int step = 1; step < 32; step *= 2) {
    int below = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += below;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < warps; i++) {
    int part = warp_sums[i];
    if (i < warp) before += part;
    total += part;
  }
  __syncthreads();
  return before + value;
}

// Tokens of an expert in all blocks; `before`: in the blocks before this one.
DEVICE int sum_over_blocks(const int* own, int& before) {
  before = 0;
  if (BLOCKS == 1) return *own;
  int part[BLOCKS], total = 0;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) part[i] = read_peer(own, i);
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    if (i < blockIdx.x) before += part[i];
    total += part[i];
  }
  return total;
}

// Turns an expert's count in each warp into that of the warps before it; returns their sum.
DEVICE int sum_over_warps(int* counts, int warps, int experts) {
  int total = 0;
  for (int first = 0; first < warps; first += 8) {  // warps is a multiple of 8
    int part[8];
#pragma unroll
    for (int i = 0; i < 8; i++) part[i] = counts[(first + i) * experts];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      counts[(first + i) * experts] = total;
      total += part[i];
    }
  }
  return total;
}

// Writes the first position of every expert, for this block, to `places`; `own` are this block's counts.
DEVICE void find_places(const AlignParams& p, const int* own, int* places, int* warp_sums) {
  int used = 0;
  for (int base = 0; base < p.experts; base += blockDim.x) {
    int expert = base + threadIdx.x, total = 0, before = 0, all;
    if (expert < p.experts) total = sum_over_blocks(own + expert, before);
    int padded = (total + p.block_size - 1) / p.block_size * p.block_size;
    int end = used + block_scan(padded, p.experts - base, warp_sums, all);
    if (expert < p.experts) {
      places[expert] = end - padded + before;
      if (blockIdx.x == 0) p.num_tokens[expert] = total;
    }
    used += all;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.used != nullptr) *p.used = used;
}

DEVICE void put(const AlignParams& p, int slot, int key, int place) {
  p.sorted[place] = slot;
  if (p.expert_ids != nullptr && place % p.block_size == 0) {
    p.expert_ids[place / p.block_size] = p.names == nullptr ? key : p.names[key];
  }
}

// Writes every slot of the warp's run to its position.
DEVICE void put_run(const AlignParams& p, Slots& slots, int (&place)[kRounds], int* mine, const int* places, int first,
                    int last) {
  for (int base = first; base < last; base += 32 * kRounds) {
    // A run that exceeds the registers is read a second time; `mine` grows from the counts of the warps before.
    bool kept = last - first <= 32 * kRounds;
    if (!kept) {
      slots = Slots(p, base, last);
      slots.rank(p, mine, place);
    }
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      int key = slots.key[i];
      if (key == p.experts) continue;
      put(p, base + 32 * i + threadIdx.x % 32, key, places[key] + place[i] + (kept ? mine[key] : 0));
    }
  }
}

// The block's slots in sorted order, if registers hold them all: gathered in shared memory, so that neighbouring
// threads write neighbouring numbers. `starts`: where each expert's begin there.
struct Gathered {
  unsigned* entries;  // key and slot of the block, 16 bits each
  int* starts;
  int count;

  DEVICE void find_starts(const AlignParams& p, const int* totals, int* warp_sums) {
    count = 0;
    for (int base = 0; base < p.experts; base += blockDim.x) {
      int expert = base + threadIdx.x, total = expert < p.experts ? totals[expert] : 0, all;
      int end = count + block_scan(total, p.experts - base, warp_sums, all);
      if (expert < p.experts) starts[expert] = end - total;
      count += all;
    }
    __syncthreads();
  }

  DEVICE void add(const AlignParams& p, const Slots& slots, const int (&place)[kRounds], const int* mine,
                  int first_in_block) {
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      int key = slots.key[i], slot = first_in_block + 32 * i + threadIdx.x % 32;
      if (key < p.experts) entries[starts[key] + mine[key] + place[i]] = (unsigned)key << 16 | slot;
    }
  }

  DEVICE void put_all(const AlignParams& p, const int* places, int first_of_block) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      int key = entries[i] >> 16, slot = entries[i] & 0xFFFF;
      put(p, first_of_block + slot, key, places[key] + i - starts[key]);
    }
  }
};

extern "C" __global__ void __launch_bounds__(1024)
#if BLOCKS > 1
    __cluster_dims__(BLOCKS, 1, 1)
#endif
        align(const __grid_constant__ AlignParams p) {
  extern __shared__ int memory[];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int* warp_sums = memory;
  int* places = warp_sums + 32;
  int* totals = places + p.experts;
  int* counts = totals + p.experts;
  int* mine = counts + warp * p.experts;
  int first = min(((int)blockIdx.x * warps + warp) * p.run, p.numel), last = min(first + p.run, p.numel);
  bool gathers = BLOCKS > 1 && p.run <= 32 * kRounds;
  for (int expert = lane; expert < p.experts; expert += 32) mine[expert] = 0;

  grid_dependency_wait();
  grid_dependency_launch();
  Slots slots(p, first, last);
  fill(p.sorted, p.length, p.numel);
  if (p.expert_ids != nullptr) fill(p.expert_ids, p.num_blocks, -1);
  __syncwarp();
  int place[kRounds];
  slots.rank(p, mine, place);
  for (int base = first + 32 * kRounds; base < last; base += 32 * kRounds) {
    int unused[kRounds];
    Slots(p, base, last).rank(p, mine, unused);
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < p.experts; expert += blockDim.x) {
    totals[expert] = sum_over_warps(counts + expert, warps, p.experts);
  }
  if (BLOCKS > 1) cluster_arrive();
  Gathered gathered;
  gathered.starts = counts + warps * p.experts;
  gathered.entries = reinterpret_cast<unsigned*>(gathered.starts + p.experts);
  if (gathers) {
    gathered.find_starts(p, totals, warp_sums);
    gathered.add(p, slots, place, mine, warp * p.run);
  }
  if (BLOCKS > 1) cluster_wait();
  find_places(p, totals, places, warp_sums);
  if (BLOCKS > 1) cluster_arrive();
  __syncthreads();

  if (gathers) {
    gathered.put_all(p, places, blockIdx.x * warps * p.run);
  } else {
    put_run(p, slots, place, mine, places, first, last);
  }
  // Other blocks may still be reading this block's counts.
  if (BLOCKS > 1) cluster_wait();
}
