"""Ranks of an elastic generation are killed and replaced on GPUs: the NVSHMEM backends get other ranks and graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_ranks.py"


@pytest.mark.parametrize(
    "gang",
    [
        pytest.param(["--agents", "3", "--at-once", "1"], marks=pytest.mark.gpu, id="three_share_a_gpu"),
        pytest.param(["--launcher", "local", "--ep-size", "2"], marks=pytest.mark.gpu2, id="two_gpus"),
    ],
)
def test_killed_ranks_are_replaced(gang: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--device", "cuda", "--geometry", "tiny", "--layers", "2", *gang]
    command += ["--times", "2", "--within", "1", "--prompts", "1500", "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(kills) == 2 and all(kill["recovery"] for kill in kills)
    assert kills[0]["backend"]["decode"] == "nvshmem_low_latency"
