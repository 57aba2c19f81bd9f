"""The number types that the Marlin kernels support, with the group sizes of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_ep.errors import one_of
from moe_ep.quantization.input_rows import INPUT_DTYPES, pair_refusal
from moe_ep.scalar_type import ScalarType, scalar_types


@dataclass(frozen=True)
class WeightType:
    """A quantized type, and the variants of it that the kernels support.

    Attributes:
        group_sizes: how many input columns can share a scale; -1 for a whole row.
        has_zero_points: whether the weights come with zero points.
        for_eight_bit_rows: whether 4-bit floats are packed for the kernels with 8-bit rows (repack.BY_ROW); the kernels
            for 16-bit rows read that packing too, with more instructions.
    """

    scalar_type: ScalarType
    group_sizes: tuple[int, ...]
    has_zero_points: bool = False
    for_eight_bit_rows: bool = False

    @property
    def bits(self) -> int:
        return self.scalar_type.size_bits

    @property
    def pack(self) -> int:
        """The number of codes in an int32."""
        return 32 // self.bits

    @property
    def packed_dtype(self) -> torch.dtype:
        """The dtype of packed codes, which tells how 4-bit floats are packed."""
        return torch.int64 if self.for_eight_bit_rows else torch.int32

    def packed_for(self, group_size: int, input_dtype: torch.dtype | None) -> WeightType:
        """Returns this type in the packing for weights that multiply rows of input_dtype."""
        is_mxfp4 = self.scalar_type == scalar_types.float4_e2m1f and group_size == _MX_GROUP
        return replace(self, for_eight_bit_rows=is_mxfp4 and input_dtype == torch.float8_e4m3fn)

    def packed_as(self, qweight: torch.Tensor) -> WeightType:
        """Returns this type in the packing of the given weights."""
        is_fp4 = self.scalar_type == scalar_types.float4_e2m1f
        return replace(self, for_eight_bit_rows=is_fp4 and qweight.dtype == torch.int64)


_INTEGER_GROUPS, _MX_GROUP = (-1, 32, 64, 128), 32
WEIGHT_TYPES = {
    scalar_type.id: WeightType(scalar_type, groups, zero_points)
    for scalar_type, groups, zero_points in (
        (scalar_types.uint4, _INTEGER_GROUPS, True),
        (scalar_types.uint4b8, _INTEGER_GROUPS, False),
        (scalar_types.uint8b128, _INTEGER_GROUPS, False),
        (scalar_types.float8_e4m3fn, _INTEGER_GROUPS, False),
        (scalar_types.float4_e2m1f, (16, _MX_GROUP), False),
    )
}
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16)
_HAS_E4M3 = (8, 9)


def check_input_dtype(
    kind: WeightType,
    scale_dtype: torch.dtype,
    act_dtype: torch.dtype,
    input_dtype: torch.dtype | None,
    capability: tuple[int, int] | None = None,
) -> None:
    """Raises ValueError for a dtype to which rows cannot be rounded with these weights; it names both.

    Args:
        capability: compute capability of the GPU; None on a CPU.
    """
    if input_dtype in (None, act_dtype):
        return
    if not isinstance(input_dtype, torch.dtype) or input_dtype not in INPUT_DTYPES:
        raise ValueError(
            f"input_dtype is {input_dtype}; it must be None, torch.int8, torch.float8_e4m3fn, or the activations' own "
            f"dtype ({act_dtype})"
        )
    refusal = pair_refusal(input_dtype, kind.scalar_type, scale_dtype)
    if refusal is None and input_dtype == torch.float8_e4m3fn and capability is not None and capability < _HAS_E4M3:
        refusal = (
            f"weights are {kind.scalar_type} on a GPU of compute capability {capability[0]}.{capability[1]}, whose "
            f"tensor cores multiply e4m3 from {_HAS_E4M3[0]}.{_HAS_E4M3[1]} on"
        )
    if refusal is not None:
        raise ValueError(f"input_dtype is {input_dtype} and {refusal}; pass None")


def weight_type(quant_type_id: int) -> WeightType:
    """The weight type of an id; ValueError for one that these kernels do not support."""
    try:
        found = WEIGHT_TYPES.get(quant_type_id)
    except TypeError:  # a list, which has no hash
        found = None
    if found is None:
        raise ValueError(
            one_of("quant_type_id", quant_type_id, [f"{t.scalar_type} ({key})" for key, t in WEIGHT_TYPES.items()])
        )
    return found


def check_group_size(kind: WeightType, group_size: int, num_columns: int | None) -> int | None:
    """The number of groups in a row of num_columns; ValueError if the type or the row does not allow the size.

    If num_columns is None, only the type is checked, and None is returned.
    """
    if group_size not in kind.group_sizes:
        allowed = ", ".join(str(size) for size in kind.group_sizes)
        raise ValueError(f"group_size is {group_size}; {kind.scalar_type} takes one of {allowed}")
    if num_columns is None:
        return None
    if group_size == -1:
        return 1
    if num_columns % group_size:
        raise ValueError(
            f"group_size is {group_size} and does not divide the {num_columns} input columns; "
            f"choose one that does, or -1 for a whole row"
        )
    return num_columns // group_size


def packed_sizes(name: str, qweight: torch.Tensor, kind: WeightType) -> tuple[int, int]:
    """Returns (rows, columns) of packed codes; raises ValueError for a tensor that cannot be packed codes."""
    pack = kind.pack * kind.packed_dtype.itemsize // 4
    if qweight.dtype != kind.packed_dtype or qweight.dim() != 3 or qweight.size(2) * pack % 16:
        wanted = "int64 [E, in/16, out]" if kind.for_eight_bit_rows else "int32 [E, in/16, out*16/pack]"
        raise ValueError(f"{name} is {qweight.dtype} {tuple(qweight.shape)}; it must be {wanted}")
    return qweight.size(2) * pack // 16, qweight.size(1) * 16


def check_sizes(name: str, num_rows: int, num_columns: int, gated: bool, way_out: str = "") -> None:
    """Raises ValueError for a matrix whose sizes have no packed form."""
    if not num_columns or num_columns % 32 or not num_rows or num_rows % (64 if gated else 32):
        raise ValueError(
            f"{name} has {num_rows} rows and {num_columns} columns; both must be multiples of 32, at least 32"
            f"{', and the rows of 64 since gate and up are interleaved' if gated else ''}{way_out}"
        )


def check_packed_zeros(name: str, zeros: torch.Tensor | None, kind: WeightType, scales: torch.Tensor) -> None:
    """Raises ValueError for zero points that cannot be `PackedWeights.zeros` with these packed scales."""
    if kind.for_eight_bit_rows and zeros is None:
        raise ValueError(f"{name} is missing; mxfp4 that is packed for 8-bit rows has its rows' largest scales there")
    if not kind.for_eight_bit_rows:
        check_zero_points(name, zeros, kind)
    shape = (scales.size(0), 1, scales.size(2)) if kind.for_eight_bit_rows else tuple(scales.shape)
    if zeros is not None and (zeros.dtype != scales.dtype or tuple(zeros.shape) != shape or not zeros.is_contiguous()):
        raise ValueError(f"{name} is {zeros.dtype} {tuple(zeros.shape)}; it must be {scales.dtype} {shape}, contiguous")


def check_zero_points(name: str, zero_points: torch.Tensor | None, kind: WeightType) -> None:
    """Raises ValueError if zero points are missing, or given for a type without them."""
    if (zero_points is not None) != kind.has_zero_points:
        raise ValueError(
            f"{name} is {'missing' if zero_points is None else 'given'}; "
            f"{kind.scalar_type} {'needs zero points' if kind.has_zero_points else 'takes none'}"
        )
