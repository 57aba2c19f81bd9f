"""Launches the kernels for rows of 8 bits: int8 beside integer weights, e4m3 beside e4m3 weights, on Hopper.

The tensor cores multiply 8-bit numbers at twice the rate of bf16, which pays where an expert has many rows. Rows are
quantized as quantize.round_rows says: those of the input by cuda/eight_bit_rows.cu, the activation's output by the
kernel that multiplies, cuda/eight_bit_sm90.cu. vLLM calls the choice input_dtype, too.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.flags import stream_flags
from moe_ep.kernels.marlin.hopper import (
    MOST_EXPERTS,
    TENSOR_MAP_BYTES,
    groups_per_step,
    have_one_spacing,
    tensor_map,
)
from moe_ep.kernels.marlin.params import CUDA, ExpertsParams, Rows, activation_defines, experts_params, type_number
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import GROUP_SIZE
from moe_ep.quantization.input_rows import dtype_name
from moe_ep.scalar_type import scalar_types

# Constants of cuda/eight_bit_layout.cuh, eight_bit_rows.cu and eight_bit_sm90.cu.
_TILE_ROWS, _TILE_TOKENS = 256, 128
_START_MULTIPLE = 16
_MULTIPLY_THREADS = 384
_COLUMNS_OF_THREAD, _MAX_ROW_THREADS = 32, 1024
_THREADS_OF_MULTIPROCESSOR = 2048
_TABLES = 3
_ALIGNMENT = 128  # bytes
_HOPPER = (9, 0)
# Fewer rows are not worth quantizing, and fewer tiles leave multiprocessors idle, as no tile is split here.
_LEAST_ROWS = {torch.float8_e4m3fn: 48, torch.int8: 64}
_LEAST_WAVES = 3


class RowsParams(ctypes.Structure):
    """RowsParams of cuda/eight_bit_rows.cu."""

    _fields_ = (
        ("experts", ExpertsParams),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


class EightBitParams(ctypes.Structure):
    """EightBitParams of cuda/eight_bit_sm90.cu, as large as its alignment makes it."""

    _fields_ = (
        ("tokens", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
        ("experts", ExpertsParams),
        ("row_scales", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("hidden_scales", ctypes.c_void_p),
        ("capacity", ctypes.c_int),
        ("unused", ctypes.c_uint8 * (-(ctypes.sizeof(ExpertsParams) + 28) % 64)),
    )


class ScratchLayout(NamedTuple):
    """Offsets of everything in scratch, in bytes.

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


