"""Swaps of two replicas between ranks that lower the heavier rank's load, on all rows at once.

Rows are independent problems as in `packing`. Arrays that hold something of every rank are laid out `[.., X * R]`, the
ranks of all rows last: reductions over a rank's few slots then run along memory, which numpy does many times faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.policy.packing import lightest_first

_HALF = np.float32(0.5)
# An exchange counts as progress only beyond float32's rounding of a load.
_PROGRESS = np.float32(0.5 - 1e-5)


class Placement:
    """Rows of one problem: which expert lies in each slot, and the loads that follow.

    Attributes:
        experts: int32 `[S, X * R]`, the expert in each slot; changed in place.
        units: float32 `[S, X * R]`, the load of each slot.
        loads: float32 `[X * R]`, the load of each rank.
        by_row: the same loads as `[X, R]`, a view.
        mean: float32 `[X]`, the mean load of a rank.
    """

    def __init__(self, weight: Array, counts: Array, slots: Array, num_ranks: int) -> None:
        num_rows, num_experts = weight.shape
        self.num_ranks = num_ranks
        unit = (weight / counts).astype(np.float32, copy=False)
        flat = slots + np.arange(num_rows)[:, None] * num_experts
        width = slots.shape[1] // num_ranks
        self.units = np.ascontiguousarray(unit.ravel()[flat].reshape(-1, width).T)
        self.experts = np.ascontiguousarray(slots.reshape(-1, width).T.astype(np.int32))
        self.replicated = slots.shape[1] > num_experts
        self.loads = self.units.sum(axis=0)
        self.by_row = self.loads.reshape(num_rows, num_ranks)
        self.mean = self.by_row.mean(axis=1)

    @property
    def slots(self) -> Array:
        """The placement as int64 `[X, P]`, slots in rank order."""
        return self.experts.T.astype(np.int64).reshape(self.by_row.shape[0], -1)

    def swap(self, rank_a: Array, slot_a: Array, rank_b: Array, slot_b: Array) -> None:
        """Exchanges listed slots of listed ranks (numbers within X * R); no rank may be listed twice."""
        experts, units = self.experts, self.units
        a, b = (slot_a, rank_a), (slot_b, rank_b)
        delta = units[a] - units[b]
        experts[a], experts[b] = experts[b], experts[a]
        units[a], units[b] = units[b], units[a]
        self.loads[rank_a] -= delta
        self.loads[rank_b] += delta

    def replace(self, rows: Array, other: Placement) -> None:
        """Takes these rows from another placement of just these rows."""
        ranks = (rows[:, None] * self.num_ranks + np.arange(self.num_ranks)).ravel()
        self.experts[:, ranks] = other.experts
        self.units[:, ranks] = other.units
        self.loads[ranks] = other.loads

    def best_exchange(self, heavy: Array, light: Array) -> tuple[Array, Array, Array]:
        """For A pairs of ranks the exchange that leaves the lower maximum: its slots, and whether it helps at all."""
        gap = self.loads[heavy] - self.loads[light]
        units_h, units_l = self.units.take(heavy, axis=1), self.units.take(light, axis=1)
        if self.replicated:
            # An expert that the other rank holds too must stay, or that rank would hold it twice.
            same = self.experts.take(heavy, axis=1)[:, None] == self.experts.take(light, axis=1)[None]
            units_h[np.logical_or.reduce(same, axis=1)] = np.inf
            units_l[np.logical_or.reduce(same, axis=0)] = -np.inf
        units_h -= gap * _HALF
        score = units_h[:, None] - units_l[None]
        np.abs(score, out=score)
        # The choice rides in the low bits of the score, so that one plain minimum finds both.
        width = score.shape[0]
        bits = max(width * width - 1, 1).bit_length()
        key = score.reshape(width * width, -1).view(np.int32)
        key &= np.int32(-1 << bits)
        key |= np.arange(width * width, dtype=np.int32)[:, None]
        best = np.minimum.reduce(key, axis=0) & np.int32((1 << bits) - 1)
        slot_h, slot_l = best // width, best % width
        exact = np.abs(units_h[slot_h, np.arange(heavy.size)] - units_l[slot_l, np.arange(heavy.size)])
        return slot_h, slot_l, exact < gap * _PROGRESS


def swap_pairs(place: Placement, target: Array, num_rounds: int) -> None:
    """Rounds of exchanges between the heaviest ranks and the lightest, k-th with k-th, while a rank exceeds `target`.

    target is float32 `[X]`. Every round exchanges in up to R / 2 pairs of every row. A row whose maximum has not fallen
    in three rounds is given up.
    """
    num_ranks = place.num_ranks
    half = num_ranks // 2
    if half == 0 or place.experts.shape[0] == 1:
        return
    rows = np.arange(target.size)
    last, stale = np.full(target.size, np.inf, dtype=np.float32), np.zeros(target.size, dtype=np.int64)
    for turn in range(num_rounds):
        worst = place.by_row[rows].max(axis=1)
        stale[rows] = np.where(worst < last[rows], 0, stale[rows] + 1)
        last[rows] = worst
        rows = rows[(worst > target[rows]) & (stale[rows] < 3)]
        if rows.size == 0:
            return
        order = lightest_first(place.by_row[rows])
        order += rows[:, None] * num_ranks
        heavy = order[:, : -half - 1 : -1]
        light = order[:, (np.arange(half) - turn) % half]
        over = place.loads[heavy] > target[rows, None]
        heavy, light = heavy[over], light[over]
        slot_h, slot_l, helps = place.best_exchange(heavy, light)
        place.swap(heavy[helps], slot_h[helps], light[helps], slot_l[helps])


def swap_heaviest(place: Placement, target: Array, num_rounds: int) -> None:
    """Rounds of the best exchange between each row's heaviest rank and any other, while it exceeds `target`.

    A round costs as much as there are ranks, so there are fewer of them beyond 32 ranks, and none beyond 256.
    """
    num_ranks = place.num_ranks
    if num_ranks == 1 or place.experts.shape[0] == 1:
        return
    rows = np.arange(target.size)
    for _ in range(num_rounds * 32 // max(num_ranks, 32)):
        rows = rows[place.by_row[rows].max(axis=1) > target[rows]]
        if rows.size == 0:
            return
        first = rows * num_ranks
        heavy = np.repeat(first + place.by_row[rows].argmax(axis=1), num_ranks)
        light = (first[:, None] + np.arange(num_ranks)).ravel()
        slot_h, slot_l, helps = place.best_exchange(heavy, light)
        delta = place.units[slot_h, heavy] - place.units[slot_l, light]
        worst = np.maximum(place.loads[heavy] - delta, place.loads[light] + delta)
        worst = np.where(helps, worst, np.inf).reshape(rows.size, num_ranks)
        best = np.arange(rows.size) * num_ranks + worst.argmin(axis=1)
        helped = helps[best]
        best = best[helped]
        place.swap(heavy[best], slot_h[best], light[best], slot_l[best])
        rows = rows[helped]


def separate_copies(place: Placement) -> None:
    """Exchanges slots until no rank holds an expert twice, as far as that can be done, at the least cost in balance.

    The experts of each rank must come in rising order, so that copies are neighbours.
    """
    num_ranks = place.num_ranks
    if not place.replicated or num_ranks == 1:
        return
    experts, width = place.experts, place.experts.shape[0]
    rank, slot = np.nonzero((experts[1:] == experts[:-1]).T)
    slot, before = slot + 1, rank.size + 1
    # An exchange that parts some copies may make room to part others.
    while 0 < rank.size < before:
        before, left = rank.size, []
        while rank.size:
            # One copy of each row a round: exchanges of one row must not cross.
            first = np.diff(rank // num_ranks, prepend=-1) > 0
            left.append(_separate(place, rank[first], slot[first], width))
            rank, slot = rank[~first], slot[~first]
        rank, slot = np.concatenate(left, axis=1)
        order = rank.argsort(kind="stable")
        rank, slot = rank[order], slot[order]


def _separate(place: Placement, rank: Array, slot: Array, width: int) -> Array:
    """Exchanges the listed slots, each of another row, with the best ones that leave no copies; others stay, and are
    returned as `[2, A]`, ranks and slots."""
    experts, num_ranks = place.experts, place.num_ranks
    still = (experts[:, rank] == experts[slot, rank]).sum(axis=0) > 1
    rank, slot = rank[still], slot[still]
    each = np.arange(rank.size)
    others = (rank // num_ranks * num_ranks)[:, None] + np.arange(num_ranks)
    theirs, mine = experts[:, others], experts[:, rank]  # [S, A, R] and [S, A]
    held = (theirs == mine[slot, each][:, None]).any(axis=0)
    ours = np.zeros(theirs.shape, dtype=bool)
    for expert in mine:
        ours |= theirs == expert[:, None]
    delta = place.units[slot, rank][:, None] - place.units[:, others]
    worst = np.maximum(place.loads[rank][:, None] - delta, place.loads[others] + delta)
    worst = np.where(held | ours, np.inf, worst).transpose(1, 2, 0).reshape(rank.size, num_ranks * width)
    best = worst.argmin(axis=1)
    found = np.isfinite(worst[each, best])
    partner = others[each, best // width]
    place.swap(rank[found], slot[found], partner[found], (best % width)[found])
    return np.stack([rank[~found], slot[~found]])


# ==== Rotations of few slots ====
#
# Experts passed round among few ranks so that all of them end within a limit, for ranks of few slots.
#
# An exchange between two ranks moves two experts to relieve one. Passing experts round among two heavy ranks and a
# light one relieves two ranks with three moves, and where every other rank is too heavy, as after a drift of experts
# that were alike, that is what moves are saved by. With few slots on a rank all combinations can be looked at.

# Beyond so many slots a rank the exchanges of `balance` find what they need, and beyond so many ranks this takes long.
_WIDEST = 3
_MOST_RANKS = 64
_ROUNDS = 96
# Partners that one heavy rank tries in a round, of the heaviest and of the light ones.
_HEAVY, _LIGHT = 16, 16


def relieve_heavy(place: Placement, target: Array) -> None:
    """Passes experts round between ranks above `target` `[X]` and others, where all that take part end within it."""
    num_ranks, width = place.num_ranks, place.experts.shape[0]
    if not 1 < width <= _WIDEST or not 2 < num_ranks <= _MOST_RANKS:
        return
    for partners in (_heavy_and_light, _any_one, _two_light):
        rows, tried = np.arange(target.size), np.zeros(target.size, dtype=np.int64)
        for _ in range(_ROUNDS):
            heavy = (place.by_row[rows] > target[rows, None]).sum(axis=1)
            goes_on = (heavy > 0) & (heavy < num_ranks) & (tried[rows] < heavy)
            rows, heavy = rows[goes_on], heavy[goes_on, None]
            if rows.size == 0:
                break
            rising = place.by_row[rows].argsort(axis=1) + rows[:, None] * num_ranks
            # A rank that was relieved is not heavy any more, and the next one has its number.
            groups = partners(rising, heavy, tried[rows, None] % heavy)
            tried[rows] += ~_pass_round(place, groups, target[rows])


def _heavy_and_light(rising: Array, heavy: Array, nth: Array) -> list[Array]:
    """The n-th heaviest rank of each row with another heavy one and a light one, both ways round: three `[X, G]`."""
    other, light = np.repeat(np.arange(_HEAVY), _LIGHT), np.tile(np.arange(_LIGHT), _HEAVY)
    num_ranks = rising.shape[1]
    second = num_ranks - 1 - (nth + 1 + other % np.maximum(heavy - 1, 1)) % heavy
    first, second, third = _ranks(rising, num_ranks - 1 - nth, second, light * (num_ranks - heavy) // _LIGHT)
    return [np.hstack([first, second]), np.hstack([second, first]), np.hstack([third, third])]


def _any_one(rising: Array, heavy: Array, nth: Array) -> list[Array]:
    """The n-th heaviest rank of each row with every rank: two `[X, R]`."""
    return _ranks(rising, rising.shape[1] - 1 - nth, np.arange(rising.shape[1])[None])


def _two_light(rising: Array, heavy: Array, nth: Array) -> list[Array]:
    """The n-th heaviest rank of each row with two light ones, in any order: three `[X, G]`."""
    one, two = np.divmod(np.arange(_LIGHT * _LIGHT), _LIGHT)
    one, two = one[one != two], two[one != two]
    num_light = rising.shape[1] - heavy
    return _ranks(rising, rising.shape[1] - 1 - nth, one * num_light // _LIGHT, two * num_light // _LIGHT)


def _ranks(rising: Array, *places: Array) -> list[Array]:
    """The ranks at places `[X, G]`, as many for each place."""
    shape = np.broadcast_shapes((*rising.shape[:1], 1), *(place.shape for place in places))
    return [np.take_along_axis(rising, np.broadcast_to(place, shape), axis=1) for place in places]


def _pass_round(place: Placement, groups: Sequence[Array], target: Array) -> Array:
    """Lets the best group of ranks of each row pass experts round, if all its ranks end within `target` `[X]`.

    groups lists the first ranks `[X, G]` of the groups, then the second ones, and so on; groups that hold a rank twice
    do not count. Each rank gets an expert of the next one, the last of the first.

    Returns:
        Where it was done, bool `[X]`.
    """
    size, width = len(groups), place.experts.shape[0]
    worst = np.zeros((*[width] * size, *groups[0].shape), dtype=np.float32)
    for m, ranks in enumerate(groups):
        n = (m + 1) % size
        others_m, others_n = ([axis for axis in range(size) if axis != only] for only in (m, n))
        goes, comes = place.units.take(ranks, axis=1), place.units.take(groups[n], axis=1)
        if place.replicated:
            held = (place.experts.take(ranks, axis=1)[:, None] == place.experts.take(groups[n], axis=1)).any(axis=0)
            comes[held] = np.inf
        load = (place.loads[ranks] - np.expand_dims(goes, others_m)) + np.expand_dims(comes, others_n)
        np.maximum(worst, load, out=worst)
    for one, two in itertools.combinations(groups, 2):
        worst[..., one == two] = np.inf
    worst = worst.reshape(width**size, *groups[0].shape).swapaxes(0, 1).reshape(target.size, -1)
    best = worst.argmin(axis=1)
    done = worst[np.arange(target.size), best] <= target
    row = np.flatnonzero(done)
    combination, group = np.divmod(best[row], groups[0].shape[1])
    slots = np.unravel_index(combination, [width] * size)
    at = [(slot, ranks[row, group]) for slot, ranks in zip(slots, groups, strict=True)]
    units, experts = ([values[where] for where in at] for values in (place.units, place.experts))
    for m, where in enumerate(at):
        n = (m + 1) % size
        place.loads[where[1]] += units[n] - units[m]
        place.units[where], place.experts[where] = units[n], experts[n]
    return done
