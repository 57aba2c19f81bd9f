"""The programs in examples/ that start processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.checkpoint.demo import make_demo_checkpoint
from tests.checkpoint.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]


def torchrun(script: str, *arguments: str, num_ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / script), *arguments], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_layer_from_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    printed = torchrun("layer_from_checkpoint.py", str(tmp_path / "model"), "0")
    for rank in (0, 1):
        assert f"rank {rank}: 2 of 4 experts, output (16, 64)" in printed


def test_a_rank_prints_its_line_in_one_write(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    ours, of_example = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a datagram for each write
    with ours, of_example:
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / "layer_from_checkpoint.py"), str(tmp_path / "model"), "0"],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=of_example,
            timeout=600,
            check=True,
            cwd=ROOT,
        )
        assert ours.recv(4096) == b"rank 0: 4 of 4 experts, output (16, 64)\n"


def test_decoding_while_experts_move(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_demo_checkpoint(tmp_path / "model", progress=False)
    printed = torchrun("decode_with_eplb.py", str(model), "def read(self, size):", "The list of", "import")
    texts = dict(line.partition(": ")[::2] for line in printed.splitlines() if line.startswith("rank "))
    assert set(texts) == {"rank 0", "rank 1"} and all(texts.values())
