"""Plans for one batch: every row is computed once, where its expert is; slots are not overbooked and copies pay.

`plan_batch` plans by flows, `rank_plan` in rounds, as a GPU does; both must be whole, and both are measured.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.eplb import BatchPlan, eplb_map_to_physical_and_record, plan_batch, rebalance_experts
from moe_ep.eplb.batch_plan import TOLERANCE, RankPlan
from moe_ep.eplb.batch_rounds import rank_plan
from moe_ep.eplb.placement_state import PlacementState
from moe_ep.layer.expert_slots import LayerEplbState


def linear(num_experts: int, num_ranks: int) -> list[int]:
    """The rank of each slot where the slots divide as evenly as they can."""
    each, more = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(each + (rank < more))]


def places(slots: torch.Tensor, num_ranks: int) -> list[set[int]]:
    """The ranks that hold each expert."""
    held: list[set[int]] = [set() for _ in range(int(slots.max()) + 1)]
    for rank, expert in zip(linear(len(slots), num_ranks), slots.tolist(), strict=True):
        if expert >= 0:
            held[expert].add(rank)
    return held


def lowest_maximum(rows: list[int], held: list[set[int]], num_ranks: int) -> int:
    """By Hall's theorem: the rows that must stay within a set of ranks, over its size, of the worst set."""
    sets = (set(part) for size in range(1, num_ranks + 1) for part in combinations(range(num_ranks), size))
    return max(-(-sum(n for n, at in zip(rows, held, strict=True) if at <= part) // len(part)) for part in sets)


def check(plan: BatchPlan, counts: torch.Tensor, slots: torch.Tensor, spare_slots: int) -> list[set[int]]:
    """Everything a plan must be; returns the ranks that hold each expert with the copies."""
    num_ranks = counts.size(0)
    held = places(slots, num_ranks)
    assert bool((plan.shares >= 0).all()) and torch.equal(plan.shares.sum(dim=2), counts)
    assert torch.equal(plan.shares.sum(dim=(0, 1)), plan.loads) and plan.loads.dtype == torch.int64
    assert len({(rank, slot) for _, _, rank, slot in plan.copies}) == len(plan.copies)
    for expert, source, rank, slot in plan.copies:
        assert source in held[expert] and rank not in held[expert] and 0 <= slot < spare_slots
    for expert, _, rank, _ in plan.copies:
        held[expert].add(rank)
    for expert, ranks in enumerate(held):
        elsewhere = [rank for rank in range(num_ranks) if rank not in ranks]
        assert not plan.shares[:, expert, elsewhere].any()
    return held


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts `[R, E]` and slots `[P]` with replicas; ranks without tokens, and all rows for one expert, are common."""
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    redundant = draw(st.integers(0, 6))
    most = draw(st.sampled_from([1, 40, 1000]))
    counts = torch.tensor(
        draw(st.lists(st.lists(st.integers(0, most), min_size=num_experts, max_size=num_experts),
                      min_size=num_ranks, max_size=num_ranks))
    )  # fmt: skip
    if draw(st.booleans()):
        counts[draw(st.integers(0, num_ranks - 1))] = 0
    if draw(st.booleans()):
        counts *= torch.arange(num_experts) == draw(st.integers(0, num_experts - 1))
    replicas = draw(st.lists(st.integers(-1, num_experts - 1), min_size=redundant, max_size=redundant))
    slots = draw(st.permutations([*range(num_experts), *replicas]))
    return counts, torch.tensor(slots)


@settings(max_examples=150)
@given(batches(), st.integers(0, 3), st.sampled_from([0, 3, 50]), st.sampled_from([0.0, TOLERANCE]))
def test_plans_are_whole(
    batch: tuple[torch.Tensor, torch.Tensor], spare_slots: int, cost: int, tolerance: float
) -> None:
    counts, slots = batch
    num_ranks, rows = counts.size(0), counts.sum(dim=0).tolist()
    plan = plan_batch(counts, slots, num_ranks, spare_slots, cost, tolerance=tolerance)
    held = check(plan, counts, slots, spare_slots)
    most = int(plan.loads.max())
    # No division over the same places has a lower maximum.
    assert most == lowest_maximum(rows, held, num_ranks)
    enough = int(-(-sum(rows) // num_ranks) * (1 + tolerance))
    for expert, _, rank, _ in plan.copies:
        held[expert].remove(rank)
        assert lowest_maximum(rows, held, num_ranks) > max(most + cost, enough)
        held[expert].add(rank)
    of_ranks = joined([plan.of_rank(rank, slots, spare_slots) for rank in range(num_ranks)], slots)
    assert sorted(of_ranks.copies) == sorted(plan.copies) and torch.equal(of_ranks.shares, plan.shares)
    again = plan_batch(counts.int(), slots.int(), num_ranks, spare_slots, cost, tolerance=tolerance)
    assert again.copies == plan.copies and torch.equal(again.shares, plan.shares)


def joined(parts: list[RankPlan], slots: torch.Tensor) -> BatchPlan:
    """What the plans of all ranks make together; each must place rows where the expert is."""
    num_ranks = len(parts)
    shares, (_, places, sources) = torch.stack([part.shares for part in parts]).long(), parts[0]
    ranks = linear(len(slots), num_ranks)
    # The expert and the rank of each id: a rank's slots, then its scratch slots.
    ids: list[tuple[int, int]] = []
    copies = []
    for rank in range(num_ranks):
        ids += [(int(slots[slot]), rank) for slot in range(len(slots)) if ranks[slot] == rank]
        for scratch, source in enumerate(sources[rank].tolist()):
            ids.append((int(slots[source]) if source >= 0 else -1, rank))
            if source >= 0:
                copies.append((int(slots[source]), ranks[source], rank, scratch))
    for part in parts:
        assert torch.equal(part.places, places) and torch.equal(part.sources, sources)
        for expert, rank in (part.shares > 0).nonzero().tolist():
            assert ids[int(places[expert, rank])] == (expert, rank)
    return BatchPlan(loads=shares.sum(dim=(0, 1)), copies=copies, shares=shares)


def in_rounds(counts: torch.Tensor, slots: torch.Tensor, spare_slots: int, cost: float = 0) -> BatchPlan:
    ranks = range(counts.size(0))
    return joined([rank_plan(counts.int(), slots.int(), rank, spare_slots, cost) for rank in ranks], slots)


@settings(max_examples=100)
@given(batches(), st.integers(1, 3), st.sampled_from([0, 3, 50]))
def test_plans_in_rounds_are_whole(batch: tuple[torch.Tensor, torch.Tensor], spare_slots: int, cost: int) -> None:
    counts, slots = batch
    plan, without = in_rounds(counts, slots, spare_slots, cost), in_rounds(counts, slots, spare_slots, 1e9)
    check(plan, counts, slots, spare_slots)
    assert without.copies == []
    saved = int(without.loads.max()) - int(plan.loads.max())
    assert saved > cost * len(plan.copies) or (saved >= 0 and not plan.copies)


RECORDED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not RECORDED.exists(), reason="recorded routing is not beside the checkout")
@pytest.mark.parametrize("num_tokens", [1024, 8192])
@pytest.mark.parametrize("name, num_experts", [("routing_128e", 128), ("routing_text_moe", 64)])
def test_recorded_batches_become_even(name: str, num_experts: int, num_tokens: int) -> None:
    """From linear placement: 0.96 with two scratch slots and at most one copy a rank, 0.9 with one at EP 8."""
    slots = torch.arange(num_experts)
    with np.load(RECORDED / f"{name}.npz") as domains:
        batches_of = [torch.from_numpy(domains[key][::3, -num_tokens:]).long() for key in domains.files]
    for num_ranks, spare_slots, wanted in ((8, 1, 0.9), (8, 2, 0.96), (16, 2, 0.96), (32, 2, 0.96)):
        evenness, copies = [], []
        for ids in (layer for domain in batches_of for layer in domain):
            # A plan in rounds follows from the sums over ranks, so that one rank may have all rows.
            counts = torch.zeros(num_ranks, num_experts, dtype=torch.int32)
            counts[0] = ids.flatten().bincount(minlength=num_experts)
            plan = rank_plan(counts, slots, 0, spare_slots)
            loads = plan.shares.sum(dim=0).double()
            evenness.append(float(loads.mean() / loads.max()))
            copies.append(int((plan.sources >= 0).sum()))
        assert np.mean(evenness) >= wanted and np.mean(copies) <= num_ranks, num_ranks


def by_flows(counts: torch.Tensor, slots: torch.Tensor, spare_slots: int) -> BatchPlan:
    return plan_batch(counts, slots, counts.size(0), spare_slots)


def test_one_hot_expert_is_divided() -> None:
    counts = torch.tensor([[90, 10], [0, 0]])
    plan = plan_batch(counts, torch.tensor([0, 1]), 2)
    assert plan.copies == [(0, 0, 1, 0)] and plan.loads.tolist() == [50, 50]
    assert plan.shares[0].tolist() == [[50, 40], [0, 10]]


def test_top_1_to_one_expert_fills_every_rank() -> None:
    counts = torch.zeros(8, 64, dtype=torch.int32)
    counts[:, 17] = 100
    for plan in (by_flows(counts, torch.arange(64), 1), in_rounds(counts, torch.arange(64), 1)):
        assert int(plan.loads.max()) <= 102 and len(plan.copies) == 7
        assert int(plan.shares[:, 17].diagonal().sum()) >= 786  # rows stay where they are


def test_rows_stay_on_their_rank_where_they_may() -> None:
    # Expert 0 is on both ranks; each has as many of its rows as it computes.
    plan = plan_batch(torch.tensor([[30], [30]]), torch.tensor([0, 0]), 2)
    assert plan.copies == [] and plan.shares.tolist() == [[[30, 0]], [[0, 30]]]


def test_copies_must_pay() -> None:
    counts = torch.tensor([[60, 20, 10, 10]] + [[0] * 4] * 3)
    most = [int(plan_batch(counts, torch.arange(4), 4, copy_cost_rows=cost).loads.max()) for cost in (0, 15, 34, 60)]
    assert most == sorted(most) and most[0] == 25 and most[-1] == 60
    assert plan_batch(counts, torch.arange(4), 4, copy_cost_rows=60).copies == []
    assert plan_batch(counts, torch.arange(4), 4, spare_slots=0).copies == []


def test_even_batches_and_single_ranks_copy_nothing() -> None:
    even = plan_batch(torch.full((4, 16), 7), torch.arange(16), 4)
    assert even.copies == [] and even.loads.tolist() == [112] * 4
    alone = plan_batch(torch.tensor([[5, 0, 9]]), torch.arange(3), 1)
    assert alone.copies == [] and alone.loads.tolist() == [14] and alone.shares.tolist() == [[[5], [0], [9]]]
    nothing = plan_batch(torch.zeros(3, 6, dtype=torch.int64), torch.arange(6), 3)
    assert nothing.copies == [] and nothing.loads.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "rule, device",
    [("one", "cpu"), ("auto", "cpu"), ("levelled", "cpu"), pytest.param("auto", "cuda", marks=pytest.mark.gpu)],
)
def test_small_batches_read_one_replica_of_each_expert(rule: str, device: str) -> None:
    num_ranks, num_experts, top_k = 4, 12, 3
    weight = torch.arange(1, num_experts + 1)[None]
    slots = rebalance_experts(weight, num_experts + num_ranks, 1, 1, num_ranks).physical_to_logical
    placement = PlacementState(slots.numpy(), num_experts, num_ranks, torch.device(device))
    state = LayerEplbState(num_experts, num_ranks).to(device)
    load = torch.zeros(1, num_experts + num_ranks, dtype=torch.int32, device=device)
    state.set(0, load, placement.logical_to_physical_map, placement.logical_replica_count)
    state.replica_rule = rule
    fewest = lowest_maximum([1] * num_experts, places(slots[0], num_ranks), num_ranks)
    for num_tokens in (num_experts, 200):
        ids = (torch.arange(num_tokens)[:, None] + torch.arange(top_k)) % num_experts  # every expert has tokens
        ids = ids.to(device)
        maps = state.maps(ids.numel(), 4)
        physical = torch.cat(
            [
                eplb_map_to_physical_and_record(ids, load[0], *maps, ep_rank=r, ep_size=num_ranks)
                for r in range(num_ranks)
            ]
        )
        physical = physical.cpu()
        assert torch.equal(slots[0][physical], ids.cpu().repeat(num_ranks, 1))
        busiest = max(len(part.unique()) for part in (physical[physical // 4 == rank] for rank in range(num_ranks)))
        one = rule == "one" or (rule == "auto" and device == "cuda" and num_tokens == num_experts)
        assert busiest == (fewest if one else 4) and fewest == 3


@pytest.mark.parametrize("spare_slots, least", [(1, 0.9), (2, 0.96)])
@pytest.mark.parametrize("exponent", [0.5, 1.2])
def test_skewed_batches_become_even(exponent: float, spare_slots: int, least: float) -> None:
    generator = torch.Generator().manual_seed(3)
    popularity = (1 + torch.randperm(128, generator=generator).double()) ** -exponent
    chosen = torch.multinomial(popularity, 8 * 2048, replacement=True, generator=generator)
    counts = torch.stack([part.bincount(minlength=128) for part in chosen.chunk(8)])
    plan = plan_batch(counts, torch.arange(128), 8, spare_slots)
    check(plan, counts, torch.arange(128), spare_slots)
    assert float(plan.loads.double().mean() / plan.loads.max()) >= least and len(plan.copies) <= 8


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"counts": torch.zeros(3, 4, dtype=torch.int64)}, "counts"),
        ({"counts": torch.zeros(2, 4)}, "counts"),
        ({"counts": torch.full((2, 4), -1)}, "counts"),
        ({"physical_to_logical": torch.tensor([0, 1, 2, 4])}, "physical_to_logical"),
        ({"physical_to_logical": torch.tensor([0, 1, 2, 2])}, "expert 3"),
        ({"spare_slots": -1}, "spare_slots"),
        ({"copy_cost_rows": -1.0}, "copy_cost_rows"),
    ],
)
def test_refuses(changes: dict, match: str) -> None:
    given = {"counts": torch.ones(2, 4, dtype=torch.int64), "physical_to_logical": torch.arange(4), "ep_size": 2}
    with pytest.raises(ValueError, match=match):
        plan_batch(**given | changes)
