"""Ranks of an elastic generation are killed and replaced on GPUs: the NVSHMEM backends get other ranks and graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.checkpoint.demo import make_demo_checkpoint
from tests.launch.elastic_jobs import PROMPTS, Job, generating
from tests.launch.jobs import start_moe_ep

NCCL = "allgather_reducescatter"
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_ranks.py"


@pytest.mark.parametrize(
    "gang",
    [
        # Processes that share a GPU take turns of milliseconds, in every step.
        pytest.param(["--agents", "3", "--prompts", "300"], marks=pytest.mark.gpu, id="three_share_a_gpu"),
        pytest.param(["--ep-size", "2", "--prompts", "1500"], marks=pytest.mark.gpu2, id="two_gpus"),
        pytest.param(
            ["--ep-size", "2", "--prompts", "1500", "--options", f"--backend {NCCL}"], marks=pytest.mark.gpu2, id="nccl"
        ),
    ],
)
def test_killed_ranks_are_replaced(gang: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--device", "cuda", "--geometry", "tiny", "--layers", "2", *gang]
    command += ["--launcher", "local", "--times", "2", "--within", "1", "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(kills) == 2 and all(kill["recovery"] for kill in kills)
    assert kills[0]["backend"]["decode"] == (NCCL if gang[-1].endswith(NCCL) else "nvshmem_low_latency")


# Run by every process of the job at its start: the first that captures a CUDA graph is killed while it does.
DIES_CAPTURING = """
import os, signal, torch

begin = torch.cuda.CUDAGraph.capture_begin

def capture_begin(graph, *args, **kwargs):
    begin(graph, *args, **kwargs)
    try:
        os.close(os.open(os.environ["DIED"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

torch.cuda.CUDAGraph.capture_begin = capture_begin
"""


@pytest.mark.gpu2
def test_a_rank_dies_while_it_captures(tmp_path: Path) -> None:
    model, died = make_demo_checkpoint(tmp_path / "demo", progress=False), tmp_path / "died"
    (tmp_path / "sitecustomize.py").write_text(DIES_CAPTURING)
    options = ["--elastic", "--launcher", "local", "--ep-size", "2", "--device", "cuda"]
    command, output = generating(model, tmp_path, *options)
    path = os.pathsep.join([str(tmp_path), str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    job = Job(start_moe_ep(*command, PYTHONPATH=path, DIED=str(died)), output)
    code, lines, summary = job.end()
    assert code == 0 and died.exists(), "".join(job.said)
    assert len(lines) == len(PROMPTS) and len(summary["recoveries"]) == 1
