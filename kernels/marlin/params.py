"""Host mirror of the kernel parameter structs of cuda/params.cuh, and the rows that a launch computes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch

from moe_ep.activation import MoEActivation, gate_limit
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair, Weights
from moe_ep.modular_kernel.workspace import current_stream, outside_of_pools
from moe_ep.scalar_type import scalar_types

CUDA = Path(__file__).parent / "cuda"
_ACTIVATION_NUMBERS = {activation: number for number, activation in enumerate(MoEActivation)}
_TYPE_NUMBERS = {
    scalar_types.uint4: 0,
    scalar_types.uint4b8: 1,
    scalar_types.uint8b128: 2,
    scalar_types.float8_e4m3fn: 3,
}
_NVFP4, _MXFP4, _MXFP4_BY_ROW = 4, 5, 6


class Rows(NamedTuple):
    """Which rows the experts compute, and where the results go.

    Attributes:
        num_tokens: int32 `[E]`, rows of each expert.
        max_rows: the most rows of one expert.
        row_ids: int32: None, or the input row of each expert's rows `[E, max_rows]`, or sorted ids (below).
        ids_divisor: the input row is id // ids_divisor.
        is_sorted: row_ids holds the rows of one expert after the other, and row `id` of the output is written.
        expected_m: expected mean number of rows per expert; None if unknown. Results do not depend on it.
        most_rows: the most rows that all experts have together, if that is less than max_rows for each.
    """

    num_tokens: torch.Tensor
    max_rows: int
    row_ids: torch.Tensor | None = None
    ids_divisor: int = 1
    is_sorted: bool = False
    expected_m: float | None = None
    most_rows: int | None = None


class GemmParams(ctypes.Structure):
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


class ExpertsParams(ctypes.Structure):
    _fields_: ClassVar[Any] = (
        ("gemm", GemmParams * 2),
        ("num_tokens", ctypes.c_void_p),
        ("row_ids", ctypes.c_void_p),
        ("sync", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("fixup_sums", ctypes.c_void_p),
        ("hidden_packets", ctypes.c_void_p),
        ("num_experts", ctypes.c_int),
        ("max_rows", ctypes.c_int),
        ("ids_divisor", ctypes.c_int),
        ("sorted", ctypes.c_int),
        ("max_tile_tokens", ctypes.c_int),
        ("max_small_m", ctypes.c_int),
        ("launch_overhead", ctypes.c_int),
        ("max_tiles", ctypes.c_int),
    )

    @classmethod
    def of(cls, params: ExpertsParams, **more: Any) -> Self:
        """Copies the parameters into a structure with further members after them."""
        joined = cls(**more)
        ctypes.memmove(ctypes.addressof(joined), ctypes.addressof(params), ctypes.sizeof(params))
        return joined


def experts_params(
    input: torch.Tensor, hidden: torch.Tensor, output: torch.Tensor, pair: WeightPair, rows: Rows | None
) -> ExpertsParams:
    """Returns all parameters but flags and partial sums, which only some kernels have."""
    params = ExpertsParams() if rows is None else rows_params(rows)
    params.gemm = pair.once(_gemms)
    first, second = params.gemm
    first.input, first.output = input.data_ptr(), hidden.data_ptr()
    second.input, second.output = hidden.data_ptr(), output.data_ptr()
    return params


def rows_params(rows: Rows) -> ExpertsParams:
    """Returns parameters that describe the rows only."""
    return ExpertsParams(
        num_tokens=rows.num_tokens.data_ptr(),
        row_ids=jit.pointer(rows.row_ids),
        num_experts=rows.num_tokens.numel(),
        max_rows=rows.max_rows,
        ids_divisor=rows.ids_divisor,
        sorted=int(rows.is_sorted),
    )


def activation_defines(activation: MoEActivation, clamp_limit: float | None = None) -> dict[str, str]:
    """ACTIVATION and CLAMP_LIMIT of cuda/epilogue.cuh."""
    limit = gate_limit(activation, clamp_limit)
    clamped = {} if limit is None else {"CLAMP_LIMIT": f"{limit!r}f"}
    return {"ACTIVATION": str(_ACTIVATION_NUMBERS[activation]), **clamped}


def type_number(kind: WeightType, scale_dtype: torch.dtype) -> int:
    """WEIGHT_TYPE of cuda/dequant.cuh."""
    if kind.scalar_type == scalar_types.float4_e2m1f:
        if scale_dtype == torch.float8_e4m3fn:
            return _NVFP4
        return _MXFP4_BY_ROW if kind.for_eight_bit_rows else _MXFP4
    return _TYPE_NUMBERS[kind.scalar_type]


def _gemms(pair: WeightPair) -> Any:
    """Both GEMMs without input and output."""
    return (GemmParams * 2)(*(_gemm(weights) for weights in (pair.w13, pair.w2)))


def _gemm(weights: Weights) -> GemmParams:
    return GemmParams(
        weights=weights.qweight.data_ptr(),
        scales=weights.scales.data_ptr(),
        zeros=jit.pointer(weights.zeros),
        bias=jit.pointer(weights.bias),
        alphas=jit.pointer(weights.alphas),
        columns=weights.num_columns,
        rows=weights.num_rows,
        groups=weights.scales.size(1),
        alphas_per_expert=1 if weights.alphas is None else weights.alphas.numel() // weights.alphas.size(0),
    )


# ==== Flags of streams ====
#
# Flags that kernels reset after use or only count up, so they are cleared once and no launch needs a memset.

_LEAST = 8192
_buffers: dict[tuple[int, int, str], list[torch.Tensor]] = {}
# Flags for the next stream that has none when it is captured. If they were made under capture, only that graph would
# clear them, and a graph captured later on the same stream might be replayed before it.
_spare: dict[tuple[int, str], torch.Tensor] = {}


def stream_flags(device: torch.device, kernel: str, numel: int) -> torch.Tensor:
    """The int32 flags of one kernel on the current stream, initially zero.

    If they become too small, the old ones are kept, since a captured graph may still use them.
    """
    index = device.index or 0
    buffers = _buffers.setdefault((index, current_stream(device), kernel), [])
    if not buffers or buffers[-1].numel() < numel or (index, kernel) not in _spare:
        _add_flags(buffers, device, (index, kernel), max(numel, _LEAST))
    return buffers[-1]


def _add_flags(buffers: list[torch.Tensor], device: torch.device, owner: tuple[int, str], numel: int) -> None:
    """Appends flags if there are none of that size, and makes spare ones unless the stream is being captured."""
    capturing = torch.cuda.is_current_stream_capturing()
    if not buffers or buffers[-1].numel() < numel:
        flags = _spare.pop(owner, None) if capturing else None
        if flags is None or flags.numel() < numel:
            flags = _zeros(numel, device, capturing)
        buffers.append(flags)
    spare = _spare.get(owner)
    if not capturing and (spare is None or spare.numel() < buffers[-1].numel()):
        _spare[owner] = _zeros(buffers[-1].numel(), device, capturing)


def _zeros(numel: int, device: torch.device, capturing: bool) -> torch.Tensor:
    def make() -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.int32, device=device)

    # A capturing thread would have to wait for another thread's allocation, which would end its capture.
    return make() if capturing else outside_of_pools(make, device)
