"""The benchmark runs on the CPU: every setting is checked and has its row, and tables are made of the rows."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_dispatch.py"
# A second command for the same processes.
NARROW = [
    "--ranks", "2", "--hidden", "32", "--experts", "10", "--topk", "3", "--graph-tokens", "1", "--eager-tokens", "",
    "--repeats", "2", "--chain", "2", "--wires", "bf16", "--backends", "all_to_all",
]  # fmt: skip
NAMES = ("allgather_reducescatter", "all_to_all", "batched_all_to_all")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("bench_dispatch")


def test_rows(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    command = [
        sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--hidden", "64", "--experts", "10",
        "--topk", "3", "--graph-tokens", "1", "--eager-tokens", "5", "--repeats", "2", "--chain", "2",
        "--routing", "one_rank", "--json", str(rows_file), "--then", *NARROW,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *rows, narrow = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert (narrow["hidden"], narrow["backend"]) == (32, "all_to_all")
    assert narrow["command"].endswith(f"bench_dispatch.py {shlex.join(NARROW)}")
    made = {(row["backend"], row["wire"], row["tokens_per_rank"]) for row in rows}
    assert made == {(name, wire, tokens) for name in NAMES for wire in ("bf16", "fp8") for tokens in (1, 5)}
    for row in rows:
        assert row["mode"] == "eager" and row["ranks"] == 2 and row["routing"] == "one_rank"
        assert 0 < row["median_us"] <= row["p99_us"] <= row["max_us"]
        assert row["floor_us"] > 0 and row["bytes_leaving"] > 0
    leaving = {(row["backend"], row["tokens_per_rank"]): row["bytes_leaving"] for row in rows if row["wire"] == "bf16"}
    # Rows of 64 bf16, with ids and weights where they go with the row. Rank 1 sends all of its tokens and gets none.
    assert [leaving["allgather_reducescatter", tokens] for tokens in (1, 5)] == [2 * 128 + 24, 5 * (2 * 128 + 24)]
    assert [leaving["all_to_all", tokens] for tokens in (1, 5)] == [128 + 24, 5 * (128 + 24)]
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == lines[1 + len(rows)].split()[:3] == ["backend", "wire", "T"]
    assert len(lines) == 1 + len(rows) + 2


ROW = {
    "ranks": 2, "gpu": "H200", "hidden": 64, "topk": 3, "experts": 10, "routing": "uniform", "torch": "2.11.0",
    "commit": "abc", "peer_bandwidth_gb_s": 300.0, "command": "python x", "backend": "a", "wire": "bf16",
    "tokens_per_rank": 8, "num_sms": None, "mode": "graph", "median_us": 5.0, "p99_us": 6.0, "raw_median_us": 4.0,
    "floor_us": 1.0, "bytes_leaving": 100,
}  # fmt: skip


def test_tables_of_recorded_rows(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eager = ROW | {"mode": "eager", "tokens_per_rank": 64}
    rows = [
        ROW,
        ROW | {"backend": "b", "median_us": 9.0, "raw_median_us": 3.0, "bytes_leaving": 50},
        ROW | {"wire": "fp8", "error": "wrong", "median_us": None},
        ROW | {"mode": "eager", "backend": "b", "median_us": 70.0, "dispatch_us": 60.0, "combine_us": 9.0},
        eager | {"num_sms": 8, "dispatch_us": 1.5, "combine_us": 2.5, "median_us": 7.0},
        eager | {"num_sms": 16, "dispatch_us": 1.0, "combine_us": 2.0, "median_us": 6.0, "p99_us": 6.5},
        ROW | {"command": "python y"},
        ROW | {"command": "python y", "topk": 4, "tokens_per_rank": 16},
    ]
    recorded = tmp_path / "rows.jsonl"
    recorded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script.main(["--markdown", str(recorded)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "### 2 x H200, hidden 64, top-3 of 10, uniform"
    assert lines[2].startswith("torch 2.11.0, commit abc;")
    assert "| bf16 | 8 | 5.0 (6.0) | 9.0 | 3.0 | 1.0 |" in lines
    assert "| fp8 | 8 | - | - | - | - |" in lines
    assert "Eager pairs of these sizes, which wait for the host: b 70.0 to 70.0 us." in lines
    assert "| bf16 | 64 | 6.0 | 4.0 | 1.0 |" in lines
    start = lines.index("| backend | SMs | 64 tokens, bf16 |")
    assert lines[start + 2 : start + 4] == ["| a | 8 | 1.5, 2.5 |", "| a | 16 | 1.0, 2.0 |"]
    assert lines[start + 5] == "### 2 x H200, hidden 64, top-3, 4 of 10, uniform"
    assert lines[-2:] == ["| 3 | bf16 | 5.0 (6.0), 4.0, 1.0 | - |", "| 4 | bf16 | - | 5.0 (6.0), 4.0, 1.0 |"]


def test_a_backend_that_cannot_run_is_named(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--backends nvshmem_low_latency:"):
        script.main(["--device", "cpu", "--backends", "all_to_all,nvshmem_low_latency"])
