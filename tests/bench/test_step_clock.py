"""scripts/step_clock.py: the clock between two marks of a stream."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from moe_ep.kernels import jit

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_clock_of_a_step_is_the_median_of_the_sms_that_both_marks_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    step_clock = importlib.import_module("step_clock")
    marks = [
        # Nanoseconds, cycles, SM; in any order, each SM with a count of its own, one SM twice and another not at all.
        [(1_000, 70_000, 0), (1_010, 500, 2), (1_020, 90, 5)],
        [(3_010, 3_500, 2), (3_000, 73_200, 0), (3_020, 3_500, 2)],
        [(5_000, 75_200, 0), (5_000, 1, 1), (5_010, 5_500, 2)],
    ]
    assert step_clock.clocks_between(np.array(marks)) == pytest.approx([1550, 1000], rel=0.01)
    assert jit.compile_only(step_clock.SOURCE, "sm_90a").spill_store_bytes == 0
