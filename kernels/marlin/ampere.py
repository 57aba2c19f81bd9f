"""Launches the kernels for all GPUs from sm_80 on: one for each GEMM, and one that reorders columns (act-order).

They support all packed weights; on Hopper they compute what its own kernels do not. Reordered columns need no scratch,
since they are written to where the results will go.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.params import (
    CUDA,
    ExpertsParams,
    Rows,
    activation_defines,
    experts_params,
    rows_params,
    stream_flags,
    type_number,
)
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair, Weights

_THREADS, _GATHER_THREADS = 128, 256
_TILE_ROWS, _STEP_COLUMNS = 128, 64
_BLOCKS_PER_SM = 3  # that registers leave room for
_BLOCKS_THAT_LOOK_UP = 2  # where every column's group is looked up
_SLICES_PER_BLOCK = 2
_GATHER_SHARED = 48 * 1024
_GATHER_ROWS = 8
_LOOKED_UP, _WHOLE_ROW = 0, -1


class Tile(NamedTuple):
    """What depends on the tokens of a tile in cuda/ampere_gemm.cu; every split-K group has so many stages."""

    tokens: int
    split_k_groups: int
    stages: int


TILES = (Tile(16, 4, 2), Tile(32, 2, 3), Tile(64, 1, 3))
_UNKNOWN_ROWS = 32  # assumed for an expert if expected_m is unknown


class AmpereParams(ctypes.Structure):
    _fields_ = (("experts", ExpertsParams), ("column_groups", ctypes.c_void_p), ("max_slices", ctypes.c_int))


class GatherParams(ctypes.Structure):
    _fields_ = (
        ("experts", ExpertsParams),
        ("order", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("rows_at_once", ctypes.c_int),
    )


def kernel_source(
    kind: WeightType,
    act_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    group_columns: int,
    phase: int,
    activation: MoEActivation,
    tile_tokens: int,
    clamp_limit: float | None = None,
) -> jit.KernelSource:
    """The kernel of w13 (`phase` 0) or w2 (1).

    Args:
        group_columns: columns that share a scale; -1 if a row has one group, 0 if each column's group is looked up.
        tile_tokens: 16, 32 or 64 rows of an expert that are computed at once.
        clamp_limit: as in gate_limit.
    """
    # The second GEMM has no activation, and one build of it serves all.
    gate = (activation, clamp_limit) if phase == 0 else (MoEActivation.SILU, None)
    defines = {
        "TILE_TOKENS": tile_tokens,
        "WEIGHT_TYPE": type_number(kind, scale_dtype),
        "ACT_BF16": int(act_dtype == torch.bfloat16),
        "GROUP_COLUMNS": group_columns,
        "PHASE": phase,
        **activation_defines(*gate),
    }
    pairs = tuple((name, str(value)) for name, value in defines.items())
    return jit.KernelSource(CUDA / "ampere_gemm.cu", "ampere_gemm", pairs)


def gather_source(phase: int) -> jit.KernelSource:
    """The kernel that reorders the columns of w13's input (`phase` 0) or w2's (1)."""
    return jit.KernelSource(CUDA / "ampere_gather.cu", "gather_columns", (("PHASE", str(phase)),))


def group_columns(weights: Weights) -> int:
    """The value for kernel_source's argument of this name."""
    if not weights.has_regular_groups:
        return _LOOKED_UP
    groups = weights.scales.size(1)
    return _WHOLE_ROW if groups == 1 else weights.num_columns // groups


