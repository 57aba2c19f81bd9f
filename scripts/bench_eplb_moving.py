"""Decode steps while experts move, the stall of the synchronous form, the bandwidth of a transfer, and what it brings.

    python scripts/bench_eplb_moving.py                           # one process a GPU of this machine
    python scripts/bench_eplb_moving.py --device cpu --ranks 2 --geometry small --tokens 4 --steps 20

A step is one replay of a CUDA graph with all layers, then `EPLBManager.step`; the host runs at most two steps ahead.
The same steps are timed with nothing moving and while a rearrangement is under way, in turns: then every rank gets
--moves new experts a layer from its neighbour and gives them back, again and again. After each setting every slot is
checked to hold its expert. A time is the maximum over ranks; median, p99 and maximum over steps. The transfer alone
moves every expert of a layer to the next rank with nothing else running, beside plain copies and messages of the same
size. One JSON line a row, then tables.

A GPU that stood idle begins with higher clocks than its power limit lets it keep, and corrects that within a second by
far lower ones for a tenth of one: --warm-up lets that pass. The clock of a step is that of the rank whose SMs were
slowest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

# NVLink multicast stays off, whatever the machine's default is.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
from eplb_moving_model import NEVER, Model, run_moving, run_steps, swapped
from eplb_skew_bench import skew_rows
from eplb_transfer_bench import peer_bandwidth, stall_row, transfer_row
from harness import Bench, checked, join_ranks, positive, positives, some_of, spawn_ranks

from moe_ep.bench.results import append_line, facts, table
from moe_ep.bench.timing import timing_of
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.launch.cli.options import geometry_name

PARTS = ("bare", "skew", "transfer", "stall", "moving")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Bench(__doc__).parser
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=positive, help="processes to start; every GPU of the machine, 2 on the CPU")
    parser.add_argument(
        "--geometry", type=checked(geometry_name), default="deepseek-v3", help="a preset of moe_ep.bench.geometries"
    )
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--tokens", type=positives, default=[64, 128])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--transports", type=some_of(("peer_copies", "messages")), default=["peer_copies", "messages"])
    parser.add_argument("--parts", type=some_of(PARTS), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--gb-s", type=positives, default=[40], help="paces of peer copies beside the model")
    parser.add_argument("--moves", type=positive, default=2, help="experts that a rank gets a layer")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds of steps before those that are timed")
    parser.add_argument("--zipf", type=float, default=0.8, help="for the tokens/s before and after a plan")
    parser.add_argument("--objectives", type=lambda text: text.split(","), default=["tokens", "auto"], help="of plans")
    return parser.parse_args(argv)


def steps_row(what: str, T: int, times: Sequence[float], base: Sequence[float], **more: Any) -> dict[str, Any]:
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

    def begin() -> None:
        manager.rearrange(swapped(manager.placement.host, model.size, args.moves, next(number)))

    for T in args.tokens:
        static, replay = model.capture(T)
        draws = model.draw(T, 0.0)
        before = replace(manager.totals)
        times, clocks, events = run_moving(model, static, replay, draws, args.steps, manager, begin)
        manager.finish()
        model.check(manager.placement.host)
        steps = list(zip(times, clocks, events, strict=True))
        medians = {event: timing_of([us for us, _, its in steps if its == event]).median for event in set(events)}
        resting, resting_mhz, _ = zip(*(step for step in steps if step[2] == "rest"), strict=True)
        moving, moving_mhz, _ = zip(*(step for step in steps if step[2] != "rest"), strict=True)
        layers = manager.totals.layers_committed - before.layers_committed
        setting = {"transport": transport, "gb_s": gb_s}
        yield steps_row("nothing moves", T, resting, resting, **setting, mhz=statistics.median(resting_mhz))
        yield steps_row(
            "experts move", T, moving, resting, **setting, mhz=statistics.median(moving_mhz),
            begin_step_us=medians.get("begin"), commit_step_us=medians.get("commit"), other_step_us=medians.get(""),
            slowest=_slowest(steps),
            layers_committed=layers,
            experts_moved=manager.totals.experts_moved - before.experts_moved,
            gb_moved=(manager.totals.bytes_moved - before.bytes_moved) / 1e9,
            transfer_ms=(manager.totals.transfer_s - before.transfer_s) / max(layers, 1) * 1e3,
            commit_host_us=(manager.totals.commit_s - before.commit_s) / max(layers, 1) * 1e6,
        )  # fmt: skip
    manager.close()


def _slowest(steps: list[tuple[float, float, str]]) -> list[tuple[float, int, int, str, int]]:
    """The eight slowest: microseconds, MHz, which step, the last event up to it, and how many steps ago that was."""
    found = []
    for index in sorted(range(len(steps)), key=lambda index: steps[index][0])[-8:]:
        last = next((i for i in range(index, -1, -1) if steps[i][2]), 0)
        us, mhz, _ = steps[index]
        found.append((round(us, 1), round(mhz), index, steps[last][2], index - last))
    return found


def run_rank(rank: int, size: int, args: argparse.Namespace, init_method: str) -> None:
    device = join_ranks(rank, size, init_method, args.device)
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
        if "bare" in args.parts:
            bare = run_steps(model, *model.capture(T), model.draw(T, 0.0), args.steps // 2, None)
            keep(peer_bandwidth(model), steps_row("no manager", T, bare, bare))
        if "skew" in args.parts:
            for row in skew_rows(model, T):
                keep(row)
        for transport in args.transports:
            if "transfer" in args.parts:
                keep(transfer_row(model, transport))
            if "stall" in args.parts:
                keep(stall_row(model, transport))
            for gb_s in args.gb_s if transport == "peer_copies" else [None]:
                for row in moving_rows(model, transport, gb_s) if "moving" in args.parts else ():
                    keep(row)
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
            "max_over_median": "max/median", "mhz": "MHz",
            "begin_step_us": "begin step", "commit_step_us": "commit step", "other_step_us": "other steps",
            "experts_moved": "experts", "gb_moved": "GB", "transfer_ms": "transfer ms", "commit_host_us": "commit us",
        },
        "transfer": {"transport": "transport", "half_gb_s": "half a layer GB/s", "all_gb_s": "a whole layer GB/s"},
        "peer": {"ring_gb_s": "ring of messages GB/s", "copy_gb_s": "one copy GB/s"},
        "stall": {"transport": "transport", "moves": "moves", "few_ms": "stall ms", "all_ms": "all experts ms"},
        "skew": {
            "what": "routing", "tokens_per_rank": "T", "tokens_per_s": "tokens/s", "of_uniform": "of uniform",
            "balancedness": "balancedness", "median_us": "median us", "active_most": "active experts",
            "tiles_most": "tiles", "experts_moved": "experts moved",
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
    spawn_ranks(size, run_rank, args)


if __name__ == "__main__":
    sys.exit(main())
