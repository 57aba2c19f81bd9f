"""Choices by shape: tables, their order, what is measured for them, and the command's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_ep.kernels.marlin import tuning
from moe_ep.kernels.marlin.tuning import CANDIDATES, MOST_FEW_ROWS, Problem, few_rows, forced, remember, rule
from moe_ep.kernels.marlin.tuning_run import ROWS, best
from moe_ep.launch.cli import main

GPU = "NVIDIA H200"
PROBLEM = Problem(32, 7168, 2048, "uint4b8", 128)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of the user's, an empty table of the package, nothing read yet."""
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "PACKAGE_TABLE", tmp_path / "package.json")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    tuning._chosen.cache_clear()
    tuning._read.cache_clear()


def test_the_users_table_comes_first_and_the_rule_last(tables: Path) -> None:
    other = PROBLEM._replace(N=4096)
    remember(tables / "package.json", GPU, PROBLEM, 8)
    remember(tables / "package.json", GPU, other, 16)
    remember(tuning.user_table(), GPU, PROBLEM, 24)
    assert few_rows(GPU, PROBLEM) == 24
    assert few_rows(GPU, other) == 16
    assert few_rows("NVIDIA H100", PROBLEM) == rule(PROBLEM)
    with forced(0):
        assert few_rows(GPU, PROBLEM) == 0
    assert few_rows(GPU, PROBLEM) == 24


def test_choices_are_added_and_replaced(tables: Path) -> None:
    path = tuning.user_table()
    remember(path, GPU, PROBLEM, 8)
    remember(path, GPU, PROBLEM._replace(experts=4), 16)
    remember(path, GPU, PROBLEM, 32)
    assert json.loads(path.read_text())[GPU] == {
        "E32 K7168 N2048 uint4b8 g128": {"few_rows": 32},
        "E4 K7168 N2048 uint4b8 g128": {"few_rows": 16},
    }
    assert [file.name for file in tables.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"b": {}}}', '{"a": {"b": {"few_rows": 7}}}'])
def test_a_broken_table_is_named_and_not_used(text: str, caplog: pytest.LogCaptureFixture) -> None:
    tuning.user_table().write_text(text)
    assert few_rows(GPU, PROBLEM) == rule(PROBLEM)
    assert "tuned.json" in caplog.text and "delete" in caplog.text
    with pytest.raises(ValueError, match="delete"):
        remember(tuning.user_table(), GPU, PROBLEM, 8)


def test_the_packages_table_is_one() -> None:
    known = tuning.read_table(Path(tuning.__file__).with_name("tuned.json"))
    assert all(choice["few_rows"] <= MOST_FEW_ROWS for problems in known.values() for choice in problems.values())


@pytest.mark.parametrize("threshold", CANDIDATES)
def test_the_best_threshold_is_where_the_kernels_cross(threshold: int) -> None:
    measured = [{"rows": rows, "few_us": 10.0 + rows, "many_us": 10.5 + threshold} for rows in ROWS]
    assert best(measured) == threshold


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("", 2, "pass one of --geometry and --shape"),
        ("--geometry deepseek-v3 --shape 1,64,64", 2, "pass one of --geometry and --shape"),
        ("--geometry deepseek-v3 --ep-size 7", 2, "--ep-size is 7 and deepseek-v3 has 256 experts"),
        ("--shape 1,64", 2, "it must be local experts, K and N"),
        ("--shape 1,4096,100", 2, "multiples of 32"),
        ("--shape 1,4096,160", 2, "--group-size is 128; it must divide K (4096) and N (160)"),
        ("--shape 1,64,64 --weights int3", 2, "--weights"),
        ("--shape 1,4096,4096", 1, "needs a Hopper GPU"),
    ],
)
def test_the_command_says_what_is_wrong(
    options: str, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        found = main(["tune", *options.split()])
    except SystemExit as error:
        found = error.code
    said = capsys.readouterr().err
    assert found == code and message in said and len(said.strip().splitlines()) == 1
