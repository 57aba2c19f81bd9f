// Waits until no rank reads this rank's experts for a batch any more, so that what follows may change them.
//
// Layout in:   the lines `copied` of all ranks.
// Warp roles:  one warp; a lane waits for a rank.
// Example:     2 ranks; rank 0 goes on once both have copied.
#include "batch_balance.cuh"

constexpr int kThreads = THREADS;

struct Params {
  Common common;
};

extern "C" __global__ void __launch_bounds__(kThreads) batch_release(const __grid_constant__ Params p) {
  const Common& c = p.common;
  const int source = static_cast<int>(threadIdx.x);
  if (source < RANKS) {
    Wait<PHASE_DISPATCH> wait(c.limits, c.epoch);
    Vec line;
    wait.for_line(c.copied_of(c.rank, source), source, line);
  }
}
