"""Where the experts of ranks that come and go lie, and who reads those that are lost."""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.membership import Membership, MembershipLog
from moe_ep.errors import ConfigError, CoverError
from moe_ep.layer.elastic import EMPTY, ElasticConfig, ElasticSlots, Skipping, first_placement, free_bytes, plan_cover
from moe_ep.routing import select_experts
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.small_layer import TOP_K, E, K, N, T, make_layer


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
    for num_experts, num_ranks, spare in [(10, 4, 0), (8, 3, 2), (2, 4, 1), (32, 3, 9)]:
        num_slots = -(-num_experts // num_ranks) + spare
        placement = first_placement(num_experts, num_ranks, num_slots, num_ranks * num_slots)
        rows = [placement[rank * num_slots :][:num_slots] for rank in range(num_ranks)]
        assert set(placement) - {EMPTY} == set(range(num_experts))
        assert EMPTY not in placement or num_slots > num_experts
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


def test_tokens_go_without_experts_that_are_missing() -> None:
    layer, missing = load(make_layer(), make_weights(E, K, N)), {0, 3}
    hidden_states, logits = make_inputs(T, K, E)
    weights, ids, _ = select_experts(hidden_states, logits, TOP_K, use_grouped_topk=False, renormalize=True)
    lacks = torch.isin(ids, torch.tensor(sorted(missing)))
    expected = layer(hidden_states, topk_weights=weights, topk_ids=ids.masked_fill(lacks, -1))
    whole = layer(hidden_states, logits)
    skipping = Skipping([layer], [missing])
    assert torch.equal(layer(hidden_states, logits), expected)
    assert skipping.take_hits() == lacks.any(dim=1).nonzero().flatten().tolist() != []
    assert skipping.take_hits() == []
    skipping.end()
    assert torch.equal(layer(hidden_states, logits), whole)


@pytest.fixture
def membership() -> Iterator[Membership]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    MembershipLog(store, [0, 1])
    made = Membership(store, 0)
    yield made
    made.close()


def test_slots_that_memory_has_no_room_for_are_refused(membership: Membership) -> None:
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_bytes("cpu") <= most
    slots = ElasticSlots(membership, ElasticConfig())
    layer = make_layer(num_experts=64, hidden_size=256, intermediate_size=512, enable_eplb=True)
    pid = os.fork()
    if pid == 0:  # a process that may take 1 MiB more
        code = 1
        try:
            with open("/proc/self/statm") as file:
                taken = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), resource.RLIM_INFINITY))
            try:
                slots.place(layer)
            except ConfigError as error:
                code = 0 if "MiB" in str(error) and free_bytes("cpu") <= 1 << 20 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
