"""The layers that scripts/bench_eplb_moving.py drives, steps of them, and their times."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step_clock import StepClock

from moe_ep.bench.geometries import preset
from moe_ep.bench.layers import SyntheticConfig, local_logical_experts
from moe_ep.bench.timing import slowest_rank
from moe_ep.bench.workload import draw_logits, parse_routing
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_values
from moe_ep.eplb.manager import EPLBManager
from moe_ep.layer import FusedMoE

NEVER = 10**9
RUN_AHEAD = 2
NUM_DRAWS = 16


class Model:
    """The layers of one rank, and inputs that change from step to step."""

    def __init__(self, args: argparse.Namespace, rank: int, size: int, device: torch.device) -> None:
        self.args, self.rank, self.size, self.device = args, rank, size, device
        self.geometry = geometry = preset(args.geometry)
        self.redundant = size + -(geometry.num_experts + size) % size
        self.num_slots = geometry.num_experts + self.redundant
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        # Plain top-k of the logits, so that a draw is what the tokens choose.
        with torch.device(device):
            self.layers = [
                FusedMoE(
                    num_experts=geometry.num_experts,
                    top_k=geometry.top_k,
                    hidden_size=geometry.hidden_size,
                    intermediate_size=geometry.intermediate_size,
                    params_dtype=self.dtype,
                    quant_config=SyntheticConfig(weights=geometry.weights, device=device, seed=index),
                    parallel_config=FusedMoEParallelConfig.make(
                        ep_size=size, rank=rank, world_size=size, all2all_backend=args.backend
                    ),
                    max_num_tokens=max(args.tokens),
                    enable_eplb=True,
                    num_redundant_experts=self.redundant,
                )
                for index in range(args.layers)
            ]
        self.sums = self._sums_by_expert()
        # Graphs read them as long as there are graphs.
        self.inputs: list[torch.Tensor] = []

    def draw(self, T: int, zipf: float, first: int = 0) -> list[list[torch.Tensor]]:
        """Logits `[T, E]` of every layer, NUM_DRAWS times, from draw number `first` on."""
        routing = parse_routing(f"zipf:{zipf:g}")
        geometry = self.geometry
        return [
            [
                draw_logits(
                    routing, T, geometry.num_experts, geometry.top_k,
                    seed=(draw * 1009 + layer) * self.size + self.rank, popularity_seed=self.args.seed + layer,
                ).to(self.device)
                for layer in range(len(self.layers))
            ]
            for draw in range(first, first + NUM_DRAWS)
        ]  # fmt: skip

    def capture(self, T: int) -> tuple[list[torch.Tensor], Callable[[], Any]]:
        """(static logits of the layers, one step)."""
        generator = torch.Generator(self.device).manual_seed(self.rank)
        x = torch.randn(T, self.geometry.hidden_size, device=self.device, generator=generator).to(self.dtype)
        self.inputs.append(x)
        logits = [torch.zeros(T, self.geometry.num_experts, device=self.device) for _ in self.layers]

        def step() -> None:
            y = x
            for layer, scores in zip(self.layers, logits, strict=True):
                y = layer(y, scores)

        for _ in range(3):
            step()
        if self.device.type != "cuda":
            return logits, step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return logits, graph.replay

    def check(self, placement: np.ndarray) -> None:
        """Every slot holds its expert, by the sum of its bytes.

        Raises:
            RuntimeError: one does not.
        """
        for index, found in enumerate(self._sums_by_slot()):
            mine = np.split(placement[index], self.size)[self.rank]
            wrong = [slot for slot, expert in enumerate(mine) if found[slot] != self.sums[index][int(expert)]]
            if wrong:
                raise RuntimeError(f"rank {self.rank}, layer {index}: slots {wrong} hold the wrong experts")

    def _sums_by_slot(self) -> list[list[int]]:
        sums = []
        for layer in self.layers:
            words = [t.view(t.size(0), -1).view(torch.uint8).view(torch.int32) for t in layer.expert_weights()]
            sums.append(sum(part.sum(dim=1) * (i + 1) for i, part in enumerate(words)).tolist())
        return sums

    def _sums_by_expert(self) -> list[dict[int, int]]:
        for layer in self.layers:
            _ = layer.modular_kernel
        mine = (self._sums_by_slot(), [local_logical_experts(layer) for layer in self.layers])
        everybody = gather_values("sums", mine)
        sums: list[dict[int, int]] = [{} for _ in self.layers]
        for found, experts in everybody:
            for index in range(len(self.layers)):
                for expert, value in zip(experts[index], found[index], strict=True):
                    if sums[index].setdefault(expert, value) != value:
                        raise RuntimeError(f"layer {index}: copies of expert {expert} differ")
        return sums


def swapped(placement: np.ndarray, size: int, moves: int, number: int) -> np.ndarray:
    """The placement with `moves` experts of every rank given to the next one; every second time they go back."""
    result = placement.copy()
    num_slots = placement.shape[1] // size
    slots = (np.arange(moves) * 7 + number // 2 * moves) % num_slots
    for row in result:
        ranks = row.reshape(size, num_slots)
        ranks[:, slots] = np.roll(ranks[:, slots], -1 if number % 2 else 1, axis=0)
    return result


class Timer:
    """Times of steps in microseconds and clocks in MHz, the host at most RUN_AHEAD steps ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self._clock = StepClock(device) if device.type == "cuda" else None
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._clock is None:
            self._marks.append(time.perf_counter())
            return
        self._clock.mark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)
        if len(self._marks) > RUN_AHEAD:
            self._marks[-1 - RUN_AHEAD].synchronize()

    def clocks_mhz(self) -> list[float]:
        """Of the rank whose SMs were slowest; 0 without a GPU."""
        if self._clock is None:
            return [0.0] * (len(self._marks) - 1)
        return [-clock for clock in slowest_rank([-clock for clock in self._clock.mhz()])]

    def times_us(self) -> list[float]:
        if self._clock is not None:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(self._marks)]
        return [(end - start) * 1e6 for start, end in itertools.pairwise(self._marks)]


