"""Exchanges that lower the mean over steps of the maximum rank load, so that experts which peak together are apart.

A step waits for its busiest rank, and which rank that is changes from step to step. A plan on mean loads evens out
ranks over the window and leaves each step uneven. This search starts from such a plan and exchanges slots of a rank
that is often the busiest. The first-order effect of every exchange comes from one matrix product: moving expert e from
rank i to j changes the mean maximum by about sum over steps of its load times (w[j] - w[i]), w a softmax of the rank
loads of the step. The most promising exchanges are then evaluated exactly, and the best is made if it helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_ep.eplb.policy.maps import keep_slots, replica_counts
from moe_ep.eplb.policy.problem import Problem

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Search:
    """How long the search goes on.

    Attributes:
        rounds: exchanges tried for each layer, at most.
        patience: ranks of a layer that are tried in vain before the layer is left as it is.
        candidates: exchanges of a round that are evaluated exactly.
        least_gain: share of the mean maximum that an exchange must win; keeps moves, and fitting noise, down.
        sharpness: of the softmax over rank loads in units of the mean load.
    """

    rounds: int = 160
    patience: int = 6
    candidates: int = 24
    least_gain: float = 2e-4
    sharpness: float = 20.0


class _Layers:
    """The layers still being searched, all arrays with them first: S steps, R ranks of W slots."""

    def __init__(self, slots: Array, window: Array, num_ranks: int, search: Search) -> None:
        num_layers, num_slots = slots.shape
        num_experts = window.shape[2]
        counts = replica_counts(slots, num_experts)
        self.search = search
        self.num_ranks, self.width = num_ranks, num_slots // num_ranks
        self.slots = slots.copy()
        unit = window.transpose(1, 2, 0) / counts[:, :, None].astype(np.float32)
        # Scaled so that a step's mean rank load is one on average.
        unit /= np.maximum(window.sum(axis=2).mean(axis=0) / num_ranks, 1e-30)[:, None, None]
        self.unit = np.ascontiguousarray(unit, dtype=np.float32)
        each = np.take_along_axis(self.unit, self.slots[:, :, None], axis=1)
        self.loads = each.reshape(num_layers, num_ranks, self.width, -1).sum(axis=2)
        self.host = np.zeros(num_ranks, dtype=np.int64)
        self.failed = np.zeros(num_layers, dtype=np.int64)
        self.rank_of = np.arange(num_slots) // self.width

    def round(self, layers: Array) -> None:
        """Tries the most promising exchanges of one rank in each of these layers, and makes the best if it helps."""
        loads, slots = self.loads[layers], self.slots[layers]
        peak = loads.max(axis=1)
        weight = np.exp((loads - peak[:, None]) * np.float32(self.search.sharpness))
        weight /= weight.sum(axis=1, keepdims=True)
        slope = self.unit[layers] @ weight.transpose(0, 2, 1)  # [L, E, R]
        rank = np.take_along_axis(weight.sum(axis=2).argsort(axis=1)[:, ::-1], self.failed[layers][:, None], axis=1)
        mine, theirs, fits = self._promising(slots, slope, rank)
        best, after = self._evaluate(layers, mine, theirs, fits, peak)
        before = peak.mean(axis=1)
        helps = after < before * np.float32(1 - self.search.least_gain)
        self.failed[layers] = np.where(helps, 0, self.failed[layers] + 1)
        each = np.flatnonzero(helps)
        self._exchange(layers[each], mine[each, best[each]], theirs[each, best[each]])

    def _promising(self, slots: Array, slope: Array, rank: Array) -> tuple[Array, Array, Array]:
        """Exchanges of a slot of `rank` with any other of its host, best first-order gain first.

        Returns:
            The slots of both sides, int64 `[L, M]`, and whether the exchange leaves no rank with two copies.
        """
        num_layers, num_slots = slots.shape
        layer = np.arange(num_layers)[:, None]
        own = rank * self.width + np.arange(self.width)
        expert = np.take_along_axis(slots, own, axis=1)
        home = slope[layer, slots, self.rank_of]
        leave = slope[layer, expert, rank][:, :, None] - slope[layer, expert]  # [L, W, R]
        arrive = home - slope[layer, slots, rank]  # [L, P]
        gain = np.repeat(leave, self.width, axis=2) + arrive[:, None]
        foreign = (self.host[self.rank_of] != self.host[rank]) | (self.rank_of == rank)
        gain[np.broadcast_to(foreign[:, None], gain.shape)] = -np.inf
        flat = gain.reshape(num_layers, -1)
        count = min(self.search.candidates, flat.shape[1])
        chosen = np.argpartition(flat, flat.shape[1] - count, axis=1)[:, flat.shape[1] - count :]
        mine = np.take_along_axis(own, chosen // num_slots, axis=1)
        theirs = chosen % num_slots
        fits = np.isfinite(np.take_along_axis(flat, chosen, axis=1))
        goes, comes = np.take_along_axis(slots, mine, axis=1), np.take_along_axis(slots, theirs, axis=1)
        by_rank = slots.reshape(num_layers, self.num_ranks, self.width)
        fits &= ~(by_rank[layer, self.rank_of[theirs]] == goes[:, :, None]).any(axis=2)
        fits &= ~(expert[:, None] == comes[:, :, None]).any(axis=2)
        return mine, theirs, fits

    def _evaluate(self, layers: Array, mine: Array, theirs: Array, fits: Array, peak: Array) -> tuple[Array, Array]:
        """The best of these exchanges and the mean maximum that it leads to, int64 and float32 `[L]`."""
        loads, slots, unit = self.loads[layers], self.slots[layers], self.unit[layers]
        each = np.arange(layers.size)[:, None]
        delta = unit[each, slots[each, mine]] - unit[each, slots[each, theirs]]  # [L, M, S]
        rank_a, rank_b = self.rank_of[mine], self.rank_of[theirs]
        both = np.maximum(loads[each, rank_a] - delta, loads[each, rank_b] + delta)
        # The maximum of the other ranks is one of the three largest of the step.
        top = np.argsort(loads, axis=1)[:, -3:]
        value = np.take_along_axis(loads, top, axis=1)
        other = np.zeros_like(both)
        for k in range(top.shape[1]):
            taking_part = (top[:, k][:, None] == rank_a[:, :, None]) | (top[:, k][:, None] == rank_b[:, :, None])
            other = np.where(taking_part, other, value[:, k][:, None])
        after = np.maximum(both, other).mean(axis=2)
        after[~fits] = np.inf
        best = after.argmin(axis=1)
        return best, after[each[:, 0], best]

    def _exchange(self, layers: Array, mine: Array, theirs: Array) -> None:
        goes, comes = self.slots[layers, mine], self.slots[layers, theirs]
        delta = self.unit[layers, goes] - self.unit[layers, comes]
        self.loads[layers, self.rank_of[mine]] -= delta
        self.loads[layers, self.rank_of[theirs]] += delta
        self.slots[layers, mine], self.slots[layers, theirs] = comes, goes


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
    if problem.num_ranks == 1 or slots.shape[0] == 0:
        return slots
    layers = _Layers(slots, window, problem.num_ranks, search)
    if problem.by_host:
        layers.host = np.arange(problem.num_ranks) // (problem.num_ranks // problem.num_nodes)
    patience = min(search.patience, problem.num_ranks)
    for _ in range(search.rounds):
        active = np.flatnonzero(layers.failed < patience)
        if active.size == 0:
            break
        layers.round(active)
    return keep_slots(slots if problem.old is None else problem.old, layers.slots, problem.num_ranks)
