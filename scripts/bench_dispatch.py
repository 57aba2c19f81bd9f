"""Dispatch and combine of every backend, beside raw all_to_all_single pairs of the same bytes in the same run.

    python scripts/bench_dispatch.py                              # one process a GPU of this machine
    torchrun --nproc-per-node 4 scripts/bench_dispatch.py         # the same, or across hosts
    python scripts/bench_dispatch.py --device cpu --ranks 2       # on CPUs, in small sizes
    python scripts/bench_dispatch.py --markdown rows.jsonl        # tables of what --json FILE recorded

A time is prepare + finalize of one step, experts left out: their output is the rows they were given (of rows by
reference, copies made beforehand). Backends that can be captured run as a CUDA graph of several chained pairs for
--graph-tokens, eager for the rest; the raw pair beside it runs in the same way, with the bytes that the backend sends
to each peer, for NVSHMEM those of a token once per rank. Every setting is checked first, bit for bit. Median, p99 and
maximum over repeats of the maximum over ranks; eager settings also with dispatch and combine by themselves, each begun
together by all ranks. The floor is the most bytes that leave a rank for others over the peer-to-peer bandwidth
measured in the same run. --ranks, --hidden, --topk and --routing take lists. One JSON line a setting, then a table.
Several commands for the same ranks share the processes and what starting them costs: put --then between their options;
each is recorded as if it had been run by itself, and the first's --device, --commit and --json serve all.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# NVLink multicast stays off, whatever the machine's default is.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import deepep_peer
import torch
import torch.distributed as dist
from dispatch_steps import (
    BY_REFERENCE,
    ONE_RANK,
    TWO_LEVEL,
    Setting,
    Workload,
    compile_kernels,
    settings,
    usable_backends,
    workloads,
)
from dispatch_tables import markdown, text
from dispatch_times import peer_bandwidth, raw_pair, time_halves, time_kernels, time_pairs
from harness import Bench, checked, join_ranks, positive, positives, spawn_ranks

from moe_ep.bench.results import append_line, facts, read_lines
from moe_ep.bench.workload import parse_routing
from moe_ep.launch.cli.options import whole_numbers

# What CPUs measure where nothing is said: a minute in place of hours.
SMALL = {"hidden": [256], "graph_tokens": [8], "eager_tokens": [64], "repeats": 5, "chain": 2}


def parse_all(argv: Sequence[str]) -> list[argparse.Namespace]:
    """The commands between --then, each with what it is recorded as."""
    ends = [index for index, word in enumerate(argv) if word == "--then"]
    found: list[argparse.Namespace] = []
    for begin, end in zip([0, *(end + 1 for end in ends)], [*ends, len(argv)], strict=True):
        args = parse(argv[begin:end])
        first = found[0] if found else args
        args.device, args.commit, args.json = first.device, first.commit, first.json
        args.command = shlex.join(["python", sys.argv[0], *argv[begin:end]])
        found.append(args)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    def names(raw: str) -> list[str]:
        return raw.split(",")

    @checked
    def some_or_none(raw: str) -> tuple[int, ...]:
        return whole_numbers(raw) if raw else ()

    @checked
    def routings(raw: str) -> list[str]:
        for routing in raw.split(","):
            if routing != ONE_RANK:
                parse_routing(routing)
        return raw.split(",")

    parser = Bench(__doc__).parser
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=positives, help="processes to start; every GPU of the machine, 4 on the CPU")
    parser.add_argument("--hidden", type=positives, default=[7168])
    parser.add_argument("--experts", type=positive, default=256)
    parser.add_argument("--topk", type=positives, default=[8])
    parser.add_argument("--routing", type=routings, default=["uniform"], help=f"uniform, zipf:S or {ONE_RANK}")
    parser.add_argument("--graph-tokens", type=some_or_none, default=[1, 8, 32, 64, 128])
    parser.add_argument("--eager-tokens", type=some_or_none, default=[1024, 4096])
    parser.add_argument("--backends", type=names, help=f"all that run here; nvshmem_low_latency{BY_REFERENCE} is one")
    parser.add_argument("--wires", type=names, default=["bf16", "fp8"])
    parser.add_argument("--num-sms", type=positives, default=[None], help="of nvshmem_high_throughput, eager")
    parser.add_argument("--peers", choices=["deepep"], help="beside them in the same run, at --graph-tokens; GPUs only")
    parser.add_argument("--kernels", action="store_true", help="time the GPU kernels of each setting too")
    parser.add_argument("--repeats", type=positive, default=40)
    parser.add_argument("--chain", type=positive, default=8, help="pairs in one graph, or in one eager repeat")
    parser.add_argument("--markdown", type=Path, metavar="JSONL", help="print tables of recorded lines and end")
    if parser.parse_known_args(argv)[0].device == "cpu":
        parser.set_defaults(**SMALL)
    return parser.parse_args(argv)


def measure(
    setting: Setting, workload: Workload, args: argparse.Namespace, bandwidth: float, raw_times: dict[Any, Any]
) -> dict[str, Any]:
    """The row of one setting; without times, and with what is wrong, where its output is."""
    device = workload.device
    step = workload.step(setting)
    graph = setting.graph and step.capturable
    row: dict[str, Any] = {
        "backend": setting.backend,
        "wire": "fp8" if setting.fp8 else "bf16",
        "tokens_per_rank": setting.num_tokens,
        "capacity": setting.capacity,
        "mode": "graph" if graph else "eager",
        "num_sms": step.num_sms,
    }
    step()
    wrong = step.is_wrong()
    dist.all_reduce(wrong)
    step.check()
    if int(wrong):
        return {**row, "error": f"the output is wrong on {int(wrong)} of {workload.size} ranks"}
    how = {"graph": graph, "chain": args.chain, "repeats": args.repeats}
    timing = time_pairs(step, device, **how)
    if device.type == "cuda" and not graph:
        halves = time_halves(step, device, max(3, args.repeats // 4))
        row["dispatch_us"], row["combine_us"] = (round(half, 1) for half in halves)
    if args.kernels and device.type == "cuda":
        row["kernels_us"] = time_kernels(step, device, graph)
    step.check()
    there, back = workload.bytes_per_peer(setting)
    leaving = torch.tensor(
        sum(there) - there[workload.rank] + sum(back) - back[workload.rank], dtype=torch.float64, device=device
    )
    dist.all_reduce(leaving, op=dist.ReduceOp.MAX)
    # Backends that send the same bytes share the time of the collectives.
    key = (int(leaving), setting.fp8, setting.num_tokens, graph)
    if key not in raw_times:
        raw_times[key] = time_pairs(raw_pair(there, back, device), device, **how)
    raw = raw_times[key]
    return {
        **row,
        "median_us": round(timing.median, 1),
        "p99_us": round(timing.p99, 1),
        "max_us": round(timing.maximum, 1),
        "raw_median_us": round(raw.median, 1),
        "raw_p99_us": round(raw.p99, 1),
        "ratio": round(timing.median / raw.median, 2),
        "bytes_leaving": int(leaving),
        "floor_us": round(float(leaving) / bandwidth * 1e6, 1) if bandwidth else 0.0,
    }


def run_rank(
    rank: int, size: int, commands: Sequence[argparse.Namespace], init_method: str, local_rank: int | None = None
) -> None:
    device = join_ranks(rank, size, init_method, commands[0].device, local_rank)
    if device.type == "cuda":
        compile_kernels(commands, rank, size, device)
        dist.barrier()
    bandwidth = peer_bandwidth(device)
    rows = []
    for args in commands:
        rows.append(run_shapes(args, rank, size, device, bandwidth))
        if rank == 0:
            print(text(rows[-1]), flush=True)
    dist.barrier()
    if device.type == "cuda":
        from moe_ep.dispatch.nvshmem.arena import SymmetricArena

        SymmetricArena.close()  # symmetric memory, where a backend took some
    dist.destroy_process_group()
    wrong = ["error" in row for of_command in rows for row in of_command]
    if any(wrong):
        sys.exit(f"{sum(wrong)} of {len(wrong)} settings are wrong; their rows say how")


def run_shapes(
    args: argparse.Namespace, rank: int, size: int, device: torch.device, bandwidth: float
) -> list[dict[str, Any]]:
    """The rows of every hidden size with every top-k and routing."""
    rows = []
    for shape, workload in workloads(args, rank, size, device):
        around = {
            "ranks": size, **shape, "experts": args.experts, "peer_bandwidth_gb_s": round(bandwidth / 1e9, 1),
            **facts(seed=args.seed, commit=args.commit, command=args.command),
        }  # fmt: skip
        rows += run_settings(workload, args, bandwidth, around)
    return rows


def run_settings(
    workload: Workload, args: argparse.Namespace, bandwidth: float, around: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of one shape; the first rank writes them down as they come."""
    rows: list[dict[str, Any]] = []
    raw_times: dict[Any, Any] = {}
    everything = settings(args)
    before: Setting | None = None
    for index, setting in enumerate(everything):
        if workload.rank == 0 and sys.stderr.isatty():
            print(f"\r{index}/{len(everything)} {setting.backend:40}", end="", file=sys.stderr, flush=True)
        if before is not None and (before.name, before.capacity) != (setting.name, setting.capacity):
            workload.forget()
            if workload.device.type == "cuda":
                torch.cuda.empty_cache()
        before = setting
        rows.append({**measure(setting, workload, args, bandwidth, raw_times), **around})
        if workload.rank == 0 and args.json is not None:
            append_line(args.json, rows[-1])
    workload.forget()
    return rows


