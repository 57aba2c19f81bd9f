"""The GPU that a script measures on; one sentence where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def this_gpu() -> torch.device:
    """Of a script in one process.

    Raises:
        SystemExit: torch sees no GPU.
    """
    _see_a_gpu()
    return torch.device("cuda", torch.cuda.current_device())


def use_gpu_of_rank() -> None:
    """Of a script that torchrun starts; CUDA's present one from here on.

    Raises:
        SystemExit: torch sees no GPU, or torchrun did not start this process.
    """
    _see_a_gpu()
    if "LOCAL_RANK" not in os.environ:
        name = Path(sys.argv[0]).name
        sys.exit(f"{name} is for several GPUs: torchrun --nproc-per-node GPUS scripts/{name}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _see_a_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} measures on a GPU, and torch sees none here; moe-ep doctor says more")
