"""The plan of a batch made in rounds of whole numbers, as one block of a GPU makes it in one launch, without the host.

`plan_batch` divides rows by exact flows, which needs a search in every step. Here a round has no search. The fullest
rank passes rows down to a target:

1. to another place of an expert that it has, the one that can take most;
2. where there is none, by a copy of the expert of which it has most rows, to the rank that has most room and a free
   scratch slot.

It ends when no rank is above the target, or the fullest one can pass nothing on. Nine tries are made side by side, each
by a warp: eight with targets from the lowest that is wanted up to the maximum before, and one without copies. The one
with the least (maximum load + copy_cost_rows * copies) is taken, of equal ones that with fewer copies, then the first.

On recorded routing it is as even as `plan_batch` within one per cent, with as many copies.

Example: two ranks with one expert each, 90 rows and 10, target 51: expert 0 is copied to rank 1, which takes 39 rows.
"""

from __future__ import annotations

import math

import torch

from moe_ep.eplb.batch_plan import RankPlan, by_source, check_batch
from moe_ep.errors import check_not_negative
from moe_ep.expert_map import expert_owner_table
from moe_ep.registry import choose_form

# The lowest target is this many 1024ths above the mean.
TOLERANCE = 26
NUM_TARGETS = 8


def rank_plan(
    counts: torch.Tensor, physical_to_logical: torch.Tensor, rank: int, spare_slots: int = 2, copy_cost_rows: float = 0
) -> RankPlan:
    """Plans which experts are copied for a batch, and which rank computes which of this rank's rows.

    For CUDA tensors it is one kernel, and the host waits for nothing.

    Args:
        counts: int32 `[R, E]`, rows that each source rank has for each logical expert; fewer than 2^27 of all.
        physical_to_logical: int32 `[P]`, the expert in each slot, slots in rank order; -1 for an empty slot. Where R
            does not divide P, the first ranks have one slot more. Every expert with rows has a slot.
        rank: this rank.
        spare_slots: scratch slots of each rank, at least 1.
        copy_cost_rows: rows that a copy costs; one is made only where it takes more off the maximum.
    """
    cost = math.ceil(min(copy_cost_rows, 1 << 20))
    form = choose_form(rank_plan_reference, "batch_plan:rank_plan", counts, needs="nvrtc")
    found: RankPlan = form(counts, physical_to_logical, rank, spare_slots, cost)
    return found


def rank_plan_reference(
    counts: torch.Tensor, physical_to_logical: torch.Tensor, rank: int, spare_slots: int, copy_cost_rows: int
) -> RankPlan:
    check_not_negative(copy_cost_rows=copy_cost_rows)
    num_ranks, num_experts = counts.shape
    check_batch(counts, physical_to_logical, num_ranks, spare_slots)
    on_host, slots = counts.cpu().long(), physical_to_logical.tolist()
    tries = _Tries(on_host.sum(dim=0).tolist(), slots, num_ranks, spare_slots)
    rows, copies = tries.best(copy_cost_rows)
    share = torch.zeros(num_experts, num_ranks, dtype=torch.int64, device="cpu")
    places, sources = torch.full_like(share, -1), torch.full((num_ranks, spare_slots), -1, device="cpu")
    for expert, at in tries.places.items():
        for slot in at:
            owner = tries.rank_of[slot]
            share[expert, owner], places[expert, owner] = rows[slot], slot + owner * spare_slots
    for (to, scratch), (slot, moved) in copies.items():
        share[slots[slot], to] += moved
        places[slots[slot], to] = tries.first[to + 1] + to * spare_slots + scratch
        sources[to, scratch] = slot
    shares = by_source(on_host, share)[rank]
    return RankPlan(*(tensor.to(counts.device, torch.int32) for tensor in (shares, places, sources)))


def place_rows(ids: torch.Tensor, plan: RankPlan) -> torch.Tensor:
    """The slot of each row, int32 `[T, top_k]`, ids as in `RankPlan`, -1 for none: of an expert's rows, in their order,
    the first shares[e, 0] go to rank 0, and so on.

    For CUDA tensors it is one kernel, and the host waits for nothing.

    Args:
        ids: integer `[T, top_k]`, logical; those outside of the experts are none.
        plan: of the same rows, on the same device.
    """
    form = choose_form(place_rows_reference, "batch_plan:place_rows", ids, plan.shares, needs="nvrtc")
    found: torch.Tensor = form(ids, plan)
    return found


