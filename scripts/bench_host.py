"""The host's time for an eager MoE layer: batches so small that the GPU keeps pace.

python scripts/bench_host.py --launcher local --ep-size 2 [--tokens 64] [--profile FILE] [--json FILE]

A layer of a preset with made-up weights is called in a chain, with other tokens each time; the slowest rank's time of a
call, the median over repeats: until the host has queued it, and with the GPU's. Inside one_pass the ranks have agreed
on their tokens; outside each call asks. With MOE_EP_REPLAY_MAX_TOKENS=0 no call is replayed.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import GangBenchConfig, measure_on_gang

from moe_ep.bench.geometries import preset
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.results import table
from moe_ep.bench.timing import slowest_rank, timing_of
from moe_ep.bench.workload import Routing
from moe_ep.distributed.passes import one_pass
from moe_ep.env import at_least
from moe_ep.launch.cli.options import geometry_name, option, output_file
from moe_ep.launch.gangs.rank_env import RankEnv

_CHAIN = 40
_REPEATS = 9


def _names(raw: str) -> tuple[str, ...]:
    return tuple(raw.split(","))


@dataclass(frozen=True, kw_only=True)
class HostBenchConfig(GangBenchConfig):
    """The settings of one measurement."""

    geometry: str = option("qwen3-30b", geometry_name, "preset of the layer (qwen3-30b); small on CPUs")
    backend: tuple[str, ...] = option(
        ("nvshmem_high_throughput", "nvshmem_low_latency"), _names, "dispatch backends (the two of NVSHMEM)"
    )
    tokens: int = option(64, at_least(1), "of each rank (64)")
    profile: Path | None = option(None, output_file, "append what Python functions of rank 0 take", "FILE")


def measure(rank_env: RankEnv, config: HostBenchConfig) -> list[dict[str, Any]]:
    """One worker's part: a row for each backend, the same on every rank."""
    device, size = torch.device(rank_env.device), rank_env.world_size
    geometry, rows = preset(config.geometry), []
    with torch.inference_mode():
        weights = make_weights(geometry, size, device, seed=0)
        for backend in config.backend:
            layers = BenchLayers(
                geometry,
                ep_size=size,
                ep_rank=rank_env.rank,
                group=dist.group.WORLD if size > 1 else None,
                backend=backend,
                capacity=config.tokens,
                dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
                device=device,
                weights=weights,
            )
            batches = layers.batches(Routing(), config.tokens, _CHAIN, seed=0)

            def chain(layers: BenchLayers = layers, batches: list[Any] = batches) -> None:
                for index, batch in enumerate(batches):
                    layers.call(index, batch)

            row = {"benchmark": "host", "geometry": geometry.name, "ep_size": size, "tokens": config.tokens}
            asking_host_us, asking_us = _time(chain, device)
            row |= {"backend": backend, "asking_host_us": asking_host_us, "asking_us": asking_us}
            with one_pass(layers.layers, config.tokens):
                row["host_us"], row["us"] = _time(chain, device)
                if config.profile is not None:
                    _profile(chain, config.profile if rank_env.rank == 0 else None, backend)
            rows.append(config.keep(row, rank_env.rank))
    return rows


def _time(chain: Callable[[], None], device: Any) -> tuple[float, float]:
    """Microseconds of one call of the slowest rank, until it is queued and until it has ended."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    together = dist.barrier if dist.is_initialized() else (lambda: None)
    queued, ended = [], []
    for _ in range(1 + _REPEATS):
        wait()
        together()
        started = time.perf_counter()
        chain()
        queued.append((time.perf_counter() - started) / _CHAIN * 1e6)
        wait()
        ended.append((time.perf_counter() - started) / _CHAIN * 1e6)
    of_host, whole = (round(timing_of(slowest_rank(times[1:])).median, 1) for times in (queued, ended))
    return of_host, whole


def _profile(chain: Callable[[], None], path: Path | None, backend: str) -> None:
    profile = cProfile.Profile()
    with profile if path is not None else contextlib.nullcontext():
        for _ in range(5):
            chain()
    if path is not None:
        with path.open("a") as file:
            print(backend, file=file)
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(60)


def main() -> int:
    """Prints a table."""
    _, results = measure_on_gang("bench_host.py", __doc__ or "", HostBenchConfig, measure)
    if results is not None:
        columns = {"geometry": "geometry", "ep_size": "EP", "tokens": "T", "backend": "backend"}
        times = {
            "host_us": "host us a layer",
            "us": "with the GPU",
            "asking_host_us": "asking, host",
            "asking_us": "with it",
        }
        print(table(results[0], columns | times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
