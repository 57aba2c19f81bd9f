// Finds NaN and infinity in bytes that are moved anyway: while a file is read, in each tile that is in the L2 cache; and
// while a tensor is copied, in registers.
//
// An element is NaN or infinity exactly if all bits of a mask are set in it: the exponent's, of e4m3 all but the sign.
// Adding the mask's lowest bit changes the sign of those and of no other. Weights are small: where the mask's highest bit
// is set in no element of a tile, none has an absolute value of 2 or more, and one pass of OR tells that much faster.

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

enum { kTileBytes = 1 << 17 };  // a smaller one pays for calls of the system

// Elements of one dtype: bytes [start, stop) of the buffer. Must match _Span in finite.py.
struct span {
  int64_t start, stop, width;
  uint64_t mask;
};

#define DEFINE_ANY_NONFINITE(bits)                                                                      \
  typedef uint##bits##_t element##bits __attribute__((aligned(1), may_alias));                          \
  VECTORIZED static int any_nonfinite##bits(const uint8_t* bytes, int64_t count, uint##bits##_t mask) { \
    const element##bits* values = (const element##bits*)bytes;                                          \
    const uint##bits##_t lowest = mask & -mask;                                                         \
    uint##bits##_t changed = 0;                                                                         \
    for (int64_t i = 0; i < count; ++i) changed |= (uint##bits##_t)(values[i] + lowest) ^ values[i];    \
    return changed >> (bits - 1);                                                                       \
  }
DEFINE_ANY_NONFINITE(8)
DEFINE_ANY_NONFINITE(16)
DEFINE_ANY_NONFINITE(32)
DEFINE_ANY_NONFINITE(64)

// The OR of all elements, two vectors an instruction where the machine has one for three operands.
typedef uint64_t vector __attribute__((vector_size(64), aligned(1), may_alias));
VECTORIZED static uint64_t bits_set(const uint8_t* bytes, int64_t nbytes) {
  vector even = {0}, odd = {0};
  int64_t i = 0;
  for (; i + 256 <= nbytes; i += 256) {
    const vector* part = (const vector*)(bytes + i);
    even |= part[0] | part[1];
    odd |= part[2] | part[3];
  }
  even |= odd;
  uint64_t all = 0;
  for (int lane = 0; lane < 8; ++lane) all |= even[lane];
  for (; i < nbytes; ++i) all |= (uint64_t)bytes[i] << (8 * (i % 8));
  return all;
}

static int any_nonfinite(const uint8_t* bytes, int64_t count, int64_t width, uint64_t mask) {
  // 8-bit formats use their range up to its end.
  if (width > 1) {
    uint64_t highest = mask & ~(mask >> 1);
    for (int64_t bits = 8 * width; bits < 64; bits *= 2) highest |= highest << bits;
    if (!(bits_set(bytes, count * width) & highest)) return 0;
  }
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

// A copy that is larger than the caches is bound by memory. Stores that do not pass through the caches save reading what
// they overwrite, and looking at each vector costs nothing then.
typedef uint8_t lanes8 __attribute__((vector_size(16), may_alias));
typedef uint16_t lanes16 __attribute__((vector_size(16), may_alias));
typedef uint32_t lanes32 __attribute__((vector_size(16), may_alias));
typedef uint64_t lanes64 __attribute__((vector_size(16), may_alias));
#if defined(__SSE2__)
#include <emmintrin.h>
#define STORE(to, vector) _mm_stream_si128((__m128i*)(to), (__m128i)(vector))
#define FENCE() _mm_sfence()
#else
#define STORE(to, vector) (*(lanes64*)(to) = (lanes64)(vector))
#define FENCE()
#endif

#define DEFINE_COPY(bits)                                                                        \
  static int copy##bits(uint8_t* to, const uint8_t* from, int64_t nbytes, uint##bits##_t mask) { \
    typedef lanes##bits lanes __attribute__((aligned(1)));                                       \
    const uint##bits##_t lowest = mask & -mask;                                                  \
    lanes##bits changed[4] = {{0}};                                                              \
    for (int64_t i = 0; i < nbytes; i += 64)                                                     \
      for (int j = 0; j < 4; ++j) {                                                              \
        const lanes##bits values = *(const lanes*)(from + i + 16 * j);                           \
        STORE(to + i + 16 * j, values);                                                          \
        changed[j] |= (values + lowest) ^ values;                                                \
      }                                                                                          \
    FENCE();                                                                                     \
    changed[0] |= changed[1] | changed[2] | changed[3];                                          \
    uint##bits##_t all = 0;                                                                      \
    for (int lane = 0; lane < 128 / bits; ++lane) all |= changed[0][lane];                       \
    return all >> (bits - 1);                                                                    \
  }
DEFINE_COPY(8)
DEFINE_COPY(16)
DEFINE_COPY(32)
DEFINE_COPY(64)

// Copies whole elements; whether one is NaN or infinity. `to` is a multiple of 16 bytes. A mask of 0 finds none.
int32_t moe_ep_copy_checked(uint8_t* to, const uint8_t* from, int64_t nbytes, int64_t width, uint64_t mask) {
  const int64_t most = nbytes & ~(int64_t)63, rest = nbytes - most;
  int32_t found;
  switch (width) {
    case 1: found = copy8(to, from, most, (uint8_t)mask); break;
    case 2: found = copy16(to, from, most, (uint16_t)mask); break;
    case 4: found = copy32(to, from, most, (uint32_t)mask); break;
    default: found = copy64(to, from, most, mask);
  }
  memcpy(to + most, from + most, (size_t)rest);
  return found | (mask && any_nonfinite(from + most, rest / width, width, mask));
}
