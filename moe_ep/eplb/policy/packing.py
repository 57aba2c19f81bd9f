"""A placement from nothing: how many replicas each expert gets, and which rank each replica goes to.

Rows are independent problems (a layer, or a layer on one host): loads `[X, E]`, P slots on R ranks, S = P / R to each.
All rows are solved at once, in few numpy calls: a plan is bound by the number of calls, not by arithmetic.
"""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import Array

# Replicas of a row that are handed out one by one; of more, bisection finds most first.
_ONE_BY_ONE = 64
_HALVINGS = 12


def greedy_counts(weight: Array, num_slots: int, num_ranks: int, power: float = 1.0) -> Array:
    """Replicas of each expert, int64 `[X, E]`: each beyond the first goes where load / count**power is largest.

    With a power of one that is the largest load per replica, which this minimises. Larger powers split the heaviest
    experts less and the next ones more. No expert gets more than one replica a rank while another has fewer. weight is
    float32 `[X, E]`.
    """
    num_rows, num_experts = weight.shape
    counts, unit = np.ones(weight.size, dtype=np.int64), weight.copy()
    left = np.full(num_rows, num_slots - num_experts)
    if num_slots - num_experts > _ONE_BY_ONE:
        extra = _most_extra(weight, num_slots - num_experts, num_ranks - 1, power)
        left -= extra.sum(axis=1)
        counts += extra.ravel()
        unit /= (extra + 1) ** np.float32(power)
        unit[extra + 1 >= num_ranks] = -1.0
    flat, base = weight.ravel(), np.arange(num_rows) * num_experts
    fewest, most = left.min(initial=num_slots), counts.max(initial=1)
    for turn in range(left.max(initial=0)):
        if turn < fewest:
            largest = base + unit.argmax(axis=1)
        else:
            rows = np.flatnonzero(left > turn)
            largest = base[rows] + unit[rows].argmax(axis=1)
        count = counts[largest] + 1
        counts[largest] = count
        each = flat[largest] / (count if power == 1.0 else count**power)
        if most + turn + 1 >= num_ranks:
            each[count >= num_ranks] = -1.0
        unit.reshape(-1)[largest] = each
    return counts.reshape(num_rows, num_experts)


def _most_extra(weight: Array, spare: int, limit: int, power: float) -> Array:
    """Almost all of what `greedy_counts` hands out beyond the first replicas, and no more, int64 `[X, E]`.

    It hands out the largest of load / count**power over all experts and counts, so a threshold divides what it hands
    out from the rest, and bisection finds that.
    """
    high = weight.max(axis=1)
    low = high / np.float32((spare + 1) ** power)

    def above(threshold: Array) -> Array:
        ratio = weight / threshold[:, None]
        return np.minimum(ratio if power == 1.0 else ratio ** (1 / power), limit).astype(np.int64)

    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        fits = above(middle).sum(axis=1) <= spare
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return above(high * np.float32(1 + 1e-6))


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
    lightest. Chunks of half the ranks lose little against one item at a time, and swaps (`balance`) win that back.
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
    base = np.arange(num_rows)[:, None] * num_ranks
    flat_load, flat_size = load.reshape(-1), size.reshape(-1)
    at = num_ranks
    while at + chunk <= end.min():
        order = lightest_first(load)[:, :chunk]
        if np.isinf(flat_load[base[:, 0] + order[:, -1]]).any():
            break
        rank[:, at : at + chunk] = order
        order = order + base
        filled = flat_size[order] + 1
        flat_size[order] = filled
        flat_load[order] = np.where(filled < capacity, flat_load[order] + loads[:, at : at + chunk], np.inf)
        at += chunk
    _pack_rest(loads, rank, load, size, at, end)
    return rank


def _pack_rest(loads: Array, rank: Array, load: Array, size: Array, at: int, end: Array) -> None:
    """Goes on with `pack` where some row has fewer ranks with room than a chunk: each row at its own pace."""
    num_ranks = load.shape[1]
    capacity = loads.shape[1] // num_ranks
    width = max(num_ranks // 2, 1)
    rows = np.flatnonzero(at < end)
    done = np.full(end.size, at)
    while rows.size:
        order = lightest_first(load[rows])[:, :width]
        take = np.minimum(np.isfinite(load[rows]).sum(axis=1), width)
        row, place = np.nonzero(np.arange(width) < take[:, None])
        target = order[row, place]
        row = rows[row]
        item = done[row] + place
        rank[row, item] = target
        size[row, target] += 1
        load[row, target] = np.where(size[row, target] < capacity, load[row, target] + loads[row, item], np.inf)
        done[rows] += take
        rows = rows[done[rows] < end[rows]]


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
