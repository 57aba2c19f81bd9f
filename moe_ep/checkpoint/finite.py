"""Finds NaN and infinity in weights, from their bits and fast enough to run on every tensor that is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moe_ep.errors import CheckpointError

# By dtype: its width in bits, and the smallest positive bit pattern that is no number. Patterns from there to the sign
# bit, and from there with the sign bit set to the end, are infinity or NaN.
MAY_BE_NONFINITE = {
    torch.bfloat16: (16, 0x7F80),
    torch.float16: (16, 0x7C00),
    torch.float32: (32, 0x7F800000),
    torch.float64: (64, 0x7FF0000000000000),
    torch.float8_e4m3fn: (8, 0x7F),
    torch.float8_e5m2: (8, 0x7C),
}
_BLOCK_BYTES = 1 << 17  # stays in the L2 cache of a core


def has_nonfinite(data: memoryview | np.ndarray, dtype: torch.dtype) -> bool:
    """Whether contiguous bytes of that dtype hold NaN or infinity.

    Finite patterns are below a bound both among the positive and among the negative ones, so the largest value as
    signed integers and the largest as unsigned ones tell. Both are found block by block, so that memory is read once.
    """
    if dtype not in MAY_BE_NONFINITE or not len(data):
        return False
    bits, bound = MAY_BE_NONFINITE[dtype]
    signed = np.frombuffer(data, dtype=f"i{bits // 8}")
    unsigned, negative_bound = signed.view(f"u{bits // 8}"), bound + (1 << (bits - 1))
    block = _BLOCK_BYTES * 8 // bits
    for start in range(0, len(signed), block):
        part = slice(start, start + block)
        if signed[part].max() >= bound or unsigned[part].max() >= negative_bound:
            return True
    return False


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinity; 0 for dtypes that have none."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0
    if tensor.is_cpu and not has_nonfinite(
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype
    ):
        return 0
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return int((~values.isfinite()).sum())


def check_finite(where: Path | str, name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError, with the count, if a tensor that was read from `where` holds NaN or infinity."""
    if count := count_nonfinite(tensor):
        raise CheckpointError(
            f"{where}: tensor {name}: expected finite numbers, found NaN or infinity in {count} of {tensor.numel()}; "
            f"fetch it again, or load it all the same with allow_nonfinite (--allow-nonfinite)"
        )
