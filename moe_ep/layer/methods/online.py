"""Plain weights that are quantized to 4- or 8-bit integers or 8-bit floats once all of them are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from moe_ep.config import FusedMoEConfig
from moe_ep.errors import one_of
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import UnquantizedFusedMoEMethod
from moe_ep.layer.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize, quantize_fp8, quantize_int

GROUP_SIZES = (128, 64, 32)


class OnlineConfig(ABC):
    """How plain weights are quantized on load."""

    quant_method: ClassVar[str]

    @abstractmethod
    def group_size_for(self, *sizes: int) -> int:
        """The group size for matrices with these numbers of input columns; ValueError if none fits."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        """Quantizes a plain weight `[..., N, K]` to the canonical form."""


@dataclass(frozen=True, kw_only=True)
class OnlineIntConfig(OnlineConfig):
    """Quantize on load to integers: round to nearest, symmetric.

    Attributes:
        bits: 4 or 8.
        group_size: number of input columns that share a scale; None means the largest of 128, 64 and 32 that fits.

    Raises:
        ValueError: any other number of bits.
    """

    quant_method: ClassVar[str] = "online_int"

    bits: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(one_of("bits", self.bits, ["4", "8"]))

    def group_size_for(self, *sizes: int) -> int:
        asked = GROUP_SIZES if self.group_size is None else (self.group_size,)
        fitting = [size for size in asked if not any(columns % size for columns in sizes)]
        if not fitting:
            raise ValueError(
                f"the matrices have {' and '.join(map(str, sizes))} input columns; quantizing to integers needs "
                f"multiples of a group size ({', '.join(map(str, asked))}); load these weights unquantized or as fp8"
            )
        return fitting[0]

    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        return quantize_int(weight, self.bits, group_size)


@dataclass(frozen=True, kw_only=True)
class OnlineFp8Config(OnlineConfig):
    """Quantize on load to e4m3 with one scale per row."""

    quant_method: ClassVar[str] = "online_fp8"

    def group_size_for(self, *sizes: int) -> int:
        return -1

    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        return quantize_fp8(weight)


# The names that `--quantize` takes.
ONLINE: dict[str, OnlineConfig] = {
    "int4": OnlineIntConfig(bits=4),
    "int8": OnlineIntConfig(bits=8),
    "fp8": OnlineFp8Config(),
}


class OnlineFusedMoEMethod(CanonicalFusedMoEMethod):
    """Has the parameters of plain weights until they are processed, and canonical weights from then on."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: OnlineConfig) -> None:
        super().__init__(moe_config, quant_config)
        self._plain = UnquantizedFusedMoEMethod(moe_config)
        self.group_size = quant_config.group_size_for(moe_config.hidden_dim, moe_config.intermediate_size_per_partition)

    def create_weights(self, layer: MoELayer, *args: Any, **kwargs: Any) -> None:
        self._plain.create_weights(layer, *args, **kwargs)

    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        return self.quant_config.quantize(layer.get_parameter(f"{gemm}_weight").data, self.group_size)

    def as_quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """The f32 values to which the layer quantizes a plain weight `[N, K]` of the checkpoint."""
        return dequantize(self.quant_config.quantize(weight.to(self.moe_config.in_dtype), self.group_size))
