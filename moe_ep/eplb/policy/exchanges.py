"""Exchanges of experts between ranks: their gain in the sum over steps of squared rank loads, and making them."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import Array, replica_counts


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
