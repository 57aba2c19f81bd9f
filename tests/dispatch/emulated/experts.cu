// Stands for the prefill kernel of packed experts (kernels/marlin/cuda/prefill_sm90.cu) on the emulated GPU: it waits for
// rows and publishes results as that does, through arrival.cuh, and computes what backend_cases.expert does.
//
// Work items are claimed by tickets: for every expert its tiles of rows, which are copied to `hidden`; then for every
// expert its tiles in two halves of the columns, which wait for `hidden`. Blocks below `leaving` claim no item behind the
// first of the second half.
#include "arrival.cuh"
#include "numbers.cuh"

constexpr int kThreads = THREADS;
constexpr int kTile = 3;  // rows
constexpr int kHalves = 2;

struct Params {
  Arrival arrival;
  const u16* rows;        // [rows, HIDDEN], as they arrive
  const int* sorted;      // slots, expert by expert
  const int* num_tokens;  // [num_experts]
  const int* numbers;     // [num_experts]: the id of each
  u16* hidden;            // [slots, HIDDEN]
  u16* slots;             // [rows * TOPK, HIDDEN]
  int* sync;              // tickets, blocks done, per expert rows in `hidden`, per expert what is stored
  int num_experts;
};

struct Item {
  int expert, first, tokens, before;  // before: rows of all experts before
};

DEVICE int tiles_of(const Params& p, int expert) { return (p.num_tokens[expert] + kTile - 1) / kTile; }

DEVICE Item item_of(const Params& p, int number) {
  Item item = {0, 0, 0, 0};
  for (; number >= tiles_of(p, item.expert); ++item.expert) {
    number -= tiles_of(p, item.expert);
    item.before += p.num_tokens[item.expert];
  }
  item.first = number * kTile;
  item.tokens = min(p.num_tokens[item.expert] - item.first, kTile);
  return item;
}

extern "C" __global__ void experts(const __grid_constant__ Params p) {
  __shared__ int ticket;
  grid_dependency_launch();
  int *ready = p.sync + 2, *stored = ready + p.num_experts, tiles = 0;
  for (int e = 0; e < p.num_experts; ++e) {
    tiles += tiles_of(p, e);
  }
  ArrivingRows arriving(p.arrival);
  for (int before = -1;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool leaves = static_cast<int>(blockIdx.x) < p.arrival.leaving && before >= tiles;
      ticket = leaves ? 3 * tiles : atomicAdd(p.sync, 1);
    }
    __syncthreads();
    if (ticket >= 3 * tiles) break;
    before = ticket;
    const bool is_first = ticket < tiles;
    const Item item = item_of(p, is_first ? ticket : (ticket - tiles) / kHalves);
    const int* slots = p.sorted + item.before + item.first;
    const int half = is_first ? 0 : (ticket - tiles) % kHalves;
    if (is_first) {
      arriving.await(item.tokens, [&](int i) { return slots[i] / TOPK; });
    } else {
      wait_at_least(ready + item.expert, p.num_tokens[item.expert]);
    }
    __syncthreads();
    for (int token = 0; token < item.tokens; ++token) {
      u16* hidden = p.hidden + static_cast<u64>(item.before + item.first + token) * HIDDEN;
      for (int column = threadIdx.x; column < HIDDEN / (is_first ? 1 : kHalves); column += kThreads) {
        if (is_first) {
          hidden[column] = p.rows[static_cast<u64>(slots[token] / TOPK) * HIDDEN + column];
        } else {
          const int at = half * (HIDDEN / kHalves) + column;
          const float number = p.numbers[item.expert], x = emulated::of_half(hidden[at]);
          const float result = x * (1.0f + number / 8.0f) + number;
          p.slots[static_cast<u64>(slots[token]) * HIDDEN + at] = emulated::half(result);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && is_first) {
      add_release_gpu(ready + item.expert, item.tokens);
    } else if (threadIdx.x == 0) {
      count_results(p.arrival, item.expert, stored + item.expert, item.tokens, kHalves * p.num_tokens[item.expert]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    grid_dependency_wait();
    if (add_acquire_release_gpu(p.sync + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      for (int i = 0; i < 2 + 2 * p.num_experts; ++i) {
        p.sync[i] = 0;
      }
    }
  }
}
