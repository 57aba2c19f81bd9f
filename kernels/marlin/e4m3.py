"""Launches the kernels for e4m3 weights and rows that are rounded to e4m3: products take Hopper half the time of bf16.

Where an expert has many rows, products are what takes the time. Rows are rounded as plain.round_rows says: first those
of the input (cuda/e4m3_rows.cu), then the activation's output by the kernel that multiplies (cuda/e4m3_sm90.cu). vLLM
calls the choice input_dtype, too.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.flags import stream_flags
from moe_ep.kernels.marlin.hopper import MOST_EXPERTS, TENSOR_MAP_BYTES, tensor_map
from moe_ep.kernels.marlin.params import CUDA, ExpertsParams, Rows, activation_defines, experts_params, type_number
from moe_ep.kernels.marlin.plain import GROUP_COLUMNS
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.scalar_type import scalar_types

_TILE_ROWS, _TILE_TOKENS = 256, 128
_START_MULTIPLE = 8
_ROWS_THREADS, _MULTIPLY_THREADS = 256, 384
_ROWS_BLOCKS = 6  # for each multiprocessor, at most
_READ_TWICE = 28_000_000  # bytes of rows in flight that stay in the L2 cache until they are read again
_TABLES = 3
_ALIGNMENT = 128  # bytes
_HOPPER = (9, 0)
# Fewer rows are not worth quantizing, and fewer tiles leave multiprocessors idle, as nothing is cut into pieces here.
_LEAST_ROWS, _LEAST_WAVES = 48, 3


class RowsParams(ctypes.Structure):
    """RowsParams of cuda/e4m3_rows.cu."""

    _fields_ = (
        ("experts", ExpertsParams),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


class E4m3Params(ctypes.Structure):
    """E4m3Params of cuda/e4m3_sm90.cu, as large as its alignment makes it."""

    _fields_ = (
        ("tokens", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
        ("experts", ExpertsParams),
        ("row_scales", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("hidden_scales", ctypes.c_void_p),
        ("capacity", ctypes.c_int),
        ("unused", ctypes.c_uint8 * (-(ctypes.sizeof(ExpertsParams) + 28) % 64)),
    )


class Places(NamedTuple):
    """Where everything lies in scratch, in bytes from its start.

    Attributes:
        capacity: rows that there is room for.
        codes, row_scales: of the input.
        hidden, hidden_scales: of the activation's output.
        num_bytes: of all.
    """

    capacity: int
    codes: int
    row_scales: int
    hidden: int
    hidden_scales: int
    num_bytes: int


def places(num_experts: int, num_rows: int, hidden_size: int, intermediate_size: int) -> Places:
    """What scratch is needed for up to num_rows rows of all experts together."""
    capacity = -(-(num_rows + num_experts * (_START_MULTIPLE - 1)) // _START_MULTIPLE) * _START_MULTIPLE
    ends = [0]
    for row_bytes in (hidden_size, 4, intermediate_size, 4 * (intermediate_size // GROUP_COLUMNS)):
        ends.append(-(-(ends[-1] + capacity * row_bytes) // _ALIGNMENT) * _ALIGNMENT)
    codes, row_scales, hidden, hidden_scales, num_bytes = ends
    return Places(capacity, codes, row_scales, hidden, hidden_scales, num_bytes)


def unfit_reason(pair: WeightPair) -> str | None:
    """Why these experts' rows cannot be e4m3; None if they can."""
    w13, w2 = pair.w13, pair.w2
    if pair.kind.scalar_type != scalar_types.float8_e4m3fn:
        return f"the weights are {pair.kind.scalar_type}, and must be float8_e4m3fn"
    if not pair.activation.is_gated:
        return f"the activation is {pair.activation.value}, and must be a gated one"
    if w13.num_columns % GROUP_COLUMNS or w2.num_columns % GROUP_COLUMNS:
        return f"K is {w13.num_columns} and N {w2.num_columns}; both must be multiples of {GROUP_COLUMNS}"
    if any(part is not None for w in (w13, w2) for part in (w.g_idx, w.sort_indices)):
        return "the weights have act-order"
    if any(w.scales.size(1) not in (1, w.num_columns // GROUP_COLUMNS) for w in (w13, w2)):
        return f"the weights have scales of fewer than {GROUP_COLUMNS} columns"
    return None


def pays(pair: WeightPair, expected_m: float) -> bool:
    """Whether these kernels compute experts that have expected_m rows in the mean: where they are faster, on Hopper."""
    if pair.input_dtype != torch.float8_e4m3fn or expected_m < _LEAST_ROWS or not pair.once(_has_kernels):
        return False
    row_tiles = sum(-(-w.num_rows // _TILE_ROWS) for w in (pair.w13, pair.w2))
    tiles = pair.num_experts * row_tiles * -(-expected_m // _TILE_TOKENS)
    return tiles >= _LEAST_WAVES * torch.cuda.get_device_properties(pair.device).multi_processor_count


def scratch_bytes(pair: WeightPair, num_rows: int) -> int:
    """What `run` needs for up to num_rows rows of all experts together."""
    return places(pair.num_experts, num_rows, pair.w13.num_columns, pair.w2.num_columns).num_bytes


def run(output: torch.Tensor, hidden_states: torch.Tensor, pair: WeightPair, rows: Rows, scratch: torch.Tensor) -> None:
    """Computes every expert's rows; the caller has checked all arguments.

    Args:
        output: `[num_ids, K]`, of whose rows those of `rows.row_ids` are written.
        rows: sorted ones.
        scratch: of any dtype, scratch_bytes that begin at a multiple of 16.
    """
    common, start = pair.once(_Common), scratch.data_ptr()
    params, where = quantize(hidden_states, pair, rows, scratch)
    params.gemm[1].output = output.data_ptr()
    kernel = common.kernels["experts"]
    params.sync = stream_flags(pair.device, kernel.entry, 2 + pair.num_experts).data_ptr()
    multiply = E4m3Params(
        experts=params,
        row_scales=start + where.row_scales,
        hidden=start + where.hidden,
        hidden_scales=start + where.hidden_scales,
        capacity=where.capacity,
    )
    for phase, (place, weights) in enumerate(((where.codes, pair.w13), (where.hidden, pair.w2))):
        encoded = tensor_map(start + place, where.capacity, weights.num_columns, torch.uint8)
        ctypes.memmove(multiply.tokens[phase], encoded, TENSOR_MAP_BYTES)
    kernel.launch(multiply, (common.num_blocks, 1, 1), _MULTIPLY_THREADS, common.shared_bytes)


def quantize(
    hidden_states: torch.Tensor, pair: WeightPair, rows: Rows, scratch: torch.Tensor
) -> tuple[ExpertsParams, Places]:
    """The first kernel: quantizes rows into scratch; returns the second one's parameters and where all lies."""
    common, start = pair.once(_Common), scratch.data_ptr()
    where = places(pair.num_experts, rows.max_rows, pair.w13.num_columns, pair.w2.num_columns)
    params = experts_params(hidden_states, scratch, hidden_states, pair, rows)
    given = RowsParams(experts=params, codes=start + where.codes, scales=start + where.row_scales)
    blocks = min(common.rows_blocks, -(-rows.max_rows * 32 // _ROWS_THREADS))
    common.kernels["rows"].launch(given, (blocks, 1, 1), _ROWS_THREADS, common.table_bytes)
    return params, where


class _Common:
    """What all launches for the same weights have in common."""

    def __init__(self, pair: WeightPair) -> None:
        properties = torch.cuda.get_device_properties(pair.device)
        self.num_blocks: int = properties.multi_processor_count
        self.shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        warps = _READ_TWICE // (2 * pair.w13.num_columns)
        self.rows_blocks = max(min(warps * 32 // _ROWS_THREADS, _ROWS_BLOCKS * self.num_blocks), self.num_blocks)
        self.table_bytes = 4 * _TABLES * (pair.num_experts + 1)
        sources = kernel_sources(pair.act_dtype, pair.activation, pair.clamp_limit)
        self.kernels = jit.load_all(sources, pair.device)
        self.kernels["experts"].allow_shared(self.shared_bytes)


def kernel_sources(
    act_dtype: torch.dtype, activation: MoEActivation, clamp_limit: float | None = None
) -> dict[str, jit.KernelSource]:
    """The kernel that quantizes "rows", and the one that multiplies and computes the "experts"."""
    defines = {
        "WEIGHT_TYPE": type_number(WEIGHT_TYPES[scalar_types.float8_e4m3fn.id], act_dtype),
        "ACT_BF16": int(act_dtype == torch.bfloat16),
        **activation_defines(activation, clamp_limit),
    }
    pairs = tuple((name, str(value)) for name, value in defines.items())
    return {
        "rows": jit.KernelSource(CUDA / "e4m3_rows.cu", "e4m3_rows", pairs),
        "experts": jit.KernelSource(CUDA / "e4m3_sm90.cu", "e4m3_experts", pairs),
    }


def _has_kernels(pair: WeightPair) -> bool:
    return (
        unfit_reason(pair) is None
        and jit.capability(pair.device.index or 0) == _HOPPER
        and pair.num_experts <= MOST_EXPERTS
    )
