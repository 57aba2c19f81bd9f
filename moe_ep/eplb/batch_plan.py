"""Balances one batch by its own counts: a few experts are copied into scratch slots for this batch alone.

EPLB plans from the past, and one batch of a prefill is far more uneven than its mean. Here the counts of the batch are
known before its rows are sent. A plan says which experts are copied to which ranks, and which rank computes how many of
each expert's rows. It is made in integers, so that every rank makes the same plan from the same counts.

The plan is a flow. An arc leads from rank a to rank b where b holds an expert of which a has rows to compute: such rows
may pass from a to b.

1. Ranks above the target pass rows along shortest paths of arcs to ranks below it.
2. Where no path is left, a copy makes a new arc. It leaves the ranks that the fullest one can pass rows to, its
   component, and is the one that carries most: of the component's rows above the target, of the rows of one expert
   there, of the room that its destination has. Among equals it has the destination with most room and the expert with
   most rows, so that it can carry more when rows are levelled.
3. Of the plans found for several targets the one with the least (maximum load + copy_cost_rows * copies) is kept, and
   copies that the maximum does not need are taken out again.
4. With the places known, rows are levelled to the lowest maximum possible, by parametric flow: the target begins at the
   mean and rises to the mean of a component that cannot pass on more.

Example: two ranks with one expert each, 90 rows and 10: expert 0 is copied to rank 1, which takes 40 rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moe_ep.arguments import check_integers, check_tensors
from moe_ep.eplb.policy.maps import Array
from moe_ep.errors import check_at_least, check_not_negative
from moe_ep.expert_map import expert_owner_table

# A maximum this share above the mean is good enough: the last rows take most of the copies.
TOLERANCE = 0.035
# Further targets, as multiples of the tolerance: where copies cost rows, or slots run out, a higher target may be
# reached with less.
_TARGETS = (1, 1.5, 2, 3, 4, 6, 8, 16)
_FAR = 1 << 20
_HOST = torch.device("cpu")  # whatever the default device is


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Where the rows of one batch are computed.

    Attributes:
        loads: int64 `[R]`, rows that each rank computes.
        copies: (expert, from_rank, to_rank, slot) of every copy: a logical expert, a rank that holds it, and a scratch
            slot of the rank that computes a part of its rows, below spare_slots.
        shares: int64 `[R, E, R]`: of the rows that source rank r has for expert e, how many each rank computes. Rows
            stay on their rank where that rank computes any of the expert.
    """

    loads: torch.Tensor
    copies: list[tuple[int, int, int, int]]
    shares: torch.Tensor

    def of_rank(self, rank: int, physical_to_logical: torch.Tensor, spare_slots: int) -> RankPlan:
        """One rank's part of the plan, on the host; arguments as of `plan_batch`."""
        slots, ep_size = physical_to_logical, self.loads.numel()
        owners = expert_owner_table(ep_size, slots.numel()).long()
        last = owners.bincount(minlength=ep_size).cumsum(0)
        places = torch.full(self.shares.shape[1:], -1, dtype=torch.int32, device=_HOST)
        sources = torch.full((ep_size, spare_slots), -1, dtype=torch.int32, device=_HOST)
        filled = (slots >= 0).nonzero().flatten()
        places[slots[filled], owners[filled]] = (filled + owners[filled] * spare_slots).int()
        for expert, source, to, scratch in self.copies:
            places[expert, to] = last[to] + to * spare_slots + scratch
            sources[to, scratch] = int(((slots == expert) & (owners == source)).int().argmax())
        return RankPlan(self.shares[rank].to(_HOST, torch.int32), places, sources)


class RankPlan(NamedTuple):
    """One rank's part of the plan of a batch. Ids number the slots of all ranks, scratch slots behind a rank's own.

    Attributes:
        shares: int32 `[E, R]`: of this rank's rows of expert e, how many each rank computes.
        places: int32 `[E, R]`: the id of a slot with expert e on each rank, -1 where there is none.
        sources: int32 `[R, spare_slots]`: the resident slot that is copied into each scratch slot, -1 for none.
    """

    shares: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor


