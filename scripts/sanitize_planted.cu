// Two mistakes that compute-sanitizer must report: warps write and read the same shared numbers without a barrier,
// and a write goes behind the end of a buffer.
struct Params {
  int* numbers;
  int count;
};

extern "C" __global__ void planted(const __grid_constant__ Params p) {
  __shared__ int shared[THREADS / 2];
  shared[threadIdx.x % (THREADS / 2)] = threadIdx.x;
  p.numbers[p.count] = shared[(threadIdx.x + 1) % (THREADS / 2)];
}
