"""Rows of every expert from one float dtype to another, and whether an expert has a row that is not finite."""

from __future__ import annotations

import torch

from moe_ep.kernels.dispatch_rows import row_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, tl
from moe_ep.registry import choose_form


def convert_rows(
    source: torch.Tensor, counts: torch.Tensor, target: torch.Tensor | None, flags: torch.Tensor | None
) -> None:
    """target[e, i] = source[e, i] for i below counts[e], rounded; flags[e] becomes 1 if one of them is inf or NaN.

    Example: counts [1, 0], source [[[1, inf], [?, ?]], ...]: target[0, 0] is [1, inf] and flags [1, unchanged].

    Args:
        source: `[E, max_rows, K]`, contiguous.
        counts: int32 `[E]`.
        target: `[E, max_rows, K]` of another float dtype, contiguous; None to look at the rows alone.
        flags: int32 `[E]`, or None.
    """
    choose_form(convert_rows_reference, triton_convert_rows, source)(source, counts, target, flags)


def convert_rows_reference(
    source: torch.Tensor, counts: torch.Tensor, target: torch.Tensor | None, flags: torch.Tensor | None
) -> None:
    """convert_rows in plain torch, on any device; reads all rows."""
    counted = torch.arange(source.size(1), device=source.device) < counts[:, None]
    if target is not None:
        target.copy_(torch.where(counted[..., None], source.to(target.dtype), target))
    if flags is not None:
        is_bad = ~source.isfinite().all(dim=2) & counted
        flags.copy_(torch.where(is_bad.any(dim=1), 1, flags))


@TritonKernel
def _convert_rows_kernel(
    source_ptr,
    counts_ptr,
    target_ptr,
    flags_ptr,
    max_rows,
    num_columns,
    HAS_TARGET: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, b) converts columns b * BLOCK ... of row r % max_rows of expert r // max_rows, if the row counts.

    Before: source `[E, max_rows, K]`, counts int32 `[E]`. After: target of the same shape, flags int32 `[E]`.

    Example: max_rows 2, counts [1, 0]: program (0, 0) converts row 0 of expert 0, and all others end at once.
    """
    row = tl.program_id(0)
    expert = row // max_rows
    if row % max_rows < tl.load(counts_ptr + expert):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < num_columns
        place = row.to(tl.int64) * num_columns + column
        values = tl.load(source_ptr + place, mask=in_row, other=0.0).to(tl.float32)
        if HAS_TARGET:
            tl.store(target_ptr + place, values.to(target_ptr.dtype.element_ty), mask=in_row)
        if HAS_FLAGS:
            is_bad = (values.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
            if tl.max(is_bad.to(tl.int32)) > 0:
                tl.store(flags_ptr + expert, 1)


def triton_convert_rows(
    source: torch.Tensor, counts: torch.Tensor, target: torch.Tensor | None, flags: torch.Tensor | None
) -> None:
    """Arguments as in `convert_rows`, not checked."""
    num_experts, max_rows, num_columns = source.shape
    block, num_warps = row_blocks(num_experts * max_rows, num_columns, source.element_size())
    _convert_rows_kernel[(num_experts * max_rows, cdiv(num_columns, block))](
        source,
        counts,
        target,
        flags,
        max_rows,
        num_columns,
        HAS_TARGET=target is not None,
        HAS_FLAGS=flags is not None,
        BLOCK=block,
        num_warps=num_warps,
    )
