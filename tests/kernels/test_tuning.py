"""Choices by shape: tables, their order, what is measured for them, and the command's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin import tuning
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.tuning import CANDIDATES, MOST_SMALL_M, Problem, forced, max_small_m, remember
from moe_ep.kernels.marlin.tuning_run import ROWS, best, measure, random_weights
from moe_ep.kernels.marlin.types import weight_type
from moe_ep.launch.cli.main import main
from moe_ep.scalar_type import scalar_types

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
    tuning.choice_of_tables.cache_clear()


def test_the_users_table_comes_first_and_the_most_rows_last(tables: Path) -> None:
    other = PROBLEM._replace(N=4096)
    remember(tables / "package.json", GPU, PROBLEM, 8)
    remember(tables / "package.json", GPU, other, 16)
    remember(tuning.user_table(), GPU, PROBLEM, 24)
    assert max_small_m(GPU, PROBLEM) == 24
    assert max_small_m(GPU, other) == 16
    assert max_small_m("NVIDIA H100", PROBLEM) == MOST_SMALL_M
    with forced(0):
        assert max_small_m(GPU, PROBLEM) == 0
    assert max_small_m(GPU, PROBLEM) == 24


def test_choices_are_added_and_replaced(tables: Path) -> None:
    path = tuning.user_table()
    remember(path, GPU, PROBLEM, 8)
    remember(path, GPU, PROBLEM._replace(experts=4), 16)
    remember(path, GPU, PROBLEM, 32)
    assert json.loads(path.read_text())[GPU] == {
        "E32 K7168 N2048 uint4b8 g128": {"max_small_m": 32},
        "E4 K7168 N2048 uint4b8 g128": {"max_small_m": 16},
    }
    assert [file.name for file in tables.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"b": {}}}', '{"a": {"b": {"max_small_m": 7}}}'])
def test_a_broken_table_is_named_and_not_used(text: str, caplog: pytest.LogCaptureFixture) -> None:
    tuning.user_table().write_text(text)
    assert max_small_m(GPU, PROBLEM) == MOST_SMALL_M
    assert "tuned.json" in caplog.text and "delete" in caplog.text
    with pytest.raises(ValueError, match="delete"):
        remember(tuning.user_table(), GPU, PROBLEM, 8)


def test_the_packages_table_is_one() -> None:
    known = tuning.read_table(Path(tuning.__file__).with_name("tuned.json"))
    assert all(choice["max_small_m"] <= MOST_SMALL_M for problems in known.values() for choice in problems.values())


@pytest.mark.parametrize("threshold", CANDIDATES)
def test_the_best_threshold_is_where_the_kernels_cross(threshold: int) -> None:
    measured = [{"rows": rows, "decode_us": 10.0 + rows, "prefill_us": 10.5 + threshold} for rows in ROWS]
    assert best(measured) == threshold


def test_the_larger_of_equal_thresholds_is_taken() -> None:
    measured = [{"rows": rows, "decode_us": 10.0 if rows > 8 else 9.0, "prefill_us": 10.0} for rows in ROWS]
    assert best(measured) == 32


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


@pytest.mark.gpu
def test_either_kernel_computes_few_rows() -> None:
    kind, device = weight_type(scalar_types.uint4b8.id), torch.device("cuda")
    problem = Problem(5, 256, 512, "uint4b8", 128)
    w1 = random_weights(problem, kind, 2 * problem.N, problem.K, True, device)
    w2 = random_weights(problem, kind, problem.K, problem.N, False, device)
    rows = torch.randn(problem.experts, 64, problem.K, device=device).bfloat16()
    counts = torch.tensor([0, 8, 17, 32, 50], dtype=torch.int32, device=device)
    outputs = []
    for few in CANDIDATES:
        output = torch.zeros_like(rows)
        with forced(few):
            batched_fused_marlin_moe(
                rows, counts, w1.qweight, w2.qweight, None, None, w1.scales, w2.scales, kind.scalar_type.id,
                output=output,
            )  # fmt: skip
        outputs.append(output.float())
    for output in outputs:
        assert (output - outputs[0]).abs().mean() < 0.01 * outputs[0].abs().mean()
        assert torch.equal(output[4], outputs[0][4])  # 50 rows are many for every choice


@pytest.mark.gpu
def test_measuring_leaves_nothing_forced() -> None:
    kind = weight_type(scalar_types.uint4b8.id)
    steps: list[tuple[int, int]] = []
    problem = Problem(2, 256, 256, "uint4b8", 128)
    found = measure(problem, kind, MoEActivation.SILU, torch.device("cuda"), lambda *step: steps.append(step))
    assert [row["rows"] for row in found] == list(ROWS) and all(
        row["decode_us"] > 0 < row["prefill_us"] for row in found
    )
    assert steps == [(done, 2 * len(ROWS)) for done in range(1, 2 * len(ROWS) + 1)]
    assert max_small_m(GPU, problem) == MOST_SMALL_M
