"""NVIDIA Model Optimizer (`quant_method: modelopt`): nvfp4, mxfp4, fp8, mxfp8, int8, or a list of modules of several.

fp8 has a scale per tensor, row or block of 128 x 128, and int8 a scale per row.

Settings are in config.json's quantization_config, or in a hf_quant_config.json beside it, which the reader merges
(https://github.com/NVIDIA/Model-Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, as_object, unexpected
from moe_ep.checkpoint.formats.compressed_tensors import IntQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, MXFP4Config
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.layout import (
    FLOATS,
    QuantizationConfig,
    Role,
    ScaleShape,
    TensorLayout,
    require_multiple,
    unpack_nibbles,
)
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes, Scheme, if_readable, ignored_modules
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

# ==== W4AFP8 ====
#
# W4AFP8 (`quant_method: w4afp8`): experts in 4-bit integers, other linear layers in fp8 with block scales.
#
#     weight            i8 [N, K / 2]       two's complement, two per byte, low half first
#     weight_scale_inv  floats [N, K / g]   a multiplier despite its name; g is group_size, by default 128
#     input_scale                           not read: rows have scales of their own
#
# DeepSeek and GLM were published in this form, for GPUs that multiply the weights with fp8 activations. The settings
# are those of https://github.com/sgl-project/sglang (python/sglang/srt/layers/quantization/w4afp8.py).
#
# Example: the byte 0x2F holds -1 (code 15) in the even column and 2 in the odd one.

W4AFP8 = "w4afp8"
_GROUP = 128


@dataclass(frozen=True, kw_only=True)
class W4AFP8Config(QuantizationConfig):
    """The experts' scheme, with one scale per `group_size` columns of a row."""

    quant_method: ClassVar[str] = W4AFP8

    group_size: int = _GROUP

    @property
    def column_block(self) -> int:
        return self.group_size

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        require_multiple("in_features", in_features, self.group_size, W4AFP8)
        groups = (out_features, in_features // self.group_size)
        return {
            "weight": TensorLayout((torch.int8, torch.uint8), (out_features, in_features // 2), out_dim=0, in_dim=1),
            "weight_scale_inv": TensorLayout(FLOATS, groups, role=Role.GROUPS, out_dim=0, in_dim=1),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        # A flipped sign bit adds 8 to a two's complement half.
        return CanonicalWeights(
            codes=unpack_nibbles(tensors["weight"].view(torch.uint8) ^ 0x88),
            scales=tensors["weight_scale_inv"],
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
    return ModuleSchemes(W4AFP8, [(("experts",), experts), ((EVERY_LINEAR,), others)], ignored_modules(values))


# The method, and the names of its algorithms in serving engines.
METHODS = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed")
_ALGORITHMS: dict[str, QuantizationConfig] = {
    "NVFP4": MODELOPT_NVFP4,
    # The same weights, for activations that are not quantized.
    "W4A16_NVFP4": MODELOPT_NVFP4,
    "FP8": Float8Config(scale=ScaleShape(Kind.TENSOR), input_dtype=torch.float8_e4m3fn),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8Config(scale=ScaleShape(Kind.CHANNEL), input_dtype=torch.float8_e4m3fn),
    "MXFP8": MXFP8,
    "MXFP4": MXFP4Config(),
    "W4A8_MXFP4_FP8": MXFP4Config(input_dtype=torch.float8_e4m3fn),
    "W8A16": IntQuantizedConfig(scale=ScaleShape(Kind.CHANNEL)),
    # Weights only; activations are not quantized.
    "FP8_PB_WO": Float8Config(scale=ScaleShape(Kind.BLOCK, rows=128, columns=128)),
}
_MIXED = "MIXED_PRECISION"


def modelopt_schemes(values: Mapping[str, Any]) -> ModuleSchemes | None:
    """The schemes of a checkpoint, None where only its cache is quantized; CheckpointError for another algorithm or
    group size."""
    if values.get("quant_algo") is None and (values.get("kv_cache_quant_algo") or values.get("kv_cache_scheme")):
        return None
    ignored = ignored_modules(values)
    if values.get("quant_algo") == _MIXED and values.get("quantized_layers") is None:
        # As in SGLang. The first such checkpoints had the lists in a separate file.
        return w4afp8_schemes(values)
    if values.get("quant_algo") == _MIXED:
        return ModuleSchemes(METHODS[0], _listed_schemes(values.get("quantized_layers")), ignored)
    scheme = scheme_of(values, known=[*_ALGORITHMS, _MIXED])
    return ModuleSchemes(METHODS[0], [((EVERY_LINEAR,), scheme)], ignored)


def _listed_schemes(layers: Any) -> list[tuple[list[str], Scheme]]:
    """The schemes of all listed modules; the others are plain."""
    if not as_object(layers, "quantized_layers"):
        raise unexpected("quantization_config: quantized_layers", "an object of modules", layers)
    # Every matrix of every expert may be listed, with few different settings.
    schemes: dict[str, tuple[list[str], Scheme]] = {}
    for name, settings in layers.items():
        where = f"{QUANT_CONFIG}quantized_layers: {name}: "
        settings = as_object(settings, f"quantized_layers: {name}")
        key = repr(sorted(settings.items(), key=str))
        if key not in schemes:
            schemes[key] = [], if_readable(partial(scheme_of, settings, where))
        schemes[key][0].append(name)
    return list(schemes.values())


def scheme_of(
    values: Mapping[str, Any],
    where: str = QUANT_CONFIG,
    known: Sequence[str] = tuple(_ALGORITHMS),
    key: str = "quant_algo",
) -> QuantizationConfig:
    """The scheme of the algorithm under that key; CheckpointError for an unknown one, or another group size."""
    # Some are written in lower case.
    algorithm = str(values.get(key)).upper()
    if algorithm not in tuple(_ALGORITHMS):
        raise CheckpointError(where + one_of(key, values.get(key), known))
    scheme = _ALGORITHMS[algorithm]
    expected = scheme.column_block
    if expected > 1 and (found := values.get("group_size") or expected) != expected:
        raise CheckpointError(f"{where}group_size is {found}; {algorithm} has groups of {expected}")
    return scheme
