// How blocks hand `hidden` to each other in tiles of 8 tokens: words of 64 bits, half a result and half the number of
// the launch that wrote it. Whoever needs a word reads it until the number is right, so there is neither a flag nor a
// fence before it: what is stored is seen after one way through the memory; store, fence, flag, poll and copy take five.
// Larger tiles would move too many bytes twice over.
//
// Words lie behind the flags (decode_stage.cuh), are written at most once a launch and never cleared:
//   p.hidden_words  [expert][step of w2][8 columns][token][2 columns], since an expert has one such tile at most
#pragma once
#include "decode_prepare.cuh"
#include "store.cuh"

DEVICE constexpr bool goes_by_words(int tokens) { return tokens == 8; }

constexpr int kHiddenWords = 8 * kStepColumns / 2;  // of a step

DEVICE u64* hidden_words(const ExpertsParams& p, const Schedule& s, int expert, int step) {
  return p.hidden_words + (i64)(expert * s.steps[1] + step) * kHiddenWords;
}

DEVICE u64 make_word(u32 value, int launch) { return (u64)(u32)launch << 32 | value; }

DEVICE void store_word(u64* to, u32 value, int launch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(make_word(value, launch)) : "memory");
}

// Two at once; either is whole by itself.
struct TwoWords {
  u64 word[2];
  DEVICE u32 value(int i) const { return (u32)word[i]; }
  DEVICE bool written(int launch) const { return (int)(word[0] >> 32) == launch && (int)(word[1] >> 32) == launch; }
};

DEVICE void store_two_words(u64* to, u32 first, u32 second, int launch) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(make_word(first, launch)),
               "l"(make_word(second, launch))
               : "memory");
}

DEVICE TwoWords load_two_words(const u64* from) {
  TwoWords v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.word[0]), "=l"(v.word[1])
               : "l"(from)
               : "memory");
  return v;
}

// 16 weight rows of a warp, as store_rows has them.
DEVICE void store_hidden(const ExpertsParams& p, const Schedule& s, const Segment& g, int launch, int first,
                         const float* sums, Units unit) {
  int lane = threadIdx.x % 32, column = kGated ? first / 2 : first;
  asm volatile("" : "+r"(lane));  // so that what follows from it is not kept where sums are made
  u64* to = hidden_words(p, s, g.expert, column / kStepColumns) + column % kStepColumns / 8 * 32;
  finish_rows<8, true>(p, g.expert, g.rows, first, sums, 0, unit, [&](int token, const u32* pairs) {
    if constexpr (kGated) {
      store_word(to + token * 4 + lane % 4, pairs[0], launch);
    } else {
      store_two_words(to + lane % 4 / 2 * 32 + token * 4 + lane % 2 * 2, pairs[0], pairs[1], launch);
    }
  });
}

// The warps of tokens and of flags take the steps of a segment of w2 in turn, and bring each one's tokens into its
// stage. Lanes 2 t and 2 t + 1 of half a warp have token t of every other 8 columns.
DEVICE void take_hidden(const ExpertsParams& p, Shared& shared, const Segment& g, Ring& ring) {
  constexpr int kLoads = kHiddenWords / 64, kTurns = kTokenWarps + 1;
  int lane = threadIdx.x % 32, token = lane / 2 % 8, step = g.from + threadIdx.x / 32 - kTokenWarp, end = g.to;
  ring.forward(min(step, end) - g.from);
#pragma unroll 1
  while (step < end) {
    const u64* from = hidden_words(p, shared.schedule, g.expert, step) + lane * 2;
    asm volatile("" : "+l"(from));  // one register pair, not one for each load
    int columns = token < g.rows ? p.gemm[1].columns - step * kStepColumns - lane / 16 * 8 : 0;
    TwoWords words[kLoads];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kLoads; i++) words[i] = i * 16 < columns ? load_two_words(from + i * 64) : TwoWords{};
#pragma unroll
      for (int i = 0; i < kLoads; i++) all &= i * 16 >= columns || words[i].written(shared.launch);
    } while (!__all_sync(~0u, all));
    // This warp has not seen every filling of the stage, so the parity of `empty` alone does not say which is over.
    while (read_shared(&shared.issued) <= ring.passed) {
    }
    barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
    u32 row = shared_address(ring.tokens()) + token * 128 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      u32 to = row + i / 4 * token_rows_of(8) * 128 + (i % 4 * 2 + lane / 16 ^ token) * 16;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(words[i].value(0)), "r"(words[i].value(1))
                   : "memory");
    }
    if constexpr (takes_raw(8)) {
      __syncwarp();
      prepare_tokens<8>(ring, shared.starts[ring.stage], prepared_place(0), 0);
    }
    barrier_arrive(&shared.landed[ring.stage], kTokenWarps);  // as in every filling of a stage
    barrier_arrive(&shared.full[ring.stage], kTokenWarps);
    ring.forward(min(kTurns, end - step));
    step += kTurns;
  }
}
