"""The two products of plain experts: rows that are sorted by expert times the weights of each.

Rows stand in blocks of one expert each, as `moe_align_block_size` lists them. The number of blocks is on the device,
and nothing behind the last one is read or written. Each function has a Triton form for CUDA tensors and a plain one,
which is the reference.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.grouped.rows import activated
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, comes_early, take_over, tl, triton_jit
from moe_ep.registry import operator


class Blocks(NamedTuple):
    """Which row is where. `positions` number the entries of the list, `places` are its values.

    Attributes:
        places: int32 `[S]`; those from num_places on stand for no row.
        experts: int32 `[S / size]`, the local expert of each block.
        used: int32 `[1]`, how many entries count; a multiple of size.
        num_places: how many places there are.
        most: positions that count at most, known on the host; others are left out.
    """

    places: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    size: int
    num_places: int
    most: int


class Activation(NamedTuple):
    """An activation and its clamp limit (`gate_limit`)."""

    name: MoEActivation
    limit: float | None


@operator("rows", "weights")
def multiply_into_order(
    rows: torch.Tensor,
    row_ids: torch.Tensor | None,
    places_per_row: int,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    blocks: Blocks,
    output: torch.Tensor,
) -> None:
    """output[j] = activation(weights[e] @ rows[r] + bias[e]) for position j of expert e, in f32 and rounded once.

    The plain form waits for the number of blocks.

    Args:
        rows: `[*, K]`, each row contiguous. Place p is row r = row_ids[p], or p // places_per_row without row_ids.
        row_ids: int32 `[num_places]`, or None.
        weights: `[El, 2N, K]` for a gated activation (gate, then up), `[El, N, K]` otherwise; contiguous.
        bias: `[El, 2N]` or `[El, N]`, or None.
        output: `[most or more, N]`. Rows of positions without a place are not written.
    """
    for positions, places, expert in _of_experts(blocks):
        sources = places // places_per_row if row_ids is None else row_ids[places]
        product = _product(rows[sources.long()], weights, bias, expert)
        output[positions] = apply_activation(activation.name, product, clamp_limit=activation.limit).to(output.dtype)


@operator("rows", "weights")
def multiply_into_places(
    rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, output: torch.Tensor
) -> None:
    """output[p] = weights[e] @ rows[j] + bias[e] for position j of expert e and place p, in f32 and rounded once.

    The plain form waits for the number of blocks.

    Args:
        rows: `[most or more, N]`, as multiply_into_order writes them; f32 beside f16 weights keeps their range.
        weights: `[El, K, N]`, contiguous.
        bias: `[El, K]`, or None.
        output: `[num_places, K]`; places that are not listed are not written.
    """
    for positions, places, expert in _of_experts(blocks):
        output[places] = _product(rows[positions], weights, bias, expert).to(output.dtype)


def _of_experts(blocks: Blocks) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(positions, places, expert) of each block, those without a place left out."""
    used = min(int(blocks.used), blocks.most)
    found = []
    for block, expert in enumerate(blocks.experts[: used // blocks.size].tolist()):
        positions = torch.arange(block * blocks.size, (block + 1) * blocks.size, device=blocks.places.device)
        positions = positions[blocks.places[positions] < blocks.num_places]
        found.append((positions, blocks.places[positions].long(), expert))
    return found


def _product(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return F.linear(rows.float(), weights[expert].float(), None if bias is None else bias[expert].float())


_ITEM_BYTES = 2
# With fewer stages a tile waits for memory at every step.
_LEAST_STAGES = 2
# Shared memory that Triton needs besides the stages.
_OTHER_BYTES = 1024


@dataclass(frozen=True)
class Tiles:
    """The tile of a program, and how it is computed.

    Attributes:
        rows: of one expert; what lists of rows are padded to.
        columns: of the output (with a gate, so many of gate and of up).
        inner: columns of the input in one step.
        num_stages: steps that are on their way from memory, the present one among them.
        group: blocks of rows that go through a block of columns together, so that weights come from the L2 cache.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    group: int = 1

    def bytes_per_stage(self, gated: bool, has_f32_rows: bool = False) -> int:
        return (self.rows * (1 + has_f32_rows) + self.columns * (1 + gated)) * self.inner * _ITEM_BYTES


# Up to how many rows an expert has on average, and the tile that was fastest there on an H200
# (docs/benchmarks/experts.md).
_BY_ROWS = (
    (6.0, Tiles(rows=16, columns=64, inner=128, num_warps=4, num_stages=5)),
    (20.0, Tiles(rows=32, columns=128, inner=128, num_warps=4, num_stages=3)),
    (160.0, Tiles(rows=64, columns=128, inner=64, num_warps=4, num_stages=4, group=8)),
    (float("inf"), Tiles(rows=128, columns=128, inner=64, num_warps=8, num_stages=4, group=8)),
)


def rows_of_blocks(rows_per_expert: float) -> int:
    """How many rows a block should have where experts have so many on average."""
    return next(tiles.rows for most, tiles in _BY_ROWS if rows_per_expert <= most)


@functools.lru_cache(maxsize=256)
def tiles_for(block_rows: int, gated: bool, device_index: int, has_f32_rows: bool = False) -> Tiles:
    """The tiles for blocks of so many rows that fit a GPU's shared memory."""
    return fitting(block_rows, gated, shared_bytes(device_index), has_f32_rows)


def shared_bytes(device_index: int) -> int:
    """Shared memory that a program may have; -1 is Triton's interpreter, which has no end."""
    if device_index < 0:
        return 1 << 20
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin  # type: ignore[attr-defined]


def fitting(block_rows: int, gated: bool, num_bytes: int, has_f32_rows: bool = False) -> Tiles:
    """The tiles for blocks of so many rows, with columns and stages for so much shared memory."""
    tiles = next(tiles for _, tiles in _BY_ROWS if tiles.rows == block_rows)
    room = num_bytes - _OTHER_BYTES
    while tiles.bytes_per_stage(gated, has_f32_rows) * _LEAST_STAGES > room:
        tiles = replace(tiles, columns=tiles.columns // 2)
    return replace(tiles, num_stages=min(tiles.num_stages, room // tiles.bytes_per_stage(gated, has_f32_rows)))


# Lists that have room for many more rows than come should cost no programs.
_MOST_PROGRAMS = 8192


@functools.partial(TritonKernel, do_not_specialize=["most", "num_places", "places_per_row"])
def product_kernel(
    rows_ptr, weights_ptr, bias_ptr, output_ptr, places_ptr, row_ids_ptr, experts_ptr, used_ptr,
    most, num_places, places_per_row, num_inner, num_columns, row_stride, output_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROW_IDS: tl.constexpr, INTO_ORDER: tl.constexpr, RANGED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
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
            # Positions without a place read any row; its products are not written.
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


@triton_jit
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


@multiply_into_order.on_gpu
def triton_multiply_into_order(
    rows, row_ids, places_per_row, weights, bias, activation, blocks, output, tiles: Tiles | None = None
):
    """`tiles` with as many rows as a block, or None for the usual."""
    _multiply(rows, weights, bias, blocks, output, tiles, row_ids, places_per_row, activation)


@multiply_into_places.on_gpu
def triton_multiply_into_places(rows, weights, bias, blocks, output, tiles: Tiles | None = None):
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
    product_kernel[(min(most_tiles, _MOST_PROGRAMS),)](
        rows, weights, None if bias is None else bias.contiguous(), output, blocks.places, row_ids, blocks.experts,
        blocks.used,
        blocks.most, blocks.num_places, places_per_row, num_inner, num_columns, rows.stride(0), output.stride(0),
        ACTIVATION=None if activation is None else str(activation.name), GATED=gated,
        LIMIT=None if activation is None else activation.limit, HAS_BIAS=bias is not None,
        HAS_ROW_IDS=row_ids is not None, INTO_ORDER=activation is not None, RANGED=is_ranged,
        EVEN=num_inner % tiles.inner == 0, BLOCK_ROWS=blocks.size, BLOCK_COLUMNS=tiles.columns, BLOCK_INNER=tiles.inner,
        GROUP=tiles.group, EARLY=early,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=early,
    )  # fmt: skip
