"""A search over replica counts, for rows that the counts with the lightest replicas leave unbalanced.

With few slots a rank, splitting the heaviest experts further can be worse than splitting the next ones, because pieces
must pair up. The first round tries other exponents of the greedy rule, each later one takes a replica from some experts
and gives it to others; all candidates are packed as rows of one problem, and the best is kept.

Example: loads [600, 560, 120, 120, 20, 10, 10, 10] on 8 ranks of 2 slots. The greedy counts [5, 5, 1, 1, ..] pack to
232, [4, 4, 2, 2, ..] to 200.
"""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.balance import Placement, separate_copies, swap_heaviest, swap_pairs
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.policy.packing import greedy_counts, pack, place_fresh, sorted_items

# Exponents of `greedy_counts` tried before single hand-overs.
_POWERS = (0.8, 1.2, 1.5, 2.0, 3.0)
_DONORS = 4
_TAKERS = 4
_MAX_ROUNDS = 8
# Candidates times slots that one search may pack: what keeps it to a few milliseconds.
_WORK = 1 << 16


def build(
    weight: Array,
    counts: Array,
    num_ranks: int,
    target: Array,
    rounds: int,
    packed: tuple[Array, Array] | None = None,
) -> Placement:
    """Rows `[X, E]` with these counts packed, copies parted, and improved by exchanges toward target `[X]`.

    packed is the experts of `sorted_items` and their ranks by `pack`, where those are known already.
    """
    if packed is None:
        expert, items = sorted_items(weight, counts)
        packed = expert, pack(items, num_ranks)
    slots = place_fresh(*packed, weight.shape[1])
    place = Placement(weight, counts, slots, num_ranks)
    # Exchanges must at least win back what chunks and the parting of copies cost.
    packed = place.by_row.max(axis=1) * np.float32(1 - 3e-5)
    target = np.minimum(target, np.maximum(packed, place.mean * np.float32(1 + 1e-6)))
    separate_copies(place)
    swap_pairs(place, target, rounds)
    swap_heaviest(place, target, rounds)
    return place


def improve_counts(weight: Array, counts: Array, worst: Array, num_ranks: int, target: Array) -> tuple[Array, Array]:
    """Counts `[X, E]` that pack to a lower maximum than `worst` `[X]`, searched while it exceeds target `[X]`.

    Returns:
        The counts, and bool `[X]`, which rows found better ones.
    """
    counts, worst = counts.copy(), worst.copy()
    found = np.zeros(worst.size, dtype=bool)
    rows = np.flatnonzero(worst > target)
    if rows.size == 0:
        return counts, found
    num_slots = int(counts[0].sum())
    work = _WORK
    for turn in range(_MAX_ROUNDS):
        tries = len(_POWERS) if turn == 0 else _DONORS * _TAKERS
        rows = rows[np.argsort(target[rows] / worst[rows], kind="stable")][: work // (tries * num_slots)]
        if rows.size == 0:
            break
        if turn == 0:
            candidate = np.concatenate([greedy_counts(weight[rows], num_slots, num_ranks, p) for p in _POWERS])
            row = np.tile(np.arange(rows.size), len(_POWERS))
        else:
            row, candidate = _neighbours(weight[rows], counts[rows], num_ranks)
            if row.size == 0:
                break
        work -= row.size * num_slots
        place = build(weight[rows[row]], candidate, num_ranks, target[rows[row]], 4)
        reached = place.by_row.max(axis=1)
        # The best candidate of each row comes last in its run.
        order = np.lexsort((-reached, row))
        last = order[np.flatnonzero(np.diff(row[order], append=rows.size))]
        last = last[reached[last] < worst[rows[row[last]]] * np.float32(1 - 1e-4)]
        better = rows[row[last]]
        counts[better], worst[better], found[better] = candidate[last], reached[last], True
        rows = rows if turn == 0 else better
        rows = rows[worst[rows] > target[rows]]
    return counts, found


def _neighbours(weight: Array, counts: Array, num_ranks: int) -> tuple[Array, Array]:
    """Counts one hand-over away: the row of each, rising, and the counts `[A, E]`."""
    each = np.arange(counts.shape[0])[:, None]
    spare = np.where(counts > 1, weight / np.maximum(counts - 1, 1), np.inf)
    donors = np.concatenate([np.argsort(spare, axis=1)[:, :2], np.argsort(-counts, axis=1)[:, :2]], axis=1)
    donors[:, 2:][(donors[:, 2:, None] == donors[:, None, :2]).any(axis=2)] = -1
    unit = np.where(counts < num_ranks, weight / counts, -1.0)
    unit[np.repeat(each, donors.shape[1], axis=1)[donors >= 0], donors[donors >= 0]] = -1.0
    takers = np.argsort(-unit, axis=1)[:, :_TAKERS]
    row, donor, taker = np.broadcast_arrays(each[:, :, None], donors[:, :, None], takers[:, None, :])
    row, donor, taker = row.ravel(), donor.ravel(), taker.ravel()
    valid = donor >= 0
    valid &= (counts[row, donor] > 1) & (unit[row, taker] > 0) & (donor != taker)
    row, donor, taker = row[valid], donor[valid], taker[valid]
    candidate = counts[row]
    candidate[np.arange(row.size), donor] -= 1
    candidate[np.arange(row.size), taker] += 1
    return row, candidate
