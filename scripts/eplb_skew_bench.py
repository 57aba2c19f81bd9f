"""Steps under skewed routing before and after a plan, beside uniform routing, for `bench_eplb_moving.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from eplb_moving_model import NEVER, NUM_DRAWS, Model, run_steps

from moe_ep.bench.timing import timing_of
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.metrics import balancedness

# Rows that an expert's weights are multiplied with at a time in a small batch.
_TILE = 16


def skew_rows(model: Model, T: int) -> Iterator[dict[str, Any]]:
    """Tokens/s with uniform routing, with Zipf routing, and with Zipf routing after a plan, for each objective.

    A plan is made from other draws of the same popularity than those that are timed.
    """
    args = model.args
    uniform, seen, used = model.draw(T, 0.0), model.draw(T, args.zipf, NUM_DRAWS), model.draw(T, args.zipf, 0)
    start = np.tile(np.arange(model.num_slots) % model.geometry.num_experts, (args.layers, 1))
    name, base = f"zipf({args.zipf:g})", 0.0
    for objective in args.objectives:
        config = EplbConfig(
            first_plan=NEVER, window_size=NUM_DRAWS, objective=objective, planner="thread", asynchronous=False,
            rebalance_below=1.0, timeout_s=60,
        )  # fmt: skip
        manager = EPLBManager(model.layers, config, placement=start)
        # A graph reads the maps of the manager that was there when it was captured.
        step = model.capture(T)
        if not base:
            row = _measure(model, T, "uniform", manager, *step, uniform)
            base = row["tokens_per_s"]
            yield row | {"of_uniform": 1.0}
            row = _measure(model, T, f"{name}, as placed", manager, *step, used)
            yield row | {"of_uniform": row["tokens_per_s"] / base}
        run_steps(model, *step, seen, NUM_DRAWS, manager)
        manager.plan_now()
        row = _measure(model, T, f"{name}, balanced by {objective}", manager, *step, used)
        moved = manager.totals.experts_moved
        yield row | {"of_uniform": row["tokens_per_s"] / base, "experts_moved": moved}
        model.check(manager.placement.host)
        manager.close()


def _measure(
    model: Model, T: int, what: str, manager: EPLBManager, static: list[torch.Tensor], replay: Any, draws: Any
) -> dict[str, Any]:
    """Times of steps, and what the busiest rank had to do in them."""
    times = run_steps(model, static, replay, draws, model.args.steps // 2, manager)
    counts = manager.recorder.snapshot()
    dist.all_reduce(counts)
    slots = counts.cpu().unflatten(2, (model.size, -1))
    tokens, active = slots.sum(dim=3), (slots > 0).sum(dim=3)
    tiles = (-(-slots // _TILE)).sum(dim=3)
    return {
        "kind": "skew", "what": what, "tokens_per_rank": T, "median_us": timing_of(times).median,
        "tokens_per_s": T * model.size * len(times) / sum(times) * 1e6,
        "balancedness": balancedness(tokens.flatten(0, 1)),
        **{
            f"{name}_{which}": float(found.double().mean())
            for name, values in (("tokens", tokens), ("active", active), ("tiles", tiles))
            for which, found in (("most", values.amax(dim=2)), ("mean", values))
        },
    }  # fmt: skip