def choose_backends(args: argparse.Namespace) -> list[str]:
    """Those that were asked for, or all that run here and are for one host.

    Raises:
        SystemExit: one that was asked for cannot run.
    """
    usable = usable_backends(torch.device(args.device))
    if args.backends is None:
        return [name for name, reason in usable.items() if reason is None and name != TWO_LEVEL]
    refused = [f"{name}: {usable.get(name, 'unknown')}" for name in args.backends if usable.get(name, "") is not None]
    if refused:
        sys.exit(f"--backends {'; '.join(refused)}; choose of {', '.join(usable)}")
    return args.backends


def main(argv: Sequence[str] | None = None) -> None:
    commands = parse_all(sys.argv[1:] if argv is None else argv)
    if commands[0].markdown is not None:
        try:
            tables = markdown(read_lines(commands[0].markdown))
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"--markdown {commands[0].markdown} holds no rows of bench_dispatch.py: {error}")
        if not tables:
            sys.exit(f"--markdown {commands[0].markdown} holds no rows of bench_dispatch.py")
        print(tables)
        return
    by_size: dict[int, list[argparse.Namespace]] = {}
    num_gpus = torch.cuda.device_count() if commands[0].device == "cuda" else None
    for args in commands:
        args.backends = choose_backends(args)
        if args.peers is not None and (num_gpus is None or "RANK" in os.environ):
            sys.exit(
                "--peers starts processes of its own on the GPUs of this machine; leave out --device cpu and torchrun"
            )
        if args.peers is not None and not args.graph_tokens:
            sys.exit("--peers is timed at --graph-tokens, and there are none; give some, such as 1,128")
        for size in args.ranks or [4 if num_gpus is None else num_gpus]:
            by_size.setdefault(size, []).append(args)
    if "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        run_rank(rank, size, commands, "env://", int(os.environ.get("LOCAL_RANK", rank)))
        return
    for size, of_size in by_size.items():
        if num_gpus is not None and size > num_gpus:
            sys.exit(f"--ranks is {size} and this machine has {num_gpus} GPUs; pass at most as many")
        spawn_ranks(size, run_rank, of_size)
        if beside := [args for args in of_size if args.peers is not None]:
            spawn_ranks(size, deepep_peer.run_rank, beside)


if __name__ == "__main__":
    main()
