"""Simulates policies and replica rules on a routing trace, at any EP size, without a GPU.

A plan is made on the first steps of a trace and used on the rest, as it happens while serving: a plan that only fits
what it has seen shows it here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moe_ep.eplb.batch_plan import one_replica, plan_batch
from moe_ep.eplb.batch_rounds import place_rows
from moe_ep.eplb.mapping import map_tiles, rows_per_tile
from moe_ep.eplb.policy.maps import Array, experts_moved, initial_placement, logical_maps
from moe_ep.eplb.rebalance import rebalance_experts
from moe_ep.eplb.recorder import balancedness
from moe_ep.eplb.trace import RoutingTrace
from moe_ep.errors import check_at_least, check_not_negative, check_number, one_of

# ==== Replica rules ====
#
# Rules that choose a replica for each token of an expert, for simulations on the CPU.
#
# "levelled" is the one that serves (`moe_ep.eplb.mapping`). A rule gets the ids of a step `[T, top_k]` of all ranks, -1
# for none, the rank of each token `[T]`, rising, and a layer's `Layout`. It gives the slot of each choice
# `[T, top_k]`, -1 for none. Rules that remember something between steps are objects made anew for each layer.

_ROW_STEP, _EXPERT_STEP, _RANK_STEP, _MASK = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, (1 << 32) - 1


@dataclass(frozen=True)
class Layout:
    """One layer's placement: the expert in each slot `[P]`, the slots of each expert `[E, max_replicas]`, how many
    there are `[E]`, slots a rank."""

    slots: Array
    table: Array
    counts: Array
    width: int
    num_ranks: int

    @classmethod
    def of(cls, slots: Array, num_experts: int, num_ranks: int) -> Layout:
        """The layout of a layer's placement `[P]`."""
        table, counts = logical_maps(slots[None], num_experts)
        return cls(slots, table[0], counts[0], slots.size // num_ranks, num_ranks)


Rule = Callable[[Array, Array, Layout], Array]


def first_row(rank: Array) -> Array:
    """Each token's row on its own rank; tokens of a rank are neighbours."""
    return np.arange(rank.size) - np.searchsorted(rank, rank)


def hashed(ids: Array, rank: Array, layout: Layout) -> Array:
    """A hash of row, expert and rank: of any run of rows each replica gets its share."""
    seed = first_row(rank)[:, None] * _ROW_STEP + ids * _EXPERT_STEP + rank[:, None] * _RANK_STEP
    replica = ((seed & _MASK) * layout.counts[ids]) >> 32
    return np.where(ids >= 0, layout.table[ids, replica], -1)


class OneReplica:
    """One replica of each expert for all tokens: those with which the most experts of a rank are fewest.

    With knows_batch only experts that any rank's tokens have in this batch count, which ranks would have to ask for.
    """

    def __init__(self, knows_batch: bool) -> None:
        self.knows_batch = knows_batch
        self.slots: Array | None = None

    def __call__(self, ids: Array, rank: Array, layout: Layout) -> Array:
        if self.knows_batch or self.slots is None:
            active = np.bincount(ids[ids >= 0], minlength=layout.counts.size) if self.knows_batch else None
            self.slots = one_replica(layout.slots, layout.counts.size, layout.num_ranks, active)
        return np.where(ids >= 0, self.slots[ids], -1)


def levelled(ids: Array, rank: Array, layout: Layout) -> Array:
    """Each rank levels what it sends, as `eplb_map_to_physical_and_record` does."""
    num_rows, top_k = rows_per_tile(ids.shape[1]), ids.shape[1]
    row = first_row(rank)
    # Tiles in order of rank: a rank's rows begin a tile of their own.
    key = rank * (len(rank) // num_rows + 1) + row // num_rows
    number, tile = np.unique(key, return_inverse=True)
    tiles = np.full((number.size, num_rows, top_k), -1, dtype=np.int64)
    tiles[tile, row % num_rows] = ids
    first = np.searchsorted(tile, np.arange(number.size))
    batch = torch.from_numpy(tiles).flatten(1)
    physical, _ = map_tiles(
        batch,
        batch >= 0,
        torch.from_numpy(layout.table),
        torch.from_numpy(layout.counts),
        torch.from_numpy(rank[first].astype(np.int64)),
        torch.from_numpy((row // num_rows)[first]),
        layout.width,
        layout.width * layout.num_ranks,
    )
    return physical.view(tiles.shape).numpy()[tile, row % num_rows]


# (expert, from rank, to rank, scratch slot)
Copy = tuple[int, int, int, int]


def by_counts(
    ids: Array, rank: Array, layout: Layout, spare_slots: int = 0, copy_cost_rows: float = 0.0
) -> tuple[Array, list[Copy]]:
    """Divides a step's rows by the counts of all ranks, which ranks would have to exchange first (`plan_batch`).

    Returns:
        The slot of each choice, where each rank's scratch slots follow its other ones; and the copies made into them.
    """
    on_host, slots = torch.from_numpy(ids), torch.from_numpy(layout.slots)
    token, place = np.nonzero(ids >= 0)
    num_experts = layout.counts.size
    key = rank[token] * num_experts + ids[token, place]
    counts = torch.from_numpy(np.bincount(key, minlength=layout.num_ranks * num_experts))
    plan = plan_batch(counts.view(-1, num_experts), slots, layout.num_ranks, spare_slots, copy_cost_rows)
    begins = np.searchsorted(rank, np.arange(layout.num_ranks + 1)).tolist()
    chosen = [
        place_rows(on_host[begin:end], plan.of_rank(source, slots, spare_slots))
        for source, (begin, end) in enumerate(itertools.pairwise(begins))
    ]
    return torch.cat(chosen).numpy(), plan.copies


RULES: dict[str, Callable[[], Rule]] = {
    "levelled": lambda: levelled,
    "hash-rank": lambda: hashed,
    "known-counts": lambda: lambda ids, rank, layout: by_counts(ids, rank, layout)[0],
    "one-replica": lambda: OneReplica(knows_batch=False),
    "known-active": lambda: OneReplica(knows_batch=True),
}

LINEAR = "linear"
# Beside the rules: the batch's counts are known, and experts are copied for it (`moe_ep.eplb.batch_plan`).
PER_BATCH = "per-batch"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The setting of a simulation.

    Attributes:
        ep_size: ranks; the tokens of a step are dealt to them anew, in order, as many each.
        num_redundant: redundant slots of all ranks together.
        num_groups, num_nodes, objective: of `rebalance_experts`.
        planned_on: share of the steps that a plan is made from; the rest is measured.
        spare_slots, copy_cost_rows: of `plan_batch`, for "per-batch".

    Raises:
        ValueError: a number out of its range.
        TypeError: a count that is not a whole number, or a share that is no number.
    """

    ep_size: int
    num_redundant: int = 0
    num_groups: int = 1
    num_nodes: int = 1
    objective: str = "tokens"
    planned_on: float = 0.5
    spare_slots: int = 2
    copy_cost_rows: float = 0.0

    def __post_init__(self) -> None:
        check_at_least(1, ep_size=self.ep_size)
        check_at_least(0, num_redundant=self.num_redundant, spare_slots=self.spare_slots)
        check_not_negative(copy_cost_rows=self.copy_cost_rows)
        check_number(planned_on=self.planned_on)
        if not 0 < self.planned_on < 1:
            raise ValueError(f"planned_on is {self.planned_on:g}; it must be above 0 and below 1")

    def num_slots(self, num_experts: int) -> int:
        """P; ValueError where the slots do not divide over the ranks, or are more than these can use."""
        num_slots = num_experts + self.num_redundant
        if num_slots % self.ep_size:
            enough = self.num_redundant + -num_slots % self.ep_size
            raise ValueError(
                f"num_experts ({num_experts}) + redundant ({self.num_redundant}) must be a multiple of ep_size "
                f"({self.ep_size}); pass {enough} redundant experts"
            )
        if self.num_redundant > (most := num_experts * self.ep_size):
            raise ValueError(
                f"there are {self.num_redundant} redundant experts; with {num_experts} experts on {self.ep_size} ranks "
                f"there may be {most} at most, which is more than every rank needs to hold all of them"
            )
        return num_slots

    def split(self, trace: RoutingTrace) -> int:
        """Steps that plans are made from; ValueError where a part is empty."""
        seen = int(trace.num_steps * self.planned_on)
        if not 0 < seen < trace.num_steps:
            raise ValueError(
                f"the trace has {trace.num_steps} steps; planning on {self.planned_on:g} leaves nothing to plan on "
                f"or nothing to measure; give more steps"
            )
        return seen


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a placement with a replica rule did on the steps that were not planned on.

    Attributes:
        counts: tokens of each rank's slots, int64 `[S, L, R, slots]`, scratch slots behind the others.
        stays: share of choices that stay on the rank of their token.
        copies: (expert, from, to, slot) of each copy made for one batch, by step and layer.
    """

    counts: Array
    stays: float
    copies: dict[tuple[int, int], list[Copy]]

    @functools.cached_property
    def loads(self) -> Array:
        """Tokens of each rank, int64 `[S, L, R]`."""
        return np.sum(self.counts, axis=3)

    @property
    def slot_loads(self) -> Array:
        """Tokens of each slot, `[L, P]`."""
        return np.sum(self.counts, axis=0).reshape(self.counts.shape[1], -1)

    @functools.cached_property
    def active(self) -> Array:
        """Slots of a rank that got any token, `[S, L, R]`."""
        return np.count_nonzero(self.counts, axis=3)

    @property
    def balancedness(self) -> float:
        """Sum of mean rank loads over sum of maximum ones, over steps and layers."""
        return balancedness(torch.from_numpy(self.loads).flatten(0, 1))

    @property
    def layer_balancedness(self) -> list[float]:
        return [balancedness(loads) for loads in torch.from_numpy(self.loads).unbind(dim=1)]

    @property
    def peaks(self) -> Array:
        """The maximum over the mean tokens of a rank, of each step and layer that has any."""
        mean = self.loads.mean(axis=2)
        busy = mean > 0
        return np.divide(self.loads.max(axis=2)[busy], mean[busy])

    @property
    def peak(self) -> float:
        """The mean of the `peaks`."""
        return float(self.peaks.mean()) if self.peaks.size else 1.0

    @property
    def copies_per_layer(self) -> float:
        """Copies of one layer in one step, over all ranks."""
        return sum(map(len, self.copies.values())) / max(self.loads.shape[0] * self.loads.shape[1], 1)

    @property
    def active_experts(self) -> float:
        """Active experts of the rank with most, on average over steps and layers."""
        return float(self.active.max(axis=2).mean())


def place(trace: RoutingTrace, scene: Scene, policy: str, num_steps: int | None = None) -> Array:
    """The placement `[L, P]` of a policy, or "linear", planned on the first steps: the scene's share, or num_steps."""
    num_slots = scene.num_slots(trace.num_experts)
    start = initial_placement(trace.num_layers, trace.num_experts, num_slots)
    if policy == LINEAR:
        return start
    window = trace.counts()[: scene.split(trace) if num_steps is None else num_steps]
    return rebalance_experts(
        window.sum(axis=0),
        num_slots,
        scene.num_groups,
        scene.num_nodes,
        scene.ep_size,
        policy,
        old_physical_to_logical=start,
        window=window,
        objective=scene.objective,
    ).physical_to_logical.numpy()


def measure(trace: RoutingTrace, scene: Scene, slots: Array, rule: str) -> Outcome:
    """Serves the other steps with a placement `[L, P]` and a rule of `moe_ep.eplb.simulate`, or "per-batch"; ValueError
    for any other rule."""
    if rule not in (*RULES, PER_BATCH):
        raise ValueError(one_of("rules", rule, (*RULES, PER_BATCH)))
    seen, num_ranks = scene.split(trace), scene.ep_size
    scratch = scene.spare_slots if rule == PER_BATCH else 0
    width = slots.shape[1] // num_ranks + scratch
    counts = np.zeros((trace.num_steps - seen, trace.num_layers, num_ranks, width), dtype=np.int64)
    stays = 0
    copies: dict[tuple[int, int], list[Copy]] = {}
    order = np.lexsort((trace.rank, trace.step, trace.layer))
    key = trace.layer[order].astype(np.int64) * trace.num_steps + trace.step[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    rules = {layer: RULES[rule]() for layer in range(trace.num_layers) if rule != PER_BATCH}
    layouts = [Layout.of(row, trace.num_experts, num_ranks) for row in slots]
    for part in np.split(order, starts[1:]):
        layer, step = int(trace.layer[part[0]]), int(trace.step[part[0]])
        if step < seen:
            continue
        rank = np.arange(part.size) * num_ranks // part.size
        ids, at = trace.ids[part].astype(np.int64), (step - seen, layer)
        if rule == PER_BATCH:
            chosen, copies[at] = by_counts(ids, rank, layouts[layer], scratch, scene.copy_cost_rows)
        else:
            chosen = rules[layer](ids, rank, layouts[layer])
        valid = chosen >= 0
        counts[at] = np.bincount(chosen[valid], minlength=num_ranks * width).reshape(num_ranks, width)
        stays += int((valid & (chosen // width == rank[:, None])).sum())
    return Outcome(counts=counts, stays=stays / max(int(counts.sum()), 1), copies=copies)


def compare(
    trace: RoutingTrace,
    scene: Scene,
    policies: list[str],
    rules: list[str],
    expert_bytes: float | None = None,
    layer_us: Callable[[Outcome], float] | None = None,
) -> Iterator[tuple[dict[str, object], Outcome]]:
    """A row for each policy and rule, and what it was made from; "linear" is the placement before any plan.

    Args:
        expert_bytes: of one expert; with it a row says how many bytes are moved by plans and copied for batches.
        layer_us: microseconds of a layer on average; with it a row says them.

    Raises:
        ValueError: unknown names, or a scene that does not fit the trace.
    """
    start = place(trace, scene, LINEAR)
    for policy in policies:
        slots = place(trace, scene, policy)
        moved = int(experts_moved(start, slots, scene.ep_size).sum())
        for rule in rules:
            outcome = measure(trace, scene, slots, rule)
            copies = outcome.copies_per_layer
            row: dict[str, object] = {
                "policy": policy,
                "rule": rule,
                "balancedness": round(outcome.balancedness, 4),
                "max / mean tokens": round(outcome.peak, 3),
                "active experts": round(outcome.active_experts, 1),
                "stays on its rank %": round(100 * outcome.stays, 1),
                "experts moved": moved,
                "copies": round(copies, 2),
            }
            if expert_bytes is not None:
                row |= {
                    "GB moved": round(moved * expert_bytes / 1e9, 2),
                    "MB copied": round(copies * expert_bytes / 1e6, 1),
                }
            if layer_us is not None:
                row["us"] = round(layer_us(outcome), 1)
            yield row, outcome


def zipf_trace(
    *, num_layers: int, num_experts: int, top_k: int, exponent: float, num_steps: int, num_tokens: int, seed: int
) -> RoutingTrace:
    """Choices without replacement by Zipf's law, each layer's experts in an order of its own; steps are alike, of
    num_tokens of all ranks together."""
    rng = np.random.default_rng(seed)
    # The largest first: where it does not fit, nothing has been filled.
    ids = np.empty((num_layers, num_steps, num_tokens, top_k), dtype=np.int32)
    steps, layers = np.arange(num_steps, dtype=np.int32), np.arange(num_layers, dtype=np.int32)
    for of_layer in ids:
        logits = -exponent * np.log(rng.permutation(num_experts) + 1.0)
        for of_step in of_layer:
            noisy = logits + rng.gumbel(size=(num_tokens, num_experts))
            chosen = np.argpartition(-noisy, top_k - 1, axis=1) if top_k < num_experts else noisy.argsort()
            of_step[:] = chosen[:, :top_k]
    return RoutingTrace(
        ids=ids.reshape(-1, top_k),
        layer=np.repeat(layers, num_steps * num_tokens),
        step=np.tile(np.repeat(steps, num_tokens), num_layers),
        rank=np.zeros(num_layers * num_steps * num_tokens, dtype=np.int32),
        num_experts=num_experts,
        model=f"zipf:{exponent:g}",
    )
