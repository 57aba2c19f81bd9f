"""What metrics cost: the same layers with nobody listening, and with a monitor that serves Prometheus.

torchrun --nproc-per-node 4 scripts/bench_observability.py [--geometry deepseek-v3] [--json FILE]

A step is a pass through --chain layers, eager or replayed; of the graphs, one is watched and replayed on sampled steps.
The ways take turns within one run; a row is one way at one number of tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import GangBenchConfig, measure_on_gang

from moe_ep.bench.geometries import preset
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.results import table
from moe_ep.bench.timing import capture, slowest_rank
from moe_ep.bench.workload import parse_routing
from moe_ep.env import at_least
from moe_ep.launch.cli.options import geometry_name, option, whole_numbers
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.observability.metrics import PrometheusSink
from moe_ep.observability.monitor import LayerMonitor
from moe_ep.observability.stages import listen, stop_listening

_TURNS = 4


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig(GangBenchConfig):
    """The settings of one measurement."""

    geometry: str = option("deepseek-v3", geometry_name, "a preset (deepseek-v3)")
    tokens: tuple[int, ...] = option((1, 128), whole_numbers, "tokens of each rank (1,128)")
    chain: int = option(8, at_least(1), "layers of a step (8)")
    steps: int = option(64, at_least(1), "steps of a turn; one in 64 is sampled (64)")


def measure(rank_env: RankEnv, config: ObservabilityConfig) -> list[dict[str, Any]]:
    """One worker's part: the slowest rank's microseconds of a step, for every way and number of tokens."""
    device = torch.device(rank_env.device)
    rows = []
    with torch.inference_mode():
        geometry, size = preset(config.geometry), rank_env.world_size
        weights = make_weights(geometry, size, device, 0)
        for tokens in config.tokens:
            layers = BenchLayers(
                geometry, ep_size=size, ep_rank=rank_env.rank, group=dist.group.WORLD if size > 1 else None,
                capacity=tokens, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device,
                weights=weights,
            )  # fmt: skip
            batches = layers.batches(parse_routing("uniform"), tokens, config.chain, 0)

            def step(layers: Any = layers, batches: Any = batches) -> None:
                for index, batch in enumerate(batches):
                    layers.call(index, batch)

            for way, times in _take_turns(step, device, config.steps, rank_env.rank).items():
                row = {"geometry": geometry.name, "ep_size": size, "tokens": tokens, "way": way, **times}
                rows.append(config.keep(row, rank_env.rank))
    return rows


def _take_turns(step: Callable[[], None], device: Any, steps: int, rank: int) -> dict[str, dict[str, float]]:
    """The slowest rank's microseconds of a step of every way, medians of turns; ratio: over the way nobody watches."""
    step()
    sink = PrometheusSink(0)
    monitor = LayerMonitor(sink, rank=rank, device=device)
    ways: dict[str, Callable[[], Any]] = {"eager": step, "eager, monitored": step}
    if device.type == "cuda":
        plain = ways["graph"] = capture(lambda _: step(), 1)
        with monitor.watching():
            watched = capture(lambda _: step(), 1)
        ways["graph, monitored"] = lambda: (watched if monitor.sampled else plain)()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + _TURNS):
        # Clocks fall while a GPU works: no way always comes after the same other.
        for name, run in list(ways.items())[:: 1 if turn % 2 else -1]:
            monitored = name.endswith("monitored")
            # Replays of the plain graph on other steps do not count: the monitor reads on sampled ones alone.
            tell = partial(monitor.end_step, replayed=name.startswith("graph")) if monitored else None
            if monitored and monitor.sampled:
                listen(monitor)
            times[name].append(_turn(run, tell, device, steps))
            stop_listening(monitor)
    sink.close()
    medians = {name: statistics.median(slowest_rank(found[1:])) for name, found in times.items()}
    return {
        name: {"us": round(us, 1), "ratio": round(us / medians[name.removesuffix(", monitored")], 4)}
        for name, us in medians.items()
    }


def _turn(run: Callable[[], Any], tell: Callable[[], None] | None, device: Any, steps: int) -> float:
    """Microseconds of a step, the mean over a turn."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run()
        if tell is not None:
            tell()
    synchronize()
    return (time.perf_counter() - start) / steps * 1e6


def main() -> int:
    _, results = measure_on_gang("bench_observability.py", __doc__ or "", ObservabilityConfig, measure)
    if results is not None:
        columns = {"geometry": "geometry", "ep_size": "EP", "tokens": "T", "way": "way", "us": "us", "ratio": "ratio"}
        print(table(results[0], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
