"""The tables of docs/benchmarks are those of the rows recorded beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def test_gemm() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gemm_tables.py"), str(BENCHMARKS / "gemm_h200.jsonl")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = (BENCHMARKS / "gemm.md").read_text().splitlines()
    rows = [line for line in made.splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert [row for row in rows if row not in page] == []
