// The plan of one batch by its own counts: which experts are copied to which ranks, and which rank computes which of
// this rank's rows; the rule of moe_ep/eplb/batch_rounds.py in one launch of one block.
//
// Layout in:   counts [RANKS, EXPERTS], rows of each source rank; slots [SLOTS], the expert in each slot, -1 for none,
//              slots in rank order. All rows are fewer than 2^27.
// Layout out:  shares [EXPERTS, RANKS], this rank's rows of each expert that each rank computes; places [EXPERTS,
//              RANKS], ids of the slots they go to, -1 for none; sources [RANKS, SPARE], the resident slot that is
//              copied into each scratch slot, -1 for none.
// Warp roles:  a thread has an expert: it adds up its rows and lists its places. Then each of the first kTries warps
//              makes a try with a target of its own: a lane has a rank, and a round takes two reductions of the warp,
//              one after the other. All threads write the best try; of an expert with several places a warp divides
//              this rank's rows, a lane having a rank.
// Example:     two ranks with one expert each, counts [[90, 10], [0, 0]], SPARE 1, rank 0: expert 0 is copied to rank
//              1, sources [[-1], [0]], shares [[51, 39], [0, 10]], places [[0, 3], [-1, 2]].
#include "ptx.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kTargets = 8;
constexpr int kTries = kTargets + 1;  // the last one without copies
constexpr int kTolerance = 26;        // 1024ths of the mean
constexpr int kCopies = RANKS * SPARE;
constexpr int kMostSlots = 1024;
constexpr int kAtOnce = 4;       // slots whose experts are read together
constexpr int kAnyRank = RANKS;  // of an expert on several
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
  int num_slots[EXPERTS];
  short several[EXPERTS];  // experts that have them, in any order
  int num_several;
  int loads[RANKS];
  Try tries[kTries];
};

DEVICE int first_slot(int rank) { return rank * (SLOTS / RANKS) + min(rank, SLOTS % RANKS); }

// The largest positive number of a warp's lanes and the lowest lane that has it, in one word, so that one reduction of
// the warp finds both; 0 if no lane has one. All rows of a batch are fewer than 2^27.
DEVICE u32 largest_of_warp(int number) {
  return __reduce_max_sync(kAll, number > 0 ? static_cast<u32>(number) << 5 | (31 - threadIdx.x % 32) : 0u);
}
DEVICE int number_of(u32 largest) { return static_cast<int>(largest >> 5); }
DEVICE int lane_of(u32 largest) { return static_cast<int>(31 - largest % 32); }

// The way by which a lane can pass most rows on, of equal ones the first.
struct Way {
  int rows = 0, slot = -1;
  int other = -1;  // slot that they go to, or copy

  DEVICE void take(int its_rows, int its_slot, int to) {
    if (its_rows > rows) {
      rows = its_rows;
      slot = its_slot;
      other = to;
    }
  }
};

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

