// The plan of one batch by its own counts: which experts are copied to which ranks, and which rank computes which of
// this rank's rows; the rule of moe_ep/eplb/batch_rounds.py in one launch of one block.
//
// Layout in:   counts [RANKS, EXPERTS], rows of each source rank; slots [SLOTS], the expert in each slot, -1 for none,
//              slots in rank order.
// Layout out:  shares [EXPERTS, RANKS], this rank's rows of each expert that each rank computes; places [EXPERTS,
//              RANKS], ids of the slots they go to, -1 for none; sources [RANKS, SPARE], the resident slot that is
//              copied into each scratch slot, -1 for none.
// Warp roles:  a thread has an expert: it adds up its rows and lists its places. Then each of the first kTries warps makes
//              a try with a target of its own: a lane has a rank, and a round takes two or three reductions of the warp.
//              All threads write the best try, each one expert's place on one rank; of an expert with several places a
//              warp divides this rank's rows, a lane having a rank.
// Example:     two ranks with one expert each, counts [[90, 10], [0, 0]], SPARE 1, rank 0: expert 0 is copied to rank 1,
//              sources [[-1], [0]], shares [[51, 39], [0, 10]], places [[0, 3], [-1, 2]].
#include "ptx.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kTargets = 8;
constexpr int kTries = kTargets + 1;  // the last one without copies
constexpr int kTolerance = 26;        // 1024ths of the mean
constexpr int kCopies = RANKS * SPARE;
constexpr int kMostSlots = 1024;
constexpr int kAtOnce = 4;  // slots whose experts are read together
constexpr u32 kAll = 0xFFFFFFFFu;
static_assert(RANKS <= 32 && SLOTS <= kMostSlots && kTries <= kWarps, "a lane is a rank, a warp a try");

struct Params {
  const int* counts;
  const int* slots;
  int* shares;
  int* places;
  int* sources;
  int rank;
  int copy_cost;
};

struct Try {
  int rows[SLOTS];
  int copy_rows[kCopies];
  short source[kCopies];
  int loads[RANKS];
  int cost, copies;
};

struct Shared {
  alignas(8) short expert[(SLOTS + kAtOnce - 1) / kAtOnce * kAtOnce];
  int rows[SLOTS];    // evenly divided
  short next[SLOTS];  // of the same expert, on another rank; the first follows the last
  unsigned char rank[SLOTS];
  short first_place[EXPERTS];
  int own[EXPERTS];           // this rank's rows
  bool has_several[EXPERTS];  // places
  int loads[RANKS];
  Try tries[kTries];
};

DEVICE int first_slot(int rank) { return rank * (SLOTS / RANKS) + min(rank, SLOTS % RANKS); }

// The largest number of a warp's lanes, and the lowest index that has it; number 0 and no index if none is above 0.
struct Best {
  int number;
  u32 index;

  DEVICE void take(int other, u32 its_index) {
    if (other > number || (other == number && its_index < index)) {
      number = other;
      index = its_index;
    }
  }
};

DEVICE Best none() { return Best{0, kAll}; }

DEVICE Best best_of_warp(Best own) {
  const int most = __reduce_max_sync(kAll, own.number);
  return Best{most, __reduce_min_sync(kAll, own.number == most ? own.index : kAll)};
}

// Adds up an expert's rows.
DEVICE int rows_of(const Params& p, int expert) {
  int have[RANKS], total = 0;
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    have[rank] = p.counts[rank * EXPERTS + expert];
  }
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    total += have[rank];
  }
  return total;
}

// Lists the places of an expert, and divides its rows evenly over them, the first ones taking the remainder.
DEVICE void divide(Shared& shared, int expert, int total) {
  int num = 0, first = -1, last = -1;
  for (int begin = 0; begin < SLOTS; begin += kAtOnce) {
    const u64 experts = *reinterpret_cast<const u64*>(shared.expert + begin);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = begin + i;
      if (static_cast<short>(experts >> 16 * i) == expert && (last < 0 || shared.rank[last] != shared.rank[slot])) {
        first = last < 0 ? slot : first;
        if (last >= 0) {
          shared.next[last] = static_cast<short>(slot);
        }
        last = slot;
        ++num;
      }
    }
  }
  shared.first_place[expert] = static_cast<short>(first);
  shared.has_several[expert] = num > 1;
  if (num == 1) {
    shared.rows[first] = total;
  } else if (num > 1) {
    shared.next[last] = static_cast<short>(first);
    for (int i = 0, slot = first; i < num; ++i, slot = shared.next[slot]) {
      shared.rows[slot] = total / num + (i < total % num);
    }
  }
}

