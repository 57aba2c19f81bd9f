// Reads an SM's cycles and the GPU's time, so that two launches tell the clock between them.
//
// Before: out int64 [blocks, 3], anything. After: a row for each block: nanoseconds, cycles of the SM that it ran on,
// and that SM's number. Example: rows [1000, 5000, 7] and, a launch later, [3000, 8200, 7] are 3200 cycles in 2 us on
// SM 7, 1600 MHz.

struct StampParams {
  long long* out;
};

extern "C" __global__ void step_stamp(const __grid_constant__ StampParams params) {
  if (threadIdx.x != 0) return;
  long long* row = params.out + 3 * blockIdx.x;
  unsigned int sm;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(row[0]));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(row[1]));
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  row[2] = sm;
}
