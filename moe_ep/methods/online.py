"""Plain weights of the checkpoint, quantized to integers of 4 or 8 bits when they are all there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moe_ep.checkpoint.formats.canonical import CanonicalWeights
from moe_ep.checkpoint.formats.plain import quantize_int
from moe_ep.config import FusedMoEConfig
from moe_ep.errors import one_of
from moe_ep.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.methods.unquantized import UnquantizedFusedMoEMethod

if TYPE_CHECKING:
    from moe_ep.expert_shard import ExpertShard

GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, kw_only=True)
class OnlineIntConfig:
    """Quantize on load: round to nearest, symmetric.

    Attributes:
        bits: 4 or 8.
        group_size: input columns that share a scale; None means the largest of 128, 64 and 32 that fits.

    Raises:
        ValueError: other bits.
    """

    quant_method: ClassVar[str] = "online_int"

    bits: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(one_of("bits", self.bits, ["4", "8"]))


class OnlineIntFusedMoEMethod(CanonicalFusedMoEMethod):
    """Parameters of plain weights until they are processed, canonical integers from then on."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: OnlineIntConfig) -> None:
        super().__init__(moe_config, quant_config)
        self._plain = UnquantizedFusedMoEMethod(moe_config)
        K, N = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        asked = GROUP_SIZES if quant_config.group_size is None else (quant_config.group_size,)
        fitting = [size for size in asked if K % size == 0 and N % size == 0]
        if not fitting:
            raise ValueError(
                f"hidden_size is {K} and the intermediate size per rank is {N}; quantizing on load needs both to be "
                f"multiples of a group size ({', '.join(map(str, asked))}); load these weights unquantized"
            )
        self.group_size = fitting[0]

    def create_weights(
        self,
        layer: ExpertShard,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._plain.create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype)

    def unpack(self, layer: ExpertShard, gemm: str) -> CanonicalWeights:
        return quantize_int(layer.get_parameter(f"{gemm}_weight").data, self.quant_config.bits, self.group_size)
