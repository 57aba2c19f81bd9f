// Streams of several ranks, and whose turn it is. One session at a time: begin, queue_kernel and queue_host, run.
//
// The clock counts turns, as nanoseconds. All that is drawn comes from the session's seed.
#include "gpu.h"

#include <cstdint>
#include <functional>
#include <queue>
#include <random>

namespace emulated {
struct Kernel : Meeting {  // of threads that wait for its end
  Kernel* before;
  void (*body)(const void*);
  std::vector<char> params;
  int num_blocks, num_threads;
  // Of work of the host instead, which is asked every so often whether it is done.
  bool (*is_done)() = nullptr;
  long every_ns = 0, next_ns = -1;

  std::vector<std::unique_ptr<Block>> blocks;
  int live_blocks = 0;
  bool complete = false;

  bool all_started() const { return (int)blocks.size() == num_blocks; }
  bool lets_next_come_up() const {
    auto lets = [](const auto& block) { return block->lets_next_come_up || block->live == 0; };
    return complete || (!is_done && all_started() && std::all_of(blocks.begin(), blocks.end(), lets));
  }
};

Thread* running = nullptr;

namespace {
constexpr int kStackBytes = 32 << 10;

struct SlowLines {
  uintptr_t begin, end;
  int period, from;
  long pause_ns;
};

struct Session {
  std::mt19937_64 random;
  int resident, pauses_per_mille;
  long longest_pause_ns, now = 0;
  std::vector<std::vector<std::unique_ptr<Kernel>>> streams;
  std::vector<SlowLines> slow;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Thread*> ready;
  using Sleeper = std::pair<long, int>;  // when it wakes, and which of `asleep`
  std::priority_queue<Sleeper, std::vector<Sleeper>, std::greater<Sleeper>> wakes;
  std::vector<Thread*> asleep;
  ucontext_t scheduler;

  long draw(long below) { return random() % below; }

  Kernel& queue(int rank) {
    auto& stream = streams[rank];
    Kernel* before = stream.empty() ? nullptr : stream.back().get();
    stream.push_back(std::make_unique<Kernel>());
    stream.back()->before = before;
    return *stream.back();
  }

  void leave() { swapcontext(&running->context, &scheduler); }

  void sleep_until(long then) {
    wakes.push({then, (int)asleep.size()});
    asleep.push_back(running);
    leave();
  }

  static void run_thread() {
    Kernel* kernel = running->block->kernel;
    kernel->body(kernel->params.data());
    running->ended = true;
  }

  void start_block(Kernel& kernel) {
    kernel.blocks.push_back(std::make_unique<Block>());
    Block& block = *kernel.blocks.back();
    block.kernel = &kernel, block.index.x = kernel.blocks.size() - 1, block.live = kernel.num_threads;
    block.warps.resize(kernel.num_threads / kLanes);
    memset(block.shared, 0xab, sizeof block.shared);
    kernel.live_blocks++;
    for (int i = 0; i < kernel.num_threads; i++) {
      threads.push_back(std::make_unique<Thread>());
      Thread& thread = *threads.back();
      thread.block = &block, thread.index.x = i;
      thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &scheduler;
      makecontext(&thread.context, run_thread, 0);
      ready.push_back(&thread);
    }
  }

  void finish(Kernel& kernel) {
    kernel.complete = true;
    wake(kernel);
  }

  void ask_host(Kernel& work) {
    if (work.next_ns < 0) work.next_ns = now + work.every_ns;
    if (now < work.next_ns) return;
    work.next_ns = now + std::max(work.every_ns, 100l);
    if (work.is_done()) finish(work);
  }

  // Starts and ends what may; true while something is left.
  bool look_at_streams() {
    bool left = false;
    for (auto& stream : streams) {
      for (auto& kernel : stream) {
        if (kernel->complete) continue;
        left = true;
        bool is_first = !kernel->before || kernel->before->complete;
        if (!is_first && !kernel->before->lets_next_come_up()) break;
        if (kernel->is_done) {
          if (is_first) ask_host(*kernel);
          break;
        }
        if (!kernel->all_started()) {
          if (kernel->live_blocks < resident && draw(4) == 0) start_block(*kernel);
        } else if (kernel->live_blocks == 0 && is_first) {
          finish(*kernel);
        }
      }
    }
    return left;
  }

  void take_turn() {
    int i = draw(ready.size());
    running = ready[i];
    ready[i] = ready.back(), ready.pop_back();
    swapcontext(&scheduler, &running->context);
    if (!running->ended) return;
    running->stack.reset();
    if (--running->block->live == 0) running->block->kernel->live_blocks--;
  }

  bool run(long most_turns) {
    for (long turn = 0; turn < most_turns; turn++, now++) {
      if ((turn % 16 == 0 || ready.empty()) && !look_at_streams()) return true;
      for (; !wakes.empty() && wakes.top().first <= now; wakes.pop()) ready.push_back(asleep[wakes.top().second]);
      if (ready.empty()) {
        now += 50;
      } else {
        take_turn();
      }
    }
    return false;
  }
};

std::unique_ptr<Session> session;
}  // namespace

Dim grid() { return {(unsigned)running->block->kernel->num_blocks}; }
long now_ns() { return session->now; }
void sleep(long ns) { session->sleep_until(session->now + ns); }
void wait_for_wake() { session->leave(); }

void wake(Meeting& meeting) {
  meeting.arrived = 0;
  session->ready.insert(session->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
}

void yield() {
  Session& s = *session;
  if (s.draw(1000) < s.pauses_per_mille) return sleep(s.draw(s.longest_pause_ns));
  s.ready.push_back(running);
  s.leave();
}

void wait_for_kernel_before() {
  yield();
  Kernel* before = running->block->kernel->before;
  if (!before || before->complete) return;
  before->waiting.push_back(running);
  wait_for_wake();
}

void before_store(const void* at) {
  uintptr_t address = (uintptr_t)at;
  for (const SlowLines& slow : session->slow) {
    if (address < slow.begin || address >= slow.end) continue;
    if ((int)((address - slow.begin) / 16 % slow.period) >= slow.from) sleep(slow.pause_ns);
  }
}
}  // namespace emulated

using namespace emulated;

extern "C" {
// `resident` blocks of a kernel run at a time; of 1000 turns so many end in a pause.
void begin(int num_ranks, int seed, int resident, int pauses_per_mille, long longest_pause_ns) {
  session = std::make_unique<Session>();
  session->random.seed(seed), session->streams.resize(num_ranks);
  session->resident = resident;
  session->pauses_per_mille = pauses_per_mille, session->longest_pause_ns = longest_pause_ns;
}

// Of each `period` lines of 16 bytes there, those behind the first `from` are stored after a pause.
void slow_lines(uintptr_t begin, long bytes, int period, int from, long pause_ns) {
  session->slow.push_back({begin, begin + bytes, period, from, pause_ns});
}

void queue_kernel(int rank, void (*body)(const void*), const void* params, int bytes, int num_blocks, int num_threads) {
  Kernel& kernel = session->queue(rank);
  kernel.body = body, kernel.num_blocks = num_blocks, kernel.num_threads = num_threads;
  kernel.params.assign((const char*)params, (const char*)params + bytes);
}

// Work of the host, which what comes next in the stream waits for.
void queue_host(int rank, bool (*is_done)(), long every_ns) {
  Kernel& work = session->queue(rank);
  work.is_done = is_done, work.every_ns = every_ns;
}

// True when everything queued has ended.
bool run(long most_turns) { return session->run(most_turns); }
}
