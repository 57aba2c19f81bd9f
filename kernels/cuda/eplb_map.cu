// Maps logical expert ids to physical ones and records the load: the rule of moe_ep/eplb/mapping.py in one launch.
//
// Layout in:   ids [tokens, slots], logical (others than 0 to experts - 1: none); table [experts, width], the replicas,
//              padded with -1; counts [experts].
// Layout out:  out [tokens, slots], physical; load [physical], incremented per id of the rows that are counted.
// Thread roles: a block does one tile of rows_per_tile rows. Its first threads have the experts with several replicas
//              ("divide"), the next all experts, the rest the slots. Barriers, with the threads that wait in brackets:
//
//     divide                        experts                           slots
//                                   read the maps, list the experts   read ids, count them
//     ------------- listed [divide, slots]                    counted [divide, experts] -------------
//     divide evenly                 add tokens of single replicas     write slots of single replicas, mark those of the
//                                   to the levels                     others; count an expert's slots before each
//     ------------- levelled [divide]
//     pass tokens between ranks
//     ------------- divided [experts, slots]
//                                   add to the load                   write the other slots
//
// The slots of an expert are bits, one word per 32 slots of the tile. All sums are integers, so the order of atomic
// additions does not matter. The load gets one addition per expert or replica of a tile, however hot it is. The kernel
// starts while the previous one runs and reads the maps before that has ended (programmatic dependent launch): the maps
// must not be written by the previous kernel, but by a copy or by an earlier kernel that the previous one waits for.
//
// Example:     ids [[0, -1], [1, 0]], table [[0, 2], [1, -1]], counts [2, 1], one physical expert per rank. Expert 0
//              has two tokens, divided 1 and 1; ranks 0 and 2 are level. Its first token (row 0) goes to 0, the second
//              (row 1) to 2: out [[0, -1], [1, 2]], load + [1, 1, 1].
#include "ptx.cuh"

// ==== Tile ====
//
// Launch parameters, shared memory of a block, and what it reads of the maps before the ids are available.

#if IDS_64
typedef long long Id;
#else
typedef int Id;
#endif
#if MAP_64
typedef long long MapEntry;
#else
typedef int MapEntry;
#endif
#if OUT_64
typedef long long OutId;
#else
typedef int OutId;
#endif

constexpr int kCandidates = 4;
constexpr unsigned kExpertStep = 0x85EBCA6Bu;
constexpr int kNone = -1;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const Id* ids;
  const int* num_counted_on_device;  // null if the host knows num_counted
  int* load;
  const MapEntry* table;
  const MapEntry* counts;
  OutId* out;
  int num_counted;
  int tokens, slots, rows_per_tile;
  int experts, width;
  int row_stride, column_stride;  // of the table
  int max_replicated;             // experts that can have several replicas
  int stride;                     // max_replicated, made odd (bank conflicts)
  int words;                      // of 32 slots each in a tile
  int ranks, ep_rank;
  unsigned rank_factor;  // ceil(2^32 / slots_per_rank), 0 if that is 1
  int dividing;          // the first threads of a block: max_replicated rounded up to whole warps
  int expert_threads;    // the threads behind them; the rest have slots
  int physical;          // experts of all ranks
};

// Arrays in shared memory. X is max_replicated.
struct Shared {
  int4* candidates;        // [X] physical experts, -1 behind the last
  uint2* ends;             // [X] tokens of the first candidate, of the first two, of the first three, 16 bits each
  unsigned* mine;          // [words, stride] which slots are an expert's
  int* spare;              // [32] dummy targets of lanes that have nothing to add
  int* num_replicated;     // experts with several replicas
  int* level;              // [ranks] tokens that this tile sends to each rank
  int* num_tokens;         // [experts] counted tokens
  int* load;               // [physical] tokens that this tile sends to each
  int* entry;              // [experts] the only replica, or kNone; of several, see `place_of`
  unsigned short* before;  // [words, stride] an expert's slots in the words before
  unsigned short* expert;  // [X]

  __device__ Shared(unsigned char* memory, const Params& p) {
    candidates = reinterpret_cast<int4*>(memory);
    ends = reinterpret_cast<uint2*>(candidates + p.max_replicated);
    mine = reinterpret_cast<unsigned*>(ends + p.max_replicated);
    spare = reinterpret_cast<int*>(mine + p.words * p.stride);
    num_replicated = spare + 32;
    level = num_replicated + 1;
    num_tokens = level + p.ranks;
    load = num_tokens + p.experts;
    entry = load + p.physical;
    before = reinterpret_cast<unsigned short*>(entry + p.experts);
    expert = before + p.words * p.stride;
  }

