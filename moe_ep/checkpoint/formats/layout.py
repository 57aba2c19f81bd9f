"""What a format says about the tensors of a linear layer on disk, and what it owes the loader."""

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

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Role(Enum):
    """What a tensor of a linear layer says.

    CODES: the weights themselves. GROUPS: one number a group, such as scales and zero points. INDEX: the group of every
    input column. BIAS. CHECKED: nothing new; it must equal the layout's default. UNUSED: it is not read, as it is about
    activations, and these are not quantized here.
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
        shape: on disk, where there may be more or fewer dimensions of 1: a number is `[]` or `[1]`.
        default: makes what stands for the tensor where a checkpoint or a layer leaves it out; None where neither may.
        out_dim, in_dim: the dimension that runs along the outputs, and along the inputs; None where none does. A
            single number has out_dim 0: the gate's and the up projection's lie side by side.
        held: the dtype in which a layer holds it: None for the first of `dtypes`, or for the layer's own dtype where
            floats of several kinds are taken. Bytes held as floats are the bits of e8m0 numbers, powers of two.
        other_names: what some writers call it.
        in_order: of an INDEX, the groups of columns in order: what it means where it holds -1, as calibration never
            reached the expert.
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
        """What was read, where it is not held as it is stored."""
        if self.in_order is not None and bool((stored == -1).any()):
            return self.in_order()
        if self.held is None or not self.held.is_floating_point:
            return stored
        return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(self.held)


@dataclass(frozen=True)
class ScaleShape:
    """The scales of a matrix `[N, K]`.

    Attributes:
        kind: TENSOR (one), CHANNEL (`[N, 1]`), GROUP (`[N, ceil(K / columns)]`) or BLOCK
            (`[ceil(N / rows), ceil(K / columns)]`).
        columns: input columns that share a scale; 1 where they all do.
        rows: output rows that share one, of a block.
    """

    kind: Kind
    columns: int = 1
    rows: int = 1

    @classmethod
    def of_blocks(cls, argument: str, size: object) -> ScaleShape:
        """Of blocks of that size; CheckpointError with the argument's name unless it is two positive whole numbers."""
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise CheckpointError(f"{argument} is {size!r}; it must be two positive whole numbers")
        return cls(Kind.BLOCK, rows=size[0], columns=size[1])

    @property
    def group_size(self) -> int:
        """As in `CanonicalWeights`."""
        return self.columns if self.kind in (Kind.GROUP, Kind.BLOCK) else -1

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """On disk; the last block of a side may be smaller."""
        if self.kind is Kind.TENSOR:
            return (1,)
        if self.kind is Kind.CHANNEL:
            return (num_rows, 1)
        return (-(-num_rows // self.rows), -(-num_columns // self.columns))

    def layout(
        self,
        dtypes: tuple[torch.dtype, ...],
        num_rows: int,
        num_columns: int,
        held: torch.dtype | None = None,
    ) -> TensorLayout:
        """What a format says of the tensor of the scales."""
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
    """How linear layers are quantized: the tensors of each, and how they become canonical weights.

    Attributes:
        quant_method: the name of the layer's method in the registry.
        input_dtype: torch.int8 or torch.float8_e4m3fn if the weights were made for activations of that dtype; None for
            activations that are not quantized, or in ways that are not computed here.
    """

    quant_method: ClassVar[str]

    input_dtype: torch.dtype | None = None

    @property
    def column_block(self) -> int:
        """Input columns that share a scale: a part of a matrix that starts elsewhere needs the scales of all columns.

        1 where the scales do not depend on the column.
        """
        return 1

    @property
    def row_block(self) -> int:
        """Output rows that share a scale within a group; 1 where rows have their own, or all have the same."""
        return 1

    @property
    def act_order(self) -> bool:
        """Whether the columns of a group may be scattered."""
        return False

    @property
    def may_have_zero_points(self) -> bool:
        """Whether some experts may turn out to have zero points, and others not."""
        return False

    @property
    def fused_endings(self) -> Mapping[str, tuple[str, ...]] | None:
        """What a linear layer's tensors are called behind the name of all experts in one, by each of its names; None
        where experts never are in one."""
        return None

    @abstractmethod
    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        """The tensors of a linear layer `[out_features, in_features]` by the last part of their names.

        Raises:
            ValueError: sizes that the format cannot hold.
        """

    @abstractmethod
    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        """The canonical form of one linear layer's tensors, with any leading batch dimensions."""

    @property
    def schemes(self) -> list[QuantizationConfig]:
        """All schemes that some module of a model may have that is quantized so: this one."""
        return [self]

    def of_module(self, name: str, *other_names: str) -> QuantizationConfig | None:
        """How the linear layer of that name is quantized: all alike."""
        return self

    def of_gemm(self, gemm: str) -> QuantizationConfig:
        """How the layers of "w13" or "w2" are quantized: both alike."""
        return self


def plain_tensors(out_features: int, in_features: int) -> dict[str, TensorLayout]:
    """The tensors of a linear layer that is not quantized."""
    return {
        "weight": TensorLayout(FLOATS, (out_features, in_features), out_dim=0, in_dim=1),
        "bias": bias_layout(out_features),
    }


def bias_layout(out_features: int) -> TensorLayout:
    """A bias, which may be left out; AutoGPTQ wrote zeros for every linear layer, whether it has a bias or not."""
    return TensorLayout(
        FLOATS,
        (out_features,),
        lambda: torch.zeros(out_features, dtype=torch.float32, device="cpu"),
        Role.BIAS,
        out_dim=0,
    )


def activation_scales() -> dict[str, TensorLayout]:
    """Numbers about activations and cached keys that some writers leave beside weights; none of them is read."""
    names = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "k_scale", "v_scale")
    return dict.fromkeys(
        names, TensorLayout(FLOATS, (1,), lambda: torch.zeros(1, dtype=torch.float32, device="cpu"), Role.UNUSED)
    )


def require_multiple(what: str, size: int, multiple: int, format_name: str) -> None:
    """ValueError unless the size is a multiple of what the format packs together."""
    if size % multiple:
        raise ValueError(f"{what} is {size}; {format_name} needs a multiple of {multiple}")
