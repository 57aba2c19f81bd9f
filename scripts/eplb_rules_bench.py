"""Replica rules on Zipf routing, and plans on recorded routing, for `bench_eplb.py`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from moe_ep.eplb import rebalance_experts
from moe_ep.eplb.policy.maps import Array, experts_moved, initial_placement, rank_loads
from moe_ep.eplb.simulate import RULES, Layout

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
    tokens = 1024
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
    return {name: round(float(found.mean(axis=1).sum() / found.max(axis=1).sum()), 4) for name, found in loads.items()}


def bench_routing(arguments: argparse.Namespace) -> Iterator[Row]:
    """Planned on a domain's first half and used on its second, from nothing and from the initial placement; then on
    the other domain, before and after moving."""
    trace = np.load(arguments.routing)
    domains = {name: trace[name].astype(np.int64) for name in trace.files}
    num_experts = max(int(ids.max()) for ids in domains.values()) + 1
    for num_ranks in (8, 16):
        for redundant in (0, num_ranks):
            for name, ids in domains.items():
                half = ids.shape[1] // 2
                plans = trace_plans(ids[:, :half], num_experts, num_ranks, redundant, None)
                firsts = trace_plans(ids[:, :half], num_experts, num_ranks, redundant, plans["linear"])
                others = [other for other in domains if other != name]
                for policy, slots in plans.items():
                    row = {"ranks": num_ranks, "redundant": redundant, "planned on": name, "plan": policy}
                    yield row | {"used on": name, **trace_balance(ids[:, half:], slots, num_experts, num_ranks)}
                    first = firsts[policy]
                    yield row | {
                        "used on": f"{name}, from the initial placement",
                        **trace_balance(ids[:, half:], first, num_experts, num_ranks),
                        **moves(plans["linear"], first, num_ranks, arguments),
                    }
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
    yield row | {
        "used on": f"{name}, replanned",
        **trace_balance(later, new, num_experts, num_ranks),
        **moves(slots, new, num_ranks, arguments),
    }


def moves(old: Array, new: Array, num_ranks: int, arguments: argparse.Namespace) -> Row:
    """What it takes from one placement `[L, P]` to another, over all layers."""
    moved = int(experts_moved(old, new, num_ranks).sum())
    return {"moved": moved, "GB moved": round(moved * arguments.expert_bytes / 1e9, 3)}
