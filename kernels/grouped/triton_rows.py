"""Moving and activating rows as Triton kernels, called through `moe_ep.kernels.grouped.rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.activation import MoEActivation
from moe_ep.kernels.triton_activation import activated
from moe_ep.kernels.triton_dispatch_rows import as_words, row_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv


@TritonKernel
@triton.jit
def _move_rows_kernel(
    source_ptr,
    sources_ptr,
    target_ptr,
    targets_ptr,
    count_ptr,
    num_columns,
    source_stride,
    target_stride,
    HAS_SOURCES: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (j, b) copies words b * BLOCK ... of the j-th row, and ends at once if there is no such row.

    Before: source `[*, W]` words, lists int32 `[S]`, count int32 `[1]`. After: target `[*, W]`.

    Example: j=1, sources [7, 3], no targets, count 2: target[1] = source[3].
    """
    row = tl.program_id(0)
    if row < tl.load(count_ptr):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < num_columns
        origin, place = row.to(tl.int64), row.to(tl.int64)
        if HAS_SOURCES:
            origin = tl.load(sources_ptr + row).to(tl.int64)
        if HAS_TARGETS:
            place = tl.load(targets_ptr + row).to(tl.int64)
        words = tl.load(source_ptr + origin * source_stride + column, mask=in_row)
        tl.store(target_ptr + place * target_stride + column, words, mask=in_row)


@TritonKernel
@triton.jit
def _activate_kernel(
    input_ptr,
    output_ptr,
    count_ptr,
    num_columns,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (j, b) computes columns b * BLOCK ... of row j in f32, and ends at once if there is no such row.

    Before: input `[S, 2N]` (gate, then up) or `[S, N]`, count int32 `[1]`. After: output `[S, N]`. Gate and up end at
    LIMIT, if there is one.

    Example: silu, N=1, input [[2, 3]]: 2 * sigmoid(2) * 3.
    """
    row = tl.program_id(0)
    if row < tl.load(count_ptr):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < num_columns
        first = row.to(tl.int64) * num_columns * (2 if GATED else 1) + column
        gate = tl.load(input_ptr + first, mask=in_row, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(input_ptr + first + num_columns, mask=in_row, other=0.0).to(tl.float32)
        result = activated(gate, up, ACTIVATION, GATED, LIMIT)
        target = output_ptr + row.to(tl.int64) * num_columns + column
        tl.store(target, result.to(output_ptr.dtype.element_ty), mask=in_row)


def triton_move_rows(
    source: torch.Tensor,
    sources: torch.Tensor | None,
    target: torch.Tensor,
    targets: torch.Tensor | None,
    count: torch.Tensor,
) -> None:
    """Arguments as in `move_rows`, not checked."""
    given = sources if sources is not None else targets
    num_rows = target.size(0) if given is None else given.size(0)
    if num_rows == 0:
        return
    source, target = as_words(source, target)
    num_columns = source.size(1)
    block, num_warps = row_blocks(num_rows, num_columns, source.element_size())
    _move_rows_kernel[(num_rows, cdiv(num_columns, block))](
        source,
        sources,
        target,
        targets,
        count,
        num_columns,
        source.stride(0),
        target.stride(0),
        HAS_SOURCES=sources is not None,
        HAS_TARGETS=targets is not None,
        BLOCK=block,
        num_warps=num_warps,
    )


def triton_activate_rows(
    activation: MoEActivation, input: torch.Tensor, output: torch.Tensor, count: torch.Tensor, limit: float | None
) -> None:
    """Arguments as in `activate_rows_reference`, not checked."""
    num_rows, num_columns = output.shape
    if num_rows == 0:
        return
    block, num_warps = row_blocks(num_rows, num_columns, output.element_size())
    _activate_kernel[(num_rows, cdiv(num_columns, block))](
        input,
        output,
        count,
        num_columns,
        ACTIVATION=str(activation),
        GATED=activation.is_gated,
        LIMIT=limit,
        BLOCK=block,
        num_warps=num_warps,
    )
