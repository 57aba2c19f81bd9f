"""Placement: who owns which expert, and the tables made from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.config import EXPERT_PLACEMENT_STRATEGIES, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.expert_map import (
    determine_expert_map,
    expert_owner_table,
    get_compressed_expert_map,
    maybe_roundup_hidden_size,
    round_robin_routing_tables,
)
from moe_ep.scalar_type import scalar_types

SIZES = {"ep_size": st.integers(1, 12), "num_experts": st.integers(1, 80)}


def placement(ep_size: int, num_experts: int, strategy: str) -> list[list[int]]:
    """The experts of each rank, dealt one by one."""
    shares: list[list[int]] = [[] for _ in range(ep_size)]
    if strategy == "round_robin":
        for expert in range(num_experts):
            shares[expert % ep_size].append(expert)
        return shares
    expert = 0
    for rank in range(ep_size):
        for _ in range(num_experts // ep_size + (rank < num_experts % ep_size)):
            shares[rank].append(expert)
            expert += 1
    return shares


def test_remainder_goes_to_the_first_ranks() -> None:
    assert [determine_expert_map(4, rank, 10)[0] for rank in range(4)] == [3, 3, 2, 2]
    assert determine_expert_map(4, 2, 10)[1].tolist() == [-1] * 6 + [0, 1] + [-1] * 2


def test_one_rank_needs_no_map() -> None:
    assert determine_expert_map(1, 0, 10) == (10, None, None)


def test_worked_examples() -> None:
    assert determine_expert_map(2, 1, 5)[1].tolist() == [-1, -1, -1, 0, 1]
    assert determine_expert_map(2, 1, 5, "round_robin")[1].tolist() == [-1, 0, -1, 1, -1]
    assert expert_owner_table(2, 5, "linear", 1, 1).tolist() == [0, 0, 0, 1, 1, 1]
    assert expert_owner_table(2, 5, "round_robin", 1, 1).tolist() == [0, 1, 0, 1, 0, 1]
    forth, back = round_robin_routing_tables(2, 8)
    assert forth.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert back.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@given(strategy=st.sampled_from(EXPERT_PLACEMENT_STRATEGIES), **SIZES)
def test_maps_and_owners_agree_with_dealing_one_by_one(strategy: str, ep_size: int, num_experts: int) -> None:
    shares = placement(ep_size, num_experts, strategy)
    owners = expert_owner_table(ep_size, num_experts, strategy)
    assert owners.dtype == torch.int32
    for rank, share in enumerate(shares):
        assert [expert for expert, owner in enumerate(owners.tolist()) if owner == rank] == share
        num_local, expert_map, mask = determine_expert_map(ep_size, rank, num_experts, strategy)
        assert (num_local, mask) == (len(share), None)
        if ep_size > 1:
            assert expert_map.dtype == torch.int32
            assert expert_map.tolist() == [share.index(e) if e in share else -1 for e in range(num_experts)]


@given(shared=st.integers(0, 3), strategy=st.sampled_from(EXPERT_PLACEMENT_STRATEGIES), **SIZES)
def test_mask_and_shared_experts(shared: int, strategy: str, ep_size: int, num_experts: int) -> None:
    for rank, share in enumerate(placement(ep_size, num_experts, strategy)):
        num_local, expert_map, mask = determine_expert_map(ep_size, rank, num_experts, strategy, shared, True)
        assert num_local == len(share)
        owners = expert_owner_table(ep_size, num_experts, strategy, shared, rank)
        assert owners[num_experts:].tolist() == [rank] * shared
        if ep_size == 1:
            assert expert_map is None and mask is None
            continue
        assert mask.dtype == torch.int32
        assert mask.tolist() == [int(e in share) for e in range(num_experts)] + [1] * shared + [0]
        assert expert_map[num_experts:].tolist() == list(range(num_local, num_local + shared))
        assert torch.equal((expert_map >= 0).int(), mask[:-1])


@given(**SIZES)
def test_round_robin_tables_are_rank_major_and_inverse(ep_size: int, num_experts: int) -> None:
    forth, back = round_robin_routing_tables(ep_size, num_experts)
    assert forth.dtype == back.dtype == torch.int32
    rank_major = [expert for share in placement(ep_size, num_experts, "round_robin") for expert in share]
    assert back.tolist() == rank_major
    assert forth[back.long()].tolist() == back[forth.long()].tolist() == list(range(num_experts))


def test_compressed_map() -> None:
    assert get_compressed_expert_map(torch.tensor([-1, -1, -1, 0, 1, 2])) == "0->3, 1->4, 2->5"
    assert get_compressed_expert_map(determine_expert_map(2, 1, 5, "round_robin")[1]) == "0->1, 1->3"
    assert get_compressed_expert_map(torch.tensor([2, 0, 1])) == "0->1, 1->2, 2->0"
    assert get_compressed_expert_map(torch.tensor([-1])) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 8), "ep_size is 0; it must be at least 1"),
        ((2, 2, 8), r"ep_rank is 2; it must be at least 0 and below ep_size \(2\)"),
        ((2, -1, 8), "ep_rank is -1"),
        ((2, 0, 0), "global_num_experts is 0; it must be at least 1"),
        ((2, 0, 8, "random"), "expert_placement_strategy is 'random'; it must be one of linear, round_robin"),
        ((2, 0, 8, "linear", -1), "num_fused_shared_experts is -1"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        determine_expert_map(*arguments)


@pytest.mark.parametrize("name", ["ep_size", "ep_rank", "global_num_experts", "num_fused_shared_experts"])
@pytest.mark.parametrize("value", [0.5, "1", None])
def test_whole_numbers_only(name: str, value: object) -> None:
    arguments = {"ep_size": 2, "ep_rank": 0, "global_num_experts": 8, "num_fused_shared_experts": 0, name: value}
    with pytest.raises(TypeError, match=f"^{name} is {value!r}; it must be a whole number"):
        determine_expert_map(**arguments)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_mask_is_asked_for_by_true_or_false(ep_size: int) -> None:
    with pytest.raises(TypeError, match="return_expert_mask is 'false'; it must be True or False"):
        determine_expert_map(ep_size, 0, 8, return_expert_mask="false")  # type: ignore[arg-type]


def test_tables_refuse_bad_arguments_too() -> None:
    with pytest.raises(ValueError, match=r"ep_rank is 2"):
        expert_owner_table(2, 8, ep_rank=2)
    with pytest.raises(ValueError, match="ep_size is 0; it must be at least 1"):
        round_robin_routing_tables(0, 8)


@pytest.mark.parametrize("hidden_size", [1, 31, 32, 33, 2880, 2889, 7168])
@pytest.mark.parametrize("backend", ["auto", "all_to_all", "nvshmem_low_latency", "two_level"])
def test_hidden_size_is_rounded_only_as_weights_and_backend_need(hidden_size: int, backend: str) -> None:
    parallel = FusedMoEParallelConfig.make(ep_size=2, all2all_backend=backend)
    multiple = 16 if backend == "nvshmem_low_latency" else 1
    packed = FusedMoEQuantConfig(quant_type_id=scalar_types.uint4b8.id, group_size=32)
    plain_size = maybe_roundup_hidden_size(hidden_size, torch.bfloat16, None, parallel)
    assert plain_size % multiple == 0 and 0 <= plain_size - hidden_size < multiple
    packed_size = maybe_roundup_hidden_size(hidden_size, torch.bfloat16, packed, parallel)
    assert packed_size % 32 == 0 and 0 <= packed_size - hidden_size < 32


def test_hidden_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="hidden_size is 0; it must be at least 1"):
        maybe_roundup_hidden_size(0, torch.bfloat16, None, FusedMoEParallelConfig())


@pytest.mark.parametrize(("name", "value"), [("quant_config", "x"), ("parallel_config", None)])
def test_hidden_size_is_rounded_by_configs(name: str, value: Any) -> None:
    configs: dict[str, Any] = {"quant_config": None, "parallel_config": FusedMoEParallelConfig(), name: value}
    with pytest.raises(TypeError, match=f"^{name} is {value!r}; it must be a FusedMoE"):
        maybe_roundup_hidden_size(64, torch.bfloat16, **configs)
