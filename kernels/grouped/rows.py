"""The steps of grouped products that move rows: into the experts' order, through the activation, and back.

Lists have room for all possible rows; the actual number is on the device, and nothing beyond it is read or written.
Each function has a Triton form for CUDA tensors and a plain one, which is the reference.
"""

from __future__ import annotations

import torch

from moe_ep.activation import SITU_BETA, SITU_LINEAR_BETA, SWIGLUOAI_ALPHA, MoEActivation, apply_activation
from moe_ep.kernels.dispatch_rows import as_words, row_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, constant, tl, triton_jit
from moe_ep.registry import operator


@operator("source", "target")
def move_rows(
    source: torch.Tensor,
    sources: torch.Tensor | None,
    target: torch.Tensor,
    targets: torch.Tensor | None,
    count: torch.Tensor,
) -> None:
    """target[targets[j]] = source[sources[j]] for j below count.

    Example: source [a, b], sources [1, 1, 0], count [2]: target [b, b, unchanged].

    Args:
        source, target: `[*, K]` of one dtype, each row contiguous.
        sources, targets: int32 `[S]`, row numbers; None means 0, 1, 2, ...
        count: int32 `[1]`, at most S; the plain form waits for it.
    """
    used = int(count)
    origins = slice(used) if sources is None else sources[:used].long()
    places = slice(used) if targets is None else targets[:used].long()
    target[places] = source[origins]


@operator("input")
def activate_rows(
    activation: MoEActivation, input: torch.Tensor, output: torch.Tensor, count: torch.Tensor, limit: float | None
) -> None:
    """Applies the activation to the first `count` rows, in f32 and rounded once.

    Args:
        input: `[S, 2N]` for a gated activation (gate, then up), `[S, N]` otherwise; contiguous.
        output: `[S, N]`, contiguous; rows from count on are not written.
        count: int32 `[1]`, at most S.
        limit: `gate_limit` of the activation.
    """
    used = int(count)
    apply_activation(activation, input[:used], output[:used], clamp_limit=limit)


_ALPHA, _BETA, _LINEAR_BETA = map(constant, (SWIGLUOAI_ALPHA, SITU_BETA, SITU_LINEAR_BETA))
# The clamp of NaN is NaN, as in torch.
_KEEP_NAN = constant(lambda: tl.PropagateNan.ALL)


@triton_jit
def _soft(x, LIMIT: tl.constexpr):
    """LIMIT * tanh(x / LIMIT). Example: x 100, LIMIT 4: 4."""
    ratio = x * (1.0 / LIMIT)
    square = ratio * ratio
    # Near zero the difference has lost its bits, and the first terms of the series have them all.
    near = ratio * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return LIMIT * tl.where(square < 0.01, near, 2.0 * tl.sigmoid(2.0 * ratio) - 1.0)


@triton_jit
def activated(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr):
    """ACTIVATION of gate, times up if GATED; both end at LIMIT before, if there is one, or as swiglustep behind it.

    Example: silu, gate 2, up 3: 2 * sigmoid(2) * 3.
    """
    if LIMIT is not None and ACTIVATION != "swiglustep":
        gate = tl.minimum(gate, LIMIT, propagate_nan=_KEEP_NAN)
    if ACTIVATION == "swigluoai":
        result = gate * tl.sigmoid(gate * _ALPHA)
    elif ACTIVATION == "swiglustep":
        result = tl.minimum(gate * tl.sigmoid(gate), LIMIT, propagate_nan=_KEEP_NAN)
    elif ACTIVATION == "situ":
        result = _soft(gate, _BETA) * tl.sigmoid(gate)
        up = _soft(up, _LINEAR_BETA)
    elif ACTIVATION == "silu" or ACTIVATION == "silu_no_mul":
        result = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_no_mul":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(x) = 2 sigmoid(2x) - 1
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        positive = tl.maximum(gate, 0.0, propagate_nan=_KEEP_NAN)
        result = positive * positive
    if GATED:
        if LIMIT is not None:
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=_KEEP_NAN)
        result *= up + 1.0 if ACTIVATION == "swigluoai" else up
    return result


@TritonKernel
def _move_rows_kernel(
    source_ptr, sources_ptr, target_ptr, targets_ptr, count_ptr,
    num_columns, source_stride, target_stride,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def _activate_kernel(
    input_ptr, output_ptr, count_ptr,
    num_columns,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@move_rows.on_gpu
def triton_move_rows(source, sources, target, targets, count):
    given = sources if sources is not None else targets
    num_rows = target.size(0) if given is None else given.size(0)
    if num_rows == 0:
        return
    source, target = as_words(source, target)
    num_columns = source.size(1)
    block, num_warps = row_blocks(num_rows, num_columns, source.element_size())
    _move_rows_kernel[(num_rows, cdiv(num_columns, block))](
        source, sources, target, targets, count,
        num_columns, source.stride(0), target.stride(0),
        HAS_SOURCES=sources is not None, HAS_TARGETS=targets is not None, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


@activate_rows.on_gpu
def triton_activate_rows(activation, input, output, count, limit):
    num_rows, num_columns = output.shape
    if num_rows == 0:
        return
    block, num_warps = row_blocks(num_rows, num_columns, output.element_size())
    _activate_kernel[(num_rows, cdiv(num_columns, block))](
        input, output, count,
        num_columns,
        ACTIVATION=str(activation), GATED=activation.is_gated, LIMIT=limit, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
