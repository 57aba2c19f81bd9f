"""The interface of formats: tensor layouts of a linear layer on disk, scales, and conversion to canonical weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from moe_ep.errors import CheckpointError
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Types of integer codes, by their bits: with an offset, and with zero points.
SYMMETRIC = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
ASYMMETRIC = {4: scalar_types.uint4, 8: scalar_types.uint8}


# Scales of activations and of cached keys and values that some writers store with the weights.
_OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip


class Role(Enum):
    """The content of a linear layer's tensor.

    CODES: the weights themselves. GROUPS: one number per group, such as scales and zero points. INDEX: the group of
    every input column. BIAS. CHECKED: redundant; it must equal the layout's default. UNUSED: for quantized activations,
    not read.
    """

    CODES = "codes"
    GROUPS = "groups"
    INDEX = "index"
    BIAS = "bias"
    CHECKED = "checked"
    UNUSED = "unused"


@dataclass(frozen=True)
class TensorLayout:
    """Expected dtypes and shape of a tensor of a linear layer.

    Attributes:
        shape: on disk, up to dimensions of 1: a number is `[]` or `[1]`.
        default: makes the value of a tensor that a checkpoint or a layer lacks; None if it is required.
        out_dim, in_dim: the dimension of the outputs and of the inputs, or None. A single number has out_dim 0: those
            of gate and up are concatenated.
        held: the dtype of the layer's parameter: None for the first of `dtypes`, or the layer's own dtype if several
            float types are accepted. Bytes held as floats are the bits of e8m0 numbers, powers of two.
        in_order: for an INDEX, the groups of sorted columns: the meaning of -1, which writers leave for experts that
            calibration never reached.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    default: Callable[[], torch.Tensor] | None = None
    role: Role = Role.CODES
    out_dim: int | None = None
    in_dim: int | None = None
    held: torch.dtype | None = None
    other_names: tuple[str, ...] = ()
    in_order: Callable[[], torch.Tensor] | None = None

    def as_held(self, stored: torch.Tensor) -> torch.Tensor:
        """Converts the stored tensor to what the layer holds."""
        if self.in_order is not None and bool((stored == -1).any()):
            return self.in_order()
        if self.held is None or not self.held.is_floating_point:
            return stored
        return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(self.held)


_UNUSED = TensorLayout(FLOATS, (1,), lambda: torch.zeros(1, dtype=torch.float32, device="cpu"), Role.UNUSED)


