"""Rotary positions on a GPU; test_interpreter.py has the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.rotary_cases import check_rotary


@pytest.mark.gpu
def test_same_bits_as_torch() -> None:
    check_rotary("cuda", (torch.float32, torch.float16, torch.bfloat16))
