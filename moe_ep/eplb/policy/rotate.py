"""Experts passed round among few ranks so that all of them end within a limit, for ranks of few slots.

An exchange between two ranks moves two experts to relieve one. Passing experts round among two heavy ranks and a light
one relieves two ranks with three moves, and where every other rank is too heavy, as after a drift of experts that were
alike, that is what moves are saved by. With few slots on a rank all combinations can be looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from moe_ep.eplb.policy.balance import Placement
from moe_ep.eplb.policy.maps import Array

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
