"""Exchanges that even out every step of a window, so that experts which peak together do not share a rank.

A step waits for its busiest rank, and which rank that is changes from step to step. A plan on mean loads evens out
ranks over the window and leaves each step uneven. This search minimises the sum over steps and ranks of the squared
rank load: that punishes high maxima, generalises to later steps better than the maxima themselves (there are few of
them to learn from), and gives the exact gain of an exchange from products of the experts' load vectors alone. With u
an expert's loads over the steps divided by its replicas, v the rank's loads over the steps, exchanging p on rank i for
q on rank j changes the sum by

    -2 (v_i - v_j) . (u_p - u_q) + 2 |u_p - u_q|**2.

Ranks meet in pairs, every pair once a tournament; each pair of a round makes its best exchange if it helps. In the end
copies of experts are placed so that batches can be levelled (section Join).

The window is a sample, and the best of a thousand exchanges wins by chance what the next window takes back. The gain is
a sum of products over S steps, and its standard error is about |v_i - v_j| |u_p - u_q| / sqrt(S). An exchange must win
that for each expert that it takes from where it is now: plans from nothing are free to use every hint, and a plan that
is there gives way to better knowledge only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_ep.eplb.policy.maps import Array, keep_slots, replica_counts
from moe_ep.eplb.policy.problem import Problem


class Layers:
    """Layers worked on together. S steps, R ranks of W slots, A pairs of ranks. Loads are in those of a mean rank.

    Attributes:
        slots: int64 `[L, R, W]`, a view of the plan.
        counts: int64 `[L, E]`, replicas.
        mean: float32 `[L, E]`, an expert's load, the mean of all steps; unit_mean is that over its replicas.
        square_of_mean: float32 `[L]`, the mean rank's load, squared, the sum of all steps.
        product: float32 `[L, E, E]`, u_e . u_f of two experts.
        along: float32 `[L, R, E]`, v_r . u_e of a rank and an expert.
        home: float32 `[L, R, E]`, 1 where a rank holds an expert now; None where nothing is placed.
        active: the layers that the last tournament still changed.
        exchanged: bool `[L]`, the layers that this tournament has changed.
    """

    def __init__(self, slots: Array, window: Array, num_ranks: int, old: Array | None, doubt: float) -> None:
        num_layers, num_experts = slots.shape[0], window.shape[2]
        self.num_steps, self.doubt = window.shape[0], doubt
        self.slots = slots.reshape(num_layers, num_ranks, -1)
        self.counts = replica_counts(slots, num_experts)
        self.replicated = slots.shape[1] > num_experts
        mean_rank = window.sum(axis=2) / np.float32(num_ranks)
        # Scaled so that a step's mean rank load is one on average.
        scale = np.maximum(mean_rank.mean(axis=0), np.float32(1e-30))
        self.mean = window.mean(axis=0) / scale[:, None]
        self.unit_mean = (self.mean / self.counts).astype(np.float32)
        self.square_of_mean = ((mean_rank / scale) ** 2).sum(axis=0)
        unit = window.transpose(1, 2, 0) / (self.counts.astype(np.float32) * scale[:, None])[:, :, None]
        self.product = unit @ unit.transpose(0, 2, 1)
        self.square = np.ascontiguousarray(np.diagonal(self.product, axis1=1, axis2=2))
        held = np.zeros((num_layers, num_ranks, num_experts), dtype=np.float32)
        each = np.arange(num_layers)[:, None, None], np.arange(num_ranks)[:, None]
        np.add.at(held, (*each, self.slots), 1.0)
        self.along = held @ self.product
        self.home: Array | None = None
        if old is not None:
            self.home = np.zeros_like(held)
            self.home[(*each, old.reshape(num_layers, num_ranks, -1))] = 1.0
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
        own_i, own_j, across = along[at_i + here], along[at_j + there], along[at_i + there]
        pair = ((base + here) * num_experts)[..., None] + there[:, :, None]
        gain = self.product.reshape(-1)[pair]
        gain *= 2
        differ = square[base + here][..., None] + square[base + there][:, :, None] - gain
        gain = (own_i - along[at_j + here])[..., None] + (own_j - across)[:, :, None] - differ
        if self.home is not None:
            home, unit = self.home.reshape(-1), self.unit_mean.reshape(-1)
            left, reached = home[at_i + here] - home[at_j + here], home[at_j + there] - home[at_i + there]
            mean_i, mean_j = unit[base + here], unit[base + there]
            apart = own_i.sum(axis=2) + own_j.sum(axis=2) - 2 * across.sum(axis=2)
            mean_apart = mean_i.sum(axis=2) - mean_j.sum(axis=2)
            # Most exchanges win nothing anyway.
            row, pair, p, q = at = np.nonzero(gain > least)
            at_p, at_q = (row, pair, p), (row, pair, q)
            gain[at] -= self._doubt(
                left[at_p] + reached[at_q],
                apart[row, pair],
                differ[at],
                mean_apart[row, pair],
                mean_i[at_p] - mean_j[at_q],
            )
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
        there, number = self.slots[layer], np.arange(layer.size)
        each, here, own_rank = layer[:, None, None], expert[:, None, None], rank[:, None, None]
        ranks = np.arange(there.shape[1])[:, None]
        leave = self.along[layer, rank, expert][:, None] - self.along[layer, :, expert]
        own, across = self.along[each, ranks, there], self.along[each, own_rank, there]
        differ = self.square[each, here] + self.square[each, there] - 2 * self.product[each, here, there]
        result: Array = leave[:, :, None] + own - across - differ
        if self.home is not None:
            moved = (self.home[layer, rank, expert][:, None] - self.home[layer, :, expert])[:, :, None]
            moved = moved + self.home[each, ranks, there] - self.home[each, own_rank, there]
            means, squares = self.unit_mean[each, there], own.sum(axis=2)
            by_rank = means.sum(axis=2)
            result -= self._doubt(
                moved,
                (squares[number, rank][:, None] + squares - 2 * across.sum(axis=2))[:, :, None],
                differ,
                (by_rank[number, rank][:, None] - by_rank)[:, :, None],
                self.unit_mean[layer, expert][:, None, None] - means,
            )
        return result

    def _doubt(self, moved: Array, apart: Array, differ: Array, mean_apart: Array, mean_differ: Array) -> Array:
        """The gain that exchanges must have, given the experts that they move from their present ranks.

        Args:
            moved: how many; below zero where they go back.
            apart, differ: |v_i - v_j|**2 of the ranks and |u_p - u_q|**2 of the experts.
            mean_apart, mean_differ: the means over steps of v_i - v_j and u_p - u_q, which are no chance.
        """
        error = apart * differ / self.num_steps - self.num_steps * (mean_apart * mean_differ) ** 2
        result: Array = self.doubt * np.maximum(moved, 0) * np.sqrt(np.maximum(error, 0))
        return result

    def exchange(self, layer: Array, rank_i: Array, slot_i: Array, rank_j: Array, slot_j: Array) -> None:
        """Exchanges the experts in two slots of each listed layer; no rank may be listed twice."""
        goes, comes = self.slots[layer, rank_i, slot_i], self.slots[layer, rank_j, slot_j]
        change = self.product[layer, goes] - self.product[layer, comes]
        self.along[layer, rank_i] -= change
        self.along[layer, rank_j] += change
        self.slots[layer, rank_i, slot_i], self.slots[layer, rank_j, slot_j] = comes, goes
        self.exchanged[layer] = True


# Layers worked on together: their products of load vectors should stay in cache.
_LAYERS = 16
# Times that every two ranks meet, at most.
_TOURNAMENTS = 3
# The least gain of an exchange, as a share of a mean rank's sum of squares.
_LEAST_GAIN = 3e-5


def refine_plan(problem: Problem, slots: Array, window: Array, doubt: float = 1.0) -> Array:
    """Improves a plan `[L, P]` against the counts of each step, exchange by exchange.

    The result depends on its arguments alone, so ranks that plan for themselves agree.

    Args:
        problem: what was planned; exchanges stay within a host where it is by hosts.
        slots: the plan, int64 `[L, P]`; its replica counts are kept.
        window: counts of each step, float32 `[S, L, E]`.
        doubt: standard errors that an exchange must win for each expert that it moves from where it is now.

    Returns:
        The better plan, int64 `[L, P]`; experts that stay on a rank of the present placement keep their slots.
    """
    num_ranks = problem.num_ranks
    refined = slots.copy()
    for at in range(0, slots.shape[0], _LAYERS):
        part = slice(at, at + _LAYERS)
        old = None if problem.old is None else problem.old[part]
        _refine_layers(problem, refined[part], old, window[:, part], doubt)
    return keep_slots(slots if problem.old is None else problem.old, refined, num_ranks)


def _refine_layers(problem: Problem, slots: Array, old: Array | None, window: Array, doubt: float) -> None:
    """Exchanges slots `[L, P]` in place; old is where the experts are now."""
    layers = Layers(slots, window, problem.num_ranks, old, doubt)
    least = _LEAST_GAIN * window.shape[0]
    per_host = problem.num_ranks // problem.num_nodes if problem.by_host else problem.num_ranks
    for _ in range(_TOURNAMENTS):
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


# ==== Join ====
#
# Where copies of experts lie so that batches can be levelled: every rank joined to others, and no two ranks twice.
#
# Tokens are steered only between the copies of their expert. A rank without copies keeps whatever a batch brings it,
# and two experts with copies on the same two ranks join them twice and others not at all. With v the ranks' loads about
# their mean in a step, L the Laplacian of the graph in which an expert of load w with c copies joins each two of its
# ranks by w / c**2, and t how far batches can be steered, levelling leaves about (I + t L)**-1 v. Where the ranks vary
# alike, the expected square of that is, to second order and but for what no exchange changes,
#
#     sum of |v|**2 + 3 t**2 (mean of |v|**2 over ranks) |L|**2,
#
# and |L|**2 is the sum of squares of the ranks' degrees and of what joins each two. Copies are exchanged for experts
# with one copy while that falls.

# t in mean degrees of a rank; these are taken for at least so much of a mean rank's load.
_REACH = 1.0
_LEAST_DEGREE = np.float32(1e-3)
_SWEEPS = 2


class Joints:
    """The graph of each layer, and exchanges that improve it. R ranks of W slots.

    Args:
        layers: whose slots are exchanged.
        ranks_per_host: exchanges stay within so many consecutive ranks.

    Attributes:
        held: bool `[L, E, R]`, which ranks hold an expert.
        edge: float32 `[L, E]`, what a copy of an expert adds between its rank and that of each other copy.
        between: float32 `[L, R, R]`, what joins two ranks.
        degree: float32 `[L, R]`, the sums of that.
        price: float32 `[L]`, of |L|**2 / 2 in sums of squares / 2.
    """

    def __init__(self, layers: Layers, ranks_per_host: int) -> None:
        self.layers, self.host = layers, np.arange(layers.slots.shape[1]) // ranks_per_host
        slots, counts = layers.slots, layers.counts
        num_layers, num_ranks, _ = slots.shape
        each = np.arange(num_layers)[:, None, None]
        self.held = np.zeros((num_layers, counts.shape[1], num_ranks), dtype=bool)
        self.held[each, slots, np.arange(num_ranks)[:, None]] = True
        self.edge = np.where(counts > 1, layers.mean / counts**2, 0).astype(np.float32)
        weighted = self.held * self.edge[:, :, None]
        self.between = self.held.transpose(0, 2, 1).astype(np.float32) @ weighted
        self.between[:, np.arange(num_ranks), np.arange(num_ranks)] = 0
        self.degree = self.between.sum(axis=2)
        own = np.take_along_axis(layers.along, slots, axis=2).sum(axis=(1, 2))
        variance = np.maximum(own / num_ranks - layers.square_of_mean, 0)
        reach = _REACH / np.maximum(self.degree.mean(axis=1), _LEAST_DEGREE)
        self.price = 3 * reach**2 * variance

    def improve(self, least: float) -> None:
        """Exchanges copies for experts with one copy, those of the best joined ranks first, where it wins enough."""
        for _ in range(_SWEEPS):
            layer, rank, slot = np.nonzero(
                np.take_along_axis(self.layers.counts[:, None], self.layers.slots, axis=2) > 1
            )
            order = np.lexsort((-self.degree[layer, rank], layer))
            layer, rank, slot = layer[order], rank[order], slot[order]
            place = np.arange(layer.size) - np.searchsorted(layer, layer)
            changed = 0
            for number in range(place.max(initial=-1) + 1):
                now = place == number
                changed += self._move(layer[now], rank[now], slot[now], least)
            if not changed:
                return

    def _move(self, layer: Array, rank: Array, slot: Array, least: float) -> int:
        """Gives one copy of each listed layer the best other place, where that wins enough; how many moved."""
        copy = self.layers.slots[layer, rank, slot]
        each, edge = np.arange(layer.size), self.edge[layer, copy][:, None]
        others = self.held[layer, copy]
        others[each, rank] = False
        share = edge * others.sum(axis=1, keepdims=True)
        # The graph without this copy: what it would meet on each rank, and what that costs.
        met = (self.between[layer] @ others[:, :, None].astype(np.float32))[:, :, 0]
        degree = self.degree[layer] - edge * others
        met[each, rank] -= share[:, 0]
        degree[each, rank] -= share[:, 0]
        cost = degree * share + 2 * edge * met
        gain = self.layers.gain(layer, rank, copy)
        gain += (self.price[layer, None] * (cost[each, rank][:, None] - cost))[:, :, None]
        allowed = ~self.held[layer, copy] & (self.host == self.host[rank][:, None])
        single = self.layers.counts[layer[:, None, None], self.layers.slots[layer]] == 1
        gain[~(allowed[:, :, None] & single)] = -np.inf
        gain = gain.reshape(layer.size, -1)
        best = gain.argmax(axis=1)
        wins = gain[each, best] > least
        self._exchange(layer[wins], rank[wins], slot[wins], *np.divmod(best[wins], self.layers.slots.shape[2]))
        return int(wins.sum())

    def _exchange(self, layer: Array, rank: Array, slot: Array, other_rank: Array, other_slot: Array) -> None:
        copy, single = self.layers.slots[layer, rank, slot], self.layers.slots[layer, other_rank, other_slot]
        self.held[layer, copy, rank] = False
        edge = self.edge[layer, copy][:, None] * self.held[layer, copy]
        for end, sign in ((rank, -1), (other_rank, 1)):
            self.between[layer, end] += sign * edge
            self.between[layer, :, end] += sign * edge
            self.degree[layer, end] += sign * edge.sum(axis=1)
        self.held[layer, copy, other_rank] = True
        self.held[layer, single, rank], self.held[layer, single, other_rank] = True, False
        self.layers.exchange(layer, rank, slot, other_rank, other_slot)
