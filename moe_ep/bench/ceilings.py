"""Measured peak rates of this machine, from which the floors beside every time are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_ep.bench.timing import slowest_rank, time_calls, timing_of


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
