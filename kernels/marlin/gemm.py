"""Launches the kernels that compute both GEMMs of the experts, with the activation between them.

Experts of up to FEW_ROWS rows are one kernel's, those of more another's; which expert is whose is decided on the
device. The structures are those of cuda/params.cuh. What a launch needs beside its inputs is small: flags (never
cleared, or zero before and after: no memset), and room for the sums of tiles that several blocks share, at most
2 x blocks x 256 x tokens of a tile floats: 35 MB on a GPU of 132 SMs for tiles of 128 tokens, 2 MB for tiles of 8.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types

FEW_ROWS = 32
_CUDA = Path(__file__).parent / "cuda"
_FEW_THREADS, _MANY_THREADS = 640, 384
_TILE_ROWS = 256
_MAX_BLOCKS = 256
STEP_COLUMNS = 128
_TILE_TOKENS = (8, 16, 32, 64, 128)
_ACTIVATIONS = {activation: number for number, activation in enumerate(MoEActivation)}
_INTEGER_TYPES = {
    scalar_types.uint4: 0,
    scalar_types.uint4b8: 1,
    scalar_types.uint8b128: 2,
    scalar_types.float8_e4m3fn: 3,
}
_NVFP4, _MXFP4 = 4, 5


class Rows(NamedTuple):
    """Which rows the experts compute, and where the results go.

    Attributes:
        num_tokens: int32 `[E]`, rows of each expert.
        max_rows: the most rows of one expert.
        row_ids: int32: None, or the input row of each expert's rows `[E, max_rows]`, or sorted ids (below).
        ids_divisor: the input row is id // ids_divisor.
        is_sorted: row_ids holds the rows of one expert after the other, and row `id` of the output is written.
    """

    num_tokens: torch.Tensor
    max_rows: int
    row_ids: torch.Tensor | None = None
    ids_divisor: int = 1
    is_sorted: bool = False


class _GemmParams(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("alphas", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("alphas_per_expert", ctypes.c_int),
    )


class _ExpertsParams(ctypes.Structure):
    _fields_ = (
        ("gemm", _GemmParams * 2),
        ("num_tokens", ctypes.c_void_p),
        ("row_ids", ctypes.c_void_p),
        ("sync", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("num_experts", ctypes.c_int),
        ("max_rows", ctypes.c_int),
        ("ids_divisor", ctypes.c_int),
        ("sorted", ctypes.c_int),
        ("max_tile_tokens", ctypes.c_int),
    )


def kernel_source(
    kind: WeightType,
    act_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    groups_per_step: int,
    activation: MoEActivation,
    few_rows: bool,
) -> jit.KernelSource:
    """The kernel for few or many rows of one number type, with scales every 128 / groups_per_step columns."""
    if kind.scalar_type == scalar_types.float4_e2m1f:
        number = _NVFP4 if scale_dtype == torch.float8_e4m3fn else _MXFP4
    else:
        number = _INTEGER_TYPES[kind.scalar_type]
    defines = {
        "WEIGHT_TYPE": number,
        "ACT_BF16": int(act_dtype == torch.bfloat16),
        "SCALES_PER_STEP": groups_per_step,
        "ACTIVATION": _ACTIVATIONS[activation],
    }
    name, entry = ("decode_sm90.cu", "decode") if few_rows else ("prefill_sm90.cu", "prefill")
    return jit.KernelSource(_CUDA / name, entry, tuple((name, str(value)) for name, value in defines.items()))


def groups_per_step(num_columns: int, num_groups: int) -> int:
    """Groups of scales that 128 columns span: 1 where a group is longer or the whole row."""
    return 1 if num_groups == 1 else max(1, STEP_COLUMNS * num_groups // num_columns)


def tile_tokens(max_rows: int) -> int:
    """Tokens of the largest tile that experts of up to max_rows rows need."""
    return next((tokens for tokens in _TILE_TOKENS if tokens >= max_rows), _TILE_TOKENS[-1])


def partials_numel(max_rows: int, device: torch.device) -> int:
    """f32 numbers a launch needs for shared tiles."""
    return 2 * _num_blocks(device.index or 0) * _TILE_ROWS * tile_tokens(max_rows)


def run_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: Weights,
    w2: Weights,
    rows: Rows,
    kind: WeightType,
    activation: MoEActivation,
    hidden: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Computes every expert's rows; all arguments checked by the caller, all on one GPU.

    Args:
        output: `[E, max_rows, K]`, or `[num_ids, K]` where rows are sorted.
        hidden_states: rows of K numbers.
        hidden: scratch for the activation's output, N numbers for each row.
        partials: f32 scratch, partials_numel.

    Raises:
        BackendUnavailableError: the GPU is not of the Hopper generation.
    """
    device = hidden_states.device
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (compute capability 9.0); "
            f"choose experts='reference' on it"
        )
    per_step = max(groups_per_step(w.num_columns, w.scales.size(1)) for w in (w13, w2))
    index = device.index or 0
    params = _ExpertsParams(
        gemm=(_gemm(w13, hidden_states, hidden), _gemm(w2, hidden, output)),
        num_tokens=rows.num_tokens.data_ptr(),
        row_ids=_pointer(rows.row_ids),
        partials=partials.data_ptr(),
        num_experts=rows.num_tokens.numel(),
        max_rows=rows.max_rows,
        ids_divisor=rows.ids_divisor,
        sorted=int(rows.is_sorted),
        max_tile_tokens=tile_tokens(rows.max_rows),
    )
    for few_rows in (True, False) if rows.max_rows > FEW_ROWS else (True,):
        source = kernel_source(kind, hidden_states.dtype, w13.scales.dtype, per_step, activation, few_rows)
        kernel = jit.load(source, device)
        kernel.allow_shared(_max_shared_bytes(index))
        params.sync = _flags(device, few_rows, params.num_experts * -(-w13.num_rows // _TILE_ROWS)).data_ptr()
        threads = _FEW_THREADS if few_rows else _MANY_THREADS
        kernel.launch(params, (_num_blocks(index), 1, 1), threads, _max_shared_bytes(index), early=True)


def _gemm(weights: Weights, input: torch.Tensor, output: torch.Tensor) -> _GemmParams:
    return _GemmParams(
        weights=weights.qweight.data_ptr(),
        scales=weights.scales.data_ptr(),
        zeros=_pointer(weights.zeros),
        bias=_pointer(weights.bias),
        alphas=_pointer(weights.alphas),
        input=input.data_ptr(),
        output=output.data_ptr(),
        columns=weights.num_columns,
        rows=weights.num_rows,
        groups=weights.scales.size(1),
        alphas_per_expert=1 if weights.alphas is None else weights.alphas.numel() // weights.alphas.size(0),
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _num_blocks(device_index: int) -> int:
    return min(torch.cuda.get_device_properties(device_index).multi_processor_count, _MAX_BLOCKS)


@functools.cache
def _max_shared_bytes(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin  # type: ignore[attr-defined]


_flag_buffers: dict[tuple[int, int, bool], list[torch.Tensor]] = {}


def _flags(device: torch.device, few_rows: bool, num_tiles: int) -> torch.Tensor:
    """Flags of this stream for one of the kernels; like the scratch, one set a stream.

    Outgrown ones are kept: a captured graph may still use them.
    """
    needed = 2 + 2 * _MAX_BLOCKS + num_tiles
    buffers = _flag_buffers.setdefault((device.index or 0, torch.cuda.current_stream(device).cuda_stream, few_rows), [])
    if not buffers or buffers[-1].numel() < needed:
        buffers.append(torch.zeros(max(needed, 8192), dtype=torch.int32, device=device))
    return buffers[-1]
