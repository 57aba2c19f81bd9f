"""W4AFP8 (`quant_method: w4afp8`): experts in 4-bit integers, other linear layers in fp8 with block scales.

    weight            i8 [N, K / 2]       two's complement, two per byte, low half first
    weight_scale_inv  floats [N, K / g]   a multiplier despite its name; g is group_size, by default 128
    input_scale                           not read: rows have scales of their own

DeepSeek and GLM were published in this form, for GPUs that multiply the weights with fp8 activations. The settings are
those of https://github.com/sgl-project/sglang (python/sglang/srt/layers/quantization/w4afp8.py).

Example: the byte 0x2F holds -1 (code 15) in the even column and 2 in the odd one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG
from moe_ep.checkpoint.formats.fp8 import Float8Config
from moe_ep.checkpoint.formats.layout import (
    FLOATS,
    QuantizationConfig,
    Role,
    TensorLayout,
    activation_scales,
    bias_layout,
    require_multiple,
)
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes
from moe_ep.checkpoint.formats.packing import unpack_nibbles
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

METHOD = "w4afp8"
_GROUP = 128
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


@dataclass(frozen=True, kw_only=True)
class W4AFP8Config(QuantizationConfig):
    """The experts' scheme, with one scale per `group_size` columns of a row."""

    quant_method: ClassVar[str] = METHOD

    group_size: int = _GROUP

    @property
    def column_block(self) -> int:
        return self.group_size

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        require_multiple("in_features", in_features, self.group_size, METHOD)
        groups = (out_features, in_features // self.group_size)
        return {
            "weight": TensorLayout((torch.int8, torch.uint8), (out_features, in_features // 2), out_dim=0, in_dim=1),
            "weight_scale_inv": TensorLayout(FLOATS, groups, role=Role.GROUPS, out_dim=0, in_dim=1),
            **activation_scales(),
            "bias": bias_layout(out_features),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        # A flipped sign bit adds 8 to a two's complement half.
        return CanonicalWeights(
            codes=unpack_nibbles(tensors["weight"].view(torch.uint8) ^ 0x88),
            scales=tensors["weight_scale_inv"],
            zero_points=None,
            g_idx=None,
            quant_type_id=scalar_types.uint4b8.id,
            group_size=self.group_size,
        )


def w4afp8_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint; CheckpointError for a group_size that is no positive even number."""
    size = values.get("group_size") or _GROUP
    if not isinstance(size, int) or size < 1 or size % 2:
        raise CheckpointError(f"{QUANT_CONFIG}group_size is {size!r}; it must be even and positive")
    experts = W4AFP8Config(group_size=size, input_dtype=torch.float8_e4m3fn)
    others = Float8Config.from_dict({"weight_block_size": [128, 128]})
    ignored = next(filter(None, map(values.get, _IGNORED)), ())
    return ModuleSchemes(METHOD, [(("experts",), experts), ((EVERY_LINEAR,), others)], ignored)
