"""A placement from nothing: how many replicas each expert gets, and which rank each replica goes to.

Rows are independent problems (a layer, or a layer on one host): loads `[X, E]`, P slots on R ranks, S = P / R to each.
All rows are solved at once, in few numpy calls: a plan is bound by the number of calls, not by arithmetic.
"""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import Array


def greedy_counts(weight: Array, num_slots: int, num_ranks: int, power: float = 1.0) -> Array:
    """Replicas of each expert, int64 `[X, E]`: each beyond the first goes where load / count**power is largest.

    With a power of one that is the largest load per replica, which this minimises. Larger powers split the heaviest
    experts less and the next ones more. No expert gets more than one replica a rank while another has fewer. weight is
    float32 `[X, E]`.
    """
    num_rows, num_experts = weight.shape
    counts, unit = np.ones(weight.size, dtype=np.int64), weight.copy()
    for _ in range(num_slots - num_experts):
        largest = np.arange(num_rows) * num_experts + unit.argmax(axis=1)
        count = counts[largest] + 1
        counts[largest] = count
        each = weight.reshape(-1)[largest] / (count if power == 1.0 else count**power)
        unit.reshape(-1)[largest] = np.where(count < num_ranks, each, -1.0)
    return counts.reshape(num_rows, num_experts)


def sorted_items(weight: Array, counts: Array) -> tuple[Array, Array]:
    """The replicas of each row, heaviest first: their experts, int32 `[X, P]`, and their loads, float32 `[X, P]`.

    The upper bits of the load and the expert's number are sorted as one word, several times faster than an argsort;
    positive floats compare like their bits. The loads come back rounded down by that: with 256 experts by less than
    one part in 30,000.
    """
    num_rows, num_experts = weight.shape
    mask = np.int32((1 << max(num_experts - 1, 1).bit_length()) - 1)
    key = (weight / counts).astype(np.float32, copy=False).view(np.int32) & ~mask
    key |= np.arange(num_experts, dtype=np.int32)
    key = np.repeat(key.ravel(), counts.ravel()).reshape(num_rows, -1)
    key.sort(axis=1)
    key = np.ascontiguousarray(key[:, ::-1])
    return key & mask, (key & ~mask).view(np.float32)


def lightest_first(loads: Array) -> Array:
    """The places of positive loads float32 `[X, R]` in rising order, int64 `[X, R]`.

    Place and load are sorted as one word, as in `sorted_items`. Loads closer than one part in 2^22 / R are equal and
    come in the order of their places.
    """
    mask = np.int32((1 << max(loads.shape[1] - 1, 1).bit_length()) - 1)
    key = loads.view(np.int32) & ~mask
    key |= np.arange(loads.shape[1], dtype=np.int32)
    key.sort(axis=1)
    key &= mask
    return key.astype(np.int64)


def smallest_companions(loads: Array, num_ranks: int) -> Array:
    """The least load beside the i-th heaviest item if it and those before it get the lightest ones: `[X, R]`.

    Items come heaviest first, `[X, P]`. The last S - 1 items go with item 0, those before them with item 1, and so on.
    """
    rest = loads[:, num_ranks:]
    if rest.shape[1] == 0:
        return np.zeros_like(loads)
    return rest[:, ::-1].reshape(loads.shape[0], num_ranks, -1).sum(axis=2)


def pack(loads: Array, num_ranks: int) -> Array:
    """The rank of each item, int64 `[X, P]`, every rank getting P / R: longest processing time first, in chunks.

    Items come heaviest first (`loads` float32 `[X, P]`). An item that exceeds the mean even beside the lightest items
    gets just those. Of the others a chunk goes to that many of the lightest ranks with room, the heaviest to the
    lightest. Chunks of half the ranks lose little against one item at a time, and exchanges win that back.
    """
    num_rows, num_slots = loads.shape
    capacity = num_slots // num_ranks
    rank = np.empty((num_rows, num_slots), dtype=np.int64)
    rank[:, :num_ranks] = np.arange(num_ranks)
    if capacity == 1:
        return rank
    load = loads[:, :num_ranks].copy()  # infinite once a rank is full
    giant = load + smallest_companions(loads, num_ranks) >= loads.sum(axis=1, keepdims=True) / num_ranks
    giant = np.logical_and.accumulate(giant, axis=1)
    load[giant] = np.inf
    end = num_slots - giant.sum(axis=1) * (capacity - 1)
    # Whatever no chunk reaches stays as set here: the tail, whose last S - 1 items are rank 0's.
    rank[:, num_ranks:] = (np.arange(num_slots - num_ranks) // (capacity - 1))[::-1]
    size = np.ones((num_rows, num_ranks), dtype=np.int64)
    chunk = max(num_ranks // 2, 1)
    done = np.full(num_rows, num_ranks)
    rows = np.flatnonzero(done < end)
    while rows.size:
        order = lightest_first(load[rows])[:, :chunk]
        take = np.minimum(np.isfinite(load[rows]).sum(axis=1), chunk)
        row, place = np.nonzero(np.arange(chunk) < take[:, None])
        target = order[row, place]
        row = rows[row]
        item = done[row] + place
        rank[row, item] = target
        size[row, target] += 1
        load[row, target] = np.where(size[row, target] < capacity, load[row, target] + loads[row, item], np.inf)
        done[rows] += take
        rows = rows[done[rows] < end[rows]]
    return rank


def packed_maximum(loads: Array, rank: Array, num_ranks: int) -> Array:
    """The maximum rank load, float64 `[X]`, of items on these ranks, `[X, P]` each."""
    flat = rank + np.arange(loads.shape[0])[:, None] * num_ranks
    total = np.bincount(flat.ravel(), weights=loads.ravel(), minlength=loads.shape[0] * num_ranks)
    return total.reshape(-1, num_ranks).max(axis=1)


def place_fresh(expert: Array, rank: Array, num_experts: int) -> Array:
    """A placement int64 `[X, P]` of experts on these ranks, `[X, P]` each, those of a rank in rising order."""
    bits = max(num_experts - 1, 1).bit_length()
    key = (rank.astype(np.int32) << np.int32(bits)) | expert
    key.sort(axis=1)
    return (key & np.int32((1 << bits) - 1)).astype(np.int64)