// The slot of a rank that holds the same expert as another slot, -1 if there is none.
DEVICE int slot_on(const Shared& shared, int slot, int rank) {
  int found = slot;
  do {
    if (shared.rank[found] == rank) {
      return found;
    }
    found = shared.next[found];
  } while (found != slot);
  return -1;
}

// By a warp: passes rows on until no rank is above the target, or the fullest one can pass nothing on.
DEVICE void make_try(const Shared& shared, Try& t, int target, int spare, int copy_cost) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int slot = lane; slot < SLOTS; slot += 32) {
    t.rows[slot] = shared.rows[slot];
  }
  for (int copy = lane; copy < kCopies; copy += 32) {
    t.source[copy] = -1;
    t.copy_rows[copy] = 0;
  }
  int load = lane < RANKS ? shared.loads[lane] : 0, used = 0, copies = 0;
  int sources[SPARE];  // of this rank's copies
#pragma unroll
  for (int i = 0; i < SPARE; ++i) {
    sources[i] = -1;
  }
  if (lane < RANKS) {
    t.loads[lane] = load;
  }
  __syncwarp();
  Best fullest;
  for (;;) {
    fullest = none();
    Best best = none(), emptiest = none(), hottest = none();
    if (lane < RANKS) {
      fullest.take(load, lane);
    }
    if (lane < RANKS && used < spare) {
      emptiest.take(target - load, lane);
    }
    // Reductions that do not depend on each other take as long as one of them.
    fullest = best_of_warp(fullest);
    emptiest = best_of_warp(emptiest);
    const int from = static_cast<int>(fullest.index), surplus = fullest.number - target;
    if (surplus <= 0) {
      break;
    }
    // To another place of one of its experts, or else by a copy of the one with most rows.
    for (int slot = first_slot(from) + lane; slot < first_slot(from + 1); slot += 32) {
      const int rows = t.rows[slot];
      hottest.take(rows, slot);
      if (rows > 0) {
        for (int other = shared.next[slot]; other != slot; other = shared.next[other]) {
          const int passed = min(min(rows, surplus), target - t.loads[shared.rank[other]]);
          best.take(passed, slot * kMostSlots + other);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SPARE; ++i) {
      const int slot = sources[i] < 0 ? -1 : slot_on(shared, sources[i], from);
      if (slot >= 0) {
        best.take(min(min(t.rows[slot], surplus), target - load), kMostSlots * kMostSlots + lane * SPARE + i);
      }
    }
    best = best_of_warp(best);
    hottest = best_of_warp(hottest);
    int passed = best.number, slot, other = -1, copy = -1, to;
    if (passed > 0) {
      const int index = static_cast<int>(best.index);
      if (index < kMostSlots * kMostSlots) {
        slot = index / kMostSlots;
        other = index % kMostSlots;
        to = shared.rank[other];
      } else {
        copy = index - kMostSlots * kMostSlots;
        slot = slot_on(shared, t.source[copy], from);
        to = copy / SPARE;
      }
    } else {
      if (emptiest.number == 0) {
        break;
      }
      to = static_cast<int>(emptiest.index);
      slot = static_cast<int>(hottest.index);
      passed = min(min(hottest.number, surplus), emptiest.number);
      copy = to * SPARE + __shfl_sync(kAll, used, to);
#pragma unroll
      for (int i = 0; i < SPARE; ++i) {
        sources[i] = lane == to && i == used ? slot : sources[i];
      }
      used += lane == to;
      ++copies;
    }
    load += (lane == to ? passed : 0) - (lane == from ? passed : 0);
    if (lane < RANKS) {
      t.loads[lane] = load;
    }
    if (lane == 0) {
      t.rows[slot] -= passed;
      if (other >= 0) {
        t.rows[other] += passed;
      } else {
        t.source[copy] = t.copy_rows[copy] == 0 ? static_cast<short>(slot) : t.source[copy];
        t.copy_rows[copy] += passed;
      }
    }
    __syncwarp();
  }
  if (lane == 0) {
    t.cost = fullest.number + copy_cost * copies;
    t.copies = copies;
  }
}

// Where an expert is on a rank, and the rows that this rank computes of it.
struct Place {
  int id, wanted;
};

DEVICE Place place_of(const Shared& shared, const Try& t, int expert, int rank) {
  Place place = {-1, 0};
  const int first = shared.first_place[expert], slot = first < 0 ? -1 : slot_on(shared, first, rank);
  if (slot >= 0) {
    place = {slot + rank * SPARE, t.rows[slot]};
  }
#pragma unroll
  for (int i = 0; i < SPARE; ++i) {
    const int source = t.source[rank * SPARE + i];
    if (source >= 0 && shared.expert[source] == expert) {
      place = {first_slot(rank + 1) + rank * SPARE + i, place.wanted + t.copy_rows[rank * SPARE + i]};
    }
  }
  return place;
}

// By a warp: this rank's rows of an expert, of which a lane's rank computes `wanted` and has some. Rows stay on their rank
// as far as its share goes; the others go to what is left, both in the order of the ranks.
DEVICE int share_of(const Params& p, int expert, int wanted) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int have = lane < RANKS ? p.counts[lane * EXPERTS + expert] : 0;
  const int stays = min(have, wanted), supply = have - stays, demand = wanted - stays;
  int supplied = supply, demanded = demand;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAll, supplied, step), asked = __shfl_up_sync(kAll, demanded, step);
    supplied += lane >= step ? before : 0;
    demanded += lane >= step ? asked : 0;
  }
  const int end = __shfl_sync(kAll, supplied, p.rank), begin = end - __shfl_sync(kAll, supply, p.rank);
  return max(min(end, demanded) - max(begin, demanded - demand), 0) + (lane == p.rank ? stays : 0);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) batch_plan(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  grid_dependency_launch();
  grid_dependency_wait();
  for (int slot = thread; slot < sizeof(shared.expert) / sizeof(short); slot += kThreads) {
    shared.expert[slot] = slot < SLOTS ? static_cast<short>(p.slots[slot]) : -1;
  }
  for (int slot = thread; slot < SLOTS; slot += kThreads) {
    constexpr int kEach = SLOTS / RANKS, kLarger = SLOTS % RANKS * (kEach + 1);
    shared.rank[slot] = slot < kLarger ? slot / (kEach + 1) : SLOTS % RANKS + (slot - kLarger) / max(kEach, 1);
    shared.next[slot] = static_cast<short>(slot);
    shared.rows[slot] = 0;
  }
  if (thread < RANKS) {
    shared.loads[thread] = 0;
  }
  const int first_total = thread < EXPERTS ? rows_of(p, thread) : 0;  // loaded before the barrier
  __syncthreads();
  for (int expert = thread; expert < EXPERTS; expert += kThreads) {
    divide(shared, expert, expert == thread ? first_total : rows_of(p, expert));
    shared.own[expert] = p.counts[p.rank * EXPERTS + expert];
  }
  __syncthreads();
  for (int slot = thread; slot < SLOTS; slot += kThreads) {
    atomicAdd(&shared.loads[shared.rank[slot]], shared.rows[slot]);
  }
  __syncthreads();
  if (warp < kTries) {
    const int load = lane < RANKS ? shared.loads[lane] : 0;
    const int most = __reduce_max_sync(kAll, load), mean = (__reduce_add_sync(kAll, load) + RANKS - 1) / RANKS;
    const int low = mean + static_cast<int>(static_cast<u64>(mean) * kTolerance / 1024);
    const bool copies = warp < kTargets;
    const u64 above = static_cast<u64>(max(most - low, 0)) * warp / kTargets;
    make_try(shared, shared.tries[warp], copies ? low + static_cast<int>(above) : mean, copies ? SPARE : 0,
             p.copy_cost);
  }
  __syncthreads();
  int best = 0;
  for (int i = 1; i < kTries; ++i) {
    const Try &one = shared.tries[i], &other = shared.tries[best];
    best = one.cost < other.cost || (one.cost == other.cost && one.copies < other.copies) ? i : best;
  }
  const Try& t = shared.tries[best];
  for (int copy = thread; copy < kCopies; copy += kThreads) {
    const int source = t.source[copy];
    p.sources[copy] = source;
    if (source >= 0) {
      shared.has_several[shared.expert[source]] = true;
    }
  }
  __syncthreads();
  for (int i = thread; i < EXPERTS * RANKS; i += kThreads) {
    const int expert = i / RANKS, id = place_of(shared, t, expert, i % RANKS).id;
    p.places[i] = id;
    if (!shared.has_several[expert]) {
      p.shares[i] = id >= 0 ? shared.own[expert] : 0;
    }
  }
  for (int expert = warp; expert < EXPERTS; expert += kWarps) {
    if (shared.has_several[expert]) {
      const int share = share_of(p, expert, lane < RANKS ? place_of(shared, t, expert, lane).wanted : 0);
      if (lane < RANKS) {
        p.shares[expert * RANKS + lane] = share;
      }
    }
  }
}
