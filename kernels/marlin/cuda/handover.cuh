// From kernel to kernel: the next one may come up while this one runs, and waits where it must.
//
// The kernel for few rows lets the one for many rows come up once the kernels before both have ended. That one can
// therefore read the row counts and its input at once; it waits for the first before it writes to scratch of both, and
// before it ends. It lets what follows come up first thing: where it has nothing to compute only one block of it waits,
// and the blocks of the next call begin as soon as those of this one leave them room.
#pragma once
#include "threshold.cuh"

// Until the kernels before this one have ended and their stores are seen.
DEVICE void wait_for_previous_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void let_next_kernel_come() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
