"""EPLB on one CPU core: plan time, quality and moves against DeepSeek, replica rules; and the mapping kernel on a GPU.

    python scripts/bench_eplb.py time                     # 61 layers x 256 experts at EP32 and EP320
    python scripts/bench_eplb.py quality                  # the grid: balancedness, moves after two kinds of drift
    python scripts/bench_eplb.py rules                    # replica rules on Zipf routing, perfect forecast
    python scripts/bench_eplb.py routing --routing FILE   # a recorded trace: npz, one uint8 [layer, token, k] a domain
    python scripts/bench_eplb.py map                      # the mapping kernel; needs a GPU

Prints markdown tables; --json keeps the rows with versions, commit, seed and command. Times are medians over
repeats, wall clock and the process's own CPU time: on a shared machine the second says what one free core would take.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from eplb_mapping_bench import bench_map
from eplb_rules_bench import Row, bench_routing, bench_rules, plan, zipf
from harness import Bench, positive

from moe_ep.eplb.policy.maps import Array, experts_moved, rank_loads


def evenness(weight: Array, slots: Array, num_ranks: int) -> float:
    """Balancedness when every expert's load divides evenly over its replicas."""
    loads = rank_loads(weight, slots, num_ranks)
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of one call: wall clock, and CPU time of this thread."""
    wall, own = time.perf_counter(), time.thread_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.thread_time() - own) * 1e3


def longest_hold(call: Callable[[], Any]) -> float:
    """The longest time in ms that another Python thread, waking every millisecond, could not run during the call."""
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    call()
    done.set()
    thread.join()
    return (max(gaps) - 0.001) * 1e3 if gaps else 0.0


def bench_time(arguments: argparse.Namespace) -> Iterator[Row]:
    """Plans from nothing, and from the last plan after a drift of 10%; then the refinement."""
    rng = np.random.default_rng(arguments.seed)
    cases = [(256, 32, 1, 1), (288, 32, 1, 1), (288, 32, 8, 4), (320, 320, 1, 1), (640, 320, 1, 1)]
    for num_slots, num_ranks, groups, nodes in cases:
        shape: dict[str, Any] = {"groups": groups, "nodes": nodes}
        for exponent in (0.3, 0.5, 0.8):
            times: dict[str, list[tuple[float, float]]] = {"from nothing": [], "after drift": [], "deepseek": []}
            weight = zipf(61, 256, exponent, rng)
            old = plan(weight, num_slots, num_ranks, **shape)
            for _ in range(3):
                plan(weight, num_slots, num_ranks, plan(weight, num_slots, num_ranks, **shape), **shape)
            for repeat in range(arguments.repeats):
                drifted = weight * rng.uniform(0.9, 1.1, weight.shape)
                todo: dict[str, dict[str, Any]] = {"from nothing": {}, "after drift": {"old": old}}
                if repeat < 3:
                    todo["deepseek"] = {"policy": "deepseek"}
                for name, options in todo.items():
                    options = shape | options
                    times[name].append(timed(lambda: plan(drifted, num_slots, num_ranks, **options)))  # noqa: B023
            for name, values in times.items():
                wall, own = np.median(np.array(values), axis=0)
                yield {
                    "ranks": num_ranks, "slots": num_slots, "hosts": nodes, "Zipf": exponent, "plan": name,
                    "median ms": round(wall, 2), "CPU ms": round(own, 2), "least ms": round(min(values)[0], 2),
                }  # fmt: skip


def bench_refinement(arguments: argparse.Namespace) -> Iterator[Row]:
    """61 layers x 256 experts at EP32 with a window of 32 steps: what the refinement takes and wins."""
    rng = np.random.default_rng(arguments.seed)
    weight = zipf(61, 256, 0.5, rng)
    window = rng.poisson(weight * 64 * np.exp(rng.normal(0, 0.5, (32, *weight.shape))))
    total = window.sum(axis=0)
    for refine in (False, True):
        slots = plan(total, 288, 32, window=window, refine=refine)
        loads = np.stack([rank_loads(step, slots, 32) for step in window])
        values = [timed(lambda: plan(total, 288, 32, window=window, refine=refine)) for _ in range(5)]  # noqa: B023
        wall, own = np.median(np.array(values), axis=0)
        hold = longest_hold(lambda: plan(total, 288, 32, window=window, refine=refine))  # noqa: B023
        yield {
            "plan": "refined" if refine else "plain",
            "median ms": round(wall, 1),
            "CPU ms": round(own, 1),
            "longest GIL hold ms": round(hold, 1),
            "balancedness over the window": round(loads.mean(axis=2).sum() / loads.max(axis=2).sum(), 4),
        }


def grid() -> Iterator[tuple[int, int, int, str]]:
    """Sizes that give every rank as many slots; at 320 ranks also the nearest redundancy above that does."""
    for num_ranks in (8, 16, 32, 64, 320):
        for num_experts in (64, 128, 256, 384):
            for redundant in (0, num_ranks // 2, num_ranks):
                if (num_experts + redundant) % num_ranks == 0:
                    yield num_experts, num_ranks, redundant, "grid"
            if num_ranks == 320:
                yield num_experts, num_ranks, -num_experts % num_ranks, "rounded up"


def bench_quality(arguments: argparse.Namespace) -> Iterator[Row]:
    """Each case: balancedness from nothing, then balancedness and experts moved after two kinds of drift."""
    for num_experts, num_ranks, redundant, kind in grid():
        num_slots = num_experts + redundant
        for exponent in (0.0, 0.3, 0.5, 0.8, 1.2):
            rng = np.random.default_rng(arguments.seed)
            weight = zipf(8, num_experts, exponent, rng)
            ours, theirs = plan(weight, num_slots, num_ranks), plan(weight, num_slots, num_ranks, policy="deepseek")
            row: Row = {"case": kind, "experts": num_experts, "ranks": num_ranks, "redundant": redundant}
            row |= {"Zipf": exponent, "ours": evenness(weight, ours, num_ranks)}
            row["deepseek"] = evenness(weight, theirs, num_ranks)
            drifts = {
                "each": weight * rng.uniform(0.9, 1.1, weight.shape),
                "traffic": 0.9 * weight + 0.1 * zipf(8, num_experts, exponent, rng),
            }
            for name, drifted in drifts.items():
                after = plan(drifted, num_slots, num_ranks, old=ours)
                theirs_after = plan(drifted, num_slots, num_ranks, policy="deepseek")
                row |= {
                    f"{name} stay": evenness(drifted, ours, num_ranks),
                    f"{name} ours": evenness(drifted, after, num_ranks),
                    f"{name} deepseek": evenness(drifted, theirs_after, num_ranks),
                    f"{name} moved": float(experts_moved(ours, after, num_ranks).mean()),
                    f"{name} deepseek moved": float(experts_moved(theirs, theirs_after, num_ranks).mean()),
                }
            yield {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def table(rows: list[Row]) -> str:
    """A markdown table of rows, with a column for every key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, ["---"] * len(keys), *[[str(row.get(key, "")) for key in keys] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


BENCHES = {
    "time": (bench_time, bench_refinement),
    "quality": (bench_quality,),
    "rules": (bench_rules,),
    "routing": (bench_routing,),
    "map": (bench_map,),
}


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("bench", choices=list(BENCHES))
    parser.add_argument("--routing", help="npz file of recorded routing")
    parser.add_argument(
        "--expert-bytes", type=positive, default=9_437_184, help="bytes of one expert (bf16, 2048 x 768)"
    )
    parser.add_argument("--repeats", type=positive, default=31)
    arguments = bench.parse()
    if arguments.bench == "routing" and not arguments.routing:
        parser.error("the routing bench needs --routing FILE")
    torch.set_num_threads(1)
    bench.about |= {"bench": arguments.bench, "numpy": np.__version__}
    for measure in BENCHES[arguments.bench]:
        print(table([bench.keep(row) for row in measure(arguments)]), end="\n\n")


if __name__ == "__main__":
    main()
