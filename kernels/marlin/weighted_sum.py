"""The weighted sum over a token's experts, on the GPU and in plain torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from moe_ep.kernels import jit

_THREADS = 256


class _SumParams(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


def kernel_source(dtype: torch.dtype) -> jit.KernelSource:
    """The kernel for bf16 or f16 rows."""
    path = Path(__file__).parent / "cuda" / "weighted_sum.cu"
    return jit.KernelSource(path, "weighted_sum", (("ACT_BF16", str(int(dtype == torch.bfloat16))),))


def weighted_sum(
    output: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, local_ids: torch.Tensor
) -> None:
    """Writes output `[T, K]`: the sum of rows `[T, slots, K]` times weights f32 `[T, slots]`, in slot order, in f32.

    A slot whose id in local_ids `[T, slots]` is negative is skipped and may hold anything; weights None means 1.
    """
    if not rows.is_cuda:
        total = torch.zeros(output.shape, dtype=torch.float32)
        for slot in range(rows.size(1)):
            part = rows[:, slot].float()
            part = part if weights is None else part * weights[:, slot, None]
            total += torch.where(local_ids[:, slot, None] >= 0, part, 0.0)
        output.copy_(total)
        return
    num_tokens, slots, columns = rows.shape
    if num_tokens == 0:
        return
    ids = local_ids.to(torch.int32).contiguous()
    weights = None if weights is None else weights.float().contiguous()
    params = _SumParams(
        rows=rows.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        ids=ids.data_ptr(),
        out=output.data_ptr(),
        tokens=num_tokens,
        slots=slots,
        columns=columns,
    )
    blocks = -(-num_tokens * (columns // 8) // _THREADS)
    jit.load(kernel_source(rows.dtype), rows.device).launch(params, (blocks, 1, 1), _THREADS)
