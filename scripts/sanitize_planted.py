"""Launches the kernel with planted mistakes, so that scripts/sanitize.sh knows that its tools see our kernels."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from moe_ep.kernels import jit

THREADS = 64


class Params(ctypes.Structure):
    """`Params` of sanitize_planted.cu."""

    _fields_ = (("numbers", ctypes.c_void_p), ("count", ctypes.c_int))


def main() -> None:
    numbers = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    source = jit.KernelSource(Path(__file__).with_suffix(".cu"), "planted", (("THREADS", str(THREADS)),))
    jit.load(source, numbers.device).launch(Params(numbers.data_ptr(), len(numbers)), (1, 1, 1), THREADS)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error)
        os._exit(0)  # the tool has ended the context, which cannot be torn down any more


if __name__ == "__main__":
    main()
