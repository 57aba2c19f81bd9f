"""The tables of docs/benchmarks are those of the rows recorded beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.bench.results import read_lines
from moe_ep.bench.scaling_file import read_scaling
from moe_ep.bench.scaling_markdown import as_markdown

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
SCALING = BENCHMARKS / "scaling"


def made(script: str, *options: str) -> list[str]:
    """The table rows that a script prints."""
    command = [sys.executable, str(ROOT / "scripts" / script), *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    return rows_of(printed)


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_number_types() -> None:
    rows = made("gemm_tables.py", str(BENCHMARKS / "gemm_types_h200.jsonl"))
    page = rows_of((BENCHMARKS / "gemm.md").read_text())
    assert len(rows) == 23  # two models, eight row counts and two lines of titles each; three lines beside Humming
    assert [row for row in rows if row not in page] == []


def test_rows_rounded_to_e4m3() -> None:
    """Every cell is the recorded number with as many digits as the cell has."""
    fields = (
        "shape", "rows", "bf16_us", "us", "ratio", "tflops", "rows_us", "sustained_bf16_us", "sustained_us",
        "sustained_ratio", "error", "taken",
    )  # fmt: skip
    page = rows_of((BENCHMARKS / "gemm_e4m3.md").read_text())
    lines = [[cell.strip() for cell in row.strip("|").split("|")] for row in page]
    shown = [cells for cells in lines if len(cells) == len(fields) and cells[1].isdecimal()]
    recorded = read_lines(BENCHMARKS / "gemm_e4m3_h200.jsonl")
    for cells, row in zip(shown, recorded, strict=True):
        for cell, field in zip(cells, fields, strict=True):
            value = row[field]
            digits = len(cell.partition(".")[2])
            assert cell == (f"{value:.{digits}f}" if isinstance(value, float) else str(value)), (cells[:2], field)


def test_beside_transformers_own_experts() -> None:
    """The page leaves out the eager times of blocks."""
    recorded = made("bench_transformers.py", "--markdown", str(BENCHMARKS / "transformers_h200.jsonl"))
    page = (BENCHMARKS / "transformers.md").read_text()
    shown = rows_of(page.partition("## Beside transformers")[2].partition("\n## ")[0])
    assert len(shown) == 2 + 18 + 2 + 8 + 2 + 8  # three tables with their titles
    assert [row for row in shown if row not in recorded] == []


def test_gemm() -> None:
    rows = made("gemm_tables.py", str(BENCHMARKS / "gemm_h200.jsonl"))
    page = rows_of((BENCHMARKS / "gemm.md").read_text())
    assert len(rows) > 50
    assert [row for row in rows if row not in page] == []


def test_dispatch() -> None:
    """Rows of runs that the page leaves out may be recorded, but none is shown that is not."""
    files = ("dispatch_4xh200.jsonl", "dispatch_2xh200.jsonl")
    recorded = [row for file in files for row in made("bench_dispatch.py", "--markdown", str(BENCHMARKS / file))]
    page = rows_of((BENCHMARKS / "dispatch.md").read_text())
    assert len(page) > 50
    assert [row for row in page if row not in recorded] == []


def test_all_tables_of_scaling() -> None:
    assert (SCALING / "tables.md").read_text() == scaling("scaling_4xh200.jsonl")


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("README.md", ("scaling_4xh200.jsonl", "scaling_4xh200_backends.jsonl")),
        ("two_gpus.md", ("scaling_2xh200.jsonl", "scaling_2xh200_backends.jsonl")),
    ],
)
def test_scaling(page: str, files: tuple[str, ...]) -> None:
    """A page may show some of the rows, and narrow tables of its own."""
    recorded = [row for file in files for row in rows_of(scaling(file))]
    shown = [row for row in rows_of((SCALING / page).read_text()) if row.count("|") > 6]
    assert len(shown) > 40
    assert [row for row in shown if row not in recorded] == []


def scaling(file: str) -> str:
    return as_markdown(read_scaling(SCALING / file)[0])
