"""Signed bytes with a scale per row: `int-quantized` of compressed-tensors, and the same of other tools.

    weight        int8 [N, K]           the values, not offset
    weight_scale  f16, bf16 or f32 [N, 1]   or [1], or [N, K / g]; of blocks [ceil(N / bn), ceil(K / bk)]

The values are `weight * weight_scale` (https://github.com/vllm-project/compressed-tensors). DeepSeek was also published
in this form for https://github.com/sgl-project/sglang, as w8a8_int8 (a scale per row) and blockwise_int8 (blocks, with
scales named weight_scale_inv).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from moe_ep.checkpoint.formats.layout import (
    FLOATS,
    QuantizationConfig,
    Role,
    ScaleShape,
    TensorLayout,
    activation_scales,
    bias_layout,
)
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types


@dataclass(frozen=True, kw_only=True)
class IntQuantizedConfig(QuantizationConfig):
    """One scheme of signed bytes; `scale` says which weights share a scale."""

    quant_method: ClassVar[str] = "int-quantized"

    scale: ScaleShape

    @property
    def column_block(self) -> int:
        return self.scale.columns

    @property
    def row_block(self) -> int:
        return self.scale.rows

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        scale = self.scale.layout(FLOATS, out_features, in_features)
        return {
            "weight": TensorLayout((torch.int8,), (out_features, in_features), out_dim=0, in_dim=1),
            "weight_scale": replace(scale, other_names=("weight_scale_inv",)),
            "weight_zero_point": TensorLayout(
                (torch.int8,),
                (out_features, 1),
                lambda: torch.zeros(out_features, 1, dtype=torch.int8, device="cpu"),
                Role.CHECKED,
            ),
            **activation_scales(),
            "bias": bias_layout(out_features),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        weight = tensors["weight"]
        # A flipped sign bit adds 128 to a two's complement byte.
        return CanonicalWeights(
            codes=weight.view(torch.uint8) ^ 0x80,
            scales=self.scale.per_row(tensors["weight_scale"], weight.shape[-2]),
            zero_points=None,
            g_idx=None,
            quant_type_id=scalar_types.uint8b128.id,
            group_size=self.scale.group_size,
        )