  // The arrays from `mine` to `load` are counters, and contiguous.
  DEVICE void clear(const Params& p) const {
#pragma unroll 1
    for (int* at = reinterpret_cast<int*>(mine) + threadIdx.x; at < entry; at += blockDim.x) {
      *at = 0;
    }
    for (int x = threadIdx.x; x < p.max_replicated; x += blockDim.x) {
      candidates[x] = make_int4(-1, -1, -1, -1);
      expert[x] = 0;
    }
  }
};

// Converts the index in the lists of X of an expert with several replicas to its entry, and back.
DEVICE int place_of(int entry) { return kNone - 1 - entry; }

// Named barriers of whole warps. A thread that waits sees what all wrote before they arrived.
enum class Barrier { kListed = 1, kCounted, kLevelled, kRound, kMarked, kDivided };

DEVICE void wait_at(Barrier barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

DEVICE void arrive_at(Barrier barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "r"(threads) : "memory");
}

// The rank of a physical expert.
DEVICE int rank_of(const Params& p, int physical) {
  return p.rank_factor == 0 ? physical : static_cast<int>(__umulhi(physical, p.rank_factor));
}

// A row of the table, as if it had at most kCandidates replicas; all loads are issued at once.
struct Row {
  const MapEntry* entries;
  int count;
  int leading[kCandidates];

  DEVICE void load(const Params& p, int expert) {
    if (expert >= p.experts) return;
    entries = p.table + static_cast<long long>(expert) * p.row_stride;
    count = static_cast<int>(p.counts[expert]);
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      leading[i] = i < p.width ? static_cast<int>(entries[i * p.column_stride]) : -1;
    }
  }
};

// By a warp, also for indices behind the last expert: writes what the tile needs to know of an expert; if it has
// several replicas, its candidates, one on this rank first.
DEVICE void enter_expert(const Params& p, const Shared& s, int expert, const Row& row) {
  const bool exists = expert < p.experts;
  const int count = exists ? row.count : 0, lane = threadIdx.x % 32;
  const unsigned replicated = __ballot_sync(kAll, count > 1);
  int x = 0;
  if (lane == 0 && replicated != 0) x = atomicAdd(s.num_replicated, __popc(replicated));
  x = __shfl_sync(kAll, x, 0) + __popc(replicated & ((1u << lane) - 1));
  if (exists) s.entry[expert] = count > 1 ? place_of(x) : max(row.leading[0], kNone);
  if (count <= 1) return;
  s.expert[x] = static_cast<unsigned short>(expert);
  const int start = static_cast<int>((p.ep_rank + blockIdx.x + __umulhi(expert * kExpertStep, count)) % count);
  int* list = reinterpret_cast<int*>(s.candidates + x);
  int own = kCandidates, own_candidate = -1, first_candidate = -1;
#pragma unroll
  for (int i = 0; i < kCandidates; ++i) {
    if (i >= count) continue;
    int candidate = row.leading[i], place = i < start ? i - start + count : i - start;
    if (count > kCandidates) {
      const int column = start + i < count ? start + i : start + i - count;
      candidate = static_cast<int>(row.entries[column * p.column_stride]);
      place = i;
    }
    list[place] = candidate;
    if (place == 0) first_candidate = candidate;
    if (rank_of(p, candidate) == p.ep_rank && place < own) own = place, own_candidate = candidate;
  }
  if (own == kCandidates) return;
  list[own] = first_candidate;
  list[0] = own_candidate;
}

// ==== Division ====
//
// Divides the tokens of each expert with several replicas over its candidates, all at once.

constexpr int kVisits = 4, kGroups = 3;

// a / b for 0 <= a < 2^15 and 1 <= b <= 4.
DEVICE int divide_by_few(int a, int b) {
  const int factor = b == 3 ? 21846 : 65536 >> (b >> 1);
  return a * factor >> 16;
}

// Thread x has the expert of index x in the lists; those behind the last take part without tokens.
struct Division {
  int expert, group, width;
  int4 candidates;
  int* spare;
  int* level[kCandidates];  // of each candidate's rank; the spare word if there is none
  int share[kCandidates];

