// Reads a range of a file and finds NaN and infinity in it while each tile of it is in the L2 cache.
//
// An element is NaN or infinity exactly if all bits of a mask are set in it: the exponent's, of e4m3 all but the sign. In
// every dtype such patterns are the largest once the sign is shifted out, so the largest of all elements tells.

#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

enum { kTileBytes = 1 << 18 };  // a smaller one pays for calls of the system

// Elements of one dtype: bytes [start, stop) of the buffer. Must match _Span in finite.py.
struct span {
  int64_t start, stop, width;
  uint64_t mask;
};

#define DEFINE_ANY_NONFINITE(bits)                                                                      \
  typedef uint##bits##_t element##bits __attribute__((aligned(1), may_alias));                          \
  VECTORIZED static int any_nonfinite##bits(const uint8_t* bytes, int64_t count, uint##bits##_t mask) { \
    const element##bits* values = (const element##bits*)bytes;                                          \
    uint##bits##_t largest = 0;                                                                         \
    for (int64_t i = 0; i < count; ++i) {                                                               \
      const uint##bits##_t shifted = (uint##bits##_t)(values[i] << 1);                                  \
      largest = shifted > largest ? shifted : largest;                                                  \
    }                                                                                                   \
    return largest >= (uint##bits##_t)(mask << 1);                                                      \
  }
DEFINE_ANY_NONFINITE(8)
DEFINE_ANY_NONFINITE(16)
DEFINE_ANY_NONFINITE(32)
DEFINE_ANY_NONFINITE(64)

static int any_nonfinite(const uint8_t* bytes, int64_t count, int64_t width, uint64_t mask) {
  switch (width) {
    case 1: return any_nonfinite8(bytes, count, (uint8_t)mask);
    case 2: return any_nonfinite16(bytes, count, (uint16_t)mask);
    case 4: return any_nonfinite32(bytes, count, (uint32_t)mask);
    default: return any_nonfinite64(bytes, count, mask);
  }
}

// Returns the bytes read, fewer than nbytes at the end of the file, or -errno. Sets *found if a span holds NaN or
// infinity. Spans are in order and do not overlap.
int64_t moe_ep_read_checked(int fd, uint8_t* into, int64_t nbytes, int64_t offset, const struct span* spans,
                            int64_t num_spans, int32_t* found) {
  int64_t done = 0, checked = 0, next = 0;
  while (done < nbytes) {
    int64_t want = nbytes - done < kTileBytes ? nbytes - done : kTileBytes;
    ssize_t count = pread(fd, into + done, (size_t)want, offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;
    done += count;
    for (; next < num_spans && spans[next].start < done; ++next) {
      struct span span = spans[next];
      int64_t from = checked > span.start ? checked : span.start;
      // The last element of a tile may be there in part only.
      int64_t elements = ((span.stop < done ? span.stop : done) - from) / span.width;
      *found |= any_nonfinite(into + from, elements, span.width, span.mask);
      checked = from + elements * span.width;
      if (span.stop > done) break;
    }
  }
  return done;
}
