"""compressed-tensors `pack-quantized`: codes of 4 or 8 bits packed along K into int32, low bits first.

With b the bits and g the group size, a linear layer of N outputs and K inputs is stored as

    weight_packed      int32 [N, K b / 32]             code of column k: bits [b * (k % (32 / b)), ...) of its word
    weight_scale       f16, bf16 or f32 [N, K / g]     [N, 1] for a scale a row, [1] for one of all
    weight_zero_point  int32 [ceil(N b / 32), K / g]   asymmetric schemes only; packed along N
    weight_shape       int64 [2]                       N, K
    weight_g_idx       int32 [K]                       the group of every column, where groups are scattered

Gemma 4 was published with fused experts: `gate_up_proj_packed` int32 [E, 2N, K b / 32] and `gate_up_proj_scale`
[E, 2N, K / g].

The value of column k of row n is `scale * (q - z)` with q = code - 2^(b-1), and z stored with the same offset. The
format is that of compressed-tensors (https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized).

Example, 4 bits: the values -7, -6, ... 0 of columns 0..7 are the int32 0x87654321.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
    groups_in_order,
    require_multiple,
)
from moe_ep.checkpoint.formats.packing import pack_words, unpack_words
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

_SYMMETRIC = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
_ASYMMETRIC = {4: scalar_types.uint4, 8: scalar_types.uint8}


@dataclass(frozen=True, kw_only=True)
class PackQuantizedConfig(QuantizationConfig):
    """One scheme of packed integers.

    Attributes:
        bits: 4 or 8.
        symmetric: whether there are no zero points.
        scattered: whether the columns of a group may be scattered ("actorder": "group"); without a weight_g_idx in the
            file they are in order.
    """

    quant_method: ClassVar[str] = "pack-quantized"

    bits: int
    scale: ScaleShape
    symmetric: bool = True
    scattered: bool = False

    @property
    def column_block(self) -> int:
        return self.scale.columns

    @property
    def act_order(self) -> bool:
        return self.scattered

    @property
    def fused_endings(self) -> dict[str, tuple[str, ...]]:
        return {"weight_packed": ("_packed",), "weight_scale": ("_scale",), "bias": ("_bias",)}

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        pack = 32 // self.bits
        require_multiple("in_features", in_features, pack, f"pack-quantized with {self.bits} bits")
        groups = self.scale.shape(out_features, in_features)[-1]
        group_size = self.scale.columns if self.scale.columns > 1 else -1
        int32, in_order = (torch.int32,), partial(groups_in_order, in_features, group_size)
        layouts = {
            "weight_packed": TensorLayout(int32, (out_features, in_features // pack), out_dim=0, in_dim=1),
            "weight_scale": self.scale.layout(FLOATS, out_features, in_features),
            "weight_shape": TensorLayout(
                (torch.int64, torch.int32),
                (2,),
                lambda: torch.tensor([out_features, in_features], device="cpu"),
                Role.CHECKED,
            ),
            "weight_g_idx": TensorLayout(
                int32,
                (in_features,),
                in_order,
                Role.INDEX if self.scattered else Role.CHECKED,
                in_dim=0,
                in_order=in_order,
            ),
            **activation_scales(),
            "bias": bias_layout(out_features),
        }
        if not self.symmetric:
            shape = (-(-out_features // pack), groups)
            layouts["weight_zero_point"] = TensorLayout(int32, shape, role=Role.GROUPS, out_dim=0, in_dim=1)
        return layouts

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        packed = tensors["weight_packed"]
        num_rows, g_idx = packed.shape[-2], tensors.get("weight_g_idx")
        scales = self.scale.per_row(tensors["weight_scale"], num_rows)
        if g_idx is not None and g_idx.numel() and bool((g_idx.min() < 0) | (g_idx.max() >= scales.shape[-1])):
            raise CheckpointError(
                f"weight_g_idx: expected groups 0 to {scales.shape[-1] - 1}, found {int(g_idx.min())} to "
                f"{int(g_idx.max())}"
            )
        zero_points = None
        if not self.symmetric:
            along_rows = unpack_words(tensors["weight_zero_point"].transpose(-1, -2).contiguous(), self.bits)
            zero_points = along_rows.transpose(-1, -2)[..., :num_rows, :].contiguous()
        return CanonicalWeights(
            codes=unpack_words(packed, self.bits),
            scales=scales,
            zero_points=zero_points,
            g_idx=g_idx,
            quant_type_id=(_SYMMETRIC if self.symmetric else _ASYMMETRIC)[self.bits].id,
            group_size=self.scale.group_size,
        )


def pack_quantized(weights: CanonicalWeights, bits: int) -> dict[str, torch.Tensor]:
    """The tensors of one matrix of a symmetric scheme by the last part of their names: the inverse of `unpack`."""
    return {
        "weight_packed": pack_words(weights.codes, bits),
        "weight_scale": weights.scales,
        "weight_shape": torch.tensor(weights.codes.shape),
    }
