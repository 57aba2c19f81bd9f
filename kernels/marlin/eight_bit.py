"""Launches the kernels for rows of 8 bits: int8 beside integer weights, e4m3 beside e4m3, mxfp4 and 4-bit integers.

The tensor cores multiply 8-bit numbers at twice the rate of bf16, which pays where an expert has many rows. Rows are
quantized as quantize.round_rows says: those of the input by cuda/eight_bit_rows.cu, the activation's output by the
kernel that multiplies. Rows that were sent in 8 bits are not quantized again. On Hopper one kernel makes both products
(cuda/eight_bit_sm90.cu); other GPUs from sm_80 on have int8 rows, with a kernel for each product
(cuda/eight_bit_sm80.cu). vLLM calls the choice input_dtype, too.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.hopper import (
    MOST_EXPERTS,
    TENSOR_MAP_BYTES,
    codes_map,
    groups_per_step,
    have_one_spacing,
    tensor_map,
)
from moe_ep.kernels.marlin.params import (
    CUDA,
    ExpertsParams,
    Rows,
    activation_defines,
    experts_params,
    stream_flags,
    type_number,
)
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import GROUP_SIZE
from moe_ep.quantization.input_rows import INPUT_DTYPES, dtype_name
from moe_ep.scalar_type import scalar_types

# Constants of cuda/eight_bit_layout.cuh, _rows.cu, _tile.cuh, _sm90.cu and _sm80.cu.
_TILE_ROWS, _TILE_TOKENS, _OLDER_TILE_TOKENS = 256, 128, 64
_START_MULTIPLE = 16
_MULTIPLY_THREADS, _OLDER_THREADS, _OLDER_WARPS = 384, 256, 8
_COLUMNS_OF_THREAD, _MAX_ROW_THREADS = 32, 1024
_THREADS_OF_MULTIPROCESSOR = 2048
_TABLES = 3
_ALIGNMENT = 128  # bytes
_HOPPER, _OLDEST = (9, 0), (8, 0)
# Fewer rows are not worth quantizing, and fewer tiles leave multiprocessors idle, as no tile is split here.
_LEAST_ROWS, _LEAST_ROWS_OF = 64, {scalar_types.float8_e4m3fn: 48}
_LEAST_WAVES = 3


class RowsParams(ctypes.Structure):
    """RowsParams of cuda/eight_bit_rows.cu."""

    _fields_ = (
        ("experts", ExpertsParams),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sent_scales", ctypes.c_void_p),
        ("sent_stride", ctypes.c_int64),
        ("sent_scale_stride", ctypes.c_int64),
        ("capacity", ctypes.c_int),
    )


class EightBitParams(ctypes.Structure):
    """EightBitParams of cuda/eight_bit_tile.cuh, as large as its alignment makes it."""

    _fields_ = (
        ("tokens", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
        ("weights", (ctypes.c_uint8 * TENSOR_MAP_BYTES) * 2),
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


def is_faster(capability: tuple[int, int]) -> bool:
    """Whether rows of 8 bits were measured to be faster than bf16 rows on such a GPU, from some number of rows on; they
    are not taken for a checkpoint's sake elsewhere."""
    return capability == _HOPPER