  // What the maps alone determine. Branch-free: lanes without work add to words of their own.
  DEVICE Division(const Params& p, const Shared& s, int x) {
    const bool exists = x < p.max_replicated;
    expert = exists ? s.expert[x] : 0;
    candidates = exists ? s.candidates[x] : make_int4(-1, -1, -1, -1);
    const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
    group = (kGroups - expert % kGroups) % kGroups;  // the first of its rounds
    spare = s.spare + x % 32;
    width = 0;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      width += candidate[i] >= 0;
      level[i] = candidate[i] >= 0 ? s.level + rank_of(p, candidate[i]) : spare;
    }
  }

  // Divides the tokens evenly and adds them to the levels.
  DEVICE void begin(const Shared& s) {
    const int total = width > 0 ? s.num_tokens[expert] : 0;
    const int even = divide_by_few(total, max(width, 1)), rest = total - even * width;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      share[i] = i < width ? even + (i < rest) : 0;
      atomicAdd(level[i], share[i]);
    }
  }

  // Rounds of levelling, with the other `dividing` threads. In every kGroups of them an expert passes tokens between
  // two of its candidates once, from the fuller rank to the other.
  template <bool kOneWarp>
  DEVICE void pass_tokens(int dividing) {
#pragma unroll
    for (int visit = 0; visit < kVisits; ++visit) {
      const int one = of_pair(visit, 0x1020, 0x0010, 0), other = of_pair(visit, 0x3231, 0x1221, 1);
      const int least = -pick(share, one), most = pick(share, other);
      int* const here = pick(level, one);
      int* const there = pick(level, other);
      int passed = 0;
#pragma unroll
      for (int round = 0; round < kGroups; ++round) {
        const bool on = group == round;
        const int change = min(max((*there - *here + 1) >> 1, least), most);
        sync<kOneWarp>(dividing);
        atomicAdd(on ? here : spare, change);
        atomicAdd(on ? there : spare, -change);
        if (on) passed = change;
        sync<kOneWarp>(dividing);
      }
#pragma unroll
      for (int i = 0; i < kCandidates; ++i) share[i] += i == one ? passed : i == other ? -passed : 0;
    }
  }

  // Stores the division for the expert's slots, and what the tile adds to the load.
  DEVICE void store(const Shared& s, int x) const {
    const int second = share[0] + share[1], third = second + share[2];
    s.ends[x] = make_uint2(share[0] | second << 16, third);
    const int candidate[kCandidates] = {candidates.x, candidates.y, candidates.z, candidates.w};
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      if (share[i] > 0) s.load[candidate[i]] = share[i];
    }
  }

 private:
  template <bool kOneWarp>
  DEVICE static void sync(int threads) {
    if (kOneWarp) {
      __syncwarp();
    } else {
      wait_at(Barrier::kRound, threads);
    }
  }

  // A candidate of a visit's pair (PAIRS in levelling.py), one digit per visit: of four candidates, of three, of two.
  DEVICE int of_pair(int visit, int of_four, int of_three, int of_two) const {
    return width == 4 ? of_four >> 4 * visit & 3 : width == 3 ? of_three >> 4 * visit & 3 : of_two;
  }

  template <typename T>
  DEVICE static T pick(const T (&values)[kCandidates], int i) {
    return i < 2 ? (i == 0 ? values[0] : values[1]) : (i == 2 ? values[2] : values[3]);
  }
};

// ==== Kernel ====

constexpr int kSlots = SLOTS;  // of a thread, at most

DEVICE void serve_division(const Params& p, const Shared& s, int thread) {
  wait_at(Barrier::kListed, blockDim.x);
  Division division(p, s, thread);
  wait_at(Barrier::kCounted, blockDim.x);
  division.begin(s);
  wait_at(Barrier::kLevelled, p.dividing + p.expert_threads);
  if (p.dividing == 32) {
    division.pass_tokens<true>(p.dividing);
  } else {
    division.pass_tokens<false>(p.dividing);
  }
  if (thread < p.max_replicated) division.store(s, thread);
  arrive_at(Barrier::kDivided, blockDim.x);
}

// kNone unless the expert exists, so that a wrong id reads and counts nothing.
DEVICE int id_of(const Params& p, Id id) { return id >= 0 && id < p.experts ? static_cast<int>(id) : kNone; }

// row: of the thread's first expert.
DEVICE void serve_experts(const Params& p, const Shared& s, int thread, Row& row) {
  enter_expert(p, s, thread, row);
#pragma unroll 1
  for (int expert = thread + p.expert_threads; expert - thread % 32 < p.experts; expert += p.expert_threads) {
    row.load(p, expert);
    enter_expert(p, s, expert, row);
  }
  arrive_at(Barrier::kListed, blockDim.x);
  grid_dependency_wait();
  wait_at(Barrier::kCounted, blockDim.x);

#pragma unroll 1
  for (int expert = thread; expert < p.experts; expert += p.expert_threads) {
    const int amount = s.num_tokens[expert], physical = s.entry[expert];
    if (amount == 0 || physical < 0) continue;  // unused, has several replicas, or none
    atomicAdd(s.level + rank_of(p, physical), amount);
    s.load[physical] = amount;
  }
  arrive_at(Barrier::kLevelled, p.dividing + p.expert_threads);
  wait_at(Barrier::kDivided, blockDim.x);

  // Neighbouring threads add to neighbouring words: where tiles contend, a warp touches few lines of memory.
#pragma unroll 1
  for (int physical = thread; physical < p.physical; physical += p.expert_threads) {
    const int amount = s.load[physical];
    if (amount > 0) atomicAdd(p.load + physical, amount);
  }
}