def scratch_layout(num_experts: int, num_rows: int, hidden_size: int, intermediate_size: int) -> ScratchLayout:
    """The scratch that up to num_rows rows of all experts together need."""
    capacity = -(-(num_rows + num_experts * (_START_MULTIPLE - 1)) // _START_MULTIPLE) * _START_MULTIPLE
    ends = [0]
    for row_bytes in (hidden_size, 4, intermediate_size, 4 * -(-intermediate_size // GROUP_SIZE)):
        ends.append(-(-(ends[-1] + capacity * row_bytes) // _ALIGNMENT) * _ALIGNMENT)
    codes, row_scales, hidden, hidden_scales, num_bytes = ends
    return ScratchLayout(capacity, codes, row_scales, hidden, hidden_scales, num_bytes)


def has_kernel(kind: WeightType, input_dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such rows and weights that go together (types.check_input_dtype)."""
    return input_dtype == torch.int8 or kind.scalar_type == scalar_types.float8_e4m3fn


def unfit_reason(
    kind: WeightType,
    input_dtype: torch.dtype,
    activation: MoEActivation,
    columns: tuple[int, int],
    groups: tuple[int, int],
    has_act_order: bool,
) -> str | None:
    """Why the kernels cannot multiply experts with 8-bit rows, in one clause; None if they can.

    Args:
        columns, groups: of `WeightPair`.
    """
    K, N = columns
    if not has_kernel(kind, input_dtype):
        return f"there is no kernel for {dtype_name(input_dtype)} rows and {kind.scalar_type} weights yet"
    if not activation.is_gated:
        return f"the activation is {activation.value}, and the kernels for 8-bit rows take a gated one"
    if K % 64 or N % 64:
        return f"K is {K} and N {N}; for the kernels for 8-bit rows both must be multiples of 64"
    if K > _COLUMNS_OF_THREAD * _MAX_ROW_THREADS:
        return f"K is {K}; for the kernels for 8-bit rows it must be at most {_COLUMNS_OF_THREAD * _MAX_ROW_THREADS}"
    if has_act_order:
        return "the weights have act-order, which the kernels for 8-bit rows do not"
    if not have_one_spacing(columns, groups):
        return "w13 and w2 have scales of different group sizes, and the kernels for 8-bit rows take one"
    return None


def pays(pair: WeightPair, expected_m: float) -> bool:
    """Whether 8-bit rows are faster for experts that have expected_m rows in the mean, on Hopper."""
    least = _LEAST_ROWS.get(pair.input_dtype)
    if least is None or expected_m < least or not pair.once(_has_kernels):
        return False
    row_tiles = sum(-(-w.num_rows // _TILE_ROWS) for w in (pair.w13, pair.w2))
    tiles = pair.num_experts * row_tiles * -(-expected_m // _TILE_TOKENS)
    return tiles >= _LEAST_WAVES * torch.cuda.get_device_properties(pair.device).multi_processor_count


def scratch_bytes(pair: WeightPair, num_rows: int) -> int:
    """What `run` needs for up to num_rows rows of all experts together."""
    return scratch_layout(pair.num_experts, num_rows, pair.w13.num_columns, pair.w2.num_columns).num_bytes


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
    multiply = EightBitParams(
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
) -> tuple[ExpertsParams, ScratchLayout]:
    """The first kernel: quantizes rows into scratch; returns the second one's parameters and where all lies."""
    common, start = pair.once(_Common), scratch.data_ptr()
    where = scratch_layout(pair.num_experts, rows.max_rows, pair.w13.num_columns, pair.w2.num_columns)
    params = experts_params(hidden_states, scratch, hidden_states, pair, rows)
    given = RowsParams(experts=params, codes=start + where.codes, scales=start + where.row_scales)
    blocks = max(1, min(common.rows_blocks, rows.max_rows))
    common.kernels["rows"].launch(given, (blocks, 1, 1), common.rows_threads, common.table_bytes)
    return params, where


class _Common:
    """What all launches for the same weights have in common."""

    def __init__(self, pair: WeightPair) -> None:
        properties = torch.cuda.get_device_properties(pair.device)
        self.num_blocks: int = properties.multi_processor_count
        self.shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self.rows_threads = -(-pair.w13.num_columns // (32 * _COLUMNS_OF_THREAD)) * 32
        self.rows_blocks = self.num_blocks * (_THREADS_OF_MULTIPROCESSOR // self.rows_threads)
        self.table_bytes = 4 * _TABLES * (pair.num_experts + 1)
        spacings = [groups_per_step(w.num_columns, w.scales.size(1)) for w in (pair.w13, pair.w2)]
        groups = 0 if all(w.scales.size(1) == 1 for w in (pair.w13, pair.w2)) else max(spacings)
        sources = kernel_sources(pair.kind, pair.input_dtype, pair.act_dtype, groups, pair.activation, pair.clamp_limit)
        self.kernels = jit.load_all(sources, pair.device)
        self.kernels["experts"].allow_shared(self.shared_bytes)


def kernel_sources(
    kind: WeightType,
    input_dtype: torch.dtype,
    act_dtype: torch.dtype,
    groups: int,
    activation: MoEActivation,
    clamp_limit: float | None = None,
) -> dict[str, jit.KernelSource]:
    """The kernel that quantizes "rows", and the one that computes the "experts".

    Args:
        groups: of scales in 128 columns; 0 for one scale a row.
    """
    numbers = {
        "WEIGHT_TYPE": str(type_number(kind, act_dtype)),
        "ROWS_INT8": str(int(input_dtype == torch.int8)),
        "ACT_BF16": str(int(act_dtype == torch.bfloat16)),
    }
    experts = numbers | {"GROUPS_PER_STEP": str(groups), **activation_defines(activation, clamp_limit)}
    return {
        "rows": jit.KernelSource(CUDA / "eight_bit_rows.cu", "eight_bit_rows", tuple(numbers.items())),
        "experts": jit.KernelSource(CUDA / "eight_bit_sm90.cu", "eight_bit_experts", tuple(experts.items())),
    }


def _has_kernels(pair: WeightPair) -> bool:
    is_hopper = jit.capability(pair.device.index or 0) == _HOPPER
    has_act_order = any(part is not None for w in (pair.w13, pair.w2) for part in (w.g_idx, w.sort_indices))
    about = (pair.kind, pair.input_dtype, pair.activation, pair.columns, pair.groups)
    reason = unfit_reason(*about, has_act_order)
    return is_hopper and pair.num_experts <= MOST_EXPERTS and reason is None
