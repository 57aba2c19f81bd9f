"""The grid that the GPU tests run has every pair of values that it promises."""

from __future__ import annotations

from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from tests.gpu.marlin_grid import DIMENSIONS, all_pairs, case_of, grid, is_possible, pairs_of


def test_every_pair_of_values_is_in_some_case() -> None:
    cases = [case_of(places) for places in grid()]
    assert all(is_possible(case) for case in cases)
    assert set(all_pairs()) <= set().union(*(pairs_of(places) for places in grid()))
    for number, values in enumerate(DIMENSIONS):
        assert {case[number] for case in cases} == set(values)


def test_every_type_has_every_group_size_and_both_dtypes() -> None:
    found = {case_of(places)[:2] for places in grid()}
    assert len(found) == 2 * sum(len(kind.group_sizes) for kind in WEIGHT_TYPES.values())
