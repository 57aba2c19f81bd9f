"""Rank numbers for a fresh placement under which as many experts as possible stay where they are."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.deepseek import pack_balanced
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


# ==== Hosts ====
#
# Which host each group of experts lives on, and the split of a problem into one row for each layer and host.


class HostRows:
    """A problem by hosts as independent rows, `[L * hosts, E / hosts]` experts each, numbered within their host.

    Attributes:
        weight: float64 `[L * hosts, E / hosts]`.
        old: int64 `[L * hosts, P / hosts]`, -1 where a slot holds an expert of another host; None without a placement.
        order: int64 `[L * hosts, E / hosts]`, the expert behind each number.
    """

    def __init__(self, problem: Problem) -> None:
        num_layers, num_experts = problem.weight.shape
        self.num_layers, self.num_nodes = num_layers, problem.num_nodes
        per_host = num_experts // problem.num_nodes
        host = np.repeat(group_hosts(problem), num_experts // problem.num_groups, axis=1)
        order = np.argsort(host, axis=1, kind="stable")
        self.order = order.reshape(-1, per_host)
        self.weight = np.take_along_axis(problem.weight, order, axis=1).reshape(-1, per_host)
        self.old = None
        if problem.old is not None:
            number = np.empty_like(order)
            np.put_along_axis(number, order, np.arange(num_experts)[None] % per_host, axis=1)
            here = np.arange(problem.num_replicas) // (problem.num_replicas // problem.num_nodes)
            is_here = np.take_along_axis(host, problem.old, axis=1) == here
            old = np.where(is_here, np.take_along_axis(number, problem.old, axis=1), -1)
            self.old = old.reshape(num_layers * problem.num_nodes, -1)

    def join(self, slots: Array) -> Array:
        """The placement `[L, P]` of the problem from that of its rows."""
        return np.take_along_axis(self.order, slots, axis=1).reshape(self.num_layers, -1)


def groups_apart(problem: Problem) -> Array:
    """Layers in whose present placement an expert is not on the host of its group alone, bool `[L]`."""
    rows = HostRows(problem)
    if rows.old is None:
        return np.zeros(rows.num_layers, dtype=bool)
    foreign: Array = rows.old.reshape(rows.num_layers, -1) < 0
    return np.any(foreign, axis=1)


def group_hosts(problem: Problem) -> Array:
    """The host of each group, int64 `[L, G]`.

    Groups keep their hosts in a layer where each lives on one host, as many on each, and the busiest host is within
    the problem's tolerance of a fresh packing (longest first). Elsewhere they are packed anew, and hosts numbered to
    agree with the present.
    """
    num_layers = problem.weight.shape[0]
    num_groups, num_nodes = problem.num_groups, problem.num_nodes
    load = problem.weight.reshape(num_layers, num_groups, -1).sum(axis=2)
    packed, _ = pack_balanced(load, num_nodes)
    if problem.old is None:
        return packed
    slot_host = np.arange(problem.num_replicas) // (problem.num_replicas // num_nodes)
    group = problem.old // (problem.weight.shape[1] // num_groups)
    flat = (np.arange(num_layers)[:, None] * num_groups + group) * num_nodes + slot_host
    present = np.bincount(flat.ravel(), minlength=num_layers * num_groups * num_nodes)
    present = present.reshape(num_layers, num_groups, num_nodes)
    current = present.argmax(axis=2)
    apart = np.count_nonzero(present, axis=2).max(axis=1) > 1
    uneven = (_per_host(np.ones_like(load), current, num_nodes) != num_groups // num_nodes).any(axis=1)
    limit = _per_host(load, packed, num_nodes).max(axis=1) * (1 + problem.tolerance)
    keep = ~apart & ~uneven & (_per_host(load, current, num_nodes).max(axis=1) <= limit)
    anew = np.flatnonzero(~keep)
    layer = np.repeat(np.arange(anew.size), num_groups)
    source = match(layer, current[anew].ravel(), packed[anew].ravel(), anew.size, num_nodes)
    becomes = np.empty_like(source)
    np.put_along_axis(becomes, source, np.arange(num_nodes)[None], axis=1)
    result = current.copy()
    result[anew] = np.take_along_axis(becomes, packed[anew], axis=1)
    return result


def _per_host(load: Array, host: Array, num_nodes: int) -> Array:
    """Sums `[L, G]` over the groups of each host: `[L, hosts]`."""
    num_layers = load.shape[0]
    flat = host + np.arange(num_layers)[:, None] * num_nodes
    total = np.bincount(flat.ravel(), weights=load.ravel(), minlength=num_layers * num_nodes)
    return total.reshape(num_layers, num_nodes)
