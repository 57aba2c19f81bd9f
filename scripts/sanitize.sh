#!/bin/sh
# memcheck and racecheck of the CUDA kernels on small cases, on the GPU at hand: a line for each kernel and tool, and
# status 1 where one is not clean, or where a tool misses what is planted in a kernel for it.
# Usage: sh scripts/sanitize.sh [folder of the logs]
# Needs compute-sanitizer (part of the CUDA toolkit) and a checkout with the extras "cuda" and "test".
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
# Every tensor an allocation of its own, so that what lies behind one is nobody's; kernels take long under the tools.
export PATH="$PATH:/usr/local/cuda/bin" PYTORCH_NO_CUDA_MEMORY_CACHING=1 MOE_EP_NVSHMEM_TIMEOUT_S=60

# check TOOL STATUS "KERNEL ..." COMMAND...: the status that the tool must end with is 9 where it reports errors.
check() {
  tool=$1 expected=$2 kernels=$3
  shift 3
  log=$logs/$tool.${kernels%% *}.txt
  # Calls that fail are no errors here: the driver's bindings ask for functions that not every driver has.
  compute-sanitizer --tool "$tool" --kernel-name "regex=^($(echo "$kernels" | tr ' ' '|'))\$" --report-api-errors no \
    --error-exitcode 9 --print-limit 5 "$@" >"$log" 2>&1
  status=$?
  case $status$expected in
    00) verdict=clean ;;
    99) verdict="its mistake is reported" ;;
    *) verdict="status $status instead of $expected, see $log" ;;
  esac
  for kernel in $kernels; do
    echo "$tool $kernel: $verdict"
  done
  [ $status -eq "$expected" ]
}

tests="python3 -m pytest -q -p no:cacheprovider -m gpu"
# One with an offset, one with zero points, floats of eight and of four bits; of all group sizes.
types="uint4b8 or uint4-32 or float8_e4m3fn-32 or float4_e2m1f"
running=
for tool in memcheck racecheck; do
  check $tool 9 planted python3 scripts/sanitize_planted.py &
  running="$running $!"
  check $tool 0 "low_latency_dispatch low_latency_combine" \
    $tests tests/gpu/test_nvshmem_ranks_gpu.py -k in_halves &
  running="$running $!"
  check $tool 0 "high_throughput_plan high_throughput_dispatch high_throughput_combine" \
    $tests tests/gpu/test_nvshmem_ranks_gpu.py -k all_has_come &
  running="$running $!"
  # racecheck takes what a thread of decode stores before bar.arrive for a race with loads behind the bar.sync that waits
  # for it, in some blocks of some runs.
  case $tool in memcheck) experts="decode prefill" ;; *) experts=prefill ;; esac
  check $tool 0 "$experts" $tests tests/gpu/test_marlin_gpu.py -k "small_shapes and hopper and ($types)" &
  running="$running $!"
  check $tool 0 "eight_bit_rows eight_bit_experts" $tests tests/gpu/test_marlin_eight_bit_gpu.py -k "384 and (shapes or blocks) or are_those" &
  running="$running $!"
  check $tool 0 "ampere_gemm gather_columns" \
    $tests tests/gpu/test_marlin_gpu.py tests/gpu/test_marlin_act_order_gpu.py \
    -k "ampere and (small_shapes and ($types) or act_order and test_batched)" &
  running="$running $!"
done
# Not under racecheck: it reports a write and a read of this kernel that a barrier of the whole block parts, where the
# writing threads have passed one barrier of their own besides.
check memcheck 0 eplb_map $tests tests/gpu/test_eplb_gpu.py -k reference &
running="$running $!"
failed=0
for pid in $running; do
  wait "$pid" || failed=1
done
exit $failed
