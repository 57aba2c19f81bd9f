"""Traces of real passes, opened and checked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.observability.trace import PREFIX, trace_to
from moe_ep.stages import STAGES
from tests.observability.test_metrics import K, T, make_layer
from tests.ranks import ranks


def record_on_a_rank(rank: int, world_size: int, folder: Path) -> None:
    layer = make_layer(ep_size=world_size, all2all_backend="all_to_all")
    with torch.inference_mode(), trace_to(folder, rank=rank):
        for _ in range(2):
            dist.barrier()
            layer(torch.randn(T, K), torch.randn(T, 8))


def test_ranges_of_all_ranks_are_there_in_order_and_on_one_clock(tmp_path: Path) -> None:
    ranks(2).run(record_on_a_rank, tmp_path / "trace")
    spans: list[list[dict[str, Any]]] = []
    processes: list[set[int]] = []
    for rank in range(2):
        events = json.loads((tmp_path / "trace" / f"rank-{rank:03}.json").read_text())["traceEvents"]
        processes.append({event["pid"] for event in events if "pid" in event})
        names = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
        assert names and all(name.startswith(f"rank {rank}: ") for name in names)
        found = [e for e in events if e.get("ph") == "X" and e["name"].startswith(PREFIX)]
        found.sort(key=lambda event: event["ts"])
        assert [event["name"] for event in found] == [PREFIX + stage for stage in STAGES] * 2
        for before, after in itertools.pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"]
        spans.append(found)
    assert not processes[0] & processes[1]
    # A pass ends in an exchange: the second begins nowhere before the first began everywhere.
    firsts, seconds = ([found[index]["ts"] for found in spans] for index in (0, len(STAGES)))
    assert max(firsts) < min(seconds)
