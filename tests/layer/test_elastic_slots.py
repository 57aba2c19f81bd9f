"""Where the experts of ranks that come and go lie, and who reads those that are lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moe_ep.errors import CoverError
from moe_ep.layer.elastic import EMPTY, ElasticConfig, first_placement, plan_cover


@pytest.mark.parametrize(
    ("min_ranks", "spare", "redundant", "expected"), [(1, None, 0, 8), (2, None, 0, 4), (4, None, 0, 2), (1, 1, 3, 4)]
)
def test_slots_of_a_rank(min_ranks: int, spare: int | None, redundant: int, expected: int) -> None:
    assert ElasticConfig(min_ranks=min_ranks, spare_slots=spare).num_slots(8, 4, redundant) == expected


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="max_ranks is 2"):
        ElasticConfig(min_ranks=3, max_ranks=2)
    with pytest.raises(ValueError, match="later"):
        ElasticConfig(when_uncovered="later")


def test_the_first_placement() -> None:
    assert first_placement(3, 2, 3, 4) == [0, 1, EMPTY, 2, 0, EMPTY]
    for num_experts, num_ranks, spare in [(10, 4, 0), (8, 3, 2), (2, 4, 1)]:
        num_slots = -(-num_experts // num_ranks) + spare
        placement = first_placement(num_experts, num_ranks, num_slots, num_ranks * num_slots)
        rows = [placement[rank * num_slots :][:num_slots] for rank in range(num_ranks)]
        assert set(placement) - {EMPTY} == set(range(num_experts))
        for row in rows:
            held = [expert for expert in row if expert != EMPTY]
            assert len(set(held)) == len(held)


def test_lost_experts_are_covered_without_losing_others() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        num_experts, num_ranks = numbers.randint(1, 12), numbers.randint(1, 5)
        num_slots = -(-num_experts // num_ranks) + numbers.randint(0, 3)
        rows = [[numbers.randint(EMPTY, num_experts - 1) for _ in range(num_slots)] for _ in range(num_ranks)]
        before = {expert for row in rows for expert in row} - {EMPTY}
        plan = plan_cover(rows, num_experts)
        assert sorted(expert for _, _, expert in plan) == sorted(set(range(num_experts)) - before)
        assert len({(rank, slot) for rank, slot, _ in plan}) == len(plan)
        for rank, slot, expert in plan:
            rows[rank][slot] = expert
        assert {expert for row in rows for expert in row} - {EMPTY} == set(range(num_experts))


def test_the_ranks_share_the_reading() -> None:
    plan = plan_cover([[0, 1, *[EMPTY] * 4], [2, 3, *[EMPTY] * 4]], 8)
    assert Counter(rank for rank, _, _ in plan) == {0: 2, 1: 2}


def test_too_few_slots_are_said_with_numbers() -> None:
    with pytest.raises(CoverError, match="2 ranks with 1 slots each in a layer cannot hold its 3 experts"):
        plan_cover([[0], [1]], 3)
