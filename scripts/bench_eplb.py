"""EPLB on one CPU core: plan time, quality and moves against DeepSeek, replica rules; and the mapping kernel on a GPU.

    python scripts/bench_eplb.py time                     # 61 layers x 256 experts at EP32 and EP320
    python scripts/bench_eplb.py quality                  # the grid: balancedness, moves after two kinds of drift
    python scripts/bench_eplb.py rules                    # replica rules on Zipf routing, perfect forecast
    python scripts/bench_eplb.py routing --routing FILE   # a recorded trace: npz, one uint8 [layer, token, k] a domain
    python scripts/bench_eplb.py map                      # the mapping kernel; needs a GPU

Prints markdown tables, then one JSON line for each row with versions, commit, seed and command. Times are medians over
repeats, wall clock and the process's own CPU time: on a shared machine the second says what one free core would take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from eplb_mapping_bench import bench_map

from moe_ep.bench.results import checkout_commit
from moe_ep.eplb import rebalance_experts
from moe_ep.eplb.policy.maps import experts_moved, initial_placement, rank_loads
from moe_ep.eplb.rules import RULES, Layout

Array = np.ndarray
Row = dict[str, Any]

# Orders of the experts, and placements, that replica rules are tried on.
_ORDERS = 4


def zipf(num_layers: int, num_experts: int, exponent: float, rng: np.random.Generator) -> Array:
    """Loads `[L, E]` by Zipf's law with a mean of one, each layer in an order of its own."""
    row = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return np.stack([rng.permutation(row / row.mean()) for _ in range(num_layers)])


def plan(weight: Array, num_slots: int, num_ranks: int, old: Array | None = None, **options: Any) -> Array:
    groups, nodes = options.pop("groups", 1), options.pop("nodes", 1)
    result = rebalance_experts(weight, num_slots, groups, nodes, num_ranks, old_physical_to_logical=old, **options)
    return result.physical_to_logical.numpy()


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
    """The issue's sizes that give every rank as many slots; at 320 ranks the nearest redundancy above that does."""
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


def run_rules(steps: Array, ranks: Array, slots: Array, num_experts: int, num_ranks: int) -> dict[str, Array]:
    """Slots `[steps, T, k]` that every rule chooses for ids `[steps, T, k]` of one layer."""
    layout = Layout.of(slots, num_experts, num_ranks)
    chosen = {}
    for name, make in RULES.items():
        rule = make()
        chosen[name] = np.stack([rule(ids, ranks, layout) for ids in steps])
    return chosen


def step_loads(chosen: Array, num_slots: int, num_ranks: int) -> Array:
    """Tokens of each rank in each step, `[steps, R]`."""
    rank = chosen.reshape(chosen.shape[0], -1) // (num_slots // num_ranks)
    return np.stack([np.bincount(step, minlength=num_ranks) for step in rank])


