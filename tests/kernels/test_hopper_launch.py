"""Which of Hopper's kernels a launch takes, and what it tells them of the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_ep.kernels.marlin import hopper, tuning
from moe_ep.kernels.marlin.params import ExpertsParams
from moe_ep.kernels.marlin.tuning import Problem

BOTH, ALONE, COST = (True, False), (True,), 7


def divide(expected_m: float | None, **rows: int) -> tuple[tuple[bool, ...], ExpertsParams]:
    params = ExpertsParams(**rows)
    common: Any = SimpleNamespace(
        device_name="a GPU that nobody has measured", problem=Problem(8, 512, 256, "uint4b8", 128), second_kernel=COST
    )
    return hopper._divide(params, common, expected_m), params


@pytest.mark.parametrize(
    ("expected_m", "rows", "kernels", "most_tiles"),
    [
        (None, {"num_experts": 8, "max_rows": 32}, ALONE, 8),
        (None, {"num_experts": 8, "max_rows": 33}, BOTH, 8),
        (None, {"num_experts": 8, "max_rows": 20, "sorted": 1}, ALONE, 8),
        (16, {"num_experts": 8, "max_rows": 128}, ALONE, 32),
        (16, {"num_experts": 8, "max_rows": 129}, ALONE, 40),
        (16.5, {"num_experts": 8, "max_rows": 128}, BOTH, 8),
        (1, {"num_experts": 128, "max_rows": 128}, ALONE, 512),
        (1, {"num_experts": 129, "max_rows": 128}, BOTH, 129),
        (2, {"num_experts": 64, "max_rows": 100, "sorted": 1}, ALONE, 67),
    ],
)
def test_kernels_of_a_launch(
    expected_m: float | None, rows: dict[str, int], kernels: tuple[bool, ...], most_tiles: int
) -> None:
    chosen, params = divide(expected_m, **rows)
    assert chosen == kernels
    assert params.most_tiles == most_tiles
    assert params.second_kernel == (COST if kernels == BOTH else 0)
    assert params.few_rows == (tuning.MOST_FEW_ROWS if kernels == BOTH else max(params.max_rows, 32))


@pytest.mark.parametrize(("few_rows", "kernels"), [(0, BOTH), (8, BOTH), (24, ALONE)])
def test_few_rows_of_the_table_decide_what_is_few(
    few_rows: int, kernels: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "few_rows", lambda device_name, problem: few_rows)
    chosen, params = divide(12, num_experts=8, max_rows=64)
    assert chosen == kernels
    assert params.few_rows == (few_rows if kernels == BOTH else 64)


def test_forced_rows_decide_alone() -> None:
    with tuning.forced(16):
        chosen, params = divide(1, num_experts=8, max_rows=64)
    assert (chosen, params.few_rows, params.second_kernel) == (BOTH, 16, 0)
