"""A plan for all layers: which expert goes into which slot, and whether that is worth the moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from moe_ep.eplb.placement_state import placement_on_host
from moe_ep.eplb.policy.incremental import plan
from moe_ep.eplb.policy.maps import (
    Array,
    experts_moved,
    initial_placement,
    logical_maps,
    rank_loads,
    ranks_with,
    replica_counts,
    slot_loads,
)
from moe_ep.eplb.policy.problem import Problem, check_objective, objective_window
from moe_ep.eplb.policy.refine import refine_plan
from moe_ep.eplb.policy.relabel import groups_apart, renumber_like
from moe_ep.errors import check_flags, check_not_negative
from moe_ep.registry import EPLB_POLICIES

ArrayLike = torch.Tensor | Array
# Kinds of numpy dtypes: booleans, integers, floats.
_REAL = "biuf"
# The relative rounding error of sums in f32.
_ROUNDING = 1e-5
# Times that one call plans; the second seldom finds anything, and hardly ever the third.
_MAX_PLANS = 6


class Placement(NamedTuple):
    """Where the experts are: three int64 CPU tensors.

    Attributes:
        physical_to_logical: `[L, P]`, the expert in each slot, slots in rank order.
        logical_to_physical: `[L, E, max_replicas]`, the slots of each expert, -1 padded.
        logical_replica_count: `[L, E]`.
    """

    physical_to_logical: torch.Tensor
    logical_to_physical: torch.Tensor
    logical_replica_count: torch.Tensor


def rebalance_experts(
    weight: ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    policy: str = "incremental",
    old_physical_to_logical: ArrayLike | None = None,
    window: ArrayLike | None = None,
    *,
    objective: str = "tokens",
    tolerance: float = 0.0098,
    rebalance_below: float = 1.0,
    min_gain: float = 0.0,
    move_cost: float = 0.0,
    refine: bool = True,
) -> Placement:
    """Plans a placement of experts and replicas for the loads of each layer.

    A layer keeps its old placement unless the plan pays: its balancedness is below `rebalance_below`, and the plan
    lowers its maximum rank load by the share `min_gain` and by more than `move_cost` for each expert moved. With a
    `rebalance_below` under 1 / (1 + tolerance) a layer, once planned, must drift for a while before it is touched
    again: hysteresis.

    Args:
        weight: loads of the logical experts `[L, E]`, any real dtype.
        num_replicas: P, slots of all ranks together, a multiple of num_ranks.
        num_groups: groups that the experts divide into; where num_nodes divides it, a group stays on one host.
        policy: a name in `moe_ep.registry.EPLB_POLICIES`.
        old_physical_to_logical: the present placement `[L, P]`; None where nothing is placed and moves are free.
        window: counts of each step `[S, L, E]`. With it "incremental" plans are refined against the variation between
            steps (`moe_ep.eplb.policy.refine`), and layers that still have the initial placement, which knows no load,
            are planned as if nothing were placed.
        objective: what a rank's load is: "tokens", "active_experts" (how many experts have any token, as for decode
            bound by reading weights), or "auto" (the time that both take); but for tokens, loads are taken from the
            window. "auto" without one means tokens.
        tolerance: share above the reachable maximum rank load at which "incremental" stops moving experts.
        rebalance_below: balancedness at and above which a layer stays as it is; 1.0 plans every layer.
        min_gain: least share by which a plan must lower a layer's maximum rank load.
        move_cost: what moving one expert costs, in tokens of the busiest rank over the time that weight covers.
        refine: False leaves the refinement out.

    Raises:
        ValueError: an unknown policy or objective, sizes that do not fit together, loads that are negative or not
            finite, thresholds below zero.
    """
    EPLB_POLICIES.check(policy)
    check_flags(refine=refine)
    check_not_negative(rebalance_below=rebalance_below, min_gain=min_gain, move_cost=move_cost)
    loads = _numbers("weight", weight).astype(np.float64, copy=False)
    steps = None if window is None else _check_window(_numbers("window", window), loads)
    check_objective(objective, steps)
    if steps is not None and objective != "tokens":
        steps = objective_window(objective, steps)
        loads = steps.sum(axis=0, dtype=np.float64)
    old = old_physical_to_logical
    problem = Problem(
        weight=loads,
        num_replicas=num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        old=None if old is None else placement_on_host("old_physical_to_logical", old),
        tolerance=tolerance,
    )
    if steps is not None and refine and policy == "incremental":
        slots = _settled(_refined, problem, steps)
    else:
        of_policy = EPLB_POLICIES.load(policy)
        slots = _settled(lambda part, _: of_policy(part), problem, loads[None])
    if problem.old is not None and (rebalance_below < 1 or min_gain or move_cost):
        pays = _pays(problem, problem.old, slots, rebalance_below, min_gain, move_cost)
        slots = np.where(pays[:, None], slots, problem.old)
    table, counts = logical_maps(slots, loads.shape[1])
    return Placement(torch.from_numpy(slots), torch.from_numpy(table), torch.from_numpy(counts))


def _settled(plan_once: Callable[[Problem, Array], Array], problem: Problem, steps: Array) -> Array:
    """A plan that planning again for the same loads `[S, L, E]` leaves as it is: each layer is planned from the last
    plan until that gains nothing."""
    slots = (plan_once(problem, steps) if problem.old is None else problem.old).copy()
    layers = np.arange(len(slots))
    for _ in range(_MAX_PLANS):
        present, counts = slots[layers], steps[:, layers]
        again = replace(problem, weight=problem.weight[layers], old=present)
        planned = plan_once(again, counts)
        gains = _gains(again, planned, counts)
        layers = layers[gains]
        if not layers.size:
            break
        slots[layers] = planned[gains]
    return slots


def _gains(problem: Problem, new: Array, steps: Array) -> Array:
    """Layers, bool `[L]`, that a plan improves over `problem.old`: groups of experts come to one host, copies of an
    expert to more ranks, the busiest ranks of the steps get less to do, or, within the tolerance of that, the
    heaviest replica does, or copies join more ranks."""
    old, num_ranks = problem.old, problem.num_ranks
    changed = np.zeros(len(new), dtype=bool) if old is None else (old != new).any(axis=1)
    if old is None or not changed.any():
        return changed
    before, after = _peaks(steps, old, num_ranks), _peaks(steps, new, num_ranks)
    gains = after < before * (1 - _ROUNDING)
    if problem.by_host:
        gains |= groups_apart(problem)
    # The spread of copies takes longest to find.
    rest = np.flatnonzero(changed & ~gains)
    if rest.size:
        weight, pair = problem.weight[rest], (old[rest], new[rest])
        heaviest, lighter = (slot_loads(weight, slots).max(axis=1) for slots in pair)
        (held, joined), (holds, joins) = (_spread(slots, weight.shape[1], num_ranks) for slots in pair)
        gains[rest] = (lighter < heaviest * (1 - _ROUNDING)) | (joins > joined)
        gains[rest] &= after[rest] <= before[rest] * (1 + problem.tolerance)
        gains[rest] |= holds > held
    return changed & gains


def _spread(slots: Array, num_experts: int, num_ranks: int) -> tuple[Array, Array]:
    """How many pairs of expert and rank a placement `[L, P]` has, and how many pairs of ranks copies of an expert join:
    int64 `[L]` each."""
    held = ranks_with(slots, num_experts, num_ranks)
    return np.count_nonzero(held, axis=(1, 2)), np.count_nonzero(held @ held.transpose(0, 2, 1), axis=(1, 2))


def _numpy(value: ArrayLike) -> Array:
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()  # numpy has no bf16


def _numbers(name: str, value: ArrayLike) -> Array:
    try:
        found = _numpy(value)
    except (ValueError, TypeError):  # rows of different lengths, or what numpy has no form for
        found = np.asarray(None)
    if found.dtype.kind not in _REAL:
        raise ValueError(f"{name} has dtype {found.dtype}; it must be an array of real numbers")
    return found


def _check_window(window: Array, weight: Array) -> Array:
    if window.ndim != 3 or window.shape[1:] != weight.shape or window.shape[0] < 1:
        raise ValueError(f"window has shape {window.shape}; it must be (S, L, E) with (L, E) = {weight.shape}")
    if not np.isfinite(window).all() or window.min(initial=0) < 0:
        raise ValueError("window holds a count that is negative or not finite; counts must be at least 0")
    return window.astype(np.float32)


def _refined(problem: Problem, steps: Array) -> Array:
    """An incremental plan `[L, P]`, refined against the counts of each step `[S, L, E]`.

    Of layers that still have the initial placement nothing is kept for its own sake: only the ranks are numbered so
    that experts stay. Those moves are made once, and not where every step's ranks are level already and groups of
    experts are on the hosts that they are to be on.
    """
    weight, old = problem.weight, problem.old
    slots = np.empty((weight.shape[0], problem.num_replicas), dtype=np.int64)
    unplaced = np.ones(weight.shape[0], dtype=bool)
    if old is not None:
        unplaced = (old == initial_placement(1, weight.shape[1], problem.num_replicas)).all(axis=1)
    for layers, present in ((unplaced, None), (~unplaced, old)):
        if layers.any():
            part = replace(problem, weight=weight[layers], old=None if present is None else present[layers])
            slots[layers] = refine_plan(part, plan(part), steps[:, layers])
    if old is not None and unplaced.any():
        present, first = old[unplaced], renumber_like(old[unplaced], slots[unplaced], problem)
        level = steps[:, unplaced].sum(axis=(0, 2), dtype=np.float64) / problem.num_ranks
        moves = _peaks(steps[:, unplaced], present, problem.num_ranks) > level * (1 + _ROUNDING)
        if problem.by_host:
            moves |= groups_apart(replace(problem, weight=weight[unplaced], old=present))
        slots[unplaced] = np.where(moves[:, None], first, present)
    return slots


def _peaks(steps: Array, slots: Array, num_ranks: int) -> Array:
    """The load of each step's busiest rank, summed over the steps `[S, L, E]`, for placements `[L, P]`: `[L]`."""
    counts = replica_counts(slots, steps.shape[2])
    loads = [(steps[:, layer] / counts[layer])[:, row] for layer, row in enumerate(slots)]
    return np.array([load.reshape(len(load), num_ranks, -1).sum(axis=2).max(axis=1).sum() for load in loads])


def _pays(problem: Problem, old: Array, new: Array, rebalance_below: float, min_gain: float, move_cost: float) -> Array:
    """Which layers gain more by the plan than it costs, bool `[L]`."""
    loads = rank_loads(problem.weight, old, problem.num_ranks)
    before = loads.max(axis=1)
    after = rank_loads(problem.weight, new, problem.num_ranks).max(axis=1)
    cost = move_cost * experts_moved(old, new, problem.num_ranks)
    uneven = loads.mean(axis=1) < rebalance_below * before
    return uneven & (before - after >= min_gain * before) & (before - after > cost)
