"""The default policy: the lowest maximum rank load, reached from the present placement with few moves.

A layer whose heaviest rank is within `tolerance` of what can be reached stays as it is. Elsewhere, in this order and
only as far as needed: replicas change hands where one replica alone is too heavy, replicas are exchanged between heavy
and light ranks, and where that does not suffice the layer is planned anew, its ranks numbered to agree with the
present as far as possible. Where groups of experts divide over hosts, groups keep their hosts while the hosts are
balanced, and each host is a problem of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from moe_ep.eplb.policy.maps import Array, experts_moved, keep_slots
from moe_ep.eplb.policy.packing import (
    greedy_counts,
    lightest_first,
    pack,
    packed_maximum,
    place_fresh,
    smallest_companions,
    sorted_items,
)
from moe_ep.eplb.policy.problem import Problem
from moe_ep.eplb.policy.relabel import HostRows, renumber

# Ranks of so few slots seldom add up to even loads.
_FEW_SLOTS = 7
# A layer that ends this far above what is reachable, after moving a third of it, might as well be planned anew.
_FAR = 0.05
# A replica is wasted where the heaviest one elsewhere is this many times as heavy as its expert would be without it.
_WASTED = 2.0
# Replica counts are searched only up to so many redundant slots: beyond, a search takes longer than it is worth.
_SEARCHED_REPLICAS = 64
# They are searched for layers planned anew that end this share above what is reachable.
_SEARCH_ABOVE = 0.01
# A layer is planned anew only if that lowers its maximum rank load by at least this share.
_REPLAN_GAIN = 0.01
# Rounds of exchanges, each in up to half of the ranks at once.
_ROUNDS = 8
# Replicas of a layer that may change hands before it is planned anew.
_REPLICA_CHANGES = 16


class RowPlanner:
    """Plans rows, each a layer or a layer on one host: loads `[X, E]`, P slots on R ranks.

    A rank load the share `tolerance` above the reachable maximum is good enough to stop moving experts.

    Attributes:
        weight: float32 `[X, E]`, scaled to a mean of one and kept above zero.
        reachable: float32 `[X]`, the maximum rank load that no plan is expected to go below: the mean, or the heaviest
            replica beside the lightest others.
        rank: int64 `[X, P]`, where longest-first puts each item, for ranks of few slots; None elsewhere.
    """

    def __init__(self, weight: Array, num_slots: int, num_ranks: int, tolerance: float) -> None:
        scale = weight.mean(axis=1, keepdims=True)
        weight = np.divide(weight, scale, out=np.ones_like(weight), where=scale > 0)
        self.weight = np.maximum(weight, 1e-6).astype(np.float32)
        self.num_slots, self.num_ranks, self.tolerance = num_slots, num_ranks, tolerance
        self.counts = greedy_counts(self.weight, num_slots, num_ranks)
        self.expert, self.items = sorted_items(self.weight, self.counts)
        self.companions = smallest_companions(self.items, num_ranks)[:, 0]
        mean = self.items.sum(axis=1) / np.float32(num_ranks)
        self.reachable = np.maximum(mean, self.items[:, 0] + self.companions)
        self.rank: Array | None = None
        if 1 < num_slots // num_ranks <= _FEW_SLOTS:
            self.rank = pack(self.items, num_ranks)

    @property
    def _searched(self) -> bool:
        """Whether other replica counts are worth a search."""
        spare = self.num_slots - self.weight.shape[1]
        return 0 < spare <= _SEARCHED_REPLICAS and self.num_slots > self.num_ranks

    def fresh(self) -> Placement:
        """All rows planned from nothing; moves are free."""
        # The more slots a rank has, the closer to even longest-first comes, and so must exchanges.
        width = self.num_slots // self.num_ranks
        target = self.reachable * np.float32(1 + min(2.5e-3, 2 / width**3))
        packed = self.expert, pack(self.items, self.num_ranks) if self.rank is None else self.rank
        place = build(self.weight, self.counts, self.num_ranks, target, _ROUNDS, packed)
        if self._searched:
            wanted = self.reachable * np.float32(1 + _SEARCH_ABOVE)
            counts, found = improve_counts(self.weight, self.counts, place.by_row.max(axis=1), self.num_ranks, wanted)
            if found.any():
                better = build(self.weight[found], counts[found], self.num_ranks, target[found], _ROUNDS)
                place.replace(np.flatnonzero(found), better)
        return place

    def improve(self, old: Array) -> tuple[Array, Array, Array]:
        """A plan for all rows from the present placement `[X, P]`, which has a slot for every expert.

        Returns the plan, int64 `[X, P]`, slots of a rank in any order; its maximum rank loads `[X]`; and bool `[X]`,
        where planning anew might do better.
        """
        reachable = self.reachable
        if self.rank is not None:
            # What longest-first reaches is a better guide than the mean.
            reachable = np.maximum(reachable, packed_maximum(self.items, self.rank, self.num_ranks))
        target = (reachable * (1 + self.tolerance)).astype(np.float32)
        slots, counts = self._change_replicas(old, target)
        place = Placement(self.weight, counts, slots, self.num_ranks)
        separate_copies(place)
        pass_round(place, target)
        # The heaviest rank first, which takes the fewest moves.
        swap_heaviest(place, target, 4 * _ROUNDS)
        swap_pairs(place, target, _ROUNDS)
        swap_heaviest(place, target, _ROUNDS)
        worst = place.by_row.max(axis=1)
        anew = worst > target
        if self._searched:
            moves_much = experts_moved(old, place.slots, self.num_ranks) * 3 > self.num_slots
            anew |= moves_much & (worst > self.reachable * np.float32(1 + _FAR))
        return place.slots, worst, anew

    def _change_replicas(self, old: Array, target: Array) -> tuple[Array, Array]:
        """Gives replicas to experts that are too heavy for any rank, from those that lose least; at most a few a row.

        Wasted replicas go too, however light the ranks are: where a batch differs from the mean, tokens can be steered
        only between replicas that have any. Returns the placement int64 `[X, P]` and the counts int64 `[X, E]` that
        follow.
        """
        num_rows, num_experts = self.weight.shape
        base = np.arange(num_rows)[:, None] * num_experts
        counts = np.bincount((old + base).ravel(), minlength=self.weight.size).reshape(num_rows, num_experts)
        if self.num_slots == num_experts:
            return old, counts
        slots, rows = old.copy(), np.arange(num_rows)
        companions = self.companions
        if self.rank is not None:
            # With few slots a rank it matters which experts have copies now.
            present = sorted_items(self.weight, counts)[1]
            companions = np.minimum(companions, smallest_companions(present, self.num_ranks)[:, 0])
        limit = target - companions
        for _ in range(max(_REPLICA_CHANGES, self.num_slots - num_experts)):
            each = np.arange(rows.size)
            unit = self.weight[rows] / counts[rows]
            heaviest = unit.argmax(axis=1)
            load = unit[each, heaviest]
            after = np.where(counts[rows] > 1, self.weight[rows] / np.maximum(counts[rows] - 1, 1), np.inf)
            donor = after.argmin(axis=1)
            without = after[each, donor]
            gives = (load > _WASTED * without) | ((load > limit[rows]) & (load > without))
            gives &= counts[rows, heaviest] < self.num_ranks
            rows, heaviest, donor = rows[gives], heaviest[gives], donor[gives]
            if rows.size == 0:
                break
            done = self._hand_over(slots, counts, rows, heaviest, donor)
            rows = rows[done]
        return slots, counts

    def _hand_over(self, slots: Array, counts: Array, rows: Array, taker: Array, donor: Array) -> Array:
        """Overwrites a slot of each row's donor with its taker, on the lightest rank without one; where it can."""
        width = self.num_slots // self.num_ranks
        row, slot = np.nonzero(slots[rows] == donor[:, None])
        beside = slots[rows[row, None], (slot - slot % width)[:, None] + np.arange(width)]
        at = rows[row, None], beside
        load = (self.weight[at] / counts[at]).sum(axis=1)
        load[(beside == taker[row, None]).any(axis=1)] = np.inf
        # Rows rise, so that each one's candidates are neighbours; the first of the lightest is taken.
        order = np.lexsort((load, row))
        first = order[np.flatnonzero(np.diff(row[order], prepend=-1))]
        done = np.isfinite(load[first])
        rows, slot, taker, donor = rows[done], slot[first[done]], taker[done], donor[done]
        slots[rows, slot] = taker
        counts[rows, taker] += 1
        counts[rows, donor] -= 1
        return done


