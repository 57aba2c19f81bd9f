"""How bench_dispatch times a step: chained pairs, each half by itself, the GPU kernels, and the raw collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from dispatch_steps import Step

from moe_ep.bench.timing import Timing, capture, slowest_rank, time_calls, timing_of
from moe_ep.distributed.exchange import gather_values

# Ranks that left a barrier are at most this far apart, and the host is ahead of the GPU by as much.
_HEAD_START_CYCLES = 400_000
_PROFILED = 4


def time_pairs(step: Callable[[int], object], device: torch.device, *, graph: bool, chain: int, repeats: int) -> Timing:
    """One step, of repeats of `chain` steps; the slowest rank of each repeat."""
    times = time_calls(step, device=device, graph=graph, chain=chain, repeats=repeats, together=dist.barrier)
    return timing_of(slowest_rank(times))


def time_halves(step: Step, device: torch.device, repeats: int) -> tuple[float, float]:
    """Medians of dispatch and combine, begun together by all ranks; the slowest rank of each repeat. GPUs only."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        prepared = _timed(step.prepare, times[0], device)
        _timed(lambda given=prepared: step.finalize(given), times[1], device)
    dispatch, combine = (timing_of(slowest_rank(of_half)).median for of_half in times)
    return dispatch, combine


def _timed(half: Callable[[], object], times: list[float], device: torch.device) -> object:
    torch.cuda.synchronize(device)
    dist.barrier()
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    result = half()
    end.record()
    torch.cuda.synchronize(device)
    times.append(begin.elapsed_time(end) * 1e3)
    return result


def time_kernels(step: Step, device: torch.device, graph: bool) -> dict[str, float]:
    """Microseconds of each GPU kernel of a step by its short name, waits inside included; the slowest rank of each."""
    from torch.profiler import ProfilerActivity, profile

    replay = capture(step, _PROFILED) if graph else lambda: [step() for _ in range(_PROFILED)]
    replay()
    torch.cuda.synchronize(device)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize(device)
    totals: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        totals[_short(event.key)] += event.device_time_total / _PROFILED
    everybody = gather_values("times", dict(totals))
    names = dict.fromkeys(name for of_rank in everybody for name in of_rank)
    slowest = {name: round(max(of_rank.get(name, 0.0) for of_rank in everybody), 1) for name in names}
    return {name: time_us for name, time_us in slowest.items() if time_us > 0}


def _short(name: str) -> str:
    """Example: "void at::native::vectorized_kernel<4, …>(…)" gives "vectorized_kernel"."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1].strip()


def raw_pair(there: Sequence[int], back: Sequence[int], device: torch.device) -> Callable[[int], None]:
    """Two all_to_all_single of those bytes for each rank: what any backend on this transport pays."""
    sizes = torch.tensor([there, back], device=device)
    received = torch.empty_like(sizes)
    for index in range(2):
        dist.all_to_all_single(received[index], sizes[index])
    buffers = []
    for send, receive in zip((list(there), list(back)), received.tolist(), strict=True):
        outgoing = torch.zeros(sum(send), dtype=torch.uint8, device=device)
        buffers.append((outgoing.new_empty(sum(receive)), outgoing, receive, send))
    uneven = torch.tensor(len({*there}) > 1 or len({*back}) > 1, dtype=torch.int32, device=device)
    dist.all_reduce(uneven)

    def run(_: int = 0) -> None:
        for output, input_, output_sizes, input_sizes in buffers:
            if uneven_somewhere:
                dist.all_to_all_single(output, input_, output_sizes, input_sizes)
            else:
                dist.all_to_all_single(output, input_)

    uneven_somewhere = bool(uneven)
    return run


def peer_bandwidth(device: torch.device, repeats: int = 10) -> float:
    """Bytes per second that leave one rank: the better of a copy to a neighbour's memory and a large all-to-all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return 0.0
    buffer = torch.zeros(size * (64 << 20 if device.type == "cuda" else 1 << 20), dtype=torch.uint8, device=device)
    output = torch.empty_like(buffer)
    exchange = time_pairs(
        lambda _: dist.all_to_all_single(output, buffer), device, graph=False, chain=8, repeats=repeats
    )
    found = buffer.numel() * (size - 1) / size / (exchange.median * 1e-6)
    if device.type == "cuda" and torch.cuda.device_count() > 1 and rank == 0:
        there = torch.empty_like(buffer, device=torch.device("cuda", (device.index + 1) % torch.cuda.device_count()))
        copies = time_calls(lambda _: there.copy_(buffer), device=device, graph=False, chain=8, repeats=repeats)
        found = max(found, buffer.numel() / (timing_of(copies).median * 1e-6))
    return max(slowest_rank([found]))