// Lists the places of an expert that has several slots, one on a rank, and divides its rows evenly over them, the first
// ones taking the remainder.
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
  shared.next[last] = static_cast<short>(first);
  for (int i = 0, slot = first; i < num; ++i, slot = shared.next[slot]) {
    shared.rows[slot] = total / num + (i < total % num);
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
  // Slots of the fullest rank that a lane looks at: neighbours, so that the first lane has the first ones.
  constexpr int kEach = ((SLOTS + RANKS - 1) / RANKS + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int slot = lane; slot < SLOTS; slot += 32) {
    t.rows[slot] = shared.rows[slot];
  }
  for (int copy = lane; copy < kCopies; copy += 32) {
    t.source[copy] = -1;
    t.copy_rows[copy] = 0;
  }
  int load = lane < RANKS ? shared.loads[lane] : 0, used = 0, copies = 0;
  int sources[SPARE], homes[SPARE];  // of this rank's copies, and the only rank that has the expert, or kAnyRank
#pragma unroll
  for (int i = 0; i < SPARE; ++i) {
    homes[i] = -1;
  }
  if (lane < RANKS) {
    t.loads[lane] = load;
  }
  __syncwarp();
  u32 fullest;
  for (;;) {
    // Reductions that do not depend on each other take as long as one of them.
    fullest = largest_of_warp(load);
    const u32 emptiest = largest_of_warp(lane < RANKS && used < spare ? target - load : 0);
    const int from = lane_of(fullest), surplus = number_of(fullest) - target;
    if (surplus <= 0) {
      break;
    }
    // To another place of one of its experts, or else by a copy of the one with most rows.
    Way to_slot, to_copy, hottest;
    const int end = first_slot(from + 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int slot = first_slot(from) + lane * kEach + i;
      if (slot < end) {
        const int rows = t.rows[slot], most = min(rows, surplus);
        hottest.take(rows, slot, -1);
        for (int other = shared.next[slot]; other != slot; other = shared.next[other]) {
          const int passed = min(most, target - t.loads[shared.rank[other]]);
          if (passed > to_slot.rows || (passed == to_slot.rows && slot == to_slot.slot && other < to_slot.other)) {
            to_slot = {passed, slot, other};
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SPARE; ++i) {
      const int slot = homes[i] == from ? sources[i] : homes[i] == kAnyRank ? slot_on(shared, sources[i], from) : -1;
      if (slot >= 0) {
        to_copy.take(min(min(t.rows[slot], surplus), target - load), slot, lane * SPARE + i);
      }
    }
    const u32 by_slot = largest_of_warp(to_slot.rows), by_copy = largest_of_warp(to_copy.rows);
    const u32 hot = largest_of_warp(hottest.rows);
    int passed, slot, other = -1, copy = -1, to;
    if (by_slot != 0 && number_of(by_slot) >= number_of(by_copy)) {
      passed = number_of(by_slot);
      slot = __shfl_sync(kAll, to_slot.slot, lane_of(by_slot));
      other = __shfl_sync(kAll, to_slot.other, lane_of(by_slot));
      to = shared.rank[other];
    } else if (by_copy != 0) {
      to = lane_of(by_copy);
      passed = number_of(by_copy);
      slot = __shfl_sync(kAll, to_copy.slot, to);
      copy = __shfl_sync(kAll, to_copy.other, to);
    } else {
      if (emptiest == 0) {
        break;
      }
      to = lane_of(emptiest);
      slot = __shfl_sync(kAll, hottest.slot, lane_of(hot));
      passed = min(min(number_of(hot), surplus), number_of(emptiest));
      copy = to * SPARE + __shfl_sync(kAll, used, to);
      const bool is_single = shared.next[slot] == slot;
#pragma unroll
      for (int i = 0; i < SPARE; ++i) {
        if (lane == to && i == used) {
          sources[i] = slot;
          homes[i] = is_single ? from : kAnyRank;
        }
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
    t.cost = number_of(fullest) + copy_cost * copies;
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

// By a warp: this rank's rows of an expert, of which a lane's rank computes `wanted` and has some. Rows stay on their
// rank as far as its share goes; the others go to what is left, both in the order of the ranks.
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
  for (int expert = thread; expert < EXPERTS; expert += kThreads) {
    shared.num_slots[expert] = 0;
    shared.first_place[expert] = -1;
  }
  if (thread == 0) {
    shared.num_several = 0;
  }
  const int first_total = thread < EXPERTS ? rows_of(p, thread) : 0;  // loaded before the barrier
  __syncthreads();
  for (int slot = thread; slot < SLOTS; slot += kThreads) {
    const int expert = shared.expert[slot];
    if (expert >= 0 && atomicAdd(&shared.num_slots[expert], 1) == 0) {
      shared.first_place[expert] = static_cast<short>(slot);  // of several below
    }
  }
  __syncthreads();
  for (int expert = thread; expert < EXPERTS; expert += kThreads) {
    const int total = expert == thread ? first_total : rows_of(p, expert), num = shared.num_slots[expert];
    if (num == 1) {
      shared.rows[shared.first_place[expert]] = total;
    } else if (num > 1) {
      divide(shared, expert, total);
    }
    const int first = shared.first_place[expert];
    shared.has_several[expert] = first >= 0 && shared.next[first] != first;
    shared.own[expert] = p.counts[p.rank * EXPERTS + expert];
  }
  __syncthreads();
  for (int rank = warp; rank < RANKS; rank += kWarps) {
    int load = 0;
    for (int slot = first_slot(rank) + lane; slot < first_slot(rank + 1); slot += 32) {
      load += shared.rows[slot];
    }
    load = __reduce_add_sync(kAll, load);
    if (lane == 0) {
      shared.loads[rank] = load;
    }
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
  // The cheapest try, of equal ones that with the fewest copies, then the first.
  const u32 cost = lane < kTries ? shared.tries[lane].cost : ~0u, least = __reduce_min_sync(kAll, cost);
  const u32 rank_of_try = lane < kTries && cost == least ? shared.tries[lane].copies * 32 + lane : ~0u;
  const Try& t = shared.tries[__reduce_min_sync(kAll, rank_of_try) % 32];
  for (int copy = thread; copy < kCopies; copy += kThreads) {
    const int source = t.source[copy];
    p.sources[copy] = source;
    if (source >= 0) {
      shared.has_several[shared.expert[source]] = true;
    }
  }
  __syncthreads();
  for (int expert = thread; expert < EXPERTS; expert += kThreads) {
    if (shared.has_several[expert]) {
      shared.several[atomicAdd(&shared.num_several, 1)] = static_cast<short>(expert);
    }
  }
  __syncthreads();
#pragma unroll 4
  for (int i = thread; i < EXPERTS * RANKS; i += kThreads) {
    const int expert = i / RANKS, rank = i % RANKS, slot = shared.first_place[expert];
    const bool is_here = slot >= 0 && shared.rank[slot] == rank;
    if (!shared.has_several[expert]) {
      p.places[i] = is_here ? slot + rank * SPARE : -1;
      p.shares[i] = is_here ? shared.own[expert] : 0;
    }
  }
  for (int i = warp; i < shared.num_several; i += kWarps) {
    const int expert = shared.several[i];
    const Place place = lane < RANKS ? place_of(shared, t, expert, lane) : Place{-1, 0};
    const int share = share_of(p, expert, place.wanted);
    if (lane < RANKS) {
      p.places[expert * RANKS + lane] = place.id;
      p.shares[expert * RANKS + lane] = share;
    }
  }
}
