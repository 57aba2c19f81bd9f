"""two_level: which ranks make up its levels, and both levels over gloo against plain loops."""

from __future__ import annotations

import pytest
import torch

from moe_ep.dispatch.two_level import Grid
from moe_ep.errors import ConfigError
from tests.dispatch.backend_cases import CASES, Case, make_backend, make_setting
from tests.dispatch.two_level_cases import check_two_level
from tests.ranks import ranks

LEVELS = ("all_to_all", "all_to_all")
# Of both placements and all dtypes, with masked ids, ranks without tokens, shared experts, fp8, weights on the input.
SOME_CASES = [CASES[index] for index in (0, 1, 2, 4, 8, 11, 13)]


def test_ranks_are_found_by_host_and_place() -> None:
    grid = Grid.of(["a", "b", "a", "b"], 3)
    assert grid == (((0, 2), (1, 3)), 1, 1)
    assert (grid.across, grid.within) == ((2, 3), (1, 3))
    hosts, places = grid.owners(torch.tensor([0, 1, 2, 3, 3, 0]))
    assert hosts.tolist() == [0, 1, 0, 1, 1, 0] and places.tolist() == [-1, 0, -1, 1, 1, -1]


def test_hosts_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the hosts have 2, 1 ranks; it needs the same number on each"):
        Grid.of(["a", "a", "b"], 0)


def deadlines_of_levels(rank: int, world_size: int) -> list[float]:
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        backend = make_backend(make_setting(Case(), rank, world_size), "two_level", levels=LEVELS)
    return [level.ranks.timeout_s for level in (backend._across, backend._within)]  # type: ignore[attr-defined]


def test_levels_have_the_deadline_of_the_group() -> None:
    pool = ranks(4)
    assert pool.run(deadlines_of_levels) == [[pool.timeout_s] * 2] * 4


def test_two_hosts_of_two_ranks_against_plain_loops() -> None:
    assert ranks(4).run(check_two_level, SOME_CASES, "cpu", LEVELS) == [len(SOME_CASES)] * 4
