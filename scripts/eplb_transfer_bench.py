"""The stall of the synchronous form and the bandwidth of a transfer, for `bench_eplb_moving.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from eplb_moving_model import NEVER, Model, swapped

from moe_ep.bench.timing import slowest_rank
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.moves import plan_moves
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.transfer import choose_transport


def stall_row(model: Model, transport: str) -> dict[str, Any]:
    """How long the synchronous form holds a step up: the same moves of all layers, and every expert of all layers."""
    manager = EPLBManager(
        model.layers,
        EplbConfig(first_plan=NEVER, planner="thread", transport=transport, asynchronous=False, timeout_s=60),
    )
    stalls = {}
    for name, moves in (("few", model.args.moves), ("all", model.num_slots // model.size)):
        times = []
        for number in range(3):
            target = swapped(manager.placement.host, model.size, moves, number)
            _wait(model.device)
            start = time.perf_counter()
            manager.rearrange(target)
            _wait(model.device)
            times.append((time.perf_counter() - start) * 1e3)
        stalls[f"{name}_ms"] = sorted(slowest_rank(times))[1]
    model.check(manager.placement.host)
    manager.close()
    return {"kind": "stall", "transport": transport, "moves": model.args.moves, **stalls}


def transfer_row(model: Model, transport: str) -> dict[str, Any]:
    """GB/s that arrive at a rank when every expert of a layer goes to the next one and nothing else runs."""
    device = model.device
    rows = ExpertRows(model.layers[0].expert_weights())
    config = EplbConfig(transport=transport, asynchronous=False, timeout_s=60)
    channel = SideChannel(model.layers[0].groups.ep, 60)
    carrier = choose_transport(channel, model.layers[0].groups.ep, [rows], config)
    staging = torch.zeros(rows.staging_bytes, dtype=torch.uint8, device=device)
    per_rank = model.num_slots // model.size
    found = {}
    for name, moves in (("all", per_rank), ("half", per_rank // 2)):
        old = np.arange(model.num_slots)
        new = swapped(old[None], model.size, moves, 0)[0]
        plan = plan_moves(old, new, model.size, model.rank)
        times = []
        for number in range(4):
            _wait(device)
            start = time.perf_counter()
            intact = carrier.fetch(rows, plan, rows.rows(staging), number)
            times.append(time.perf_counter() - start)
            if not intact:
                raise RuntimeError("an expert arrived broken")
        seconds = sorted(slowest_rank(times[1:]))[1]
        found[f"{name}_gb_s"] = plan.num_received * rows.expert_bytes / seconds / 1e9
    carrier.close()
    return {"kind": "transfer", "transport": transport, **found}


def peer_bandwidth(model: Model) -> dict[str, Any]:
    """GB/s that leave a GPU: a copy into a neighbour's memory, and large messages round a ring."""
    size = (1 << 30) if model.device.type == "cuda" else 1 << 22
    out = torch.zeros(size, dtype=torch.uint8, device=model.device)
    into = torch.empty_like(out)
    after, before = (model.rank + 1) % model.size, (model.rank - 1) % model.size
    times = []
    for _ in range(5):
        _wait(model.device)
        start = time.perf_counter()
        operations = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    ring = size / sorted(slowest_rank(times[1:]))[2] / 1e9
    copy = 0.0
    if model.device.type == "cuda" and model.rank == 0:
        there = torch.empty_like(out, device="cuda:1")
        there.copy_(out)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            there.copy_(out)
        torch.cuda.synchronize()
        copy = 5 * size / (time.perf_counter() - start) / 1e9
    dist.barrier()
    return {"kind": "peer", "ring_gb_s": ring, "copy_gb_s": slowest_rank([copy])[0]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
