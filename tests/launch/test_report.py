"""The report of a run, from accounts made up here."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.report import RankReport, RunReport, StepReport, Times, percentile, terminal_lines
from moe_ep.launch.cli.run_config import RunConfig, read_texts
from tests.checkpoint.checkpoints import make_checkpoint


def account(rank: int, errors: dict[int, float], **changes: Any) -> RankReport:
    """Of one of two ranks with two layers."""
    values: dict[str, Any] = {
        "rank": rank,
        "node": "n",
        "device": "cpu",
        "device_name": "a processor",
        "experts": [[[0, 1, 2], [3, 5]][rank]] * 2,
        "num_tokens": 10 * (rank + 1),
        "backend": "all_to_all",
        "experts_name": "reference",
        "load_s": 0.5,
        "bytes_read": 100,
        "versions": {"torch": "0"},
        "model": {
            "path": "model",
            "family": "qwen3_moe",
            "moe_layers": [1, 3],
            "num_experts": 5,
            "top_k": 2,
            "hidden_size": 8,
            "intermediate_size": 4,
            "quantization": "none",
        },
        "dtype": "float32",
        "tolerance": 1e-4,
        "rows": ["rows not rounded: asked for by name"],
        "memory_bytes": 2**20,
        "errors": errors,
    }
    return RankReport(**(values | changes))


def steps(loads: list[list[int]]) -> list[StepReport]:
    """Two steps of two ranks, the second of which is the slower one."""
    found = []
    for step in range(2):
        stage_ms = []
        for rank in range(2):
            names = ("route", "dispatch", "experts", "combine")
            stage = {name: float(i + 1 + 10 * rank) for i, name in enumerate(names)}
            stage_ms.append([stage, {name: (1 + step) * ms for name, ms in stage.items()}])
        step_ms = [[100.0, 100.0], [200.0, 201.0]][step]
        found.append(StepReport(step, "", step_ms, stage_ms, loads, [1.0, 0.5], 30))
    return found


def report(
    errors_0: dict[int, float], errors_1: dict[int, float], loads: Any = ((30, 30), (60, 0)), json: Path | None = None
) -> RunReport:
    made = RunReport(RunConfig(launcher="local", json=json or Path("unused")), "moe-ep run")
    ranks = [account(0, errors_0), account(1, errors_1)]
    made.take([asdict(rank) for rank in ranks])
    for step in steps([list(layer) for layer in loads]):
        made.take(step)
    made.complete(ranks)
    return made


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, 0.0), ([3.0], 0.99, 3.0), ([4, 1, 3, 2], 0.5, 2), (list(range(1, 101)), 0.99, 99), ([1, 2, 3], 0.5, 2)],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_times_are_those_of_the_slowest_rank() -> None:
    summary = report({1: 1e-6}, {3: 2e-6}).summary()
    assert summary["ms"]["dispatch"] == {"median": 12.0, "p99": 24.0, "max": 24.0}
    assert summary["step_ms"] == {"median": 100.0, "p99": 201.0, "max": 201.0}
    assert summary["tokens_per_s"] == pytest.approx(30 / 0.1)
    assert summary["mean_tokens_per_s"] == pytest.approx(30 * 2 / 0.301)
    assert summary["verify"] == {"max_relative_error": 2e-6, "tolerance": 1e-4, "passed": True}


def test_json_lines() -> None:
    lines = [json.loads(line) for line in report({1: 1e-6}, {3: float("inf")}).json_lines()]
    assert [(line["step"], line["layer"]) for line in lines[:-1]] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert lines[0]["ms_per_rank"]["route"] == [1.0, 11.0] and lines[0]["ms"]["route"] == 11.0
    assert lines[0]["max_relative_error"] == 1e-6
    assert lines[1]["max_relative_error"] is None
    assert lines[-1]["verify"] == {"max_relative_error": None, "tolerance": 1e-4, "passed": False}
    assert lines[-1]["text"] is None
    unverified = [json.loads(line) for line in report({}, {}).json_lines()]
    assert unverified[-1]["verify"] is None and all("max_relative_error" not in line for line in unverified)


@pytest.mark.parametrize(
    ("errors_0", "errors_1", "verified", "words"),
    [
        ({1: 1e-6}, {3: 2e-6}, True, "verified: maximum relative error 2.00e-06 (layer 3)"),
        ({1: 1e-6}, {3: 1e-4}, True, "verified: maximum relative error 1.00e-04 (layer 3)"),
        ({1: 1e-6}, {3: 2e-2}, False, "NOT verified: maximum relative error 2.00e-02 (layer 3)"),
        ({1: 1e-6}, {}, False, "NOT verified"),
        ({}, {}, False, "verification: off"),
    ],
)
def test_verified_means_every_layer_within_tolerance(
    errors_0: dict[int, float], errors_1: dict[int, float], verified: bool, words: str
) -> None:
    made = report(errors_0, errors_1)
    assert made.verified is verified
    assert made.verification_line().startswith(words)


def test_lines_of_the_terminal() -> None:
    text = "\n".join(terminal_lines(report({1: 1e-6}, {3: 2e-6})))
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "0-2", "(3)", "10", "1", "MiB", "n,", "cpu"] in rows
    assert ["1", "3,", "5", "(2)", "20", "1", "MiB", "n,", "cpu"] in rows
    assert ["3", "60", "0", "0.500"] in rows
    assert ["whole", "step", "100.000", "201.000", "201.000"] in rows
    assert max(map(len, text.splitlines())) <= 140


def test_experts_that_differ_by_layer() -> None:
    found = report({}, {})
    found.ranks[0].experts = [[0, 1], [1, 2, 4]]
    first, second = found.summary()["placement"]
    assert (first["experts"], first["experts_by_layer"]) == (None, [[0, 1], [1, 2, 4]])
    assert (second["experts"], second["experts_by_layer"]) == ([3, 5], None)
    assert any("0  2 to 3, others in each layer" in line for line in terminal_lines(found))


def test_the_load_of_many_ranks_is_its_least_mean_and_most() -> None:
    made = RunReport(RunConfig(launcher="local"), "moe-ep run")
    made.complete([account(rank % 2, {1: 1e-6, 3: 1e-6}) for rank in range(40)])
    stages = [[{"route": 1.0}] * 2] * 40
    made.take(StepReport(0, "", [1.0] * 40, stages, [list(range(40))] * 2, [0.5, 0.5], 40))
    rows = [line.split() for line in terminal_lines(made)]
    assert ["layer", "least", "mean", "most", "mean/max"] in rows
    assert ["3", "0", "20", "39", "0.500"] in rows


def test_loads_of_any_size_have_columns_of_their_own() -> None:
    made = report({1: 1e-6}, {3: 1e-6}, loads=((0, 0), (12345678, 12345678)))
    rows = [line.split() for line in terminal_lines(made)]
    assert ["1", "0", "0", "1.000"] in rows and ["3", "12345678", "12345678", "1.000"] in rows


def test_times_beyond_what_is_kept_are_as_exact_as_their_classes() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 2, 5000).tolist()
    few, many = Times(exact=5000), Times(exact=10)
    for value in values:
        few.add(value)
        many.add(value)
    for share in (0.01, 0.5, 0.99, 1.0):
        assert few.percentile(share) == percentile(values, share)
        assert many.percentile(share) == pytest.approx(percentile(values, share), rel=1e-3)
    assert few.summary()["max"] == many.summary()["max"] == max(values)
    assert (few.count, few.total) == (many.count, many.total)


def test_the_memory_of_a_report_does_not_grow_with_its_steps() -> None:
    made = RunReport(RunConfig(launcher="local"), "moe-ep run")
    made.complete([account(0, {}), account(1, {})])
    tracemalloc.start()
    sizes, numbers = [], itertools.count()
    for _ in range(3):
        for _ in range(3000):
            for step in steps([[30, 30], [60, 0]]):
                made.take(replace(step, step=next(numbers)))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert made.num_steps == 18000
    assert sizes[2] - sizes[1] < 50_000


def test_texts_of_json_take_turns_by_branch(tmp_path: Any) -> None:
    file = tmp_path / "texts"
    file.write_text(json.dumps({"a": ["1", {"x": "2"}], "b": ["3"], "c": 4}))
    assert read_texts(file) == ["1", "3", "2"]
    file.write_text("not { json")
    assert read_texts(file) == ["not { json"]


def test_results_are_kept_where_nobody_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_reads(*lines: str, **options: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", nobody_reads)
    file = tmp_path / "out.jsonl"
    with pytest.raises(BrokenPipeError):
        report({1: 0.0}, {3: 0.0}, json=file).tell()
    assert json.loads(file.read_text().splitlines()[-1])["kind"] == "summary"


def test_a_second_run_is_added_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    for _ in range(2):
        report({1: 0.0}, {3: 0.0}, json=file).tell()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == [*["layer"] * 4, "summary"] * 2


@pytest.mark.parametrize("full", ["json", "save_placement", "record_routing"])
def test_what_can_be_written_is_where_a_disk_is_full(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model")
    files = {name: tmp_path / name for name in ("json", "save_placement", "record_routing")} | {full: Path("/dev/full")}
    flags = [text for name, path in files.items() for text in (f"--{name.replace('_', '-')}", str(path))]
    shape = [
        "--launcher",
        "local",
        "--device",
        "cpu",
        "--ep-size",
        "1",
        "--steps",
        "2",
        "--tokens-per-rank",
        "4",
        "--eplb",
    ]
    assert main(["run", "--model", str(tmp_path / "model"), *shape, *flags]) == 1
    output = capsys.readouterr()
    assert "verified" in output.out and "'/dev/full'" in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"model"} | files.keys() - {full})
