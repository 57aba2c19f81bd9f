"""Times of GPU and CPU work: chained calls, captured in a CUDA graph or eager, the slowest rank of each repeat."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_WARM_UP = 3
_LEAST_REPEATS = 5


class Timing(NamedTuple):
    """Microseconds of one call.

    Attributes:
        median, p99, maximum: over repeats.
    """

    median: float
    p99: float
    maximum: float


def timing_of(times_us: Sequence[float]) -> Timing:
    """Median, 99th percentile (the smallest that 99% do not exceed) and maximum of at least one time."""
    ordered = sorted(times_us)
    return Timing(statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1])


def slowest_rank(times_us: Sequence[float]) -> list[float]:
    """The maximum over ranks of each entry; the times themselves where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return list(times_us)
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    times = torch.tensor(times_us, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def time_calls(call: Callable[[int], object], **options: Any) -> list[float]:
    """Microseconds of one call in each repeat of a chain; options as of `time_in_turns`."""
    return time_in_turns({"call": call}, **options)["call"]


def time_in_turns(
    calls: Mapping[str, Callable[[int], object]],
    *,
    device: torch.device,
    chain: int = 10,
    repeats: int = 20,
    limit_s: float | None = None,
    graph: bool | None = None,
    together: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds of one call of each in each repeat of `chain` calls, call(0) to call(chain - 1).

    Their chains take turns, so that a clock which drifts, as that of a GPU at its power limit does, favours none.

    Args:
        limit_s: fewer repeats than `repeats` where the slowest rank needs longer for them, and at least 5; a collective
            step then.
        graph: capture each chain in a CUDA graph and time its replays; None does so on GPUs.
        together: what ranks do to begin together, such as a barrier; once before the repeats on GPUs, whose streams
            keep ranks in step from then on, and before every chain on CPUs.
    """
    for call in calls.values():
        for i in range(_WARM_UP):
            call(i % chain)
    on_gpu = device.type == "cuda"
    runs: list[Callable[[], Any]] = [partial(_run, call, chain) for call in calls.values()]
    if on_gpu:
        torch.cuda.synchronize(device)
        runs = [capture(call, chain) for call in calls.values()] if graph is not False else runs
        together()
    if limit_s is not None:
        repeats = _affordable(runs, repeats, limit_s, on_gpu)
    if on_gpu:
        spans = _time_on_gpu(runs * (repeats + _WARM_UP), chain)[_WARM_UP * len(runs) :]
    else:
        spans = [_time_on_cpu(run, chain, together) for run in runs * repeats]
    return {name: spans[index :: len(runs)] for index, name in enumerate(calls)}


def _run(call: Callable[[int], object], chain: int) -> None:
    for i in range(chain):
        call(i)


def _affordable(runs: Sequence[Callable[[], Any]], repeats: int, limit_s: float, on_gpu: bool) -> int:
    """The number of repeats, the same on every rank."""
    if on_gpu:
        for run in runs:
            run()
        torch.cuda.synchronize()
    start = time.perf_counter()
    for run in runs:
        run()
    if on_gpu:
        torch.cuda.synchronize()
    took = slowest_rank([time.perf_counter() - start])[0]
    return min(repeats, max(_LEAST_REPEATS, int(limit_s / took)))


def capture(call: Callable[[int], object], chain: int) -> Callable[[], Any]:
    """Replays of a CUDA graph of call(0) to call(chain - 1), which have run outside a capture before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(chain):
            call(i)
    return graph.replay


def _time_on_cpu(run: Callable[[], Any], chain: int, together: Callable[[], object]) -> float:
    together()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / chain * 1e6


def _time_on_gpu(runs: Sequence[Callable[[], Any]], chain: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    for event, run in zip(events, runs, strict=False):
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / chain for start, end in itertools.pairwise(events)]


# ==== Ceilings ====
#
# Measured peak rates of this machine, from which the floors beside every time are computed.


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates of one device, and of the links between ranks.

    Attributes:
        memory_bytes_per_s: one large array read and another written by a kernel, bytes of both.
        flops_per_s: a large matrix product of random numbers in `dtype`.
        link_bytes_per_s: bytes that leave one rank in a large all-to-all; None where there is one rank.
    """

    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float | None

    def experts_us(self, num_bytes: float, flops: float) -> float:
        """The least time in which that many bytes are read and that many operations done."""
        return 1e6 * max(num_bytes / self.memory_bytes_per_s, flops / self.flops_per_s)

    def link_us(self, num_bytes: float) -> float:
        """The least time in which that many bytes leave a rank."""
        return 0.0 if self.link_bytes_per_s is None else 1e6 * num_bytes / self.link_bytes_per_s


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures them; a collective call of all ranks. On CPUs the sizes are small and a step takes 0.1 s."""
    on_gpu = device.type == "cuda"
    source = torch.randn((1 << 29) if on_gpu else (1 << 23), device=device)
    target = torch.empty_like(source)
    # A kernel and not a copy: the driver's own copies reach two thirds of what kernels do.
    copy_us = timing_of(time_calls(lambda _: torch.neg(source, out=target), device=device, chain=4, repeats=8)).median
    side = 8192 if on_gpu else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product_us = timing_of(time_calls(lambda _: a @ b, device=device, chain=4, repeats=8)).median
    return Ceilings(
        memory_bytes_per_s=2 * source.nbytes / copy_us * 1e6,
        flops_per_s=2 * side**3 / product_us * 1e6,
        link_bytes_per_s=_link(device),
    )


def _link(device: torch.device) -> float | None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return None
    buffer = torch.zeros(size * ((64 << 20) if device.type == "cuda" else (1 << 20)), dtype=torch.uint8, device=device)
    output = torch.empty_like(buffer)
    times = time_calls(
        lambda _: dist.all_to_all_single(output, buffer),
        device=device,
        chain=2,
        repeats=8,
        graph=False,
        together=lambda: dist.barrier(),
    )
    leaving = buffer.numel() * (size - 1) / size
    return leaving / timing_of(slowest_rank(times)).median * 1e6
