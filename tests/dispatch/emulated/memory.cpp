// Memory of several ranks: what one stores in another's arrives late, in any order, but for fences.
//
// Kernels are compiled with calls before each load and store (-fsanitize=thread, whose own library is not linked), so
// that plain ones to other ranks are found too. Such a store is taken back at the thread's next call, and made again
// when it arrives.
#include <cstdint>

#include "gpu.h"

namespace emulated {
namespace {
constexpr int kMostBytes = 128;
constexpr int kReadsOfTurn = 8;

struct Region {
  uintptr_t begin, end;
  int rank;
};

struct Store {
  const Thread* by;
  Scope known;
  char* at;
  int bytes;
  char data[kMostBytes];

  bool is_known() const {
    const Block *own = running->block, *its = by->block;
    if (by == running || (known >= RANK && its->rank == own->rank)) return true;
    const bool of_warp = by->index.x / kLanes == running->index.x / kLanes;
    return its == own && (known >= BLOCK || (known >= WARP && of_warp));
  }
};

// Of the device library: bytes that are read when they arrive, and a flag that arrives behind them.
struct Put {
  const void* from;
  void* there;
  long bytes;
  uint64_t *flag, value;
};

std::vector<Region> regions;
std::vector<Store> on_the_way;
std::vector<Put> puts;
int landing_per_mille;
Store seen;  // the running thread's last, which is to be taken back; of 0 bytes for none

const Region* region_of(const void* at) {
  for (const Region& region : regions) {
    if ((uintptr_t)at >= region.begin && (uintptr_t)at < region.end) return &region;
  }
  return nullptr;
}

bool is_of_peer(const void* at) {
  const Region* region = region_of(at);
  return region && region->rank != running->block->rank;
}

// Where a rank has what this one has there.
void* at_rank(int rank, const void* own) {
  const Region* region = region_of(own);
  auto is_its = [&](const Region& other) { return other.rank == rank; };
  const Region& its = *std::find_if(regions.begin(), regions.end(), is_its);
  return (void*)(its.begin + ((uintptr_t)own - region->begin));
}

// Sometimes a step of one: its bytes, and later its flag.
void land_puts() {
  if (puts.empty() || draw(1000) >= landing_per_mille) return;
  Put& drawn = puts[draw(puts.size())];
  if (drawn.bytes) {
    memcpy(drawn.there, drawn.from, drawn.bytes);
    drawn.bytes = 0;
  } else {
    *drawn.flag = drawn.value;
    drawn = puts.back(), puts.pop_back();
  }
}

template <typename Which>
void land(Which is_due) {
  size_t kept = 0;
  for (size_t i = 0; i < on_the_way.size(); i++) {
    Store& store = on_the_way[i];
    if (is_due(store)) {
      memcpy(store.at, store.data, store.bytes);
    } else if (kept++ != i) {
      on_the_way[kept - 1] = store;
    }
  }
  on_the_way.resize(kept);
}

void put_on_the_way(void* at, const void* data, int bytes) {
  Store store{running, THREAD, (char*)at, bytes};
  memcpy(store.data, data, bytes);
  on_the_way.push_back(store);
}

void before_load(const void* at) {
  see_stores();
  if (region_of(at) && draw(kReadsOfTurn) == 0) yield();
}

void before_store(void* at, int bytes) {
  see_stores();
  if (!region_of(at)) return;
  pause_before_store(at);
  yield();
  if (!is_of_peer(at)) return;
  seen.at = (char*)at, seen.bytes = bytes;
  memcpy(seen.data, at, bytes);
}
}  // namespace

void begin_memory(int per_mille) {
  regions.clear(), on_the_way.clear(), puts.clear();
  seen.bytes = 0, landing_per_mille = per_mille;
}

void see_stores() {
  if (!seen.bytes) return;
  put_on_the_way(seen.at, seen.at, seen.bytes);
  memcpy(seen.at, seen.data, seen.bytes);
  seen.bytes = 0;
}

void store_bytes(void* at, const void* data, int bytes) {
  see_stores();
  if (is_of_peer(at)) {
    put_on_the_way(at, data, bytes);
  } else {
    memcpy(at, data, bytes);
  }
}

void load_bytes(const void* at, void* data, int bytes) { memcpy(data, at, bytes); }

void put(void* there, const void* from, long bytes, uint64_t* flag, uint64_t value, int rank) {
  see_stores();
  puts.push_back({from, bytes ? at_rank(rank, there) : nullptr, bytes, (uint64_t*)at_rank(rank, flag), value});
}

// Sometimes one of them, behind earlier ones to the same place.
void land_some() {
  land_puts();
  if (on_the_way.empty() || draw(1000) >= landing_per_mille) return;
  const Store drawn = on_the_way[draw(on_the_way.size())];
  auto is_first = [&, left = true](const Store& store) mutable {
    const bool meets = store.at < drawn.at + drawn.bytes && drawn.at < store.at + store.bytes;
    return meets && std::exchange(left, false);
  };
  land(is_first);
}

void land_all(const Block& of) {
  land([&](const Store& store) { return store.by->block == &of; });
}

void fence(Scope scope) {
  yield();
  if (scope == SYSTEM) return land([](const Store& store) { return store.is_known(); });
  for (Store& store : on_the_way) {
    if (store.is_known()) store.known = std::max(store.known, scope);
  }
}

void tell_warp() {
  see_stores();
  for (Store& store : on_the_way) {
    const bool is_its = store.by->block == running->block && store.by->index.x / kLanes == running->index.x / kLanes;
    if (is_its) store.known = std::max(store.known, WARP);
  }
}

void tell_block(const Meeting& of) {
  see_stores();
  for (Store& store : on_the_way) {
    const bool waits = std::find(of.waiting.begin(), of.waiting.end(), store.by) != of.waiting.end();
    if (waits || store.by == running) store.known = std::max(store.known, BLOCK);
  }
}
}  // namespace emulated

using namespace emulated;

extern "C" {
// Memory that all ranks may write.
void add_memory(int rank, uintptr_t begin, long bytes) { regions.push_back({begin, begin + bytes, rank}); }

#define HOOKS(bytes)                                               \
  void __tsan_read##bytes(void* at) { before_load(at); }           \
  void __tsan_write##bytes(void* at) { before_store(at, bytes); }  \
  void __tsan_unaligned_read##bytes(void* at) { before_load(at); } \
  void __tsan_unaligned_write##bytes(void* at) { before_store(at, bytes); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* at, long) { before_load(at); }
void __tsan_write_range(void* at, long bytes) { before_store(at, bytes); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
