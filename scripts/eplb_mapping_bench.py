"""Times on a GPU for `bench_eplb.py`: the mapping kernel beside one pass over the ids."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import this_gpu

from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.eplb import eplb_map_to_physical_and_record, rebalance_experts
from moe_ep.eplb.mapping import map_reference
from moe_ep.eplb.placement_state import PlacementState

Row = dict[str, Any]

_CHAIN = 50
_COPIES = 8


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
