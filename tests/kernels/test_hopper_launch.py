"""Which of Hopper's kernels a launch takes, and what it tells them of the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.errors import ConfigError
from moe_ep.kernels.arrival import ArrivalParams
from moe_ep.kernels.marlin import hopper, tuning
from moe_ep.kernels.marlin.params import ExpertsParams, Rows
from moe_ep.kernels.marlin.tuning import Problem

BOTH, ALONE, COST = (True, False), (True,), 30


def divide(
    expected_m: float | None, num_experts: int, max_rows: int, most_rows: int | None = None, cost: int = COST
) -> tuple[tuple[bool, ...], ExpertsParams]:
    params = ExpertsParams(num_experts=num_experts, max_rows=max_rows)
    rows = Rows(torch.zeros(num_experts), max_rows, expected_m=expected_m, most_rows=most_rows)
    common: Any = SimpleNamespace(
        device_name="a GPU without a table", problem=Problem(8, 512, 256, "uint4b8", 128), launch_overhead=cost
    )
    return hopper.select_kernels(params, common, rows), params


@pytest.mark.parametrize(
    ("expected_m", "num_experts", "max_rows", "most_rows", "kernels", "most_tiles"),
    [
        (None, 8, 32, None, ALONE, 8),
        (None, 8, 33, None, BOTH, 16),
        (16, 8, 128, None, ALONE, 32),
        (16, 8, 129, None, ALONE, 40),
        (16, 8, 129, 8 * 129, ALONE, 40),
        (16, 8, 129, 160, ALONE, 13),
        (16.5, 8, 128, None, BOTH, 32),
        (17, 8, 128, 160, BOTH, 13),
        (1, 128, 128, None, ALONE, 512),
        # With both, the list of tiles takes no more room than 272 or the experts need.
        (1, 129, 128, None, BOTH, 272),
        (None, 300, 1024, None, BOTH, 300),
        (1, 129, 128, 256, ALONE, 137),
        # 256 experts on 4 ranks, 128 tokens each, top-8.
        (16, 64, 512, 4096, ALONE, 192),
    ],
)
def test_kernels_of_a_launch(
    expected_m: float | None,
    num_experts: int,
    max_rows: int,
    most_rows: int | None,
    kernels: tuple[bool, ...],
    most_tiles: int,
) -> None:
    chosen, params = divide(expected_m, num_experts, max_rows, most_rows)
    assert chosen == kernels
    assert params.max_tiles == most_tiles
    assert params.launch_overhead == (COST if kernels == BOTH else 0)
    assert params.max_small_m == (tuning.MOST_SMALL_M if kernels == BOTH else max(params.max_rows, 32))


@pytest.mark.parametrize(("max_small_m", "kernels"), [(0, BOTH), (16, BOTH), (24, ALONE)])
def test_the_table_decides_what_is_small_m(
    max_small_m: int, kernels: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "max_small_m", lambda device_name, problem: max_small_m)
    chosen, params = divide(12, num_experts=8, max_rows=64)
    assert chosen == kernels
    assert params.max_small_m == (max_small_m if kernels == BOTH else 64)


def test_large_weights_are_not_read_anew_for_every_32_rows() -> None:
    chosen, params = divide(4, num_experts=8, max_rows=64, cost=COST - 1)
    assert (chosen, params.max_small_m, params.launch_overhead) == (BOTH, tuning.MOST_SMALL_M, COST - 1)


def test_forced_rows_decide_alone() -> None:
    with tuning.forced(16):
        chosen, params = divide(1, num_experts=8, max_rows=64)
    assert (chosen, params.max_small_m, params.launch_overhead) == (BOTH, 16, 0)


def test_experts_that_wait_for_rows_are_told_of_both() -> None:
    joined = hopper.ArrivingExperts.of(ExpertsParams(sync=3, max_tiles=7), arrival=ArrivalParams(epoch=5, leaving=9))
    assert (joined.sync, joined.max_tiles, joined.arrival.epoch, joined.arrival.leaving) == (3, 7, 5, 9)


def test_a_batch_invariant_launch_has_one_kernel_and_room_for_tiles_of_16() -> None:
    params = ExpertsParams(num_experts=32, max_rows=256)
    hopper.set_invariant_rows(params, Rows(torch.zeros(32), 256, most_rows=2048))
    assert (params.max_small_m, params.launch_overhead, params.max_tiles) == (256, 0, 32 + 2048 // 16)
    assert hopper.most_invariant_rows(32) == (1536 - 32) * 16
    with pytest.raises(ConfigError, match=r"batch_invariant .* 32768 rows .* above 24064"):
        hopper.set_invariant_rows(params, Rows(torch.zeros(32), 1024))
