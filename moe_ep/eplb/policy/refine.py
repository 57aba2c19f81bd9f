"""Exchanges that even out every step of a window, so that experts which peak together do not share a rank.

A step waits for its busiest rank, and which rank that is changes from step to step. A plan on mean loads evens out
ranks over the window and leaves each step uneven. This search minimises the sum over steps and ranks of the squared
rank load: that punishes high maxima, generalises to later steps better than the maxima themselves (there are few of
them to learn from), and gives the exact gain of an exchange from products of the experts' load vectors alone. With u
an expert's loads over the steps divided by its replicas, v the rank's loads over the steps, exchanging p on rank i for
q on rank j changes the sum by

    -2 (v_i - v_j) . (u_p - u_q) + 2 |u_p - u_q|**2.

Ranks meet in pairs, every pair once a tournament; each pair of a round makes its best exchange if it helps. In the end
copies of experts are placed so that batches can be levelled (`moe_ep.eplb.policy.join`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_ep.eplb.policy.join import Joints
from moe_ep.eplb.policy.maps import keep_slots, replica_counts
from moe_ep.eplb.policy.problem import Problem

Array = np.ndarray

# Layers worked on together: their products of load vectors should stay in cache.
_LAYERS = 16


@dataclass(frozen=True, kw_only=True)
class Search:
    """How long the search goes on.

    Attributes:
        tournaments: times that every two ranks meet, at most.
        least_gain: what an exchange must win, as a share of a mean rank's sum of squares; keeps down moves, and
            exchanges that fit noise.
    """

    tournaments: int = 3
    least_gain: float = 3e-5


def refine_plan(problem: Problem, slots: Array, window: Array, search: Search | None = None) -> Array:
    """Improves a plan `[L, P]` against the counts of each step, exchange by exchange.

    The result depends on its arguments alone, so ranks that plan for themselves agree.

    Args:
        problem: what was planned; exchanges stay within a host where it is by hosts.
        slots: the plan, int64 `[L, P]`; its replica counts are kept.
        window: counts of each step, float32 `[S, L, E]`.

    Returns:
        The better plan, int64 `[L, P]`; experts that stay on a rank of the present placement keep their slots.
    """
    search = search or Search()
    num_ranks = problem.num_ranks
    refined = slots.copy()
    for at in range(0, slots.shape[0], _LAYERS):
        part = slice(at, at + _LAYERS)
        _refine_layers(problem, refined[part], window[:, part], search)
    return keep_slots(slots if problem.old is None else problem.old, refined, num_ranks)


def _refine_layers(problem: Problem, slots: Array, window: Array, search: Search) -> None:
    """Exchanges slots `[L, P]` in place."""
    layers = Layers(slots, window, problem.num_ranks)
    least = search.least_gain * window.shape[0]
    per_host = problem.num_ranks // problem.num_nodes if problem.by_host else problem.num_ranks
    for _ in range(search.tournaments):
        active = layers.active
        for first, second in meetings(problem.num_ranks):
            together = first // per_host == second // per_host
            if together.any():
                layers.meet(active, first[together], second[together], least)
        layers.active = np.flatnonzero(layers.exchanged)
        layers.exchanged[:] = False
        if layers.active.size == 0:
            break
    if layers.replicated:
        Joints(layers, per_host).improve(least)


def meetings(num_ranks: int) -> Iterator[tuple[Array, Array]]:
    """Rounds of disjoint pairs in which every two ranks meet once: the circle method of round-robin tournaments."""
    circle = np.arange(num_ranks + num_ranks % 2)
    half = circle.size // 2
    for _ in range(circle.size - 1):
        first, second = circle[:half], circle[: half - 1 : -1]
        both = (first < num_ranks) & (second < num_ranks)
        yield first[both], second[both]
        circle[1:] = np.roll(circle[1:], 1)


class Layers:
    """Layers being refined together. S steps, R ranks of W slots, A pairs of ranks. Loads are in those of a mean rank.

    Attributes:
        slots: int64 `[L, R, W]`, a view of the plan.
        counts: int64 `[L, E]`, replicas.
        mean: float32 `[L, E]`, an expert's load over its replicas, the mean of all steps.
        square_of_mean: float32 `[L]`, the mean rank's load, squared, the sum of all steps.
        product: float32 `[L, E, E]`, u_e . u_f of two experts.
        along: float32 `[L, R, E]`, v_r . u_e of a rank and an expert.
        active: the layers that the last tournament still changed.
        exchanged: bool `[L]`, the layers that this tournament has changed.
    """

    def __init__(self, slots: Array, window: Array, num_ranks: int) -> None:
        num_layers, num_experts = slots.shape[0], window.shape[2]
        self.slots = slots.reshape(num_layers, num_ranks, -1)
        self.counts = replica_counts(slots, num_experts)
        self.replicated = slots.shape[1] > num_experts
        mean_rank = window.sum(axis=2) / np.float32(num_ranks)
        # Scaled so that a step's mean rank load is one on average.
        scale = np.maximum(mean_rank.mean(axis=0), np.float32(1e-30))
        self.mean = window.mean(axis=0) / scale[:, None]
        self.square_of_mean = ((mean_rank / scale) ** 2).sum(axis=0)
        unit = window.transpose(1, 2, 0) / (self.counts.astype(np.float32) * scale[:, None])[:, :, None]
        self.product = unit @ unit.transpose(0, 2, 1)
        self.square = np.ascontiguousarray(np.diagonal(self.product, axis1=1, axis2=2))
        held = np.zeros((num_layers, num_ranks, num_experts), dtype=np.float32)
        np.add.at(held, (np.arange(num_layers)[:, None, None], np.arange(num_ranks)[:, None], self.slots), 1.0)
        self.along = held @ self.product
        self.active = np.arange(num_layers)
        self.exchanged = np.zeros(num_layers, dtype=bool)

    def meet(self, active: Array, first: Array, second: Array, least: float) -> None:
        """Makes the best exchange between the ranks of each pair, in each active layer, where it wins enough."""
        num_ranks, width = self.slots.shape[1:]
        num_experts = self.square.shape[1]
        layer = active[:, None, None]
        here, there = self.slots[active[:, None], first], self.slots[active[:, None], second]  # [L, A, W]
        along, square = self.along.reshape(-1), self.square.reshape(-1)
        row_i, row_j = (layer * num_ranks + rank[:, None] for rank in (first, second))
        at_i, at_j = row_i * num_experts, row_j * num_experts
        base = layer * num_experts
        leave = along[at_i + here] - along[at_j + here] - square[base + here]
        arrive = along[at_j + there] - along[at_i + there] - square[base + there]
        pair = ((base + here) * num_experts)[..., None] + there[:, :, None]
        gain = self.product.reshape(-1)[pair]
        gain *= 2
        gain += leave[..., None]
        gain += arrive[:, :, None]
        if self.replicated:
            # An expert that the other rank holds too must stay, or that rank would hold it twice.
            same = here[..., None] == there[:, :, None]
            if same.any():
                gain[same.any(axis=3)[..., None] | same.any(axis=2)[:, :, None]] = -np.inf
        gain = gain.reshape(active.size, first.size, -1)
        best = gain.argmax(axis=2)
        row, meeting = np.nonzero(np.take_along_axis(gain, best[..., None], axis=2)[..., 0] > least)
        if row.size == 0:
            return
        slot_i, slot_j = np.divmod(best[row, meeting], width)
        self.exchange(active[row], first[meeting], slot_i, second[meeting], slot_j)

    def gain(self, layer: Array, rank: Array, expert: Array) -> Array:
        """Half of what the sum of squares falls by when an expert of a rank is exchanged for what lies in each slot of
        all ranks, float32 `[n, R, W]`, for n layers with a rank and an expert each."""
        there = self.slots[layer]
        each, here = layer[:, None, None], expert[:, None, None]
        leave = self.along[layer, rank, expert][:, None] - self.along[layer, :, expert]
        arrive = np.take_along_axis(self.along[layer], there, axis=2) - self.along[each, rank[:, None, None], there]
        both = self.square[each, here] + self.square[each, there] - 2 * self.product[each, here, there]
        result: Array = leave[:, :, None] + arrive - both
        return result

    def exchange(self, layer: Array, rank_i: Array, slot_i: Array, rank_j: Array, slot_j: Array) -> None:
        """Exchanges the experts in two slots of each listed layer; no rank may be listed twice."""
        goes, comes = self.slots[layer, rank_i, slot_i], self.slots[layer, rank_j, slot_j]
        change = self.product[layer, goes] - self.product[layer, comes]
        self.along[layer, rank_i] -= change
        self.along[layer, rank_j] += change
        self.slots[layer, rank_i, slot_i], self.slots[layer, rank_j, slot_j] = comes, goes
        self.exchanged[layer] = True