def bench_rules(arguments: argparse.Namespace) -> Iterator[Row]:
    """256 experts, top-8, Zipf 0.5, one spare slot a rank, planned from 100,000 tokens in steps as those that are
    measured, as a manager plans; several orders of the experts, each with a placement of its own."""
    for num_ranks, tokens, num_steps in ((32, 1, 500), (32, 32, 60), (8, 1, 400), (8, 32, 200), (8, 128, 40)):
        num_slots, ranks = 256 + num_ranks, np.repeat(np.arange(num_ranks), tokens)
        ratios: dict[str, list[Array]] = {}
        stays: dict[str, list[float]] = {}
        for order in range(_ORDERS):
            rng = np.random.default_rng((arguments.seed, order))
            log_load = np.log(zipf(1, 256, 0.5, rng)[0])
            seen = np.concatenate([_draw(log_load, 5_000, rng) for _ in range(20)])
            window = count_steps(seen[None, : len(seen) // ranks.size * ranks.size], 256, ranks.size)
            slots = plan(window.sum(axis=0), num_slots, num_ranks, window=window)[0]
            steps = np.stack([_draw(log_load, ranks.size, rng) for _ in range(num_steps)])
            for name, chosen in run_rules(steps, ranks, slots, 256, num_ranks).items():
                loads = step_loads(chosen, num_slots, num_ranks)
                ratios.setdefault(name, []).append(loads.max(axis=1) / loads.mean(axis=1))
                stays.setdefault(name, []).append((chosen // (num_slots // num_ranks) == ranks[:, None]).mean())
        for name, parts in ratios.items():
            ratio = np.concatenate(parts)
            yield {
                "ranks": num_ranks, "tokens per rank": tokens, "rule": name, "max / mean": round(ratio.mean(), 4),
                "standard error": round(ratio.std() / ratio.size**0.5, 4),
                "stays on the rank %": round(100 * np.mean(stays[name]), 1), "steps": ratio.size,
            }  # fmt: skip


def _draw(log_load: Array, num_tokens: int, rng: np.random.Generator) -> Array:
    """Eight experts a token, without replacement."""
    return np.argpartition(-(log_load + rng.gumbel(size=(num_tokens, log_load.size))), 8, axis=1)[:, :8]


def count_steps(ids: Array, num_experts: int, tokens: int) -> Array:
    """Counts `[S, L, E]` of ids `[L, T, k]` in steps of so many tokens."""
    num_layers = ids.shape[0]
    steps = ids.reshape(num_layers, -1, tokens * ids.shape[2])
    row = np.arange(num_layers)[:, None] * steps.shape[1] + np.arange(steps.shape[1])
    flat = np.bincount((steps + num_experts * row[..., None]).ravel(), minlength=row.size * num_experts)
    return flat.reshape(num_layers, -1, num_experts).transpose(1, 0, 2)


def trace_plans(seen: Array, num_experts: int, num_ranks: int, redundant: int, old: Array | None) -> dict[str, Array]:
    """The placements that are compared, planned on counts of steps `[S, L, E]` (1024 tokens) and on finer ones."""
    num_slots = num_experts + redundant
    coarse = count_steps(seen, num_experts, 1024)
    total, fine = coarse.sum(axis=0), count_steps(seen, num_experts, 128)
    return {
        "linear": initial_placement(seen.shape[0], num_experts, num_slots),
        "deepseek": plan(total, num_slots, num_ranks, policy="deepseek"),
        "incremental": plan(total, num_slots, num_ranks, old),
        "refined, 1024-token steps": plan(total, num_slots, num_ranks, old, window=coarse),
        "refined, 128-token steps": plan(total, num_slots, num_ranks, old, window=fine),
    }


def trace_balance(ids: Array, slots: Array, num_experts: int, num_ranks: int) -> dict[str, float]:
    """Balancedness over steps of 1024 tokens and all layers: even split, and three replica rules."""
    tokens, total = (
        1024,
        {"even split": np.zeros(2), "hash": np.zeros(2)} | {name: np.zeros(2) for name in ("levelled", "known counts")},
    )
    ranks = np.repeat(np.arange(num_ranks), tokens // num_ranks)
    even = [rank_loads(step, slots, num_ranks) for step in count_steps(ids, num_experts, tokens)]
    loads = {"even split": np.concatenate(even)}
    for name, rule in (("hash", "hash-rank"), ("levelled", "levelled"), ("known counts", "known-counts")):
        per_layer = []
        for layer, row in zip(ids, slots, strict=True):
            layout, apply = Layout.of(row, num_experts, num_ranks), RULES[rule]()
            steps = layer.reshape(-1, tokens, layer.shape[1])
            chosen = np.stack([apply(step, ranks, layout) for step in steps])
            per_layer.append(step_loads(chosen, row.size, num_ranks))
        loads[name] = np.concatenate(per_layer)
    for name, values in loads.items():
        total[name] += values.mean(axis=1).sum(), values.max(axis=1).sum()
    return {name: round(float(mean / peak), 4) for name, (mean, peak) in total.items()}


def bench_routing(arguments: argparse.Namespace) -> Iterator[Row]:
    """Planned on a domain's first half and used on its second; then on the other domain, before and after moving."""
    trace = np.load(arguments.routing)
    domains = {name: trace[name].astype(np.int64) for name in trace.files}
    num_experts = max(int(ids.max()) for ids in domains.values()) + 1
    for num_ranks in (8, 16):
        for redundant in (0, num_ranks):
            for name, ids in domains.items():
                half = ids.shape[1] // 2
                plans = trace_plans(ids[:, :half], num_experts, num_ranks, redundant, None)
                others = [other for other in domains if other != name]
                for policy, slots in plans.items():
                    row = {"ranks": num_ranks, "redundant": redundant, "planned on": name, "plan": policy}
                    yield row | {"used on": name, **trace_balance(ids[:, half:], slots, num_experts, num_ranks)}
                    for other in others:
                        yield from changed_domain(row, policy, slots, domains[other], other, num_experts, arguments)


def changed_domain(
    row: Row, policy: str, slots: Array, ids: Array, name: str, num_experts: int, arguments: argparse.Namespace
) -> Iterator[Row]:
    """The other domain's second half with the old plan, then with a new one from its first half, with the moves."""
    num_ranks, half = row["ranks"], ids.shape[1] // 2
    later = ids[:, half:]
    yield row | {"used on": f"{name}, plan kept", **trace_balance(later, slots, num_experts, num_ranks)}
    new = trace_plans(ids[:, :half], num_experts, num_ranks, row["redundant"], slots)[policy]
    moved = int(experts_moved(slots, new, num_ranks).sum())
    yield row | {
        "used on": f"{name}, replanned",
        **trace_balance(later, new, num_experts, num_ranks),
        "moved": moved,
        "GB moved": round(moved * arguments.expert_bytes / 1e9, 3),
    }


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=list(BENCHES))
    parser.add_argument("--routing", help="npz file for the routing bench")
    parser.add_argument("--expert-bytes", type=int, default=9_437_184, help="bytes of one expert (bf16, 2048 x 768)")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to record where this does not run from a git checkout")
    arguments = parser.parse_args()
    if arguments.bench == "routing" and not arguments.routing:
        parser.error("the routing bench needs --routing FILE")
    torch.set_num_threads(1)
    about = {
        "bench": arguments.bench, "commit": arguments.commit or checkout_commit(), "seed": arguments.seed,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__,
        "command": f"python scripts/bench_eplb.py {arguments.bench}",
    }  # fmt: skip
    for bench in BENCHES[arguments.bench]:
        rows = list(bench(arguments))
        print(table(rows), end="\n\n")
        for row in rows:
            print(json.dumps(about | row), file=sys.stderr)


if __name__ == "__main__":
    main()
