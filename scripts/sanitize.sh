#!/bin/sh
# memcheck and racecheck of the packed experts' kernels on small shapes, on the GPU at hand; any error ends it with 9.
# Needs compute-sanitizer (part of the CUDA toolkit) and a checkout with the extras "cuda" and "test".
set -e
# Every tensor an allocation of its own, so that what lies behind one is nobody's.
export PATH="$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck; do
  echo "$tool"
  # Calls that fail are not errors here: the driver's bindings ask for functions that not every driver has.
  compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 --print-limit 5 \
    python3 -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_marlin_gpu.py tests/gpu/test_marlin_act_order_gpu.py \
    -k 'small_shapes or act_order' "$@"
done
