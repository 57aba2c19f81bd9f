"""The programs in examples/ that start processes of their own."""

from __future__ import annotations

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


def test_decoding_while_experts_move(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make_demo_checkpoint(tmp_path / "model", progress=False)
    printed = torchrun("decode_with_eplb.py", str(model), "def read(self, size):", "The list of", "import")
    texts = dict(line.partition(": ")[::2] for line in printed.splitlines() if line.startswith("rank "))
    assert set(texts) == {"rank 0", "rank 1"} and all(texts.values())
