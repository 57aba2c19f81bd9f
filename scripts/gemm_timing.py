"""How bench_gemm.py and gemm_peers.py set up and time a call, the same for all: weights that come from memory, buffers
of one size, short bursts on a rested GPU, and its clock.

Products keep an H200 at its power limit: after 50 ms of them its clock goes down. DeepSeek-V3's experts with 32 rows
each take 271 us at first (1.77 GHz) and 315 us from then on (1.50 GHz), so what runs longer, or after others, looks
slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_ep.bench.timing import time_calls, timing_of

_CACHE_BYTES = 150_000_000
_BURSTS, _REPEATS = 2, 7
_REST_S = 0.1
_LONG_US = 500
_SPIN_CYCLES = 400_000


class Timed(NamedTuple):
    """Microseconds of a call, median and 99th percentile, and the GPU's clock right after calls, in MHz."""

    median: float
    p99: float
    clock_mhz: float


def num_copies(num_bytes: float) -> int:
    """How many copies of weights of that size, taken in turn, are more than the L2 cache holds."""
    return max(1, -(-_CACHE_BYTES // int(num_bytes)))


def capacity_of(rows: int) -> int:
    """Rows that buffers have for an expert, where the one with the most has `rows`."""
    return 128 if rows <= 128 else max(rows, 1024)


def timed(call: Callable[[int], object], device: torch.device) -> Timed:
    """Times call(i) in CUDA graphs of ten calls, or three of long ones."""
    about = time_calls(call, device=device, chain=1, repeats=1, graph=False)[0]
    times: list[float] = []
    for _ in range(_BURSTS):
        time.sleep(_REST_S)
        times += time_calls(call, device=device, chain=10 if about < _LONG_US else 3, repeats=_REPEATS)
        clock = clock_mhz()
    timing = timing_of(times)
    return Timed(timing.median, timing.p99, clock)


def clock_mhz() -> float:
    """The clock of the current GPU's multiprocessors now."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(_SPIN_CYCLES)
    end.record()
    end.synchronize()
    return _SPIN_CYCLES / start.elapsed_time(end) * 1e-3