// By a warp: how many slots of experts first, first + step, ... come before each word.
DEVICE void sum_before(const Params& p, const Shared& s, int first, int step) {
  const int lane = threadIdx.x % 32, num_replicated = *s.num_replicated;
  const bool has_word = lane < p.words;
  const int row = has_word ? lane * p.stride : 0;
#pragma unroll 1
  for (int x = first; x < num_replicated; x += step) {
    const int amount = has_word ? __popc(s.mine[row + x]) : 0;
    int sum = amount;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      const int other = __shfl_up_sync(kAll, sum, far);
      sum += lane >= far ? other : 0;
    }
    if (has_word) s.before[row + x] = static_cast<unsigned short>(sum - amount);
  }
}

DEVICE void serve_slots(const Params& p, const Shared& s, int thread, int threads) {
  const int lane = thread % 32, tile_slots = p.rows_per_tile * p.slots;
  const long long start = static_cast<long long>(blockIdx.x) * tile_slots;
  const long long all_slots = static_cast<long long>(p.tokens) * p.slots;
  const int num_slots = static_cast<int>(min(all_slots - start, static_cast<long long>(tile_slots)));
  const Id* ids = p.ids + start;
  OutId* out = p.out + start;
  grid_dependency_wait();
  int id[kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int slot = thread + j * threads;
    id[j] = slot < num_slots ? id_of(p, ids[slot]) : kNone;
  }
  const int num_counted = p.num_counted_on_device ? *p.num_counted_on_device : p.num_counted;
  const long long counted_slots = static_cast<long long>(num_counted) * p.slots - start;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    if (id[j] >= 0 && thread + j * threads < counted_slots) atomicAdd(s.num_tokens + id[j], 1);
  }
  arrive_at(Barrier::kCounted, blockDim.x);
  wait_at(Barrier::kListed, blockDim.x);

  int entry[kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) entry[j] = id[j] >= 0 ? s.entry[id[j]] : kNone;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int slot = thread + j * threads;
    if (entry[j] >= kNone) {
      if (slot < num_slots) out[slot] = entry[j];
    } else if (slot < counted_slots) {
      atomicOr(s.mine + slot / 32 * p.stride + place_of(entry[j]), 1u << lane);
    }
  }
  wait_at(Barrier::kMarked, threads);
  sum_before(p, s, thread / 32, threads / 32);
  wait_at(Barrier::kMarked, threads);

  // Slots of experts with several replicas: how many of the expert's come before, and where they may go.
  int left[kSlots];
  int4 candidates[kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int slot = thread + j * threads, x = entry[j] < kNone ? place_of(entry[j]) : 0;
    const bool counted = entry[j] < kNone && slot < counted_slots;
    const int at = counted ? slot / 32 * p.stride + x : 0;
    left[j] = counted ? s.before[at] + __popc(s.mine[at] & ((1u << lane) - 1)) : -1;
    candidates[j] = s.candidates[x];
  }
  wait_at(Barrier::kDivided, blockDim.x);

#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    if (entry[j] >= kNone) continue;
    const uint2 ends = s.ends[place_of(entry[j])];
    const int end = ends.x & 0xFFFF, second = ends.x >> 16, third = ends.y;
    const int4 all = candidates[j];
    out[thread + j * threads] = left[j] < end ? all.x : left[j] < second ? all.y : left[j] < third ? all.z : all.w;
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) eplb_map(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Shared s(memory, p);
  const int thread = threadIdx.x, expert = thread - p.dividing, slot = expert - p.expert_threads;
  grid_dependency_launch();
  Row row;
  if (expert >= 0 && slot < 0) row.load(p, expert);
  s.clear(p);
  __syncthreads();
  if (expert < 0) {
    serve_division(p, s, thread);
  } else if (slot < 0) {
    serve_experts(p, s, expert, row);
  } else {
    serve_slots(p, s, slot, blockDim.x - p.dividing - p.expert_threads);
  }
}
