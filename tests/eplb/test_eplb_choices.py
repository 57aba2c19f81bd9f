"""Files of plain choices: what is none is refused by the array's name, by every command that reads one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_ep.bench.workload import recorded_ids
from moe_ep.eplb.trace import plain_choices
from moe_ep.launch.cli.main import main

Arrays = dict[str, np.ndarray]
GOOD = np.arange(24).reshape(2, 3, 4) % 5
REFUSED: list[tuple[Arrays, str]] = [
    ({}, "has no array of choices [layer, token, top_k]"),
    ({"a": GOOD[0]}, "has no array of choices [layer, token, top_k]"),
    ({"a": GOOD * 0.5}, "float64 [2, 3, 4], holds no choices; give integers"),
    ({"a": GOOD[:0]}, "int64 [0, 3, 4], holds no choices"),
    ({"a": GOOD[:, :0]}, "int64 [2, 0, 4], holds no choices"),
    ({"a": GOOD - 2}, "holds no choices; give integers [layer, token, top_k] from -1, for none, on"),
    ({"a": GOOD, "b": GOOD[:1]}, "differ in layers or top-k (a [2, 3, 4], b [1, 3, 4])"),
    ({"a": GOOD, "b": GOOD[:, :, :2]}, "differ in layers or top-k (a [2, 3, 4], b [2, 3, 2])"),
]


@pytest.mark.parametrize(("arrays", "sentence"), REFUSED)
def test_what_is_no_choices_is_refused(
    arrays: Arrays, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "choices.npz"
    np.savez(file, **arrays)
    simulate = ["eplb", "simulate", "--routing", str(file), "--ep-size", "1", "--step-tokens", "1"]
    report = ["eplb", "report", str(file), "--ep-size", "1", "--step-tokens", "1", "--out", str(tmp_path / "load.png")]
    bench = ["bench", "scaling", "--geometry", "small", "--routing", str(file)]
    for command in (simulate, report, bench):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert str(file) in error and sentence in error and error.count("\n") == 1
    assert not (tmp_path / "load.png").exists()


def test_arrays_are_put_one_behind_the_other() -> None:
    joined = plain_choices({"a": GOOD, "counts": np.zeros(3), "b": GOOD[:, :1]}, Path("choices.npz"))
    assert joined.tolist() == np.concatenate([GOOD, GOOD[:, :1]], axis=1).tolist()


def test_a_benchmark_wants_an_expert_in_every_place(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", a=GOOD)
    np.savez(tmp_path / "some.npz", a=GOOD - 1)
    assert recorded_ids(tmp_path / "whole.npz", 5, 4).tolist() == GOOD[0].tolist()
    with pytest.raises(ValueError, match=r"some.npz has tokens without an expert \(-1\)"):
        recorded_ids(tmp_path / "some.npz", 5, 4)
