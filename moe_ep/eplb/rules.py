"""Rules that choose a replica for each token of an expert, for simulations on the CPU.

"levelled" is the one that serves (`moe_ep.eplb.levelling`); the others are what it was chosen over. A rule gets the ids
of a step `[T, top_k]` of all ranks, -1 for none, the rank of each token `[T]`, rising, and a layer's `Layout`; it gives
the slot of each choice, `[T, top_k]`. Rules that remember something between steps are objects made anew for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moe_ep.eplb.batch_plan import one_replica
from moe_ep.eplb.levelling import map_tiles, rows_per_tile
from moe_ep.eplb.policy.maps import Array, logical_maps

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


def occurrence(ids: Array, rank: Array, num_experts: int) -> Array:
    """How many choices of the same expert by the same rank come before each choice: `[T, top_k]`."""
    key = (rank[:, None] * num_experts + ids).ravel()
    order = np.argsort(key, kind="stable")
    place = np.arange(key.size) - np.searchsorted(key[order], key[order])
    result = np.empty(key.size, dtype=np.int64)
    result[order] = place
    return result.reshape(ids.shape)


def hashed(ids: Array, rank: Array, layout: Layout, offset: bool) -> Array:
    """A hash of row and expert, with or without the rank in it: of any run of rows each replica gets its share."""
    seed = first_row(rank)[:, None] * _ROW_STEP + ids * _EXPERT_STEP + (rank[:, None] * _RANK_STEP if offset else 0)
    replica = ((seed & _MASK) * layout.counts[ids]) >> 32
    return layout.table[ids, replica]


def hash_rule(ids: Array, rank: Array, layout: Layout) -> Array:
    return hashed(ids, rank, layout, offset=False)


def hash_with_rank(ids: Array, rank: Array, layout: Layout) -> Array:
    return hashed(ids, rank, layout, offset=True)


def nearest(ids: Array, rank: Array, layout: Layout) -> Array:
    """The replica on the token's own rank, else the hash with the rank in it."""
    own = layout.table[ids] // layout.width == rank[:, None, None]
    own &= layout.table[ids] >= 0
    local = np.take_along_axis(layout.table[ids], own.argmax(axis=2)[..., None], axis=2)[..., 0]
    return np.where(own.any(axis=2), local, hash_with_rank(ids, rank, layout))


class RoundRobin:
    """Replicas in turn, counted by each rank for each expert over all steps, each rank starting at another replica."""

    def __init__(self) -> None:
        self.counter: Array | None = None

    def __call__(self, ids: Array, rank: Array, layout: Layout) -> Array:
        num_experts = layout.counts.size
        if self.counter is None:
            self.counter = np.arange(layout.num_ranks)[:, None] + np.arange(num_experts)
        turn = self.counter[rank[:, None], ids] + occurrence(ids, rank, num_experts)
        seen = np.bincount((rank[:, None] * num_experts + ids).ravel(), minlength=self.counter.size)
        self.counter = self.counter + seen.reshape(self.counter.shape)
        return layout.table[ids, turn % layout.counts[ids]]


class OneReplica:
    """One replica of each expert for all tokens: those with which the most experts of a rank are fewest.

    Args:
        knows_batch: only experts that any rank's tokens have in this batch count, which ranks would have to ask for.
    """

    def __init__(self, knows_batch: bool) -> None:
        self.knows_batch = knows_batch
        self.slots: Array | None = None

    def __call__(self, ids: Array, rank: Array, layout: Layout) -> Array:
        if self.knows_batch or self.slots is None:
            active = np.bincount(ids.ravel(), minlength=layout.counts.size) if self.knows_batch else None
            self.slots = one_replica(layout.slots, layout.counts.size, layout.num_ranks, active)
        return self.slots[ids]


def water_filling(ids: Array, rank: Array, layout: Layout) -> Array:
    """Splits every expert's tokens of the whole batch so that the fullest of its ranks is as low as can be.

    Experts with one replica are placed first; the others fill the lowest of their ranks, the largest first, and are
    taken out and filled in again three times. A token keeps to its own rank while that rank's share lasts. Needs the
    counts of all ranks before the step.
    """
    total = np.bincount(ids.ravel(), minlength=layout.counts.size)
    single = layout.counts == 1
    load = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(load, layout.table[single, 0] // layout.width, total[single])
    several = np.flatnonzero(~single & (total > 0))
    several = several[np.argsort(-total[several], kind="stable")]
    share = np.zeros_like(layout.table)
    for _ in range(4):
        for expert in several:
            count = layout.counts[expert]
            ranks = layout.table[expert, :count] // layout.width
            np.subtract.at(load, ranks, share[expert, :count])
            share[expert, :count] = fill(load[ranks], int(total[expert]))
            np.add.at(load, ranks, share[expert, :count])
    result = layout.table[ids, 0]
    for expert in several:
        token, place = np.nonzero(ids == expert)
        result[token, place] = deal(rank[token], layout.table[expert, : layout.counts[expert]], share[expert], layout)
    return result


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


def fill(level: Array, amount: int) -> Array:
    """How much of `amount` goes onto each of these levels so that the highest stays lowest; whole numbers."""
    order = np.argsort(level, kind="stable")
    rising = level[order]
    room = np.arange(1, level.size + 1) * np.append(rising[1:], np.iinfo(np.int64).max >> 8) - np.cumsum(rising)
    reached = int(np.argmax(room >= amount)) + 1
    surface, rest = divmod(int(rising[:reached].sum()) + amount, reached)
    result = np.zeros_like(level)
    result[order[:reached]] = surface - rising[:reached] + (np.arange(reached) < rest)
    return result


def deal(rank: Array, slots: Array, share: Array, layout: Layout) -> Array:
    """Gives tokens on these ranks their slots, `share` to each, own rank first."""
    left = share[: slots.size].copy()
    result = np.full(rank.size, -1, dtype=np.int64)
    for replica, slot in enumerate(slots):
        own = np.flatnonzero((rank == slot // layout.width) & (result < 0))[: left[replica]]
        result[own] = slot
        left[replica] -= own.size
    result[result < 0] = np.repeat(slots, left)
    return result


RULES: dict[str, Callable[[], Rule]] = {
    "levelled": lambda: levelled,
    "hash": lambda: hash_rule,
    "hash-rank": lambda: hash_with_rank,
    "nearest": lambda: nearest,
    "round-robin": RoundRobin,
    "known-counts": lambda: water_filling,
    "one-replica": lambda: OneReplica(knows_batch=False),
    "known-active": lambda: OneReplica(knows_batch=True),
}


def choose(rule: Rule, ids: Array, rank: Array, layout: Layout) -> Array:
    """Applies a rule to ids that may hold -1, which stays -1."""
    if (ids >= 0).all():
        return rule(ids, rank, layout)
    # Rules other than the one that serves know experts only: a missing one is taken for expert 0 and dropped.
    return np.where(ids >= 0, rule(ids if rule is levelled else np.maximum(ids, 0), rank, layout), -1)
