"""Where a rank sends ids, which of them are its own, and maps that say something else."""

from __future__ import annotations

import pytest
import torch

from moe_ep.dispatch.rank_group import Placement, owners_of
from tests.dispatch.backend_cases import Case, make_setting

HOST = torch.device("cpu")


def test_tables_of_a_rank() -> None:
    placement = Placement(torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32), 1)
    assert (placement.num_ids, placement.num_local) == (5, 3)
    assert placement.expert_map(HOST).tolist() == [0, -1, 1, 2, -1]
    assert placement.expert_map(HOST) is placement.expert_map(HOST)
    assert placement.owners(HOST) is placement.on_host


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_ranks_send_routed_experts_alike_and_shared_ones_to_themselves(strategy: str) -> None:
    case = Case(num_experts=5, num_shared=2, placement=strategy)
    of_ranks = [Placement(owners_of(make_setting(case, rank, 2).config), rank) for rank in range(2)]
    owners = [placement.owners(HOST).tolist() for placement in of_ranks]
    routed = {"linear": [0, 0, 0, 1, 1], "round_robin": [0, 1, 0, 1, 0]}[strategy]
    assert owners == [[*routed, 0, 0], [*routed, 1, 1]]
    first, second = (placement.checksum(5) for placement in of_ranks)
    assert first == second != of_ranks[0].checksum(4)
    assert Placement(torch.tensor([0, 0, 1, 0, 1], dtype=torch.int32), 0).checksum(5) != first


def test_a_map_is_compared_once() -> None:
    placement = Placement(torch.arange(24, dtype=torch.int32) % 2, 1)
    expert_map = placement.expert_map(HOST).clone()
    placement.check(expert_map)
    expert_map[1] = -1
    placement.check(expert_map)
    with pytest.raises(ValueError) as error:
        placement.check(expert_map.clone())
    assert str(error.value).startswith(
        "expert_map has experts 3, 5, 7, 9, 11, 13, 15, 17, ... on EP rank 1 and rows of 1, 3, 5, 7, 9, 11, 13, 15, ..."
    )
    with pytest.raises(ValueError, match="expert_map has experts 0, 1 on EP rank 1"):
        placement.check(torch.tensor([0, 1], dtype=torch.int32))
