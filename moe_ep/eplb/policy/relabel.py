"""Rank numbers for a fresh placement under which as many experts as possible stay where they are."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import keep_slots

Array = np.ndarray

# Overlap of every new rank with every old one, for all rows at once, must fit in this many entries.
_MAX_ENTRIES = 1 << 23


def agree_with(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    """The placement `new` `[X, P]` with its ranks renumbered, and slots reordered, to agree with `old` `[X, P]`.

    Ranks are interchangeable, so this changes nothing about balance. Pairs of a new and an old rank that are each
    other's best match are joined, round by round. An old slot of -1 holds nothing. Example with one slot on each of
    three ranks: old [2, 0, 1], new [0, 1, 3] gives [3, 0, 1].
    """
    num_rows, num_slots = new.shape
    width = num_slots // num_ranks
    result = np.empty_like(new)
    step = max(_MAX_ENTRIES // (num_ranks * max(num_ranks, num_experts)), 1)
    for at in range(0, num_rows, step):
        part = slice(at, at + step)
        source = match(_overlap(old[part], new[part], num_experts, num_ranks))
        ranks = new[part].reshape(-1, num_ranks, width)
        result[part] = np.take_along_axis(ranks, source[:, :, None], axis=1).reshape(-1, num_slots)
    return keep_slots(old, result, num_ranks)


def _overlap(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    """How many experts each old rank shares with each new one, float32 `[X, R, R]`."""
    num_rows, num_slots = new.shape
    rank = np.arange(num_slots) // (num_slots // num_ranks)
    held = np.zeros((2, num_rows, num_ranks, num_experts + 1), dtype=np.float32)
    row = np.arange(num_rows)[:, None]
    held[0, row, rank, old] = 1.0
    held[1, row, rank, new] = 1.0
    return held[0, ..., :-1] @ held[1, ..., :-1].transpose(0, 2, 1)


def match(overlap: Array) -> Array:
    """The new rank that takes each old rank's place, int64 `[X, R]`, by overlaps `[X, old, new]`, which are used up."""
    num_rows, num_ranks, _ = overlap.shape
    source = np.full((num_rows, num_ranks), -1, dtype=np.int64)
    rows = np.arange(num_rows)
    while rows.size:
        best_new = overlap[rows].argmax(axis=2)
        best_old = overlap[rows].argmax(axis=1)
        mutual = np.take_along_axis(best_old, best_new, axis=1) == np.arange(num_ranks)
        mutual &= source[rows] < 0
        row, old_rank = np.nonzero(mutual)
        new_rank = best_new[row, old_rank]
        source[rows[row], old_rank] = new_rank
        overlap[rows[row], old_rank, :] = -1.0
        overlap[rows[row], :, new_rank] = -1.0
        rows = rows[(source[rows] < 0).any(axis=1)]
    return source
