"""Who sends which expert to whom when one layer goes from one placement to another.

Every rank finds the same answer from the two placements alone, so no rank has to ask. An expert that stays in its slot
is not touched. One that is new in a slot waits in a row of the staging buffer until the commit: copied there from
another slot of the rank where there is one, received otherwise, and once however many slots of the rank it goes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_ep.eplb.policy.maps import Array


class Round(NamedTuple):
    """The messages of one rank in one round; those between two ranks go in rising order of the expert.

    Attributes:
        sends: (expert, local slot, the ranks that get it).
        receives: (expert, staging row, the rank it comes from, its local slot there).
    """

    sends: list[tuple[int, int, list[int]]]
    receives: list[tuple[int, int, int, int]]


class LayerMoves(NamedTuple):
    """One rank's part in moving a layer.

    Attributes:
        num_rows: staging rows that hold an expert until the commit, 0..num_rows-1; a round packs into the rows behind.
        copies: (expert, local slot, staging row) of experts that the rank holds already.
        rounds: as many on every rank.
        writes: (staging row, local slot), what the commit does; a row may go to several slots.
    """

    num_rows: int
    copies: list[tuple[int, int, int]]
    rounds: list[Round]
    writes: list[tuple[int, int]]

    @property
    def num_received(self) -> int:
        """Experts that come from other ranks."""
        return sum(len(part.receives) for part in self.rounds)


def plan_moves(old: Array, new: Array, num_ranks: int, rank: int, ranks_per_host: int | None = None) -> LayerMoves:
    """One rank's moves from placement `old` to `new`, integer `[P]`, the logical expert of each slot.

    The source of an expert is a rank of the receiver's host where one holds it, then the one that sends least so far.
    Rounds are cut so that the experts that wait and those packed to be sent are at most one layer's and one more.

    Example: 2 ranks, old [0, 1 | 2, 0]. To [1, 0 | 0, 0] rank 0 swaps its slots through two rows, rank 1 copies its
    slot 1 to slot 0, and nothing is sent. To [2, 1 | 1, 0] one expert goes each way.

    Args:
        ranks_per_host: consecutive ranks that share a host; None where all do.
    """
    num_slots = len(old) // num_ranks
    before, after = (
        [row[r * num_slots : (r + 1) * num_slots].tolist() for r in range(num_ranks)] for row in (old, new)
    )
    staged = [_staged(*pair) for pair in zip(before, after, strict=True)]
    sources = _sources(before, staged, ranks_per_host or num_ranks)
    rounds = _rounds(sources, num_slots + 1 - max(map(len, staged)))
    mine = [Round([], []) for _ in range(max(rounds.values(), default=-1) + 1)]
    receivers: dict[int, list[int]] = {}
    for (expert, receiver), source in sorted(sources.items()):
        if source == rank:
            receivers.setdefault(expert, []).append(receiver)
        if receiver == rank:
            slot = before[source].index(expert)
            mine[rounds[source, expert]].receives.append((expert, staged[rank][expert], source, slot))
    for expert, peers in receivers.items():
        mine[rounds[rank, expert]].sends.append((expert, before[rank].index(expert), peers))
    return LayerMoves(
        num_rows=len(staged[rank]),
        copies=[(e, before[rank].index(e), row) for e, row in staged[rank].items() if e in before[rank]],
        rounds=mine,
        writes=[
            (staged[rank][expert], slot)
            for slot, (was, expert) in enumerate(zip(before[rank], after[rank], strict=True))
            if was != expert
        ],
    )


def _staged(before: Sequence[int], after: Sequence[int]) -> dict[int, int]:
    """expert -> staging row, of the experts that are new in some slot of a rank."""
    experts = dict.fromkeys(expert for was, expert in zip(before, after, strict=True) if was != expert)
    return {expert: row for row, expert in enumerate(experts)}


def _sources(before: list[list[int]], staged: list[dict[int, int]], ranks_per_host: int) -> dict[tuple[int, int], int]:
    """(expert, receiver) -> the rank that sends it."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(before):
        for expert in set(experts):
            holders.setdefault(expert, []).append(rank)
    num_sent = [0] * len(before)
    sources = {}
    for receiver, wanted in enumerate(staged):
        for expert in wanted:
            if receiver in holders[expert]:
                continue
            host = receiver // ranks_per_host
            source = min(holders[expert], key=lambda rank: (rank // ranks_per_host != host, num_sent[rank], rank))
            num_sent[source] += 1
            sources[expert, receiver] = source
    return sources


def _rounds(sources: dict[tuple[int, int], int], sends_per_round: int) -> dict[tuple[int, int], int]:
    """(source, expert) -> the round in which it is sent; an expert is packed once for all its receivers."""
    rounds: dict[tuple[int, int], int] = {}
    num_sent: dict[int, int] = {}
    for source, expert in sorted({(source, expert) for (expert, _), source in sources.items()}):
        rounds[source, expert] = num_sent.get(source, 0) // sends_per_round
        num_sent[source] = num_sent.get(source, 0) + 1
    return rounds
