"""The tables of docs/benchmarks are those of the rows recorded beside them."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

from moe_ep.bench.results import read_lines
from moe_ep.bench.scaling_tables import as_markdown, read_scaling

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
SCALING = BENCHMARKS / "scaling"


def made(script: str, *options: str) -> list[str]:
    """The table rows that a script prints."""
    folder = ROOT / "scripts"
    with (
        mock.patch.object(sys, "argv", [script, *options]),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(folder / script), run_name="__main__")
    return rows_of(printed.getvalue())


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_number_types() -> None:
    """The page shows five of the eight row counts of one model, and how Humming compares."""
    rows = made("gemm_tables.py", str(BENCHMARKS / "gemm_types_h200.jsonl"))
    section = (BENCHMARKS / "experts.md").read_text().partition("## Number types")[2].partition("\n## ")[0]
    shown = rows_of(section)
    assert len(shown) == (2 + 5) + 3
    assert [row for row in shown if row not in rows] == []


def test_rows_of_eight_bits() -> None:
    """Every cell is the recorded number with as many digits as the cell has."""
    fields = ("weights", "rows", "bf16_us", "us", "ratio", "tflops", "rows_us", "sustained_bf16_us", "sustained_us")
    section = (BENCHMARKS / "experts.md").read_text().partition("## Rows of 8 bits")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows_of(section)]
    shown = [cells for cells in lines if len(cells) == len(fields) and cells[1].isdecimal()]
    recorded = {
        (row["weights"], str(row["rows"])): row
        for row in read_lines(BENCHMARKS / "eight_bit_rows_h200.jsonl")
        if row["shape"] == "deepseek-v3"
        and (row["weights"], row["input_dtype"])
        in {("int4", "int8"), ("fp8", "float8_e4m3fn"), ("mxfp4", "float8_e4m3fn")}
    }
    assert len(shown) == 12
    for cells in shown:
        for cell, field in zip(cells, fields, strict=True):
            value = recorded[cells[0], cells[1]][field]
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
    """Five row counts of three models, the uneven rows of two, and how others compare."""
    rows = made("gemm_tables.py", str(BENCHMARKS / "gemm_h200.jsonl"))
    text = (BENCHMARKS / "experts.md").read_text()
    of_models = rows_of(text.partition("## DeepSeek-V3")[2].partition("## Which kernel")[0])
    shown = rows_of(text.partition("## Summary")[2].partition("\n## ")[0]) + of_models
    assert len(shown) > 30
    assert [row for row in shown if row not in rows] == []


def test_dispatch() -> None:
    """Rows of runs that the page leaves out may be recorded, but none is shown that is not."""
    files = ("dispatch_4xh200.jsonl", "dispatch_2xh200.jsonl", "deepep_2xh200.jsonl")
    recorded = [row for file in files for row in made("bench_dispatch.py", "--markdown", str(BENCHMARKS / file))]
    text = (BENCHMARKS / "dispatch.md").read_text().partition("## 4 GPUs, uniform")[2].partition("## What bounds it")[0]
    page = rows_of(text)
    assert len(page) > 40
    assert [row for row in page if row not in recorded] == []


def test_scaling() -> None:
    """The page shows some of the rows, and narrow tables of its own; "## Where a decode step goes" has no rows here."""
    files = ("scaling_4xh200.jsonl", "scaling_4xh200_backends.jsonl", "scaling_2xh200.jsonl")
    recorded = [row for file in files for row in rows_of(scaling(file))]
    text = (BENCHMARKS / "scaling.md").read_text().partition("## Predicted")[0]
    shown = [row for row in rows_of(text) if row.count("|") > 6]
    assert len(shown) > 40
    assert [row for row in shown if row not in recorded] == []


def test_beside_megamoe() -> None:
    """Our rows of that table are those of the file, at EP 2."""
    recorded = read_lines(SCALING / "scaling_2xh200_megamoe.jsonl")
    times = [f"{row['us']:,.1f}" for row in recorded if row["ep_size"] == 2]
    text = (BENCHMARKS / "scaling.md").read_text().partition("## Beside MegaMoE")[2].partition("## Where")[0]
    shown = [cell.strip() for row in rows_of(text) if "moe_ep" in row for cell in row.split("|")[3:-1]]
    assert sorted(shown) == sorted(times)


def scaling(file: str) -> str:
    return as_markdown(read_scaling(SCALING / file)[0])
