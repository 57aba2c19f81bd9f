"""The benchmark runs on the CPU: every setting is checked and has its row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_dispatch.py"


def test_rows_and_table(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--hidden", "64", "--experts", "10",
        "--topk", "3", "--graph-tokens", "1", "--eager-tokens", "5", "--repeats", "2", "--chain", "2", "--zipf", "0.5",
        "--json", str(rows_file),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    made = {(row["backend"], row["wire"], row["tokens_per_rank"]) for row in rows}
    names = ("allgather_reducescatter", "all_to_all", "batched_all_to_all")
    assert made == {(name, wire, tokens) for name in names for wire in ("bf16", "fp8") for tokens in (1, 5)}
    for row in rows:
        assert row["mode"] == "eager" and row["ranks"] == 2 and row["routing"] == "zipf(0.5)"
        assert 0 < row["median_us"] <= row["p99_us"]
        assert row["floor_us"] > 0 and row["bytes_leaving"] > 0
    gathered = [row for row in rows if row["backend"] == "allgather_reducescatter" and row["wire"] == "bf16"]
    assert {row["bytes_leaving"] for row in gathered} == {tokens * (2 * 2 * 64 + 8 * 3) for tokens in (1, 5)}
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["backend", "wire", "T", "mode"] and len(lines) == 1 + len(rows)
