"""4-bit floats (e2m1), two per byte, low half first, in groups that share a scale.

    mxfp4  groups of 32 columns, scales e8m0 (powers of two, kept as their bits)
           per expert (compressed-tensors): weight_packed u8 [N, K / 2], weight_scale u8 [N, K / 32]
           per expert (DeepSeek-V4): weight i8 [N, K / 2], scale e8m0 [N, K / 32]
           fused (gpt-oss): ..._blocks u8 [E, rows, K / 32, 16], ..._scales u8 [E, rows, K / 32]
    nvfp4  groups of 16 columns, scales e4m3, and one global f32 scale per matrix
           modelopt:            weight,        weight_scale e4m3 [N, K / 16], weight_scale_2      multiplied by
           fused (modelopt):    ... u8 [E, rows, K / 2], ..._weight_scale [E, rows, K / 16], ..._weight_scale_2
           compressed-tensors:  weight_packed, weight_scale e4m3 [N, K / 16], weight_global_scale divided by

`value = e2m1 * scale` (times the matrix's global scale). The formats are those of the OCP Microscaling Formats
specification 1.0, section 5, and of https://github.com/NVIDIA/Model-Optimizer and compressed-tensors.

Example: the byte 0x2A holds -1 (code 10) in the even column and 1 (code 2) in the odd one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from moe_ep.checkpoint.formats.layout import QuantizationConfig, Role, TensorLayout, require_multiple, unpack_nibbles
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

MXFP4_GROUP = 32
NVFP4_GROUP = 16
_E8M0_NAN = 255


@dataclass(frozen=True, kw_only=True)
class MXFP4Config(QuantizationConfig):
    """mxfp4 with its codes under `weight_name`; fused tensors of gpt-oss are read as `weight` and `weight_scale`."""

    quant_method: ClassVar[str] = "mxfp4"

    weight_name: str = "weight"

    @property
    def column_block(self) -> int:
        return MXFP4_GROUP

    @property
    def fused_endings(self) -> dict[str, tuple[str, ...]] | None:
        is_fused = self.weight_name == "weight"
        return {"weight": ("_blocks",), "weight_scale": ("_scales",), "bias": ("_bias",)} if is_fused else None

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        require_multiple("in_features", in_features, MXFP4_GROUP, "mxfp4")
        octet = torch.uint8
        groups = (out_features, in_features // MXFP4_GROUP)
        return {
            self.weight_name: TensorLayout((octet, torch.int8), (out_features, in_features // 2), out_dim=0, in_dim=1),
            "weight_scale": TensorLayout(
                (octet, torch.float8_e8m0fnu), groups, role=Role.GROUPS, out_dim=0, in_dim=1, other_names=("scale",)
            ),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        scales = tensors["weight_scale"].view(torch.uint8)
        if bool((scales == _E8M0_NAN).any()):
            raise CheckpointError("weight_scale: expected exponents up to 254, found 255, which is NaN")
        return CanonicalWeights(
            codes=unpack_nibbles(tensors[self.weight_name].view(torch.uint8)),
            scales=scales,
            quant_type_id=scalar_types.float4_e2m1f.id,
            group_size=MXFP4_GROUP,
        )


@dataclass(frozen=True, kw_only=True)
class NVFP4Config(QuantizationConfig):
    """nvfp4.

    Attributes:
        global_divides: whether the global scale divides; experts get its reciprocal.
    """

    quant_method: ClassVar[str] = "nvfp4"

    weight_name: str
    global_name: str
    global_divides: bool

    @property
    def column_block(self) -> int:
        return NVFP4_GROUP

    @property
    def fused_endings(self) -> dict[str, tuple[str, ...]] | None:
        if self.weight_name != "weight":
            return None
        of_weight = {name: (f"_{name}",) for name in ("weight_scale", self.global_name, "input_scale", "bias")}
        return {"weight": ("",), **of_weight}

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        require_multiple("in_features", in_features, NVFP4_GROUP, "nvfp4")
        groups = (out_features, in_features // NVFP4_GROUP)
        return {
            self.weight_name: TensorLayout((torch.uint8,), (out_features, in_features // 2), out_dim=0, in_dim=1),
            "weight_scale": TensorLayout((torch.float8_e4m3fn,), groups, role=Role.GROUPS, out_dim=0, in_dim=1),
            self.global_name: TensorLayout((torch.float32,), (1,), role=Role.GROUPS, out_dim=0),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        factor = tensors[self.global_name].squeeze(-1)
        # A matrix of zeros may have a factor of 0, which cannot divide.
        if bool((factor < 0).any()) or (self.global_divides and bool((factor == 0).any())):
            raise CheckpointError(f"{self.global_name}: expected a positive number, found {float(factor.min())}")
        return CanonicalWeights(
            codes=unpack_nibbles(tensors[self.weight_name]),
            scales=tensors["weight_scale"],
            quant_type_id=scalar_types.float4_e2m1f.id,
            group_size=NVFP4_GROUP,
            global_scales=1 / factor if self.global_divides else factor,
        )


MODELOPT_NVFP4 = NVFP4Config(weight_name="weight", global_name="weight_scale_2", global_divides=False)
PACKED_NVFP4 = NVFP4Config(weight_name="weight_packed", global_name="weight_global_scale", global_divides=True)
PACKED_MXFP4 = MXFP4Config(weight_name="weight_packed")
