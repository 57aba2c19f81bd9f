"""Decode steps while experts move, the stall of the synchronous form, the bandwidth of a transfer, and what it brings.

    python scripts/bench_eplb_moving.py                           # one process a GPU of this machine
    python scripts/bench_eplb_moving.py --device cpu --ranks 2 --geometry small --tokens 4 --steps 20

A step is one replay of a CUDA graph with all layers, then `EPLBManager.step`; the host runs at most two steps ahead.
The same steps are timed with nothing moving (before and after) and while a rearrangement is under way: then every rank
gets --moves new experts a layer from its neighbour and gives them back, again and again. After each setting every slot
is checked to hold its expert. A time is the maximum over ranks; median, p99 and maximum over steps. The transfer alone
moves every expert of a layer to the next rank with nothing else running, beside plain copies and messages of the same
size. One JSON line a row, then tables.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# NVLink multicast stays off, whatever the machine's default is.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from eplb_moving_model import NUM_DRAWS, Model, run_steps, swapped

from moe_ep.bench.results import append_line, facts, table
from moe_ep.bench.timing import slowest_rank, timing_of
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.metrics import balancedness
from moe_ep.eplb.moves import plan_moves
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.transports import choose_transport

NEVER = 10**9


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help="processes to start; every GPU of the machine, 2 on the CPU")
    parser.add_argument("--geometry", default="deepseek-v3", help="a preset of moe_ep.bench.geometries")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=numbers, default=[64, 128])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["peer_copies", "messages"])
    parser.add_argument("--gb-s", type=numbers, default=[40, 10], help="paces of peer copies beside the model")
    parser.add_argument("--moves", type=int, default=2, help="experts that a rank gets a layer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--zipf", type=float, default=0.8, help="for the tokens/s before and after; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to record where the script is not run from a git checkout")
    parser.add_argument("--json", type=Path, help="file to append the JSON lines to")
    return parser.parse_args(argv)


def steps_row(what: str, T: int, times: list[float], base: list[float], **more: Any) -> dict[str, Any]:
    """Times of steps beside those of the same steps with nothing moving."""
    timing, resting = timing_of(times), timing_of(base)
    return {
        "kind": "steps", "what": what, "tokens_per_rank": T,
        "median_us": timing.median, "p99_us": timing.p99, "max_us": timing.maximum,
        "median_ratio": timing.median / resting.median, "p99_ratio": timing.p99 / resting.p99,
        "max_over_median": timing.maximum / timing.median, **more,
    }  # fmt: skip


def moving_rows(model: Model, transport: str, gb_s: int | None) -> Iterator[dict[str, Any]]:
    """For each number of tokens: steps while nothing moves, and while experts move."""
    args = model.args
    manager = EPLBManager(
        model.layers,
        EplbConfig(first_plan=NEVER, planner="thread", transport=transport, max_transfer_gb_s=gb_s, timeout_s=60),
    )
    number = itertools.count()

    def keep_moving() -> None:
        manager.rearrange(swapped(manager.placement.host, model.size, args.moves, next(number)))

    for T in args.tokens:
        static, replay = model.capture(T)
        draws = model.draw(T, 0.0)
        resting, _ = run_steps(model, static, replay, draws, args.steps // 2, manager)
        before = replace(manager.totals)
        moving, events = run_steps(model, static, replay, draws, args.steps, manager, keep_moving)
        manager.finish()
        resting += run_steps(model, static, replay, draws, args.steps // 2, manager)[0]
        model.check(manager.placement.host)
        by_event = {
            event: [us for us, its in zip(moving, events, strict=True) if its == event] for event in set(events)
        }
        medians = {event: timing_of(times).median for event, times in by_event.items()}
        layers = manager.totals.layers_committed - before.layers_committed
        yield steps_row("nothing moves", T, resting, resting, transport=transport, gb_s=gb_s)
        yield steps_row(
            "experts move", T, moving, resting, transport=transport, gb_s=gb_s,
            begin_step_us=medians.get("begin"), commit_step_us=medians.get("commit"), other_step_us=medians.get(""),
            slowest=_slowest(moving, events),
            layers_committed=layers,
            experts_moved=manager.totals.experts_moved - before.experts_moved,
            gb_moved=(manager.totals.bytes_moved - before.bytes_moved) / 1e9,
            transfer_ms=(manager.totals.transfer_s - before.transfer_s) / max(layers, 1) * 1e3,
            commit_host_us=(manager.totals.commit_s - before.commit_s) / max(layers, 1) * 1e6,
        )  # fmt: skip
    manager.close()


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


def skew_rows(model: Model, T: int) -> list[dict[str, Any]]:
    """Tokens/s with uniform routing, with Zipf routing, and with Zipf routing after a plan from it."""
    args = model.args
    # A plan window of its own draws: the steps that are timed choose from the same popularity, not the same choices.
    config = EplbConfig(first_plan=NEVER, window_size=NUM_DRAWS, timeout_s=60)
    start = np.tile(np.arange(model.num_slots) % model.geometry.num_experts, (args.layers, 1))
    manager = EPLBManager(model.layers, config, placement=start)
    static, replay = model.capture(T)
    uniform, skewed = model.draw(T, 0.0), model.draw(T, args.zipf)
    rows = []

    def measure(what: str, draws: list[list[torch.Tensor]]) -> None:
        times, _ = run_steps(model, static, replay, draws, args.steps // 2, manager)
        counts = manager.recorder.snapshot().sum(dim=0).double()
        dist.all_reduce(counts)
        rows.append(
            {
                "kind": "skew", "what": what, "tokens_per_rank": T, "median_us": timing_of(times).median,
                "tokens_per_s": T * model.size * len(times) / sum(times) * 1e6,
                "balancedness": balancedness(counts.unflatten(1, (model.size, -1)).sum(2).cpu()),
            }
        )  # fmt: skip

    measure("uniform", uniform)
    measure(f"zipf({args.zipf:g}), as placed", skewed)
    manager.plan_now()
    manager.finish()
    measure(f"zipf({args.zipf:g}), balanced", skewed)
    for row in rows:
        row["of_uniform"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    rows[-1]["experts_moved"] = manager.totals.experts_moved
    model.check(manager.placement.host)
    manager.close()
    return rows


def _slowest(times: list[float], events: list[str]) -> list[tuple[float, str, int]]:
    """The eight slowest steps: microseconds, the last event up to each, and how many steps ago that was."""
    found = []
    for index in sorted(range(len(times)), key=times.__getitem__)[-8:]:
        last = next((i for i in range(index, -1, -1) if events[i]), 0)
        found.append((round(times[index], 1), events[last], index - last))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_rank(rank: int, size: int, args: argparse.Namespace, init_method: str) -> None:
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    options = {"device_id": device} if args.device == "cuda" else {}
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, **options)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    about = facts(seed=args.seed, commit=args.commit)
    with torch.inference_mode():
        model = Model(args, rank, size, device)
        about |= {"backend": type(model.layers[0].prepare_finalize).__name__}
        about |= {"experts": type(model.layers[0].modular_kernel.fused_experts).__name__}

        def keep(*found: dict[str, Any]) -> None:
            for row in found:
                rows.append(row)
                if rank == 0:
                    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
                    print(f"{time.perf_counter() - started:.1f} s", shown, file=sys.stderr, flush=True)
                if rank == 0 and args.json is not None:
                    setting = {"geometry": args.geometry, "layers": args.layers, "ep_size": size, "moves": args.moves}
                    append_line(args.json, row | setting | about)

        T = max(args.tokens)
        bare, _ = run_steps(model, *model.capture(T), model.draw(T, 0.0), args.steps // 2, None)
        keep(peer_bandwidth(model), steps_row("no manager", T, bare, bare))
        for transport in args.transports:
            keep(transfer_row(model, transport))
            keep(stall_row(model, transport))
            for gb_s in args.gb_s if transport == "peer_copies" else [None]:
                for row in moving_rows(model, transport, gb_s):
                    keep(row)
            if args.zipf and transport == args.transports[0]:
                keep(*skew_rows(model, max(args.tokens)))
    if rank == 0:
        tell(rows)
    dist.barrier()
    dist.destroy_process_group()


def tell(rows: list[dict[str, Any]]) -> None:
    """The rows as tables."""
    columns = {
        "steps": {
            "transport": "transport", "gb_s": "GB/s", "tokens_per_rank": "T", "what": "",
            "median_us": "median us", "p99_us": "p99 us",
            "max_us": "max us", "median_ratio": "median ratio", "p99_ratio": "p99 ratio",
            "max_over_median": "max/median", "begin_step_us": "begin step", "commit_step_us": "commit step",
            "other_step_us": "other steps",
            "experts_moved": "experts", "gb_moved": "GB", "transfer_ms": "transfer ms", "commit_host_us": "commit us",
        },
        "transfer": {"transport": "transport", "half_gb_s": "half a layer GB/s", "all_gb_s": "a whole layer GB/s"},
        "peer": {"ring_gb_s": "ring of messages GB/s", "copy_gb_s": "one copy GB/s"},
        "stall": {"transport": "transport", "moves": "moves", "few_ms": "stall ms", "all_ms": "all experts ms"},
        "skew": {
            "what": "routing", "tokens_per_rank": "T", "tokens_per_s": "tokens/s", "of_uniform": "of uniform",
            "balancedness": "balancedness", "median_us": "median us", "experts_moved": "experts moved",
        },
    }  # fmt: skip
    for kind, names in columns.items():
        found = [row for row in rows if row["kind"] == kind]
        if found:
            print(table(found, names), end="\n\n", flush=True)


def main() -> None:
    args = parse()
    size = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cpu":
        args.transports = ["messages"]
    with tempfile.TemporaryDirectory(prefix="moe_ep_bench_") as folder:
        mp.spawn(_spawned, (size, args, f"file://{folder}/meet"), nprocs=size)


def _spawned(rank: int, size: int, args: argparse.Namespace, init_method: str) -> None:
    run_rank(rank, size, args, init_method)


if __name__ == "__main__":
    sys.exit(main())