def run_steps(
    model: Model,
    static: list[torch.Tensor],
    replay: Callable[[], Any],
    draws: list[list[torch.Tensor]],
    count: int,
    manager: EPLBManager | None,
    warm_up: float | None = None,
) -> list[float]:
    """Step times, the slowest rank's; warm_up is in seconds, None for that of the arguments."""
    _warm_up(model, static, replay, draws, manager, model.args.warm_up if warm_up is None else warm_up)
    timer = Timer(model.device)
    timer.mark()
    for number in range(count):
        _serve(static, replay, draws[number % NUM_DRAWS])
        if manager is not None:
            manager.step()
        timer.mark()
    return slowest_rank(timer.times_us())


def run_moving(
    model: Model,
    static: list[torch.Tensor],
    replay: Callable[[], Any],
    draws: list[list[torch.Tensor]],
    count: int,
    manager: EPLBManager,
    begin: Callable[[], None],
) -> tuple[list[float], list[float], list[str]]:
    """Step times, the slowest rank's, clocks, and what each step was: "rest", or with a move under way "begin",
    "commit" or "".

    As many steps at rest as there are draws and whole rearrangements take turns until `count` steps had a move under
    way, so that both see the same draws and placements: small batches take longer with some than with others.
    """
    _warm_up(model, static, replay, draws, manager, model.args.warm_up)
    timer, events, resting = Timer(model.device), [], 0
    timer.mark()
    while len(events) - events.count("rest") < count:
        _serve(static, replay, draws[len(events) % NUM_DRAWS])
        before = manager.totals.layers_committed
        event = "" if manager.busy else "rest"
        resting += not manager.busy
        if resting == NUM_DRAWS + 1:
            begin()
            event, resting = "begin", 0
        manager.step()
        timer.mark()
        events.append("commit" if manager.totals.layers_committed > before else event)
    return slowest_rank(timer.times_us()), timer.clocks_mhz(), events


def _warm_up(
    model: Model,
    static: list[torch.Tensor],
    replay: Callable[[], Any],
    draws: list[list[torch.Tensor]],
    manager: EPLBManager | None,
    seconds: float,
) -> None:
    """Every draw once, and on a GPU so many seconds of steps; as many steps on every rank."""
    dist.barrier()
    timer, count, number = Timer(model.device), NUM_DRAWS, 0
    while number < count:
        _serve(static, replay, draws[number % NUM_DRAWS])
        if manager is not None:
            manager.step()
        timer.mark()
        number += 1
        if number == NUM_DRAWS and model.device.type == "cuda":
            count += int(seconds * 1e6 / slowest_rank([float(np.median(timer.times_us()))])[0])


def _serve(static: list[torch.Tensor], replay: Callable[[], Any], draw: list[torch.Tensor]) -> None:
    for target, source in zip(static, draw, strict=True):
        target.copy_(source)
    replay()
