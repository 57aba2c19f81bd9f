#include "gpu.h"
namespace {
#include "low_latency_dispatch.cu"
}
KERNEL(low_latency_dispatch)