def plan(problem: Problem) -> Array:
    """A placement, int64 `[L, P]`, reached from the present one with few moves, or planned anew where there is none."""
    if not problem.by_host:
        return _plan_rows(problem.weight, problem.old, problem.num_replicas, problem.num_ranks, problem.tolerance)
    rows = HostRows(problem)
    num_slots, num_ranks = problem.num_replicas // problem.num_nodes, problem.num_ranks // problem.num_nodes
    return rows.join(_plan_rows(rows.weight, rows.old, num_slots, num_ranks, problem.tolerance))


def _plan_rows(weight: Array, old: Array | None, num_slots: int, num_ranks: int, tolerance: float) -> Array:
    """Plans rows; those that lack an expert, hold a foreign one (-1) or one more often than there are ranks, anew."""
    num_rows, num_experts = weight.shape
    if num_rows == 0:
        return np.empty((0, num_slots), dtype=np.int64)
    if old is None:
        return RowPlanner(weight, num_slots, num_ranks, tolerance).fresh().slots
    row = np.arange(num_rows)[:, None] * (num_experts + 1)
    held = np.bincount((row + old + 1).ravel(), minlength=num_rows * (num_experts + 1)).reshape(num_rows, -1)
    whole = (held[:, 0] == 0) & (held[:, 1:].min(axis=1) > 0)
    if num_slots <= num_experts * num_ranks:
        whole &= held[:, 1:].max(axis=1) <= num_ranks
    result, worst, anew = old.copy(), np.full(num_rows, np.inf, dtype=np.float32), ~whole
    if whole.any():
        planner = RowPlanner(weight[whole], num_slots, num_ranks, tolerance)
        result[whole], worst[whole], anew[whole] = planner.improve(old[whole])
    rows = np.flatnonzero(anew)
    if rows.size:
        fresh = RowPlanner(weight[rows], num_slots, num_ranks, tolerance).fresh()
        better = fresh.by_row.max(axis=1) * np.float32(1 + _REPLAN_GAIN) < worst[rows]
        rows = rows[better]
    if rows.size:
        result[rows] = renumber(old[rows], fresh.slots[better], num_experts, num_ranks)
    return keep_slots(old, result, num_ranks)


