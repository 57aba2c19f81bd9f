"""Weights that are quantized in the checkpoint: one method for all formats, driven by the layouts of a format."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.checkpoint.formats.layout import FLOATS, QuantizationConfig, Role, TensorLayout
from moe_ep.checkpoint.formats.modules import LayerQuantization
from moe_ep.config import FusedMoEConfig
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import w13_rows
from moe_ep.layer.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.layer.weight_loading import ParamLayout
from moe_ep.quantization.canonical_weights import CanonicalWeights, concatenate_rows, with_g_idx, with_zero_points


class CheckpointFusedMoEMethod(CanonicalFusedMoEMethod):
    """A method whose parameters have the names, dtypes and shapes of the checkpoint, for all local experts.

    A linear layer's tensor `weight_packed` becomes `w13_weight_packed` and `w2_weight_packed`, `[El, ...]`; w13 holds
    the tensors of gate and up side by side, along the output dimension. They are unpacked separately and their rows
    joined afterwards, so a block of scales never spans both.

    Tensor parallelism divides the groups of w2 if a rank's part of N consists of whole groups in order. Otherwise
    (act-order, or a group that straddles two ranks) every rank keeps the scales of all groups, and g_idx says which
    it uses.

    Raises:
        ValueError: sizes that the format, or its division over ranks, does not support.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: LayerQuantization) -> None:
        super().__init__(moe_config, quant_config)
        parallel = moe_config.moe_parallel_config
        self._tp_size, self._tp_rank = (parallel.tp_size, parallel.tp_rank) if parallel.shards_experts else (1, 0)
        self._halves = 2 if w13_rows(moe_config) > moe_config.intermediate_size_per_partition else 1
        w13, w2 = (quant_config.of_gemm(gemm) for gemm in ("w13", "w2"))
        local = moe_config.intermediate_size_per_partition
        self._divides_groups = self._tp_size == 1 or (not w2.act_order and local % w2.column_block == 0)
        if self._tp_size > 1 and local % w13.row_block:
            raise ValueError(
                f"intermediate size per rank is {local}; dividing experts over ranks needs a multiple of "
                f"{w13.row_block}, the rows of a block of scales; use expert parallelism"
            )

    def uses_weight_scale_2_pattern(self) -> bool:
        K, N = self.moe_config.hidden_dim, self.moe_config.intermediate_size_per_partition
        return "weight_scale_2" in self.quant_config.of_gemm("w2").tensors(K, N * self._tp_size)

    def checkpoint_input_dtype(self) -> torch.dtype | None:
        w13, w2 = (self.quant_config.of_gemm(gemm).input_dtype for gemm in ("w13", "w2"))
        return w13 if w13 == w2 else None

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        N, K = intermediate_size_per_partition, hidden_size
        for gemm, whole_size, size in (
            ("w13", (N * self._tp_size, K), (N, K)),
            ("w2", (K, N * self._tp_size), (K, N)),
        ):
            scheme = self.quant_config.of_gemm(gemm)
            whole = scheme.tensors(*whole_size)
            for name, layout in scheme.tensors(*size).items():
                if layout.role in (Role.CODES, Role.GROUPS, Role.INDEX):
                    self._add(layer, gemm, name, whole[name], layout, num_experts, params_dtype)
        self.add_biases(layer, num_experts, w13_rows(self.moe_config), K, params_dtype)

    def _add(
        self,
        layer: MoELayer,
        gemm: str,
        name: str,
        whole: TensorLayout,
        local: TensorLayout,
        num_experts: int,
        params_dtype: torch.dtype,
    ) -> None:
        tp_dim = local.out_dim if gemm == "w13" else local.in_dim
        if local.role is Role.GROUPS and gemm == "w2" and not self._divides_groups:
            tp_dim, local = None, whole
        if whole.shape == local.shape:
            tp_dim = None
        halves_dim = local.out_dim if gemm == "w13" else None
        shape = list(local.shape)
        if halves_dim is not None:
            shape[halves_dim] *= self._halves
        dtype = local.held or (params_dtype if local.dtypes[: len(FLOATS)] == FLOATS else local.dtypes[0])
        data = torch.empty(num_experts, *shape, dtype=dtype)
        if local.default is not None:
            if data.is_meta:
                raise ValueError(
                    f"{layer.layer_name} is made on the meta device, which cannot hold what {gemm}_{name} is where a "
                    f"checkpoint leaves it out; make the layer on the device that it is to run on"
                )
            # If the checkpoint lacks this tensor, the value is this rank's part of the default.
            default, size = whole.default(), local.shape[0]  # type: ignore[misc]
            data.copy_(default.narrow(0, self._tp_rank * size, size) if tp_dim is not None else default)
        optional = local.default is not None
        param_layout = ParamLayout(gemm=gemm, halves_dim=halves_dim, tp_dim=tp_dim, optional=optional)
        self.add_parameter(layer, f"{gemm}_{name}", data, param_layout)

    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        scheme = self.quant_config.of_gemm(gemm)
        layouts = scheme.tensors(self.moe_config.intermediate_size_per_partition, self.moe_config.hidden_dim)
        held = {
            name: layer.get_parameter(f"{gemm}_{name}").data
            for name, layout in layouts.items()
            if hasattr(layer, f"{gemm}_{name}") and layout.role is not Role.BIAS
        }
        if gemm == "w2":
            weights = scheme.unpack(self._with_own_groups(scheme, held, layouts))
            if not self._divides_groups and weights.group_size != -1:
                weights = with_g_idx(weights, self._tp_rank * weights.codes.shape[-1])
        elif self._halves == 1:
            weights = scheme.unpack(held)
        else:
            halves = {
                name: [tensor] * 2 if layouts[name].out_dim is None else tensor.chunk(2, 1 + layouts[name].out_dim)  # type: ignore[operator]
                for name, tensor in held.items()
            }
            gate, up = (scheme.unpack({name: pair[i] for name, pair in halves.items()}) for i in range(2))
            weights = concatenate_rows(gate, up)
        # The list of tensors that move with an expert must be the same on every rank, whatever its experts contain.
        if layer.enable_eplb and scheme.act_order:
            weights = with_g_idx(weights)
        if layer.enable_eplb and scheme.may_have_zero_points:
            weights = with_zero_points(weights)
        return weights

    def _with_own_groups(
        self, scheme: QuantizationConfig, held: dict[str, torch.Tensor], layouts: dict[str, TensorLayout]
    ) -> dict[str, torch.Tensor]:
        """Makes group indices count from the first group of this rank, if it holds only a part of the groups."""
        if self._tp_size == 1 or not self._divides_groups or scheme.column_block == 1:
            return held
        first_group = self._tp_rank * (self.moe_config.intermediate_size_per_partition // scheme.column_block)
        return {
            name: tensor - first_group if layouts[name].role is Role.INDEX else tensor for name, tensor in held.items()
        }