def place_rows_reference(ids: torch.Tensor, plan: RankPlan) -> torch.Tensor:
    (num_experts, num_ranks), shares = plan.shares.shape, plan.shares.long()
    flat = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).flatten().long()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=num_experts + 1)
    first = counts.cumsum(0) - counts
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    expert = flat.clamp(max=num_experts - 1)
    rank = (nth[:, None] >= shares.cumsum(dim=1)[expert]).sum(dim=1).clamp(max=num_ranks - 1)
    return torch.where(flat < num_experts, plan.places[expert, rank], -1).view_as(ids).int()


_Copies = dict[tuple[int, int], list[int]]


class _Tries:
    """The tries for one batch.

    Attributes:
        rank_of: the rank of each slot.
        first: the first slot of each rank, and the number of slots.
        places: the slots of each expert that count, one on a rank.
    """

    def __init__(self, totals: list[int], slots: list[int], num_ranks: int, spare_slots: int) -> None:
        self._slots, self._num_ranks, self._spare_slots = slots, num_ranks, spare_slots
        self.rank_of = expert_owner_table(num_ranks, len(slots)).tolist()
        self.first = [sum(owner < rank for owner in self.rank_of) for rank in range(num_ranks + 1)]
        self.places: dict[int, list[int]] = {}
        for slot, expert in enumerate(slots):
            at = self.places.setdefault(expert, []) if expert >= 0 else []
            if expert >= 0 and all(self.rank_of[other] != self.rank_of[slot] for other in at):
                at.append(slot)
        self._rows = [0] * len(slots)
        for expert, at in self.places.items():
            for index, slot in enumerate(at):
                self._rows[slot] = totals[expert] // len(at) + (index < totals[expert] % len(at))
        self._mean = -(-sum(totals) // num_ranks)

    def best(self, cost: int) -> tuple[list[int], _Copies]:
        """Rows of each slot, and the source slot and the rows of each copy, by rank and scratch slot."""
        most = max(self._loads(self._rows))
        low = self._mean + self._mean * TOLERANCE // 1024
        targets = [(low + max(most - low, 0) * step // NUM_TARGETS, self._spare_slots) for step in range(NUM_TARGETS)]
        tried = [self._try(*target) for target in (*targets, (self._mean, 0))]
        _, rows, copies = min(tried, key=lambda found: (found[0] + cost * len(found[2]), len(found[2])))
        return rows, copies

    def _loads(self, rows: list[int]) -> list[int]:
        return [sum(rows[self.first[rank] : self.first[rank + 1]]) for rank in range(self._num_ranks)]

    def _try(self, target: int, spare_slots: int) -> tuple[int, list[int], _Copies]:
        """The maximum load that is reached, and how."""
        rows, copies = list(self._rows), _Copies()
        loads, used = self._loads(rows), [0] * self._num_ranks
        while True:
            fullest = max(range(self._num_ranks), key=lambda rank: (loads[rank], -rank))
            surplus = loads[fullest] - target
            if surplus <= 0:
                return loads[fullest], rows, copies
            here = range(self.first[fullest], self.first[fullest + 1])
            # What passes, from which slot, and to which slot or copy of which rank.
            ways: list[tuple[int, int, int | tuple[int, int], int]] = []
            for slot in here:
                for other in self.places.get(self._slots[slot], ()) if rows[slot] else ():
                    if other != slot:
                        ways.append((rows[slot], slot, other, self.rank_of[other]))
            for (to, scratch), (source, _) in sorted(copies.items()):
                for slot in self.places[self._slots[source]]:
                    if self.rank_of[slot] == fullest:
                        ways.append((rows[slot], slot, (to, scratch), to))
            ways = [(min(part, surplus, target - loads[to]), slot, place, to) for part, slot, place, to in ways]
            passed, slot, place, to = max(ways, key=lambda way: way[0], default=(0, 0, 0, 0))
            if passed <= 0:
                free = [rank for rank in range(self._num_ranks) if used[rank] < spare_slots and loads[rank] < target]
                if not free:
                    return loads[fullest], rows, copies
                to = max(free, key=lambda rank: (-loads[rank], -rank))
                slot = max(here, key=lambda slot: (rows[slot], -slot))
                passed, place = min(rows[slot], surplus, target - loads[to]), (to, used[to])
                copies[place] = [slot, 0]
                used[to] += 1
            rows[slot] -= passed
            loads[fullest] -= passed
            loads[to] += passed
            if isinstance(place, tuple):
                copies[place][1] += passed
            else:
                rows[place] += passed