def launch(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    hidden: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Computes every expert's rows; arguments as compute.run_experts."""
    hidden_states, rows = in_packed_order(output, hidden_states, pair.w13, rows)
    params = experts_params(hidden_states, hidden, output, pair, rows)
    tile = tile_of(rows)
    params.partials, params.max_tile_tokens = partials.data_ptr(), _kept_tokens(tile, rows.max_rows)
    max_slices = partials.numel() // (_TILE_ROWS * params.max_tile_tokens)
    params.sync = stream_flags(pair.device, "ampere_gemm", max_slices).data_ptr()
    sms, shared_of_sm = _sizes(pair.device.index or 0)
    kernels = pair.once(_kernels)
    for phase, weights in enumerate((pair.w13, pair.w2)):
        if phase == 1 and weights.sort_indices is not None:
            _gather(params, weights, 1, hidden, hidden)
        groups = None if weights.g_idx is None else weights.g_idx.data_ptr()
        shared = shared_bytes(tile, pair.kind, weights, pair.num_experts)
        most = _BLOCKS_PER_SM if weights.has_regular_groups else _BLOCKS_THAT_LOOK_UP
        blocks = max(1, min(most, shared_of_sm // (shared + 1024)))
        with_groups = AmpereParams(params, groups, max_slices)
        kernels[tile, phase].launch(with_groups, (sms * blocks, 1, 1), _THREADS, shared)


def tile_of(rows: Rows) -> Tile:
    """The smallest that holds the rows that an expert is expected to have; one of more has several.

    If that is unknown, the one in the middle: with tiles of 64, one row would take as long as 64, and with tiles of 32,
    large-M takes a fifth longer.
    """
    expected = _UNKNOWN_ROWS if rows.expected_m is None else rows.expected_m
    return next((tile for tile in TILES if tile.tokens >= min(expected, rows.max_rows)), TILES[-1])


def _kernels(pair: WeightPair) -> dict[tuple[Tile, int], jit.Kernel]:
    """The kernels by tile and phase."""
    sources, shared = {}, {}
    for tile, (phase, weights) in itertools.product(TILES, enumerate((pair.w13, pair.w2))):
        columns, numbers = group_columns(weights), (pair.kind, pair.act_dtype, weights.scales.dtype)
        sources[tile, phase] = kernel_source(*numbers, columns, phase, pair.activation, tile.tokens, pair.clamp_limit)
        shared[tile, phase] = shared_bytes(tile, pair.kind, weights, pair.num_experts)
    kernels = jit.load_all(sources, pair.device)
    for name, kernel in kernels.items():
        kernel.allow_shared(shared[name])
    return kernels


def partials_numel(max_rows: int, device: torch.device) -> int:
    """The f32 numbers that a launch needs for tiles that several blocks share."""
    blocks = _BLOCKS_PER_SM * _sizes(device.index or 0)[0]
    return _SLICES_PER_BLOCK * blocks * _TILE_ROWS * _kept_tokens(TILES[-1], max_rows)


def in_packed_order(
    output: torch.Tensor, hidden_states: torch.Tensor, w13: Weights, rows: Rows
) -> tuple[torch.Tensor, Rows]:
    """The rows with their columns in w13's order, and how to read them; `output` is used to reorder them if necessary.

    Every expert has its own order, so a row that several experts read is written once for each.
    """
    if w13.sort_indices is None:
        return hidden_states, rows
    _gather(rows_params(rows), w13, 0, hidden_states, output)
    return output, rows._replace(row_ids=rows.row_ids if rows.is_sorted else None, ids_divisor=1)


def _gather(params: ExpertsParams, weights: Weights, phase: int, source: torch.Tensor, target: torch.Tensor) -> None:
    columns = weights.num_columns
    tables = -(-8 * (params.num_experts + 1) // 16) * 16
    rows_at_once = max(1, min(_GATHER_ROWS, (_GATHER_SHARED - tables) // (2 * columns)))
    shared = tables + rows_at_once * 2 * columns
    kernel = jit.load(gather_source(phase), target.device)
    kernel.allow_shared(shared)
    order = weights.sort_indices.data_ptr()  # type: ignore[union-attr]
    gather = GatherParams(params, order, source.data_ptr(), target.data_ptr(), columns, rows_at_once)
    sms, shared_of_sm = _sizes(target.device.index or 0)
    blocks = max(1, min(8, shared_of_sm // (shared + 1024)))
    kernel.launch(gather, (sms * blocks, 1, 1), _GATHER_THREADS, shared)


def shared_bytes(tile: Tile, kind: WeightType, weights: Weights, num_experts: int) -> int:
    """The bytes of the split-K groups' stages of codes, scales and tokens, and of the tables."""
    columns = group_columns(weights)
    groups = _STEP_COLUMNS // columns if 0 < columns < _STEP_COLUMNS else 1 if columns != _LOOKED_UP else 0
    per_row = _STEP_COLUMNS * kind.bits // 8
    per_row += groups * weights.scales.dtype.itemsize * (2 if kind.has_zero_points else 1)
    stage = _TILE_ROWS * per_row + tile.tokens * 2 * _STEP_COLUMNS
    return tile.split_k_groups * tile.stages * stage + 8 * (num_experts + 1)


def _kept_tokens(tile: Tile, max_rows: int) -> int:
    """The number of tokens whose sums a slice keeps, in whole products of 16."""
    return min(tile.tokens, -(-max_rows // 16) * 16)


@functools.cache
def _sizes(device_index: int) -> tuple[int, int]:
    """The number of SMs, and the shared memory of each."""
    properties = torch.cuda.get_device_properties(device_index)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor  # type: ignore[attr-defined]