@dataclass(frozen=True)
class ScaleShape:
    """Which weights of a matrix `[N, K]` share a scale: all, an output row, a group of input columns, or a block.

    Attributes:
        kind: TENSOR (one), CHANNEL (`[N, 1]`), GROUP (`[N, ceil(K / columns)]`) or BLOCK
            (`[ceil(N / rows), ceil(K / columns)]`).
        columns: input columns of a group or block; 1 if all share the scale.
    """

    kind: Kind
    columns: int = 1
    rows: int = 1

    @classmethod
    def of_blocks(cls, argument: str, size: object) -> ScaleShape:
        """Blocks of that size; CheckpointError with the argument's name unless it is two positive whole numbers."""
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise CheckpointError(f"{argument} is {size!r}; it must be two positive whole numbers")
        return cls(Kind.BLOCK, rows=size[0], columns=size[1])

    @property
    def group_size(self) -> int:
        """`group_size` of `CanonicalWeights`."""
        return self.columns if self.kind in (Kind.GROUP, Kind.BLOCK) else -1

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """The shape on disk; the last block of a side may be smaller."""
        if self.kind is Kind.TENSOR:
            return (1,)
        if self.kind is Kind.CHANNEL:
            return (num_rows, 1)
        return (-(-num_rows // self.rows), -(-num_columns // self.columns))

    def layout(
        self, dtypes: tuple[torch.dtype, ...], num_rows: int, num_columns: int, held: torch.dtype | None = None
    ) -> TensorLayout:
        """The layout of the tensor of scales."""
        return TensorLayout(
            dtypes,
            self.shape(num_rows, num_columns),
            role=Role.GROUPS,
            out_dim=0,
            in_dim=1 if self.kind in (Kind.GROUP, Kind.BLOCK) else None,
            held=held,
        )

    def per_row(self, scales: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[..., N, G]`, from scales with any leading dimensions."""
        if self.kind is Kind.TENSOR:
            return scales.unsqueeze(-1).expand(*scales.shape[:-1], num_rows, 1).contiguous()
        if self.kind is Kind.BLOCK:
            return scales.repeat_interleave(self.rows, dim=-2)[..., :num_rows, :].contiguous()
        return scales


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(ABC):
    """The scheme of quantized linear layers: the tensors of each, and the conversion to canonical weights.

    Attributes:
        quant_method: the name of the layer's method in the registry.
        input_dtype: torch.int8 or torch.float8_e4m3fn if the weights were made for activations of that dtype; None for
            activations that are not quantized, or in ways that are not computed here.
    """

    quant_method: ClassVar[str]

    input_dtype: torch.dtype | None = None

    @property
    def column_block(self) -> int:
        """Input columns that share a scale, 1 if scales do not depend on the column.

        A part of a matrix that does not start at a multiple of it needs the scales of all columns.
        """
        return 1

    @property
    def row_block(self) -> int:
        """Output rows that share a scale within a group; 1 if each row has its own, or all rows have the same."""
        return 1

    @property
    def act_order(self) -> bool:
        """Whether the columns of a group may be scattered."""
        return False

    @property
    def may_have_zero_points(self) -> bool:
        """Whether only some experts may have zero points."""
        return False

    @property
    def fused_endings(self) -> Mapping[str, tuple[str, ...]] | None:
        """Suffixes of fused tensors, which hold all experts, by the name of the linear layer's tensor; None if the
        format has none."""
        return None

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        """The tensors of a linear layer `[out_features, in_features]` by the last part of their names.

        Raises:
            ValueError: sizes that the format cannot hold.
        """
        tensors = self.weight_tensors(out_features, in_features)
        return {**tensors, **dict.fromkeys(_OF_ACTIVATIONS, _UNUSED), "bias": bias_layout(out_features)}

    @abstractmethod
    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        """Those of them that say the weights; ValueError as above."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        """The canonical form of one linear layer's tensors, with any leading batch dimensions."""

    @property
    def schemes(self) -> list[QuantizationConfig]:
        """All schemes of a model that is quantized so: this one."""
        return [self]

    def of_module(self, name: str, *other_names: str) -> QuantizationConfig | None:
        """The scheme of the linear layer of that name: the same for all."""
        return self

    def of_gemm(self, gemm: str) -> QuantizationConfig:
        """The scheme of "w13" or "w2": the same for both."""
        return self


@dataclass(frozen=True, kw_only=True)
class ScaledConfig(QuantizationConfig):
    """A scheme whose settings say which weights share a scale."""

    scale: ScaleShape

    @property
    def column_block(self) -> int:
        return self.scale.columns

    @property
    def row_block(self) -> int:
        return self.scale.rows


def plain_tensors(out_features: int, in_features: int) -> dict[str, TensorLayout]:
    """The tensors of a plain linear layer."""
    return {
        "weight": TensorLayout(FLOATS, (out_features, in_features), out_dim=0, in_dim=1),
        "bias": bias_layout(out_features),
    }


def groups_in_order(num_columns: int, group_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The group of each column, int32 `[K]`, of groups of adjacent columns; group_size -1 is one group of all."""
    columns = torch.arange(num_columns, dtype=torch.int32, device=device)
    return columns // (num_columns if group_size == -1 else group_size)


def needed_g_idx(name: str, g_idx: torch.Tensor, group_size: int, num_groups: int) -> torch.Tensor | None:
    """The group of every column, or None if the groups are of adjacent columns; CheckpointError for other groups."""
    if bool((g_idx == groups_in_order(g_idx.shape[-1], group_size, g_idx.device)).all()):
        return None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= num_groups:
        raise CheckpointError(f"{name}: expected groups 0 to {num_groups - 1}, found {low} to {high}")
    return g_idx


def bias_layout(out_features: int) -> TensorLayout:
    """An optional bias; AutoGPTQ wrote zeros for linear layers without one."""
    return TensorLayout(
        FLOATS,
        (out_features,),
        lambda: torch.zeros(out_features, dtype=torch.float32, device="cpu"),
        Role.BIAS,
        out_dim=0,
    )


def require_multiple(what: str, size: int, multiple: int, format_name: str) -> None:
    """ValueError unless the size is a multiple of what the format packs together."""
    if size % multiple:
        raise ValueError(f"{what} is {size}; {format_name} needs a multiple of {multiple}")


# ==== Packing codes of 4 and 8 bits into words along the last dimension, low bits first ====


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[..., R]` -> uint8 `[..., R * 32 / bits]`; the bytes of an int32 are low first already."""
    octets = _in_a_row(packed).view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])
    return octets if bits == 8 else unpack_nibbles(octets)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: uint8 `[..., R]` -> int32 `[..., R * bits / 32]`, R a multiple of 32 / bits."""
    octets = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    return _in_a_row(octets).view(torch.int32).view(*octets.shape[:-1], octets.shape[-1] // 4)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., R]` -> uint8 `[..., 2 R]`, the low half of a byte first.

    Example: 0xA5 is 5, 10: as a word of 16 bits 0x00A5, with itself four bits higher 0x0AF5, masked 0x0A05.
    """
    words = octets.contiguous().to(torch.int16)
    return ((words << 4) | words).bitwise_and_(0x0F0F).view(torch.uint8)


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous flat copy or view; `flatten` alone may return a strided tensor."""
    return tensor.flatten().contiguous()
