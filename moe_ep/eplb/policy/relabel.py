"""Rank numbers for a fresh placement under which as many experts as possible stay where they are."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import keep_slots, logical_maps

Array = np.ndarray

# Copies of an expert are alike, so that it takes few of many to find one that fits; more take longer than they help.
_MEETINGS = 8


def agree_with(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    """The placement `new` `[X, P]` with its ranks renumbered, and slots reordered, to agree with `old` `[X, P]`.

    Example with one slot on each of three ranks: old [2, 0, 1], new [0, 1, 3] gives [3, 0, 1].
    """
    return keep_slots(old, renumber(old, new, num_experts, num_ranks), num_ranks)


def renumber(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    """The same with the slots of a rank as they come.

    Ranks are interchangeable, so this changes nothing about balance. An old slot of -1 holds nothing.
    """
    num_rows, num_slots = new.shape
    width = num_slots // num_ranks
    # Every old slot meets new slots of the same expert, of an expert with many copies a few.
    table, counts = logical_maps(new, num_experts)
    row, slot = np.nonzero(old >= 0)
    expert = old[row, slot]
    copies = counts[row, expert][:, None]
    turn = np.arange(min(_MEETINGS, table.shape[2]))
    partner = table[row[:, None], expert[:, None], (slot[:, None] + turn) % np.maximum(copies, 1)]
    edge, turn = np.nonzero(turn < copies)
    source = match(row[edge], slot[edge] // width, partner[edge, turn] // width, num_rows, num_ranks)
    ranks = new.reshape(num_rows, num_ranks, width)
    return np.take_along_axis(ranks, source[:, :, None], axis=1).reshape(num_rows, num_slots)


def match(row: Array, old: Array, new: Array, num_rows: int, num_ranks: int) -> Array:
    """For each old number of each row the new number that takes its place, int64 `[X, R]`, a permutation of each row.

    Edges (row, old, new) may repeat; pairs joined by the most are matched. Pairs that are each other's best are joined,
    round by round, ties broken by fixed noise so that few rounds suffice.
    """
    edges, votes = np.unique((row * num_ranks + old) * num_ranks + new, return_counts=True)
    owner, new = np.divmod(edges, num_ranks)
    taken = owner // num_ranks * num_ranks + new
    # A multiplicative hash of the edge's place, below one vote.
    noise = (np.arange(edges.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(43)
    score = votes.astype(np.int64) << 32 | (noise.astype(np.int64) + 1) << 11
    source = np.full(num_rows * num_ranks, -1, dtype=np.int64)
    used = np.zeros(num_rows * num_ranks, dtype=bool)
    while owner.size:
        best_owner = np.zeros(source.size, dtype=np.int64)
        best_taken = np.zeros(source.size, dtype=np.int64)
        np.maximum.at(best_owner, owner, score)
        np.maximum.at(best_taken, taken, score)
        mutual = np.flatnonzero((best_owner[owner] == score) & (best_taken[taken] == score))
        # Equal scores are possible, if hardly: the first edge of each side counts.
        mutual = mutual[np.unique(owner[mutual], return_index=True)[1]]
        mutual = mutual[np.unique(taken[mutual], return_index=True)[1]]
        source[owner[mutual]] = taken[mutual] % num_ranks
        used[taken[mutual]] = True
        rest = (source[owner] < 0) & ~used[taken]
        owner, taken, score = owner[rest], taken[rest], score[rest]
    # As many of each side of a row are left, and boolean indexing walks both row by row.
    source[source < 0] = np.flatnonzero(~used) % num_ranks
    return source.reshape(num_rows, num_ranks)
