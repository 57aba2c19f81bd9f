// Streams of several ranks, their hosts, and whose turn it is. One session at a time: begin, queue_kernel, queue_host
// and add_host, run.
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
  int rank;
  void (*body)(const void*);
  std::vector<char> params;
  int num_blocks, num_threads;
  bool is_early;  // may come up while the one before it runs
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
jmp_buf scheduler;  // a thread's context is set once, and jumped to later, which costs no call of the system
constexpr int kStackBytes = 32 << 10;

struct SlowLines {
  uintptr_t begin, end;
  int period, from;
  long pause_ns;
};

// A host's program, which queues work and looks for what it waits for.
struct Host {
  bool (*is_through)();
  long next_ns;
};

struct Session {
  std::mt19937_64 random;
  int resident, pauses_per_mille, most_blocks = 0;
  long longest_pause_ns, now = 0;
  std::vector<std::vector<std::unique_ptr<Kernel>>> streams;
  std::vector<Host> hosts;
  std::vector<SlowLines> slow;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Thread*> ready;
  using Sleeper = std::pair<long, int>;  // when it wakes, and which of `asleep`
  std::priority_queue<Sleeper, std::vector<Sleeper>, std::greater<Sleeper>> wakes;
  std::vector<Thread*> asleep;

  long draw(long below) { return random() % below; }

  Kernel& queue(int rank) {
    auto& stream = streams[rank];
    Kernel* before = stream.empty() ? nullptr : stream.back().get();
    stream.push_back(std::make_unique<Kernel>());
    stream.back()->before = before, stream.back()->rank = rank;
    return *stream.back();
  }

  void leave() {
    see_stores();
    if (!_setjmp(running->at)) _longjmp(scheduler, 1);
  }

  void sleep_until(long then) {
    wakes.push({then, (int)asleep.size()});
    asleep.push_back(running);
    leave();
  }

  static void run_thread() {
    Kernel* kernel = running->block->kernel;
    kernel->body(kernel->params.data());
    see_stores();
    running->ended = true;
    _longjmp(scheduler, 1);
  }

  void start_block(Kernel& kernel) {
    kernel.blocks.push_back(std::make_unique<Block>());
    Block& block = *kernel.blocks.back();
    block.kernel = &kernel, block.rank = kernel.rank, block.index.x = kernel.blocks.size() - 1;
    block.num_threads = block.live = kernel.num_threads;
    block.warps.resize(kernel.num_threads / kLanes);
    kernel.live_blocks++;
    for (int i = 0; i < kernel.num_threads; i++) {
      threads.push_back(std::make_unique<Thread>());
      Thread& thread = *threads.back();
      thread.block = &block, thread.index.x = i;
      thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = kStackBytes;
      makecontext(&thread.context, run_thread, 0);
      ready.push_back(&thread);
    }
  }

  void finish(Kernel& kernel) {
    for (auto& block : kernel.blocks) land_all(*block);
    kernel.complete = true;
    wake(kernel);
  }

  void ask_host(Kernel& work) {
    if (work.next_ns < 0) work.next_ns = now + work.every_ns;
    if (now < work.next_ns) return;
    work.next_ns = now + std::max(work.every_ns, 100l);
    if (work.is_done()) finish(work);
  }

  // True while a host is not through.
  bool ask_hosts() {
    for (Host& host : hosts) {
      if (!host.is_through || now < host.next_ns) continue;
      host.next_ns = now + 200 + draw(longest_pause_ns) * (draw(4) == 0);
      if (host.is_through()) host.is_through = nullptr;
    }
    return std::any_of(hosts.begin(), hosts.end(), [](const Host& host) { return host.is_through; });
  }

  // Starts and ends what may; true while something is left.
  bool look_at_streams() {
    bool left = ask_hosts();
    for (auto& stream : streams) {
      int live = 0;
      for (auto& kernel : stream) live += kernel->live_blocks;
      for (auto& kernel : stream) {
        if (kernel->complete) continue;
        left = true;
        bool is_first = !kernel->before || kernel->before->complete;
        if (!is_first && !(kernel->is_early && kernel->before->lets_next_come_up())) break;
        if (kernel->is_done) {
          if (is_first) ask_host(*kernel);
          break;
        }
        if (!kernel->all_started()) {
          bool has_room = kernel->live_blocks < resident && (most_blocks == 0 || live < most_blocks);
          if (has_room && draw(4) == 0) start_block(*kernel), live++;
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
    if (!_setjmp(scheduler)) {
      if (running->begun) _longjmp(running->at, 1);
      running->begun = true;
      setcontext(&running->context);
    }
    if (!running->ended) return;
    running->stack.reset();
    if (--running->block->live == 0) running->block->kernel->live_blocks--;
  }

  bool run(long most_turns) {
    for (long turn = 0; turn < most_turns; turn++, now++) {
      if ((turn % 16 == 0 || ready.empty()) && !look_at_streams()) return true;
      land_some();
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
long draw(long below) { return session->draw(below); }
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

void* shared(int number, size_t bytes) {
  auto& memory = running->block->shared[number];
  if (!memory) {
    memory.reset(new char[bytes]);
    memset(memory.get(), 0xff, bytes);
  }
  return memory.get();
}

// Of stores to be made now.
void pause_before_store(const void* at) {
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
void begin(int num_ranks, int seed, int resident, int pauses_per_mille, long longest_pause_ns, int landing_per_mille) {
  session = std::make_unique<Session>();
  begin_memory(landing_per_mille);
  session->random.seed(seed), session->streams.resize(num_ranks);
  session->resident = resident;
  session->pauses_per_mille = pauses_per_mille, session->longest_pause_ns = longest_pause_ns;
}

// Blocks of all kernels of a rank that run at a time, as a GPU has so many multiprocessors.
void limit_blocks(int most) { session->most_blocks = most; }

// Of each `period` lines of 16 bytes there, those behind the first `from` are stored after a pause.
void slow_lines(uintptr_t begin, long bytes, int period, int from, long pause_ns) {
  session->slow.push_back({begin, begin + bytes, period, from, pause_ns});
}

void queue_kernel(int rank, void (*body)(const void*), const void* params, int bytes, int num_blocks, int num_threads,
                  bool is_early) {
  Kernel& kernel = session->queue(rank);
  kernel.is_early = is_early;
  kernel.body = body, kernel.num_blocks = num_blocks, kernel.num_threads = num_threads;
  kernel.params.assign((const char*)params, (const char*)params + bytes);
}

// Work of the host, which what comes next in the stream waits for.
void queue_host(int rank, bool (*is_done)(), long every_ns) {
  Kernel& work = session->queue(rank);
  work.is_done = is_done, work.every_ns = every_ns;
}

// A program of a host, asked every so often, which may queue work of its rank.
void add_host(bool (*is_through)()) { session->hosts.push_back({is_through, 0}); }

// True when everything queued has ended.
bool run(long most_turns) { return session->run(most_turns); }
}