def plan_batch(
    counts: torch.Tensor,
    physical_to_logical: torch.Tensor,
    ep_size: int,
    spare_slots: int = 2,
    copy_cost_rows: float = 0,
    *,
    tolerance: float = TOLERANCE,
) -> BatchPlan:
    """Plans which experts are copied for one batch, and how their rows are divided.

    Args:
        counts: integer `[R, E]`, rows that each source rank has for each logical expert.
        physical_to_logical: integer `[P]`, the expert in each slot, slots in rank order; -1 for an empty slot. Where
            ep_size does not divide P, the first ranks have one slot more.
        copy_cost_rows: rows that a copy must take off the maximum to pay; every copy takes off more.
        tolerance: no copies are made for a maximum within this share above the mean.

    Raises:
        ValueError: shapes or numbers that do not fit together, or an expert with rows and without a slot.
        TypeError: a number that is not one, or counts that are no integers.
    """
    check_batch(counts, physical_to_logical, ep_size, spare_slots)
    check_not_negative(copy_cost_rows=copy_cost_rows, tolerance=tolerance)
    on_host = counts.detach().to("cpu", torch.int64)
    resident = places(physical_to_logical.detach().cpu(), on_host.size(1), ep_size)
    total = on_host.sum(dim=0)
    missing = ((total > 0) & ~resident.any(dim=1)).nonzero()
    if missing.numel():
        expert = int(missing[0])
        raise ValueError(
            f"physical_to_logical has no slot for expert {expert}, which has {int(total[expert])} rows; every expert "
            f"with rows needs one"
        )
    start = _Split(total, resident)
    _level(start)
    mean = -(-int(total.sum()) // ep_size)
    best, least = start, float(start.loads.max())
    for multiple in _TARGETS:
        target = max(mean, int(mean * (1 + multiple * tolerance)))
        if int(start.loads.max()) <= target:
            break
        found = _with_copies(start, target, spare_slots, copy_cost_rows)
        cost = int(found.loads.max()) + copy_cost_rows * len(found.copies)
        if cost < least:
            best, least = found, cost
        if copy_cost_rows == 0 and int(found.loads.max()) <= target:
            break
    _level(best)
    best = _without_needless(best, resident, copy_cost_rows, int(mean * (1 + tolerance)))
    return BatchPlan(
        loads=best.loads.to(counts.device),
        copies=_addressed(best.copies, resident),
        shares=by_source(on_host, best.share).to(counts.device),
    )


def places(physical_to_logical: torch.Tensor, num_experts: int, ep_size: int) -> torch.Tensor:
    """Which ranks hold which experts, bool `[E, R]`, of slots `[P]` in rank order; -1 is an empty slot."""
    owners = expert_owner_table(ep_size, physical_to_logical.numel()).long()
    held = torch.zeros(num_experts, ep_size, dtype=torch.bool, device=_HOST)
    filled = physical_to_logical >= 0
    held[physical_to_logical[filled].long(), owners[filled]] = True
    return held


def divide(total: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Divides each expert's rows int64 `[E]` over its places, bool `[E, R]`, so that the maximum load of a rank is the
    least possible: int64 `[E, R]`."""
    split = _Split(total, held)
    _level(split)
    return split.share


def one_replica(slots: Array, num_experts: int, ep_size: int, active: Array | None = None) -> Array:
    """A slot of each expert for all its tokens, int64 `[E]`, so that the most experts that a rank has to read are
    fewest.

    Decode is bound by reading weights, and a second replica of an expert is a second reading.

    Args:
        slots: integer `[P]`, the expert in each slot, slots in rank order.
        active: integer `[E]`, above 0 for experts that have tokens; None for all.
    """
    held = places(torch.from_numpy(slots), num_experts, ep_size)
    counted = torch.ones(num_experts, dtype=torch.int64, device=_HOST)
    if active is not None:
        counted = torch.from_numpy(active).clamp(max=1)
    # An expert without tokens is on no rank in particular.
    chosen = torch.where(counted[:, None] > 0, divide(counted, held), held)
    ranks = chosen.int().argmax(dim=1).numpy()
    width = slots.size // ep_size
    there = (slots == np.arange(num_experts)[:, None]) & (np.arange(slots.size) // width == ranks[:, None])
    found: Array = there.argmax(axis=1)
    return found


class _Split:
    """Rows of each expert on each rank, int64 `[E, R]`, where they may be, bool `[E, R]`, and what follows from both.

    Attributes:
        copies: (expert, rank) of each copy.
        loads: int64 `[R]`.
        several: the experts with several places, the only ones whose rows can pass.
        arcs: the most rows of one expert that can pass from rank to rank, int64 `[R, R]`.
    """

    def __init__(self, total: torch.Tensor, held: torch.Tensor) -> None:
        # Every expert's rows are divided evenly over its places, the first ones taking the remainder.
        num, place = held.sum(dim=1, keepdim=True).clamp(min=1), held.cumsum(dim=1) - 1
        each = total[:, None] // num + (place < total[:, None] % num)
        self.share, self.held = torch.where(held, each, 0), held.clone()
        self.copies: list[tuple[int, int]] = []
        self.loads = self.share.sum(dim=0)
        self._find_arcs()

    def copy(self) -> _Split:
        twin, changing = copy.copy(self), (self.share, self.held, self.loads, self.arcs)
        twin.share, twin.held, twin.loads, twin.arcs = (part.clone() for part in changing)
        twin.copies = list(self.copies)
        return twin

    def pass_rows(self, expert: int, source: int, target: int, rows: int) -> None:
        self.share[expert, source] -= rows
        self.share[expert, target] += rows
        self.loads[source] -= rows
        self.loads[target] += rows
        changed = torch.tensor([source, target], device=_HOST)
        self.arcs[changed] = self._arcs_from(changed)

    def add_copy(self, expert: int, rank: int) -> None:
        self.held[expert, rank] = True
        self.copies.append((expert, rank))
        self._find_arcs()

    def drop_copy(self, expert: int, rank: int, home: int) -> None:
        self.pass_rows(expert, rank, home, int(self.share[expert, rank]))
        self.held[expert, rank] = False
        self.copies.remove((expert, rank))
        self._find_arcs()

    def _find_arcs(self) -> None:
        self.several = (self.held.sum(dim=1) > 1).nonzero().flatten()
        self.arcs = self._arcs_from(torch.arange(self.loads.numel(), device=_HOST))

    def _arcs_from(self, ranks: torch.Tensor) -> torch.Tensor:
        if not self.several.numel():
            return self.loads.new_zeros(ranks.numel(), self.loads.numel())
        most = (self.share[self.several][:, ranks, None] * self.held[self.several, None]).amax(dim=0)
        most[torch.arange(ranks.numel(), device=_HOST), ranks] = 0
        return most


def _distances(arcs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The fewest arcs from each rank to one of the goal's (bool `[R]`), int64 `[R]`; `_FAR` where there is no path."""
    distance, steps, frontier, length = torch.where(goal, 0, _FAR), (arcs > 0).float(), goal, 0
    while bool(frontier.any()):
        length += 1
        frontier = (torch.mv(steps, frontier.float()) > 0) & (distance == _FAR)
        distance[frontier] = length
    return distance


def _flow(split: _Split, target: int) -> torch.Tensor | None:
    """Passes rows from ranks above the target to ranks below it, along shortest paths.

    Returns None once no rank is above the target; otherwise the component of the fullest rank, bool `[R]`: the ranks
    that it can pass rows to, none of which is below the target.
    """
    while True:
        loads = split.loads
        if int(loads.max()) <= target:
            return None
        arcs = split.arcs
        distance = _distances(arcs, loads < target)
        source = int(torch.where(distance < _FAR, loads, -1).argmax())
        if int(distance[source]) == _FAR or int(loads[source]) <= target:
            fullest = torch.zeros_like(loads, dtype=torch.bool)
            fullest[loads.argmax()] = True
            return _distances(arcs.T, fullest) < _FAR
        nearer = torch.where(distance == distance[source] - 1, arcs[source], 0)
        to = int(nearer.argmax())
        passing = split.share[split.several, source] * split.held[split.several, to]
        rows = min(int(loads[source]) - target, int(passing.max()))
        if int(distance[to]) == 0:
            rows = min(rows, target - int(loads[to]))
        split.pass_rows(int(split.several[passing.argmax()]), source, to, rows)


def _level(split: _Split) -> None:
    """Divides the rows over their places so that the maximum load is the least possible."""
    target = -(-int(split.loads.sum()) // split.loads.numel())
    while (component := _flow(split, target)) is not None:
        # Its rows have no place elsewhere.
        target = max(target + 1, -(-int(split.loads[component].sum()) // int(component.sum())))


def _with_copies(start: _Split, target: int, spare_slots: int, cost: float) -> _Split:
    """The best of the splits reached on the way to the target, one copy after the other."""
    split = start.copy()
    best, least = start, float(start.loads.max())
    while True:
        component = _flow(split, target)
        worth = int(split.loads.max()) + cost * len(split.copies)
        if worth < least:
            best, least = (split if component is None else split.copy()), worth
        if component is None or (chosen := _next_copy(split, component, target, spare_slots)) is None:
            return best
        split.add_copy(*chosen)


def _next_copy(split: _Split, component: torch.Tensor, target: int, spare_slots: int) -> tuple[int, int] | None:
    """The expert and the rank of the copy that takes most off the fullest component; None where there is none."""
    loads = split.loads
    surplus = int((loads - target).clamp(min=0)[component].sum())
    rows = split.share[:, component].sum(dim=1)
    room = (target - loads).clamp(min=0)
    ranks = torch.tensor([rank for _, rank in split.copies], dtype=torch.int64, device=_HOST)
    used = ranks.bincount(minlength=loads.numel())
    room[(used >= spare_slots) | component] = 0
    carried = torch.minimum(rows[:, None], room).clamp(max=surplus).masked_fill(split.held, 0)
    most = carried.max()
    if int(most) == 0:
        return None
    fits = carried == most
    rank = int(torch.where(fits.any(dim=0), room, -1).argmax())
    return int(torch.where(fits[:, rank], rows, -1).argmax()), rank


def _without_needless(split: _Split, resident: torch.Tensor, cost: float, enough: int) -> _Split:
    """Takes copies out whose absence raises the maximum by no more than they cost, or not above what is enough."""
    for expert, rank in sorted(split.copies, key=lambda made: int(split.share[made])):
        fewer = split.copy()
        fewer.drop_copy(expert, rank, int(resident[expert].int().argmax()))
        if _flow(fewer, max(int(split.loads.max()) + int(cost), enough)) is None:
            _level(fewer)
            return _without_needless(fewer, resident, cost, enough)
    return split


def _addressed(copies: list[tuple[int, int]], resident: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Copies with their slot and the rank they are read from: of those that hold the expert the one read least."""
    num_ranks = resident.size(1)
    sent, used = [0] * num_ranks, [0] * num_ranks
    addressed = []
    for rank, expert in sorted((rank, expert) for expert, rank in copies):
        source = min(resident[expert].nonzero().flatten().tolist(), key=lambda holder: (sent[holder], holder))
        addressed.append((expert, source, rank, used[rank]))
        sent[source] += 1
        used[rank] += 1
    return addressed


def by_source(counts: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Divides each expert's rows `[R, E]` so that ranks compute what `share` `[E, R]` says: int64 `[R, E, R]`.

    Rows stay on their rank as far as its share goes; the others go to what is left, both in the order of the ranks.
    """
    wanted = share.T  # [R, E] like the counts
    stays = torch.minimum(counts, wanted)
    supply_end, demand_end = (counts - stays).cumsum(dim=0), (wanted - stays).cumsum(dim=0)
    supply, demand = supply_end - (counts - stays), demand_end - (wanted - stays)
    overlap = torch.minimum(supply_end[:, None], demand_end) - torch.maximum(supply[:, None], demand)
    shares = overlap.clamp(min=0).transpose(1, 2).contiguous()  # [source, E, destination]
    shares.diagonal(dim1=0, dim2=2).add_(stays.T)
    return shares


def check_batch(counts: torch.Tensor, physical_to_logical: torch.Tensor, ep_size: int, spare_slots: int) -> None:
    check_at_least(1, ep_size=ep_size)
    check_at_least(0, spare_slots=spare_slots)
    check_tensors(counts=counts, physical_to_logical=physical_to_logical)
    check_integers(counts=counts, physical_to_logical=physical_to_logical)
    if counts.dim() != 2 or counts.size(0) != ep_size or not counts.size(1):
        raise ValueError(f"counts has shape {tuple(counts.shape)}; it must be (R, E) with R = ep_size = {ep_size}")
    if int(counts.min()) < 0:
        raise ValueError(f"counts holds {int(counts.min())}; rows must be at least 0")
    if physical_to_logical.dim() != 1 or not physical_to_logical.numel():
        raise ValueError(
            f"physical_to_logical has shape {tuple(physical_to_logical.shape)}; it must be (P,), one layer's"
        )
    low, high = (int(bound) for bound in physical_to_logical.aminmax())
    if low < -1 or high >= counts.size(1):
        raise ValueError(
            f"physical_to_logical holds {low if low < -1 else high}; experts are 0 to {counts.size(1) - 1}, and -1 is "
            f"an empty slot"
        )
