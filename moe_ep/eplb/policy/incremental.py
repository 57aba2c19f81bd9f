"""The default policy: the lowest maximum rank load, reached from the present placement with few moves.

A layer whose heaviest rank is within `tolerance` of what can be reached stays as it is. Elsewhere, in this order and
only as far as needed: replicas change hands where one replica alone is too heavy, replicas are exchanged between heavy
and light ranks, and where that does not suffice the layer is planned anew, its ranks numbered to agree with the
present as far as possible. Where groups of experts divide over hosts, groups keep their hosts while the hosts are
balanced, and each host is a problem of its own.
"""

from __future__ import annotations

import copy

import numpy as np

from moe_ep.eplb.policy.balance import Placement, relieve_heavy, separate_copies, swap_heaviest, swap_pairs
from moe_ep.eplb.policy.maps import Array, experts_moved, keep_slots
from moe_ep.eplb.policy.packing import (
    greedy_counts,
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
# A layer that ends this far above what is reachable, after moving much, might as well be planned anew.
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

    def fresh(self, rows: Array | slice) -> Placement:
        """These rows planned from nothing; moves are free."""
        weight, counts = self.weight[rows], self.counts[rows]
        # The more slots a rank has, the closer to even longest-first comes, and so must exchanges.
        width = self.num_slots // self.num_ranks
        target = self.reachable[rows] * np.float32(1 + min(2.5e-3, 2 / width**3))
        packed = self.expert[rows], pack(self.items[rows], self.num_ranks) if self.rank is None else self.rank[rows]
        place = build(weight, counts, self.num_ranks, target, _ROUNDS, packed)
        if not self._searched:
            return place
        worst = place.by_row.max(axis=1)
        wanted = self.reachable[rows] * np.float32(1 + _SEARCH_ABOVE)
        counts, found = improve_counts(weight, counts, worst, self.num_ranks, wanted)
        if found.any():
            better = build(weight[found], counts[found], self.num_ranks, target[found], _ROUNDS)
            place.replace(np.flatnonzero(found), better)
        return place

    def only(self, rows: Array) -> RowPlanner:
        """The planner of these rows alone."""
        part = copy.copy(self)
        for name in ("weight", "counts", "expert", "items", "companions", "reachable"):
            setattr(part, name, getattr(self, name)[rows])
        part.rank = None if self.rank is None else self.rank[rows]
        return part

    def improve(self, old: Array) -> tuple[Array, Array, Array]:
        """A plan for all rows from the present placement `[X, P]`, which has a slot for every expert.

        Returns:
            The plan, int64 `[X, P]`, slots of a rank in any order; its maximum rank loads `[X]`; and bool `[X]`, where
            planning anew might do better.
        """
        target = self._good_enough()
        slots, counts = self._change_replicas(old, target)
        place = Placement(self.weight, counts, self._copies_adjoined(slots), self.num_ranks)
        separate_copies(place)
        relieve_heavy(place, target)
        swap_pairs(place, target, _ROUNDS)
        swap_heaviest(place, target, _ROUNDS)
        result, worst = place.slots, place.by_row.max(axis=1)
        return result, worst, (worst > target) | self._moves_much(old, result, worst)

    def _moves_much(self, old: Array, new: Array, worst: Array) -> Array:
        """Rows that move a third of their experts and still end well above what is reachable, bool `[X]`."""
        much = worst > self.reachable * np.float32(1 + _FAR)
        if not self._searched:
            return np.zeros_like(much)
        rows = np.flatnonzero(much)
        much[rows] = experts_moved(old[rows], new[rows], self.num_ranks) * 3 > self.num_slots
        return much

    def _copies_adjoined(self, slots: Array) -> Array:
        """The placement with the slots of each rank that holds an expert twice in rising order."""
        if self.num_slots == self.weight.shape[1]:
            return slots
        ranks = slots.reshape(slots.shape[0] * self.num_ranks, -1)
        rising = np.sort(ranks.astype(np.int16 if self.weight.shape[1] < 1 << 15 else np.int32), axis=1)
        twice = (rising[:, 1:] == rising[:, :-1]).any(axis=1)
        if not twice.any():
            return slots
        return np.where(twice[:, None], rising, ranks).reshape(slots.shape)

    def _good_enough(self) -> Array:
        """The maximum rank load, float32 `[X]`, at which moving experts stops."""
        reachable = self.reachable
        if self.rank is not None:
            # What longest-first reaches is a better guide than the mean.
            reachable = np.maximum(reachable, packed_maximum(self.items, self.rank, self.num_ranks))
        return (reachable * (1 + self.tolerance)).astype(np.float32)

    def _change_replicas(self, old: Array, target: Array) -> tuple[Array, Array]:
        """Gives replicas to experts that are too heavy for any rank, from those that lose least; at most a few a row.

        Wasted replicas go too, however light the ranks are: where a batch differs from the mean, tokens can be steered
        only between replicas that have any.

        Returns:
            The placement, int64 `[X, P]`, and the counts, int64 `[X, E]`, that follow.
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
    if not problem.by_host or not len(problem.weight):
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
        return RowPlanner(weight, num_slots, num_ranks, tolerance).fresh(slice(None)).slots
    row = np.arange(num_rows)[:, None] * (num_experts + 1)
    held = np.bincount((row + old + 1).ravel(), minlength=num_rows * (num_experts + 1)).reshape(num_rows, -1)
    whole = (held[:, 0] == 0) & (held[:, 1:].min(axis=1) > 0)
    if num_slots <= num_experts * num_ranks:
        whole &= held[:, 1:].max(axis=1) <= num_ranks
    planner = RowPlanner(weight, num_slots, num_ranks, tolerance)
    result, worst, anew = old.copy(), np.full(num_rows, np.inf, dtype=np.float32), ~whole
    if whole.any():
        part = planner if whole.all() else planner.only(whole)
        result[whole], worst[whole], anew[whole] = part.improve(old[whole])
    rows = np.flatnonzero(anew)
    if rows.size:
        fresh = planner.fresh(slice(None) if rows.size == num_rows else rows)
        better = fresh.by_row.max(axis=1) * np.float32(1 + _REPLAN_GAIN) < worst[rows]
        rows = rows[better]
    if rows.size:
        result[rows] = renumber(old[rows], fresh.slots[better], num_experts, num_ranks)
    return keep_slots(old, result, num_ranks)


# ==== Search ====
#
# A search over replica counts, for rows that the counts with the lightest replicas leave unbalanced.
#
# With few slots a rank, splitting the heaviest experts further can be worse than splitting the next ones, because
# pieces must pair up. The first round tries other exponents of the greedy rule, each later one takes a replica from
# some experts and gives it to others; all candidates are packed as rows of one problem, and the best is kept.
#
# Example: loads [600, 560, 120, 120, 20, 10, 10, 10] on 8 ranks of 2 slots. The greedy counts [5, 5, 1, 1, ..] pack to
# 232, [4, 4, 2, 2, ..] to 200.

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
    won_back = place.by_row.max(axis=1) * np.float32(1 - 3e-5)
    target = np.minimum(target, np.maximum(won_back, place.mean * np.float32(1 + 1e-6)))
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
