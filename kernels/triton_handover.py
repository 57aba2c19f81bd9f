"""From one kernel of a stream to the next: Triton kernels that come up while the one before them runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_ep.kernels import jit

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def take_over(EARLY: tl.constexpr):
    """Comes before everything a kernel reads or writes: waits for the kernels before, and lets the next one come up.

    Waiting for the one before keeps the order of all: none ends before those before it have ended.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def comes_early(device: torch.device) -> bool:
    """Whether a kernel there can be launched with `launch_pdl` (programmatic dependent launch): from Hopper on."""
    return not _INTERPRETED and jit.capability(device.index) >= (9, 0)