# ==== Search ====
#
# Other replica counts, for rows that the counts with the lightest replicas leave unbalanced.
#
# With few slots a rank, splitting the heaviest experts further can be worse than splitting the next ones, because
# pieces must pair up. Other exponents of the greedy rule give other counts; all of them are packed as rows of one
# problem, and the best are kept.
#
# Example: loads [600, 560, 120, 120, 20, 10, 10, 10] on 8 ranks of 2 slots. The greedy counts [5, 5, 1, 1, ..] pack to
# 232, [4, 4, 2, 2, ..] to 200.

_POWERS = (0.6, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0, 3.0)
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
    won_back = place.by_row.max(axis=1) * np.float32(1 - 3e-5)
    target = np.minimum(target, np.maximum(won_back, place.mean * np.float32(1 + 1e-6)))
    separate_copies(place)
    swap_pairs(place, target, rounds)
    swap_heaviest(place, target, rounds)
    return place


def improve_counts(weight: Array, counts: Array, worst: Array, num_ranks: int, target: Array) -> tuple[Array, Array]:
    """Counts `[X, E]` that pack to a lower maximum than `worst` `[X]`, searched where that exceeds target `[X]`; and
    bool `[X]`, which rows found better ones."""
    counts, found = counts.copy(), np.zeros(worst.size, dtype=bool)
    num_slots = int(counts[0].sum())
    rows = np.flatnonzero(worst > target)
    rows = rows[np.argsort(target[rows] / worst[rows], kind="stable")][: _WORK // (len(_POWERS) * num_slots)]
    if rows.size:
        candidates = np.stack([greedy_counts(weight[rows], num_slots, num_ranks, power) for power in _POWERS])
        each = np.tile(rows, len(_POWERS))
        place = build(weight[each], candidates.reshape(each.size, -1), num_ranks, target[each], 4)
        reached = place.by_row.max(axis=1).reshape(len(_POWERS), -1)
        best, number = reached.argmin(axis=0), np.arange(rows.size)
        found[rows] = reached[best, number] < worst[rows] * np.float32(1 - 1e-4)
        counts[rows] = np.where(found[rows, None], candidates[best, number], counts[rows])
    return counts, found


# ==== Exchanges ====
#
# Exchanges of two replicas between ranks that lower the heavier rank's load, on all rows at once.
#
# Rows are independent problems as in `packing`. Arrays that hold something of every rank are laid out `[.., X * R]`,
# the ranks of all rows last: reductions over a rank's few slots then run along memory, many times faster.

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
    """Exchanges slots until no rank holds an expert twice, as far as that can be done, at the least cost in balance."""
    num_ranks = place.num_ranks
    if not place.replicated or num_ranks == 1:
        return
    rising = np.sort(place.experts, axis=0)
    twice = np.flatnonzero((rising[1:] == rising[:-1]).any(axis=0))
    later = np.tril(np.ones((len(rising), len(rising)), dtype=bool), -1)[..., None]
    held = place.experts[:, twice]
    at, slot = np.nonzero(((held[:, None] == held) & later).any(axis=1).T)
    rank, before = twice[at], at.size + 1
    # An exchange that parts some copies may make room to part others.
    while 0 < rank.size < before:
        before, left = rank.size, []
        while rank.size:
            # One copy of each row a round: exchanges of one row must not cross.
            first = np.diff(rank // num_ranks, prepend=-1) > 0
            left.append(_separate(place, rank[first], slot[first]))
            rank, slot = rank[~first], slot[~first]
        rank, slot = np.concatenate(left, axis=1)
        order = rank.argsort(kind="stable")
        rank, slot = rank[order], slot[order]


def _separate(place: Placement, rank: Array, slot: Array) -> Array:
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
    width = len(experts)
    worst = np.where(held | ours, np.inf, worst).transpose(1, 2, 0).reshape(rank.size, num_ranks * width)
    best = worst.argmin(axis=1)
    found = np.isfinite(worst[each, best])
    partner = others[each, best // width]
    place.swap(rank[found], slot[found], partner[found], (best % width)[found])
    return np.stack([rank[~found], slot[~found]])


# ==== Rotations of few slots ====
#
# Experts passed round among three ranks so that all of them end within a limit, for ranks of few slots.
#
# An exchange between two ranks moves two experts to relieve one. Passing experts round among two heavy ranks and a
# light one relieves two ranks with three moves, and where every other rank is too heavy, as after a drift of experts
# that were alike, that is what moves are saved by. With few slots on a rank all combinations can be looked at.

# Beyond so many slots a rank exchanges find what they need, and beyond so many ranks this takes long.
_WIDEST = 3
_MOST_RANKS = 64
_ROTATIONS = 96
# Partners that one heavy rank tries in a round, of the heaviest and of the light ones.
_HEAVY, _LIGHT = 16, 16


def pass_round(place: Placement, target: Array) -> None:
    """Passes experts round among two ranks above `target` `[X]` and a light one, where all three end within it."""
    num_ranks, width = place.num_ranks, place.experts.shape[0]
    if not 1 < width <= _WIDEST or not 2 < num_ranks <= _MOST_RANKS:
        return
    other, light = np.divmod(np.arange(_HEAVY * _LIGHT), _LIGHT)
    rows, tried = np.arange(target.size), np.zeros(target.size, dtype=np.int64)
    for _ in range(_ROTATIONS):
        heavy = (place.by_row[rows] > target[rows, None]).sum(axis=1)
        goes_on = (heavy > 0) & (heavy < num_ranks) & (tried[rows] < heavy)
        rows, heavy = rows[goes_on], heavy[goes_on, None]
        if rows.size == 0:
            break
        rising = place.by_row[rows].argsort(axis=1) + rows[:, None] * num_ranks
        # A rank that was relieved is not heavy any more, and the next one has its number.
        nth = tried[rows, None] % heavy
        second = num_ranks - 1 - (nth + 1 + other % np.maximum(heavy - 1, 1)) % heavy
        third = light * (num_ranks - heavy) // _LIGHT
        one = np.repeat(np.take_along_axis(rising, num_ranks - 1 - nth, axis=1), other.size, axis=1)
        two, three = (np.take_along_axis(rising, at, axis=1) for at in (second, third))
        # Both ways round.
        groups = [np.hstack([one, two]), np.hstack([two, one]), np.hstack([three, three])]
        tried[rows] += ~_pass_round(place, groups, target[rows])


def _pass_round(place: Placement, groups: Sequence[Array], target: Array) -> Array:
    """Lets the best three ranks of each row pass experts round, if all of them end within `target` `[X]`; where, bool
    `[X]`.

    groups lists the first, the second and the third ranks, `[X, G]` each; groups that hold a rank twice do not count.
    Each rank gets an expert of the next one, the third of the first.
    """
    width, shape = place.experts.shape[0], groups[0].shape
    worst = np.zeros((width, width, width, *shape), dtype=np.float32)
    for m, ranks in enumerate(groups):
        n = (m + 1) % 3
        goes, comes = place.units.take(ranks, axis=1), place.units.take(groups[n], axis=1)
        if place.replicated:
            held = (place.experts.take(ranks, axis=1)[:, None] == place.experts.take(groups[n], axis=1)).any(axis=0)
            comes[held] = np.inf
        load = place.loads[ranks] - np.expand_dims(goes, [axis for axis in range(3) if axis != m])
        load = load + np.expand_dims(comes, [axis for axis in range(3) if axis != n])
        np.maximum(worst, load, out=worst)
    for one, two in itertools.combinations(groups, 2):
        worst[..., one == two] = np.inf
    worst = worst.reshape(width**3, *shape).swapaxes(0, 1).reshape(target.size, -1)
    best = worst.argmin(axis=1)
    done = worst[np.arange(target.size), best] <= target
    row = np.flatnonzero(done)
    combination, group = np.divmod(best[row], shape[1])
    slots = np.unravel_index(combination, [width] * 3)
    at = [(slot, ranks[row, group]) for slot, ranks in zip(slots, groups, strict=True)]
    units, experts = ([values[where] for where in at] for values in (place.units, place.experts))
    for m, where in enumerate(at):
        n = (m + 1) % 3
        place.loads[where[1]] += units[n] - units[m]
        place.units[where], place.experts[where] = units[n], experts[n]
    return done
