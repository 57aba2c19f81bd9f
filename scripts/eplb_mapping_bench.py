"""Times on a GPU for `bench_eplb.py`: the mapping kernel beside one pass over the ids, and decode by replica rules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_gemm import make_weights
from gemm_cases import SHAPES, Shape
from gemm_timing import num_copies
from harness import this_gpu

from moe_ep.bench.timing import capture, time_calls, timing_of
from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.eplb import eplb_map_to_physical_and_record, rebalance_experts
from moe_ep.eplb.mapping import map_reference
from moe_ep.eplb.placement_state import PlacementState
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.simulate import Scene, measure, place
from moe_ep.eplb.trace import from_choices, read_arrays
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe

Row = dict[str, Any]

_CHAIN = 50
_COPIES = 8
# Steps that a plan is made from, and layers and steps that are timed.
_PLANNED, _LAYERS, _STEPS = 24, 3, 4
_CALLS = 4


def bench_map(arguments: argparse.Namespace) -> Iterator[Row]:
    """256 experts, top-8, Zipf 0.5, one spare slot a rank: the kernel, checked against the reference, and a copy."""
    this_gpu()
    for ep_size in (8, 32):
        frequency = _ids(100_000, arguments.seed).flatten().bincount(minlength=256)[None]
        slots = rebalance_experts(frequency, 256 + ep_size, 1, 1, ep_size).physical_to_logical
        maps = PlacementState(slots.numpy(), 256, ep_size, torch.device("cuda"))
        table, counts = maps.logical_to_physical_map[0], maps.logical_replica_count[0]
        for num_tokens in (1, 32, 128, 1024, 4096, 16384):
            batches = [_ids(num_tokens, arguments.seed + i).int().cuda() for i in range(_COPIES)]
            load = torch.zeros(256 + ep_size, dtype=torch.int32, device="cuda")
            _check(batches[0], load, table, counts, ep_size)
            copy = torch.empty_like(batches[0])
            mapping = partial(_map, batches, load, table, counts, ep_size)
            one_pass = partial(_copy, batches, copy)
            ours, floor = _median(mapping), _median(one_pass)
            yield {
                "EP": ep_size, "tokens": num_tokens, "mapping us": round(ours, 2),
                "read and write ids us": round(floor, 2), "ratio": round(ours / floor, 2),
                "eager us": round(_median(mapping, graph=False), 1),
            }  # fmt: skip


def _map(
    batches: list[torch.Tensor], load: torch.Tensor, table: torch.Tensor, counts: torch.Tensor, ep_size: int, i: int
) -> torch.Tensor:
    ids = batches[i % len(batches)]
    return eplb_map_to_physical_and_record(ids, load, table, counts, ep_rank=1, ep_size=ep_size)


def _copy(batches: list[torch.Tensor], copy: torch.Tensor, i: int) -> torch.Tensor:
    return copy.copy_(batches[i % len(batches)])


def _ids(num_tokens: int, seed: int) -> torch.Tensor:
    return draw_logits(Routing(zipf=0.5), num_tokens, 256, 8, seed=seed).topk(8).indices


def _check(ids: torch.Tensor, load: torch.Tensor, table: torch.Tensor, counts: torch.Tensor, ep_size: int) -> None:
    expected_load = load.clone()
    expected = map_reference(ids, expected_load, table, counts, ids.size(0), 1, load.numel() // ep_size)
    found = eplb_map_to_physical_and_record(ids, load, table, counts, ep_rank=1, ep_size=ep_size)
    if not (torch.equal(found.long(), expected) and torch.equal(load, expected_load)):
        raise SystemExit(f"the kernel differs from the reference at {ids.size(0)} tokens and EP{ep_size}")


def _median(call: Callable[[int], object], graph: bool | None = None) -> float:
    times = time_calls(call, device=torch.device("cuda"), chain=_CHAIN, repeats=20, graph=graph)
    return timing_of(times).median


def bench_decode(arguments: argparse.Namespace) -> Iterator[Row]:
    """Recorded decode batches by replica rules: time of the experts (Qwen3-235B's, int4) on the slowest rank, one spare
    slot a rank, mean over layers and steps."""
    this_gpu()
    for ep_size in (8, 16):
        for tokens in (8, 32, 128):
            for name, choices in read_arrays(arguments.routing).items():
                counts = _recorded_counts(choices, name, ep_size, tokens)
                row: Row = {"EP": ep_size, "tokens a rank": tokens, "domain": name}
                for rule, of_rule in counts.items():
                    row[f"{rule} active"] = round(float((of_rule > 0).sum(axis=3).max(axis=2).mean()), 2)
                shape = replace(SHAPES["qwen3-235b"], experts=next(iter(counts.values())).shape[3])
                for rule, us in _slowest_rank(shape, counts).items():
                    row[f"{rule} us"] = round(us, 2)
                yield row


def _recorded_counts(choices: Array, name: str, ep_size: int, tokens: int) -> dict[str, Array]:
    """Rows of each slot `[S, L, R, slots]` by replica rule, of a plan that is made from earlier steps."""
    of_step = ep_size * tokens
    num_steps = min(choices.shape[1] // of_step, _PLANNED + _STEPS)
    choices = choices[:: max(choices.shape[0] // _LAYERS, 1), : num_steps * of_step]
    trace = from_choices(choices, of_step, 1, num_experts=int(choices.max()) + 1, model=name)
    scene = Scene(ep_size=ep_size, num_redundant=ep_size, planned_on=(num_steps - _STEPS + 0.5) / num_steps)
    slots = place(trace, scene, "incremental")
    return {rule: measure(trace, scene, slots, rule).counts for rule in ("levelled", "one-replica")}


def _slowest_rank(shape: Shape, counts: dict[str, Array]) -> dict[str, float]:
    """Microseconds by rule: of the rank that takes longest, means over steps and layers. Rules take turns."""
    first = next(iter(counts.values()))
    capacity = max(int(of_rule.max()) for of_rule in counts.values())
    rows = torch.randn(shape.experts, capacity, shape.K, device="cuda").bfloat16()
    pairs = [
        (make_weights(shape, 2 * shape.N, shape.K, True), make_weights(shape, shape.K, shape.N, False))
        for _ in range(num_copies(shape.num_bytes))
    ]
    numbers = torch.ones(shape.experts, dtype=torch.int32, device="cuda")
    output, scratch = torch.empty_like(rows), torch.empty_like(rows)  # of max(K, 2 N) columns
    hidden = torch.empty(shape.experts * capacity * shape.N, dtype=torch.bfloat16, device="cuda")

    def call(i: int) -> object:
        one, other = pairs[i % len(pairs)]
        return batched_fused_marlin_moe(
            rows, numbers, one.qweight, other.qweight, None, None, one.scales, other.scales,
            shape.type.scalar_type.id, intermediate_cache13=scratch, intermediate_cache2=hidden, output=output,
            expected_m=float(first.mean()),
        )  # fmt: skip

    call(0)
    run = capture(call, _CALLS)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def us(of_rank: Array) -> float:
        numbers.copy_(torch.from_numpy(of_rank))
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / _CALLS

    slowest: dict[str, list[float]] = {rule: [] for rule in counts}
    for at in np.ndindex(first.shape[:2]):
        for rule, of_rule in counts.items():
            slowest[rule].append(max(us(of_rank) for of_rank in of_rule[at]))
    return {rule: float(np.mean(times)) for rule, times in slowest.items()}
