"""Products of rows with the weights of their experts as a Triton kernel, called through
`moe_ep.kernels.grouped.products`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.grouped.products import Activation, Blocks
from moe_ep.kernels.grouped.tiles import Tiles, tiles_for
from moe_ep.kernels.triton_activation import activated
from moe_ep.kernels.triton_handover import comes_early, take_over
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv

# Lists that have room for many more rows than come should cost no programs.
_MOST_PROGRAMS = 8192


@TritonKernel
@triton.jit(do_not_specialize=["most", "num_places", "places_per_row"])
def _product_kernel(
    rows_ptr,
    weights_ptr,
    bias_ptr,
    output_ptr,
    places_ptr,
    row_ids_ptr,
    experts_ptr,
    used_ptr,
    most,
    num_places,
    places_per_row,
    num_inner,
    num_columns,
    row_stride,
    output_stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_IDS: tl.constexpr,
    INTO_ORDER: tl.constexpr,
    RANGED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes tiles of BLOCK_ROWS positions by BLOCK_COLUMNS columns, every num_programs-th of all.

    Before: rows `[*, num_inner]`, weights `[El, num_columns, num_inner]` (GATED: gate, then up, so twice the rows),
    bias `[El, num_columns]` or twice that, the lists of Blocks. INTO_ORDER, position j stands for a place's row and is
    written to row j of the output; otherwise it stands for row j and is written to the place's. Tiles of GROUP blocks
    of rows by one block of columns follow each other. EVEN where BLOCK_INNER divides num_inner. RANGED: rows are f32
    and weights f16; a step's part of a row beyond f16's range is scaled into it by a power of two.

    Example: INTO_ORDER, BLOCK_ROWS 2, places [3, 9] of 8, places_per_row 2, experts [1]: output[0] is row 1 by
    expert 1, and nothing else is written.
    """
    take_over(EARLY)
    num_blocks = tl.minimum(tl.load(used_ptr), most) // BLOCK_ROWS
    blocks_of_columns = tl.cdiv(num_columns, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), num_blocks * blocks_of_columns, tl.num_programs(0)):
        first_block = tile // (GROUP * blocks_of_columns) * GROUP
        in_group = tile % (GROUP * blocks_of_columns)
        group = tl.minimum(num_blocks - first_block, GROUP)
        block = first_block + in_group % group
        expert = tl.load(experts_ptr + block).to(tl.int64)
        position = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        place = tl.load(places_ptr + position)
        is_row = place < num_places
        source, target = position, place
        if INTO_ORDER:
            # Of no place, any row: what is computed of it is not written.
            place = tl.where(is_row, place, 0)
            source, target = place // places_per_row, position
            if HAS_ROW_IDS:
                source = tl.load(row_ids_ptr + place, mask=is_row, other=0)
        column = in_group // group * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inner = tl.arange(0, BLOCK_INNER)
        # Columns behind the last one are others again, and are not written.
        line = expert * num_columns * (2 if GATED else 1) + column % num_columns
        row_ptrs = rows_ptr + source.to(tl.int64)[:, None] * row_stride + inner[None, :]
        weight_ptrs = weights_ptr + line[:, None] * num_inner + inner[None, :]
        up_ptrs = weights_ptr + (line + num_columns)[:, None] * num_inner + inner[None, :]
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        up = total
        for start in range(0, num_inner, BLOCK_INNER):
            if EVEN:
                of_rows, of_weights = tl.load(row_ptrs), tl.load(weight_ptrs)
            else:
                is_inner = start + inner[None, :] < num_inner
                of_rows = tl.load(row_ptrs, mask=is_inner, other=0.0)
                of_weights = tl.load(weight_ptrs, mask=is_inner, other=0.0)
            if RANGED:
                scaled, scale = _into_f16(of_rows)
                total += tl.dot(scaled, tl.trans(of_weights)) * scale[:, None]
            else:
                total = tl.dot(of_rows, tl.trans(of_weights), total)
            if GATED:
                of_up = tl.load(up_ptrs) if EVEN else tl.load(up_ptrs, mask=is_inner, other=0.0)
                up = tl.dot(of_rows, tl.trans(of_up), up)
            row_ptrs += BLOCK_INNER
            weight_ptrs += BLOCK_INNER
            up_ptrs += BLOCK_INNER
        if HAS_BIAS:
            total += tl.load(bias_ptr + line)[None, :].to(tl.float32)
            if GATED:
                up += tl.load(bias_ptr + line + num_columns)[None, :].to(tl.float32)
        if ACTIVATION is not None:
            total = activated(total, up, ACTIVATION, GATED, LIMIT)
        output_ptrs = output_ptr + target.to(tl.int64)[:, None] * output_stride + column[None, :]
        is_output = is_row[:, None] & (column < num_columns)[None, :]
        tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _into_f16(rows):
    """f32 `[R, C]` as f16 codes, and the power of two f32 `[R]` that they are to be multiplied by: 1 in f16's range.

    Example: rows [[65536, 2]]: codes [[16384, .5]], factor [4]. Rows with inf keep it.
    """
    largest = tl.max(tl.abs(rows), axis=1)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    is_over = largest > 65504.0
    down = tl.where(is_over, (268 - exponent) << 23, 127 << 23).to(tl.float32, bitcast=True)
    up = tl.where(is_over, (exponent - 14) << 23, 127 << 23).to(tl.float32, bitcast=True)
    return (rows * down[:, None]).to(tl.float16), up


def triton_multiply_into_order(
    rows: torch.Tensor,
    row_ids: torch.Tensor | None,
    places_per_row: int,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    blocks: Blocks,
    output: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Arguments as in `multiply_into_order`, not checked; tiles with as many rows as a block, or None for the usual."""
    _multiply(rows, weights, bias, blocks, output, tiles, row_ids, places_per_row, activation)


def triton_multiply_into_places(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    output: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Arguments as in `multiply_into_places`, not checked; tiles as above."""
    _multiply(rows, weights, bias, blocks, output, tiles)


def _multiply(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    output: torch.Tensor,
    tiles: Tiles | None,
    row_ids: torch.Tensor | None = None,
    places_per_row: int = 1,
    activation: Activation | None = None,
) -> None:
    """With an activation into order, without one into places."""
    gated = activation is not None and activation.name.is_gated
    num_inner, num_columns = weights.size(2), weights.size(1) // (1 + gated)
    is_ranged = rows.dtype is torch.float32 and weights.dtype is torch.float16
    tiles = tiles or tiles_for(blocks.size, gated, rows.get_device(), is_ranged)
    most_tiles = cdiv(blocks.most, blocks.size) * cdiv(num_columns, tiles.columns)
    early = comes_early(rows.device)
    _product_kernel[(min(most_tiles, _MOST_PROGRAMS),)](
        rows,
        weights,
        None if bias is None else bias.contiguous(),
        output,
        blocks.places,
        row_ids,
        blocks.experts,
        blocks.used,
        blocks.most,
        blocks.num_places,
        places_per_row,
        num_inner,
        num_columns,
        rows.stride(0),
        output.stride(0),
        ACTIVATION=None if activation is None else str(activation.name),
        GATED=gated,
        LIMIT=None if activation is None else activation.limit,
        HAS_BIAS=bias is not None,
        HAS_ROW_IDS=row_ids is not None,
        INTO_ORDER=activation is not None,
        RANGED=is_ranged,
        EVEN=num_inner % tiles.inner == 0,
        BLOCK_ROWS=blocks.size,
        BLOCK_COLUMNS=tiles.columns,
        BLOCK_INNER=tiles.inner,
        GROUP=tiles.group,
        EARLY=early,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=early,
    )
