"""Steps under skewed routing before and after a plan, beside uniform routing, for `bench_eplb_moving.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from eplb_moving_model import NEVER, NUM_DRAWS, Model, run_steps

from moe_ep.bench.timing import timing_of
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.planner import make_plan
from moe_ep.eplb.policy.maps import experts_moved
from moe_ep.eplb.recorder import balancedness

# Rows that an expert's weights are multiplied with at a time in a small batch.
_TILE = 16
# Times that the settings take turns: clocks drift by more than plans differ.
_ROUNDS = 3


def skew_rows(model: Model, T: int) -> Iterator[dict[str, Any]]:
    """Tokens/s with uniform routing, with Zipf routing, and with Zipf routing after a plan, for each objective.

    A plan is made from other draws of the same popularity than those that are timed.
    """
    args = model.args
    uniform, seen, used = model.draw(T, 0.0), model.draw(T, args.zipf, NUM_DRAWS), model.draw(T, args.zipf, 0)
    start = np.tile(np.arange(model.num_slots) % model.geometry.num_experts, (args.layers, 1))
    config = EplbConfig(
        first_plan=NEVER, window_size=NUM_DRAWS, planner="thread", asynchronous=False, rebalance_below=1.0, timeout_s=60
    )
    manager = EPLBManager(model.layers, config, placement=start)
    step = model.capture(T)
    run_steps(model, *step, seen, NUM_DRAWS, manager)
    counts = _counts(manager)
    name = f"zipf({args.zipf:g})"
    settings = {"uniform": (uniform, start), f"{name}, as placed": (used, start)}
    for objective in args.objectives:
        sizes = model.geometry.num_experts, model.size
        plan, _ = make_plan(counts, start, *sizes, replace(config, objective=objective))
        settings[f"{name}, balanced by {objective}"] = used, start if plan is None else plan
    times: dict[str, list[float]] = {what: [] for what in settings}
    work = {}
    for _ in range(_ROUNDS):
        for what, (draws, placement) in settings.items():
            manager.rearrange(placement)
            times[what] += run_steps(model, *step, draws, args.steps // (2 * _ROUNDS), manager, warm_up=0)
            work[what] = _work(_counts(manager).unflatten(2, (model.size, -1)))
        model.check(manager.placement.host)
    manager.close()
    base = timing_of(times["uniform"]).median
    for what, found in times.items():
        median = timing_of(found).median
        yield {
            "kind": "skew", "what": what, "tokens_per_rank": T, "median_us": median,
            "tokens_per_s": T * model.size / median * 1e6, "of_uniform": base / median,
            "experts_moved": int(experts_moved(start, settings[what][1], model.size).sum()), **work[what],
        }  # fmt: skip


def _counts(manager: EPLBManager) -> torch.Tensor:
    """The recorded steps, summed over ranks: int64 `[S, L, P]` on the CPU."""
    counts = manager.recorder.snapshot()
    dist.all_reduce(counts)
    return counts.cpu().long()


def _work(slots: torch.Tensor) -> dict[str, float]:
    """What the busiest rank and the mean one had to do, from counts `[S, L, R, slots of a rank]`."""
    tokens, active = slots.sum(dim=3), (slots > 0).sum(dim=3)
    tiles = (-(-slots // _TILE)).sum(dim=3)
    return {
        "balancedness": balancedness(tokens.flatten(0, 1)),
        **{
            f"{name}_{which}": float(found.double().mean())
            for name, values in (("tokens", tokens), ("active", active), ("tiles", tiles))
            for which, found in (("most", values.amax(dim=2)), ("mean", values))
        },
    }
