// Experts that run while their rows are in flight, and whose results leave while others are computed.
//
// The dispatch sets a row's flag to the batch's number once that row is here, and a source's flag once all rows of that
// rank are. A work unit of the experts waits for the rows that it reads, and no others. Whoever stores the last results
// of an expert sets that expert's flag, for which the combine waits. Numbers of batches only grow, so nothing is
// cleared.
//
// Progress: the experts start when every block of the dispatch has started, and the combine when every block of the
// experts has (programmatic dependent launch). So whoever waits, waits for blocks that run or have ended.
// Example: source 0 has rows 0 and 1, source 1 row 2. A unit that reads rows 1 and 2 polls these two flags, unless both
// sources' flags are set.
#pragma once
#include "deadline.cuh"

struct Arrival {
  const u64* row_flags;     // of each row that can arrive
  const u64* source_flags;  // [num_sources]
  const int* first_rows;    // [num_sources]: first row of each source
  const u64* epoch;         // number of the batch
  u64* finished;            // [E]: of each expert
  Limits limits;
  int num_sources;
  int leaving;  // CTAs of the experts that may end before the others, to make room for the combine
};

// A warp's waits for rows.
class ArrivingRows {
 public:
  DEVICE explicit ArrivingRows(const Arrival& arrival) : arrival_(arrival) {}

  // By a warp: waits for rows row_of(0) ... row_of(n - 1). Behind a wait that failed rows are what they happen to be.
  template <typename RowOf>
  DEVICE void await(int n, const RowOf& row_of) {
    if (are_all_here_) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const u64 epoch = *reinterpret_cast<const volatile u64*>(arrival_.epoch);
    const u32 alive = *reinterpret_cast<volatile u32*>(&arrival_.limits.status->alive);
    const bool is_due = lane < arrival_.num_sources && (alive >> lane & 1);
    are_all_here_ = __all_sync(~0u, !is_due || load_acquire_sys(arrival_.source_flags + lane) == epoch);
    if (!are_all_here_) {
      Deadline<PHASE_DISPATCH> wait(arrival_.limits, static_cast<u32>(epoch));
      for (int i = lane; i < n; i += 32) {
        const int row = row_of(i);
        const u64* flag = arrival_.row_flags + row;
        if (load_acquire_sys(flag) != epoch) wait.for_flag(flag, epoch, source_of(row));
      }
    }
    __syncwarp();
  }

 private:
  DEVICE int source_of(int row) const {
    int source = 0;
    for (int s = 1; s < arrival_.num_sources; ++s) {
      if (arrival_.first_rows[s] <= row) source = s;
    }
    return source;
  }

  const Arrival& arrival_;
  bool are_all_here_ = false;
};

// By one thread, behind a barrier of all that stored: `more` of an expert's `total` results are stored. The counter is
// zero before the first.
DEVICE void count_results(const Arrival& arrival, int expert, int* counter, int more, int total) {
  if (add_acquire_release_gpu(counter, more) + more == total) {
    const u64 epoch = *reinterpret_cast<const volatile u64*>(arrival.epoch);
    __threadfence();
    *reinterpret_cast<volatile u64*>(arrival.finished + expert) = epoch;
  }
}
