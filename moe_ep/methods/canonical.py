"""Integer weights in the canonical form: what GPTQ and weights quantized on load become before experts run them.

A layer holds the fields of `CanonicalWeights` `[El, ...]` of each GEMM as buffers `w13_canonical_codes`,
`w13_canonical_scales` and so on; a field that is None has no buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_ep.checkpoint.formats.canonical import CanonicalWeights
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.methods.base import FusedMoEMethodBase
from moe_ep.scalar_type import ScalarType, scalar_types

if TYPE_CHECKING:
    from moe_ep.expert_shard import ExpertShard

_TENSORS = ("codes", "scales", "zero_points", "g_idx")
_WITH_ZERO_POINTS = {scalar_types.uint4b8: scalar_types.uint4, scalar_types.uint8b128: scalar_types.uint8}


class CanonicalFusedMoEMethod(FusedMoEMethodBase):
    """Base of methods whose weights end as `CanonicalWeights`; a subclass creates parameters and unpacks them."""

    _quant_type_id: int | None = None
    _group_size: int | None = None

    def unpack(self, layer: ExpertShard, gemm: str) -> CanonicalWeights:
        """The loaded parameters of "w13" or "w2", with the leading dimension El."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: ExpertShard) -> None:
        """Unpacks both GEMMs, agrees on one number type, and frees the loaded parameters."""
        weights = {gemm: self.unpack(layer, gemm) for gemm in ("w13", "w2")}
        if any(self._needs_zero_points(layer, weight) for weight in weights.values()):
            weights = {gemm: with_zero_points(weight) for gemm, weight in weights.items()}
        for name in [name for name, _ in layer.named_parameters(recurse=False) if not name.endswith("_bias")]:
            delattr(layer, name)
        for gemm, weight in weights.items():
            for field in _TENSORS:
                tensor = getattr(weight, field)
                if tensor is not None:
                    layer.register_buffer(f"{gemm}_canonical_{field}", tensor)
        self._quant_type_id = weights["w13"].quant_type_id
        self._group_size = weights["w13"].group_size
        layer.loader.close()

    def _needs_zero_points(self, layer: ExpertShard, weights: CanonicalWeights) -> bool:
        """A layer has one number type: zero points in one GEMM mean zero points in both."""
        return weights.zero_points is not None

    def gemm_weights(self, layer: ExpertShard) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.get_buffer("w13_canonical_codes"), layer.get_buffer("w2_canonical_codes")

    def get_fused_moe_quant_config(self, layer: ExpertShard) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(
            quant_type_id=self._quant_type_id,
            group_size=self._group_size,
            w1_scale=_held(layer, "w13", "scales"),
            w2_scale=_held(layer, "w2", "scales"),
            w1_zp=_held(layer, "w13", "zero_points"),
            w2_zp=_held(layer, "w2", "zero_points"),
            w1_bias=self.bias(layer, "w13"),
            w2_bias=self.bias(layer, "w2"),
        )

    def expert_kwargs(self, layer: ExpertShard) -> dict[str, Any]:
        return {f"{gemm}_g_idx": _held(layer, gemm, "g_idx") for gemm in ("w13", "w2")}

    def weight_tensors(self, layer: ExpertShard) -> list[torch.Tensor]:
        held = [_held(layer, gemm, field) for gemm in ("w13", "w2") for field in _TENSORS]
        return [tensor for tensor in held if tensor is not None]


def _held(layer: ExpertShard, gemm: str, field: str) -> torch.Tensor | None:
    return dict(layer.named_buffers(recurse=False)).get(f"{gemm}_canonical_{field}")


def with_zero_points(weights: CanonicalWeights) -> CanonicalWeights:
    """The same values with the type's bias written out as zero points: uint4b8 becomes uint4, uint8b128 uint8."""
    if weights.zero_points is not None:
        return weights
    biased = ScalarType.from_id(weights.quant_type_id)
    zero_points = torch.full_like(weights.scales, biased.bias, dtype=torch.uint8)
    return weights._replace(zero_points=zero_points, quant_type_id=_WITH_ZERO_POINTS[biased].id)


def with_g_idx(weights: CanonicalWeights) -> CanonicalWeights:
    """The same weights with the group of every column written out."""
    if weights.g_idx is not None:
        return weights
    num_columns = weights.codes.shape[-1]
    group_size = num_columns if weights.group_size == -1 else weights.group_size
    groups = torch.arange(num_columns, dtype=torch.int32, device=weights.codes.device) // group_size
    return weights._replace(g_idx=groups.expand(*weights.codes.shape[:-2], -1).contiguous())
