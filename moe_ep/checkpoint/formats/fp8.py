"""8-bit floats (e4m3) with a scale per block (DeepSeek), tensor or output row.

    weight            e4m3 [N, K]
    weight_scale_inv  f32 or e8m0 [ceil(N / bn), ceil(K / bk)]   with weight_block_size [bn, bk]; or
    weight_scale      [1] or [N, 1], f32 or the model's dtype; blocks and groups in compressed-tensors

mxfp8 has e8m0 scales, also stored as their bits (u8), for groups of 32 columns: blocks of [1, 32] to transformers.

transformers also names the scale of a whole tensor weight_scale_inv, and DeepSeek-V4 names any scale `scale`, so all
names are accepted for all kinds.
Fused experts: Qwen3-VL has `gate_up_proj` e4m3 [E, K, 2N] with `gate_up_proj_scale_inv` [E, K / bk, 2N / bn], Mistral
Small 4 one number per expert there. Granite by llm-compressor has `input_linear.weight` e4m3 [E, 2N, K] with
`input_linear.weight_scale` [E, 2N, 1], and Llama 4 by Model Optimizer one number for all experts,
`gate_up_proj_weight_scale`.

All scales multiply, whatever their name; only those of GPTQModel divide (`weight_scale_semantics: inverse`, in
https://github.com/ModelCloud/GPTQModel). A block at an edge may be smaller; gate and up have separate blocks, so scales
are expanded to rows before gate and up are concatenated. The formats are those of
https://huggingface.co/deepseek-ai/DeepSeek-V3 (inference/fp8_cast_bf16.py) and compressed-tensors' float-quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG
from moe_ep.checkpoint.formats.layout import FLOATS, ScaledConfig, ScaleShape, TensorLayout
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

MXFP8_GROUP = 32
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale")


def input_dtype_of_scheme(values: Mapping[str, Any]) -> torch.dtype | None:
    """e4m3 where activation_scheme says that activations are quantized too, as they come or with a scale on disk."""
    return torch.float8_e4m3fn if values.get("activation_scheme") in ("dynamic", "static") else None


@dataclass(frozen=True, kw_only=True)
class Float8Config(ScaledConfig):
    """One scheme of e4m3 weights.

    Attributes:
        scale_name: weight_scale or weight_scale_inv, the suffix of the layer's parameters.
        divides: whether scales divide; experts get their reciprocals.
    """

    quant_method: ClassVar[str] = "fp8"

    scale_name: str = "weight_scale"
    divides: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Float8Config:
        """`quantization_config` of `quant_method: fp8`.

        Raises:
            CheckpointError: another 8-bit float, an invalid weight_block_size, or another kind of scales.
        """
        kind = str(values.get("fmt") or "e4m3").lower()
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(QUANT_CONFIG + one_of("fmt", kind, ["e4m3"]))
        # Only GPTQModel writes both keys.
        semantics, of_each = values.get("weight_scale_semantics"), values.get("weight_scale_method")
        if semantics not in (None, "inverse"):
            raise CheckpointError(QUANT_CONFIG + one_of("weight_scale_semantics", semantics, ["inverse"]))
        if of_each not in (None, "block", "row", "tensor"):
            raise CheckpointError(QUANT_CONFIG + one_of("weight_scale_method", of_each, ["block", "row", "tensor"]))
        form: dict[str, Any] = {
            "scale_name": "weight_scale_inv",
            "divides": semantics == "inverse",
            "input_dtype": input_dtype_of_scheme(values),
        }
        block = values.get("weight_block_size")
        if block is None:
            return cls(scale=ScaleShape(Kind.CHANNEL if of_each == "row" else Kind.TENSOR), **form)
        return cls(scale=ScaleShape.of_blocks(f"{QUANT_CONFIG}weight_block_size", block), **form)

    @property
    def fused_endings(self) -> dict[str, tuple[str, ...]]:
        return {
            "weight": ("",),
            self.scale_name: tuple(dict.fromkeys((self.scale_name.removeprefix("weight"), "_weight_scale", "_scale"))),
            "bias": ("_bias",),
            "activation_scale": ("_activation_scale", "_input_scale"),
        }

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        # Kept in f32 as on disk: f16 would lose bits of small scales.
        dtypes = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
        scale = self.scale.layout(dtypes, out_features, in_features, held=torch.float32)
        other_names = tuple(name for name in _SCALE_NAMES if name != self.scale_name)
        return {
            "weight": TensorLayout((torch.float8_e4m3fn,), (out_features, in_features), out_dim=0, in_dim=1),
            self.scale_name: replace(scale, other_names=other_names),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        weight, scales = tensors["weight"], tensors[self.scale_name]
        if self.divides and bool((scales <= 0).any()):
            raise CheckpointError(f"{self.scale_name}: expected positive numbers, found {float(scales.min())}")
        return CanonicalWeights(
            codes=weight.view(torch.uint8),
            scales=self.scale.per_row(1 / scales if self.divides else scales, weight.shape[-2]),
            quant_type_id=scalar_types.float8_e4m3fn.id,
            group_size=self.scale.group_size,
        )


# Made for activations in e4m3 with scales of 32 columns.
MXFP8 = Float8Config(scale=ScaleShape(Kind.GROUP, columns=MXFP8_GROUP), input_dtype=torch.float8_e4m3fn)
