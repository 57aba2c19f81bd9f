"""Groups of some of a group's ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch import two_level
from moe_ep.distributed.process_groups import subgroup
from moe_ep.errors import DispatchTimeoutError
from tests.ranks import ranks


def groups_beside_one_of_a_rank_alone(rank: int, world_size: int) -> tuple[list[float], list[int], int]:
    """Sums over the ranks of a host and over those of one place, where rank 0 is in two groups more than others."""
    names = dist.distributed_c10d._world.pg_names
    world = dist.new_group()
    assert world is not None
    own = [dist.new_group([0], use_local_synchronization=True) for _ in range(2 if rank == 0 else 0)]
    before = len(names)
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        groups = two_level.groups_of(world)
    sums = []
    for group in (groups.within, groups.across):
        number = torch.tensor(10.0**rank)
        dist.all_reduce(number, group=group)
        sums.append(float(number))
    made = len(names) - before
    reverse = subgroup(world, range(world_size - 1, -1, -1), "reverse")
    order = [dist.get_rank(reverse), *dist.get_process_group_ranks(reverse)]
    for group in own:
        dist.destroy_process_group(group)
    return sums, order, made


def test_ranks_that_are_in_different_numbers_of_groups_make_one_together() -> None:
    results = ranks(4).run(groups_beside_one_of_a_rank_alone)
    assert [sums for sums, _, _ in results] == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]
    assert [order for _, order, _ in results] == [[3 - rank, 3, 2, 1, 0] for rank in range(4)]
    assert [made for *_, made in results] == [2] * 4


def group_where_one_of_a_rank_alone_has_the_next_name(rank: int, world_size: int) -> float:
    """The sum over a subgroup that rank 0 makes while in as many groups as when it made one that still is there."""
    world = dist.new_group()
    first = dist.new_group([rank], use_local_synchronization=True)
    second = dist.new_group([rank], use_local_synchronization=True)
    if rank == 0:
        dist.destroy_process_group(first)
    pair = subgroup(world, [0, 1], "pair") if rank < 2 else dist.group.WORLD
    number = torch.tensor(10.0**rank)
    if rank < 2:
        dist.all_reduce(number, group=pair)
    dist.destroy_process_group(second)
    if rank:
        dist.destroy_process_group(first)
    return float(number)


def test_a_subgroup_beside_one_whose_name_would_come_again() -> None:
    assert ranks(3).run(group_where_one_of_a_rank_alone_has_the_next_name) == [11, 11, 100]


def alone_where_two_should_be(rank: int, world_size: int) -> str:
    world = dist.new_group()
    assert world is not None
    said = ""
    if rank == 1:
        with pytest.MonkeyPatch.context() as machine:
            machine.setenv("MOE_EP_DISPATCH_TIMEOUT_S", "0.2")
            with pytest.raises(DispatchTimeoutError) as error:
                subgroup(world, [1, 2], "pair")
        said = str(error.value)
    dist.barrier()
    return said


def test_a_rank_that_does_not_come() -> None:
    said = ranks(3).run(alone_where_two_should_be)[1]
    assert "rank 2 did not come within 0.2 s" in said
