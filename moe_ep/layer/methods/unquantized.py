"""Plain weights in f32, f16 or bf16."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.config import FusedMoEQuantConfig
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import FusedMoEMethodBase, w13_rows
from moe_ep.layer.weight_loading import weight_layout


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """`w13_weight` `[El, 2N, K]` (gate rows, then up rows; `[El, N, K]` ungated) and `w2_weight` `[El, K, N]`."""

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, N, K = w13_rows(self.moe_config), intermediate_size_per_partition, hidden_size
        for gemm, shape in (("w13", (num_experts, rows, K)), ("w2", (num_experts, K, N))):
            self.add_parameter(layer, f"{gemm}_weight", torch.empty(shape, dtype=params_dtype), weight_layout(gemm))
        self.add_biases(layer, num_experts, rows, K, params_dtype)

    def gemm_weights(self, layer: MoELayer) -> tuple[torch.Tensor, torch.Tensor]:
        w13: Any = layer.w13_weight
        w2: Any = layer.w2_weight
        return w13.data, w2.data

    def get_fused_moe_quant_config(self, layer: MoELayer) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(w1_bias=self.bias(layer, "w13"), w2_bias=self.bias(layer, "w2"))

    def weight_tensors(self, layer: MoELayer) -> list[torch.Tensor]:
        return list(self.gemm_weights(layer))
