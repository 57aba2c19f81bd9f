"""GPTQ: 4- and 8-bit integers with group scales, loaded in the form they have on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_ep.checkpoint.formats.canonical import CanonicalWeights
from moe_ep.checkpoint.formats.gptq import GPTQConfig, unpack_gptq
from moe_ep.config import FusedMoEConfig
from moe_ep.methods.base import w13_rows
from moe_ep.methods.canonical import CanonicalFusedMoEMethod, with_g_idx
from moe_ep.weight_loading import (
    FusedMoeWeightScaleSupported,
    ParamLayout,
    input_index_layout,
    scale_layout,
    weight_layout,
)

if TYPE_CHECKING:
    from moe_ep.expert_shard import ExpertShard


class GPTQFusedMoEMethod(CanonicalFusedMoEMethod):
    """Parameters as in `moe_ep.checkpoint.formats.gptq`, of all local experts; pack = 32 / bits, g = group_size.

    `w13_qweight` int32 `[El, K/pack, 2N]`, `w13_scales` `[El, K/g, 2N]`, `w13_qzeros` int32 `[El, K/g, 2N/pack]`,
    `w13_g_idx` int32 `[El, K]`; `w2_qweight` `[El, N/pack, K]`, `w2_scales` `[El, N/g, K]`, `w2_qzeros`
    `[El, N/g, K/pack]`, `w2_g_idx` `[El, N]`.

    Tensor parallelism divides the groups of w2 where its part of N is whole groups in order. Elsewhere (act-order, or
    a group that straddles two ranks) every rank keeps the scales of all groups and g_idx says which it uses.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: GPTQConfig) -> None:
        super().__init__(moe_config, quant_config)
        parallel = moe_config.moe_parallel_config
        self._tp_size, self._tp_rank = (parallel.tp_size, parallel.tp_rank) if parallel.shards_experts else (1, 0)
        local_columns = moe_config.intermediate_size_per_partition
        self._divides_w2_groups = (
            quant_config.group_size != -1 and not quant_config.desc_act and local_columns % quant_config.group_size == 0
        )

    def create_weights(
        self,
        layer: ExpertShard,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = w13_rows(self.moe_config)
        pack = self.quant_config.pack_factor
        for name, size in (
            ("hidden_size", hidden_size),
            ("intermediate size per rank", intermediate_size_per_partition),
        ):
            if size % pack:
                raise ValueError(
                    f"{name} is {size}; GPTQ with {self.quant_config.bits} bits needs a multiple of {pack}"
                )
        all_w2_columns = intermediate_size_per_partition * self._tp_size
        w2_groups = self.quant_config.num_groups(
            intermediate_size_per_partition if self._divides_w2_groups else all_w2_columns
        )
        self._add(layer, "w13", num_experts, hidden_size, rows, self.quant_config.num_groups(hidden_size), params_dtype)
        self._add(layer, "w2", num_experts, intermediate_size_per_partition, hidden_size, w2_groups, params_dtype)
        self.add_biases(layer, num_experts, rows, hidden_size, params_dtype)

    def _add(
        self, layer: ExpertShard, gemm: str, num_experts: int, columns: int, rows: int, groups: int, dtype: torch.dtype
    ) -> None:
        pack = self.quant_config.pack_factor
        first_column = self._tp_rank * columns if gemm == "w2" else 0
        all_columns = columns * self._tp_size if gemm == "w2" else columns
        group_size = all_columns if self.quant_config.group_size == -1 else self.quant_config.group_size
        g_idx = torch.arange(first_column, first_column + columns, dtype=torch.int32) // group_size
        codes = weight_layout(gemm, transposed=True)
        scales = scale_layout(FusedMoeWeightScaleSupported.GROUP, gemm, transposed=True)
        if gemm == "w2" and not self._divides_w2_groups:
            scales = ParamLayout(gemm=gemm)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(num_experts, *shape, dtype=dtype)

        self.add_parameter(layer, f"{gemm}_qweight", empty(columns // pack, rows), codes)
        self.add_parameter(layer, f"{gemm}_qzeros", empty(groups, rows // pack), scales)
        self.add_parameter(layer, f"{gemm}_scales", empty(groups, rows, dtype=dtype), scales)
        self.add_parameter(layer, f"{gemm}_g_idx", g_idx.repeat(num_experts, 1), input_index_layout(gemm))

    def unpack(self, layer: ExpertShard, gemm: str) -> CanonicalWeights:
        qweight, qzeros, scales, g_idx = (
            layer.get_parameter(f"{gemm}_{name}").data for name in ("qweight", "qzeros", "scales", "g_idx")
        )
        if gemm == "w2" and self._divides_w2_groups:
            g_idx = g_idx - self._tp_rank * scales.shape[-2]
        weights = unpack_gptq(qweight, qzeros, scales, g_idx, self.quant_config)
        # What moves with an expert must be the same list on every rank, whatever its experts happen to hold.
        return with_g_idx(weights) if layer.enable_eplb and self.quant_config.desc_act else weights

    def _needs_zero_points(self, layer: ExpertShard, weights: CanonicalWeights) -> bool:
        return super()._needs_zero_points(layer, weights) or (layer.enable_eplb and not self.quant_config.sym)
