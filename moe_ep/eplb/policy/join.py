"""Where copies of experts lie so that batches can be levelled: every rank joined to others, and no two ranks twice.

Tokens are steered only between the copies of their expert. A rank without copies keeps whatever a batch brings it, and
two experts with copies on the same two ranks join them twice and others not at all. With v the ranks' loads about their
mean in a step, L the Laplacian of the graph in which an expert of load w with c copies joins each two of its ranks by
w / c**2, and t how far batches can be steered, levelling leaves about (I + t L)**-1 v. Where the ranks vary alike, the
expected square of that is, to second order and but for what no exchange changes,

    sum of |v|**2 + 3 t**2 (mean of |v|**2 over ranks) |L|**2,

and |L|**2 is the sum of squares of the ranks' degrees and of what joins each two. Copies are exchanged for experts with
one copy while that falls.
"""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.exchanges import Layers
from moe_ep.eplb.policy.maps import Array

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
