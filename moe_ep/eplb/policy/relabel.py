"""Rank numbers for a fresh placement under which as many experts as possible stay where they are."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import Array, keep_slots, slots_by_expert
from moe_ep.eplb.policy.problem import Problem

# Rows worked on together: larger arrays come from the operating system anew in every plan, page by page, which took a
# fourth of a plan for 320 ranks.
_ROWS = 32
# Copies of an expert are alike, so that it takes few of many to find one that fits; more take longer than they help.
_MEETINGS = 3


def renumber(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    """The placement `new` `[X, P]`, its ranks renumbered to agree with `old` `[X, P]`, slots of a rank as they come.

    Ranks are interchangeable, so this changes nothing about balance. An old slot of -1 holds nothing.

    Example with one slot on each of three ranks: old [2, 0, 1], new [0, 1, 3] gives [3, 0, 1].
    """
    parts = [slice(at, at + _ROWS) for at in range(0, max(len(new), 1), _ROWS)]
    return np.concatenate([_renumber_rows(old[part], new[part], num_experts, num_ranks) for part in parts])


def renumber_like(old: Array, new: Array, problem: Problem) -> Array:
    """The plan `new` `[X, P]` of a problem with its hosts, then its ranks renumbered to agree with `old` `[X, P]`;
    experts that stay on a rank keep their slots."""
    num_hosts, num_experts = problem.num_nodes if problem.by_host else 1, problem.weight.shape[1]
    agreed = renumber(old, new, num_experts, num_hosts)
    of_hosts = (-1, old.shape[1] // num_hosts)
    per_host = problem.num_ranks // num_hosts
    agreed = renumber(old.reshape(of_hosts), agreed.reshape(of_hosts), num_experts, per_host).reshape(old.shape)
    return keep_slots(old, agreed, problem.num_ranks)


def _renumber_rows(old: Array, new: Array, num_experts: int, num_ranks: int) -> Array:
    num_rows, num_slots = new.shape
    width = num_slots // num_ranks
    # Every old slot meets new slots of the same expert, of an expert with many copies a few.
    listed, first, counts = slots_by_expert(new, num_experts)
    rank = np.arange(num_slots) // width
    new_rank = rank[listed].ravel()
    row, slot = np.nonzero(old >= 0)
    expert = row * num_experts + old[row, slot]
    copies = counts.ravel()[expert]
    met = np.minimum(copies, _MEETINGS)
    edge = np.repeat(np.arange(row.size), met)
    place = np.arange(edge.size) + (slot % np.maximum(copies, 1) - np.cumsum(met) + met)[edge]
    around = copies[edge]
    place -= around * (place >= around)
    partner = new_rank[(row * num_slots + first.ravel()[expert])[edge] + place]
    source = match(row[edge], rank[slot][edge], partner, num_rows, num_ranks)
    ranks = new.reshape(num_rows, num_ranks, width)
    return np.take_along_axis(ranks, source[:, :, None], axis=1).reshape(num_rows, num_slots)


def match(row: Array, old: Array, new: Array, num_rows: int, num_ranks: int) -> Array:
    """For each old number of each row the new number that takes its place, int64 `[X, R]`, a permutation of each row.

    Edges (row, old, new) may repeat; pairs joined by the most are matched. Pairs that are each other's best are joined,
    round by round, ties broken by fixed noise so that few rounds suffice.
    """
    # Words of bits rather than products: divisions would take longer than all the rest.
    bits = max(num_ranks - 1, 1).bit_length()
    one = 1 << bits
    edges = row << 2 * bits | old << bits | new
    edges = edges.astype(np.int32 if num_rows << 2 * bits < 1 << 31 else np.int64)
    edges.sort()
    begin = _begins(edges)
    votes, edges = np.diff(begin, append=edges.size), edges[begin].astype(np.int64)
    owner, taken = edges >> bits, edges >> 2 * bits << bits | edges & one - 1
    # A multiplicative hash of the edge's place: as noisy as it must be, and never twice the same.
    noise = (np.arange(edges.size, dtype=np.uint32) * np.uint32(0x9E3779B1)).astype(np.int64)
    score = votes << 32 | noise
    source, best_owner, best_taken = np.full((3, num_rows * one), -1, dtype=np.int64)
    used = np.zeros(num_rows * one, dtype=bool)
    while owner.size:
        # Owners rise, so that each one's edges are neighbours.
        begin = _begins(owner)
        best_owner[owner[begin]] = np.maximum.reduceat(score, begin)
        best_taken[taken] = -1
        np.maximum.at(best_taken, taken, score)
        mutual = np.flatnonzero((best_owner[owner] == score) & (best_taken[taken] == score))
        source[owner[mutual]] = taken[mutual] & one - 1
        used[taken[mutual]] = True
        rest = np.flatnonzero((source[owner] < 0) & ~used[taken])
        owner, taken, score = owner[rest], taken[rest], score[rest]
    source, used = (part.reshape(num_rows, one)[:, :num_ranks] for part in (source, used))
    # As many of each side of a row are left, and boolean indexing walks both row by row.
    source[source < 0] = np.nonzero(~used)[1]
    return source


def _begins(rising: Array) -> Array:
    """Where runs of equal numbers begin."""
    new = np.empty(rising.size, dtype=bool)
    new[:1] = True
    np.not_equal(rising[1:], rising[:-1], out=new[1:])
    return np.flatnonzero(new)