def has_kernel(input_dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a GPU has kernels for such rows, beside all weights that they go with (types.check_input_dtype)."""
    return capability == _HOPPER or (input_dtype == torch.int8 and capability >= _OLDEST)


def unfit_reason(
    input_dtype: torch.dtype,
    capability: tuple[int, int],
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
    if not has_kernel(input_dtype, capability):
        major, minor = capability
        return f"this GPU has compute capability {major}.{minor}; {dtype_name(input_dtype)} rows have kernels on 9.0"
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
    """Whether 8-bit rows are taken for experts that have expected_m rows in the mean: where they are faster on Hopper,
    as measured; other pairs and GPUs follow the same rule."""
    least = _LEAST_ROWS_OF.get(pair.kind.scalar_type, _LEAST_ROWS)
    if pair.input_dtype not in INPUT_DTYPES or expected_m < least or not pair.once(_has_kernels):
        return False
    row_tiles = sum(-(-w.num_rows // _TILE_ROWS) for w in (pair.w13, pair.w2))
    tiles = pair.num_experts * row_tiles * -(-expected_m // _TILE_TOKENS)
    return tiles >= _LEAST_WAVES * torch.cuda.get_device_properties(pair.device).multi_processor_count


def scratch_bytes(pair: WeightPair, num_rows: int) -> int:
    """What `run` needs for up to num_rows rows of all experts together."""
    return scratch_layout(pair.num_experts, num_rows, pair.w13.num_columns, pair.w2.num_columns).num_bytes


def run(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    scratch: torch.Tensor,
    row_scales: torch.Tensor | None = None,
    ampere_only: bool = False,
) -> None:
    """Computes every expert's rows; the caller has checked all arguments.

    Args:
        output: `[num_ids, K]`, of whose rows those of `rows.row_ids` are written.
        hidden_states: `[T, K]`, in the activations' dtype, or with row_scales in pair.input_dtype.
        rows: sorted ones.
        scratch: of any dtype, scratch_bytes that begin at a multiple of 16.
        row_scales: f32 `[T, 1]` of rows that were sent in 8 bits.
        ampere_only: do not use Hopper's own kernel, so that tests can run that of other GPUs on it.
    """
    launches = _launches(pair, row_scales is not None, ampere_only)
    quantizing, multiplying, where = make_params(output, hidden_states, pair, rows, scratch, row_scales)
    launches.quantize(quantizing, rows)
    if launches.is_older:
        for phase in (0, 1):
            launches.kernels[f"gemm{phase}"].launch(
                multiplying, (launches.num_blocks, 1, 1), _OLDER_THREADS, launches.shared_bytes
            )
        return
    kernel = launches.kernels["experts"]
    multiplying.experts.sync = stream_flags(pair.device, kernel.entry, 2 + pair.num_experts).data_ptr()
    for phase, weights in enumerate((pair.w13, pair.w2)):
        encoded = tensor_map(multiplying.experts.gemm[phase].input, where.capacity, weights.num_columns, torch.uint8)
        ctypes.memmove(multiplying.tokens[phase], encoded, TENSOR_MAP_BYTES)
        if pair.kind.scalar_type == scalar_types.float8_e4m3fn:  # kFromShared of cuda/eight_bit_tile.cuh
            encoded = codes_map(weights.qweight.data_ptr(), pair.num_experts * weights.num_rows, weights.num_columns)
            ctypes.memmove(multiplying.weights[phase], encoded, TENSOR_MAP_BYTES)
    kernel.launch(multiplying, (launches.num_blocks, 1, 1), _MULTIPLY_THREADS, launches.shared_bytes)


def prepare(pair: WeightPair, sent: bool) -> None:
    """Loads the kernels in a pass that does not take them.

    One that a CUDA graph captures may: it counts the rows that buffers have room for, not those that came.
    """
    if pair.input_dtype in INPUT_DTYPES and pair.once(_has_kernels) and not torch.cuda.is_current_stream_capturing():
        _launches(pair, sent, ampere_only=False)


def quantize(hidden_states: torch.Tensor, pair: WeightPair, rows: Rows, scratch: torch.Tensor) -> None:
    """The first kernel alone: quantizes rows into scratch."""
    _launches(pair, False, False).quantize(make_params(hidden_states, hidden_states, pair, rows, scratch)[0], rows)


def make_params(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    scratch: torch.Tensor,
    row_scales: torch.Tensor | None = None,
) -> tuple[RowsParams, EightBitParams, ScratchLayout]:
    """The kernels' parameters without flags and tensor maps, and where all lies in scratch; arguments as `run`."""
    where = scratch_layout(pair.num_experts, rows.max_rows, pair.w13.num_columns, pair.w2.num_columns)
    codes, scales, hidden, hidden_scales = (scratch.data_ptr() + place for place in where[1:5])
    quantizing = RowsParams(
        experts=experts_params(hidden_states, scratch, output, pair, rows),
        codes=codes,
        scales=scales,
        capacity=where.capacity,
    )
    if row_scales is not None:
        quantizing.sent_scales = row_scales.data_ptr()
        quantizing.sent_stride, quantizing.sent_scale_stride = hidden_states.stride(0), row_scales.stride(0)
    multiplying = EightBitParams(
        experts=quantizing.experts,
        row_scales=scales,
        hidden=hidden,
        hidden_scales=hidden_scales,
        capacity=where.capacity,
    )
    for gemm, place in zip(multiplying.experts.gemm, (codes, hidden), strict=True):
        gemm.input = place
    return quantizing, multiplying, where


def in_sent_form(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as kernels read them: where they lie, unless columns or rows begin where they cannot be read."""
    if codes.stride(1) != 1 or codes.stride(0) % 4 or codes.data_ptr() % 4:
        codes = codes.contiguous()
    return codes, scales if scales.stride(1) == 1 else scales.contiguous()


class _Launches:
    """What all launches for the same weights have in common.

    Args:
        sent: rows come in 8 bits.
        older: with the kernels of GPUs before Hopper.
    """

    def __init__(self, pair: WeightPair, sent: bool, older: bool) -> None:
        properties = torch.cuda.get_device_properties(pair.device)
        self.num_blocks: int = properties.multi_processor_count
        self.is_older = older
        spacings = [groups_per_step(w.num_columns, w.scales.size(1)) for w in (pair.w13, pair.w2)]
        groups = 0 if all(w.scales.size(1) == 1 for w in (pair.w13, pair.w2)) else max(spacings)
        if older:
            self.shared_bytes = older_shared_bytes(pair.kind, groups, pair.num_experts)
        else:
            self.shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self._rows_threads = rows_threads(pair.w13.num_columns)
        self._rows_blocks = self.num_blocks * (_THREADS_OF_MULTIPROCESSOR // self._rows_threads)
        self.table_bytes = table_bytes(pair.num_experts)
        sources = kernel_sources(
            pair.kind, pair.input_dtype, pair.act_dtype, groups, pair.activation, pair.clamp_limit, sent, older
        )
        self.kernels = jit.load_all(sources, pair.device)
        for name, kernel in self.kernels.items():
            if name != "rows":
                kernel.allow_shared(self.shared_bytes)

    def quantize(self, params: RowsParams, rows: Rows) -> None:
        blocks = max(1, min(self._rows_blocks, rows.max_rows))
        self.kernels["rows"].launch(params, (blocks, 1, 1), self._rows_threads, self.table_bytes)


def rows_threads(num_columns: int) -> int:
    """Threads of a block of the kernel that quantizes rows: whole warps."""
    return -(-num_columns // (32 * _COLUMNS_OF_THREAD)) * 32


def table_bytes(num_experts: int) -> int:
    """Bytes of the tables of experts."""
    return 4 * _TABLES * (num_experts + 1)


def older_shared_bytes(kind: WeightType, groups: int, num_experts: int) -> int:
    """Shared memory of cuda/eight_bit_sm80.cu: stages, what its epilogue needs, tables."""
    codes = GROUP_SIZE * (_TILE_ROWS * kind.bits // 8 + _OLDER_TILE_TOKENS)
    scale_rows = groups + (max(groups, 1) if kind.has_zero_points else 0)
    stage = -(-(codes + scale_rows * _TILE_ROWS * 2 + 4 * _OLDER_TILE_TOKENS) // 1024) * 1024
    stages = 3 if kind.bits == 4 else 2
    return stages * stage + 4 * (_OLDER_WARPS + 1) * _OLDER_TILE_TOKENS + table_bytes(num_experts)


def _launches(pair: WeightPair, sent: bool, ampere_only: bool) -> _Launches:
    older = ampere_only or jit.capability(pair.device.index or 0) != _HOPPER
    return pair.once(_Launches, sent, older)


def kernel_sources(
    kind: WeightType,
    input_dtype: torch.dtype,
    act_dtype: torch.dtype,
    groups: int,
    activation: MoEActivation,
    clamp_limit: float | None = None,
    sent: bool = False,
    older: bool = False,
) -> dict[str, jit.KernelSource]:
    """The kernel that quantizes "rows", and that which computes the "experts", or "gemm0" and "gemm1" one product each.

    Args:
        groups: of scales in 128 columns; 0 for one scale a row.
        sent: rows come in 8 bits.
        older: for GPUs before Hopper.
    """
    numbers = {
        "WEIGHT_TYPE": str(type_number(kind, act_dtype)),
        "ROWS_INT8": str(int(input_dtype == torch.int8)),
        "ACT_BF16": str(int(act_dtype == torch.bfloat16)),
    }
    experts = numbers | {"GROUPS_PER_STEP": str(groups), **activation_defines(activation, clamp_limit)}
    if sent:
        numbers["SENT_ROWS"] = "1"
    sources = {"rows": jit.KernelSource(CUDA / "eight_bit_rows.cu", "eight_bit_rows", tuple(numbers.items()))}
    if not older:
        sources["experts"] = jit.KernelSource(CUDA / "eight_bit_sm90.cu", "eight_bit_experts", tuple(experts.items()))
        return sources
    for phase in (0, 1):
        defines = experts | {"TILE_TOKENS": str(_OLDER_TILE_TOKENS), "PHASE": str(phase)}
        sources[f"gemm{phase}"] = jit.KernelSource(CUDA / "eight_bit_sm80.cu", "eight_bit_gemm", tuple(defines.items()))
    return sources


def _has_kernels(pair: WeightPair) -> bool:
    if pair.kind.scalar_type == scalar_types.float4_e2m1f and not pair.kind.for_eight_bit_rows:
        return False
    capability = jit.capability(pair.device.index or 0)
    has_act_order = any(part is not None for w in (pair.w13, pair.w2) for part in (w.g_idx, w.sort_indices))
    reason = unfit_reason(pair.input_dtype, capability, pair.activation, pair.columns, pair.groups, has_act_order)
    return pair.num_experts <= MOST_EXPERTS and reason is None
