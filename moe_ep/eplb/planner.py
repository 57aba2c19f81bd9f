"""From the counts of a window to a load report and, where it pays, a plan."""

from __future__ import annotations

import numpy as np
import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import LoadReport
from moe_ep.eplb.metrics import balancedness
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.rebalance import rebalance_experts


def measure_load(counts: torch.Tensor, num_ranks: int, step: int) -> LoadReport:
    """What a window says.

    Args:
        counts: int64 `[S, L, P]` of physical experts, summed over ranks, slots in rank order.
    """
    slots = counts.unflatten(2, (num_ranks, -1))
    per_rank = slots.sum(dim=3)
    busiest = per_rank.amax(dim=2).double()
    active = (slots > 0).sum(dim=3).amax(dim=2).double()
    return LoadReport(
        step=step,
        num_steps=counts.size(0),
        balancedness=balancedness(per_rank.flatten(0, 1)),
        layer_balancedness=tuple(balancedness(per_rank[:, layer]) for layer in range(counts.size(1))),
        max_tokens=float(busiest.mean()) if busiest.numel() else 0.0,
        mean_tokens=float(per_rank.double().mean()) if per_rank.numel() else 0.0,
        active_experts=float(active.mean()) if active.numel() else 0.0,
    )


def logical_counts(counts: torch.Tensor, placement: Array, num_experts: int) -> torch.Tensor:
    """Counts of logical experts int64 `[S, L, E]`, from those of physical ones `[S, L, P]` and their placement."""
    result = counts.new_zeros(*counts.shape[:2], num_experts)
    return result.scatter_add_(2, torch.from_numpy(placement).expand_as(counts), counts)


def make_plan(
    counts: torch.Tensor, placement: Array, num_experts: int, num_ranks: int, config: EplbConfig
) -> tuple[Array | None, str]:
    """The placement to go to from the counts of a window int64 `[S, L, P]`: int64 `[L, P]`, or None and why not."""
    load = measure_load(counts, num_ranks, 0)
    if load.mean_tokens == 0:
        return None, "no tokens in the window"
    # For other objectives only the planner can tell whether the layers are even.
    if config.objective == "tokens" and load.balancedness >= config.rebalance_below:
        return None, f"balancedness {load.balancedness:.3f} is not below {config.rebalance_below:g}"
    window = logical_counts(counts, placement, num_experts)
    plan = rebalance_experts(
        window.sum(dim=0),
        placement.shape[1],
        config.num_groups,
        config.num_nodes,
        num_ranks,
        config.policy,
        old_physical_to_logical=placement,
        window=window,
        objective=config.objective,
        rebalance_below=config.rebalance_below,
        min_gain=config.min_gain,
        move_cost=config.move_cost,
        refine=config.refine,
    ).physical_to_logical.numpy()
    if np.array_equal(plan, placement):
        return None, "no layer gains enough"
    return plan, ""
