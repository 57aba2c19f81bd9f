#include "gpu.h"
namespace {
#include "low_latency_combine.cu"
}
KERNEL(low_latency_combine)
