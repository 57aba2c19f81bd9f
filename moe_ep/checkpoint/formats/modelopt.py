"""NVIDIA Model Optimizer (`quant_method: modelopt`): nvfp4, fp8 with a scale a tensor, or a list of modules of both.

Its settings stand in config.json's quantization_config, or in a hf_quant_config.json beside it, whose `quantization`
object the reader puts there (https://github.com/NVIDIA/Model-Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, NVFP4_GROUP
from moe_ep.checkpoint.formats.fp8 import Float8Config
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes
from moe_ep.checkpoint.formats.scales import ScaleShape
from moe_ep.errors import CheckpointError, one_of
from moe_ep.weight_loading import FusedMoeWeightScaleSupported as Kind

# The method, and what it is called where serving engines tell its algorithms apart.
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
_ALGORITHMS: dict[str, QuantizationConfig] = {
    "NVFP4": MODELOPT_NVFP4,
    # The same weights, made for activations that are not quantized.
    "W4A16_NVFP4": MODELOPT_NVFP4,
    "FP8": Float8Config(scale=ScaleShape(Kind.TENSOR)),
}
_MIXED = "MIXED_PRECISION"
_WHERE = "config.json: quantization_config: "


def modelopt_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint; CheckpointError for another algorithm or group size."""
    ignored = values.get("exclude_modules") or values.get("ignore") or ()
    if values.get("quant_algo") == _MIXED:
        return ModuleSchemes(METHODS[0], _listed_schemes(values.get("quantized_layers")), ignored)
    return ModuleSchemes(METHODS[0], [((EVERY_LINEAR,), _scheme(values, _WHERE, [*_ALGORITHMS, _MIXED]))], ignored)


def _listed_schemes(layers: Any) -> list[tuple[list[str], QuantizationConfig]]:
    """Of every module that is listed; the others are plain."""
    if not isinstance(layers, Mapping) or not layers:
        raise CheckpointError(f"{_WHERE}quantized_layers: expected an object of modules, found {layers!r}")
    names: dict[QuantizationConfig, list[str]] = {}
    for name, settings in layers.items():
        where = f"{_WHERE}quantized_layers: {name}: "
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{where}expected an object of settings, found {settings!r}")
        names.setdefault(_scheme(settings, where, list(_ALGORITHMS)), []).append(name)
    return [(modules, scheme) for scheme, modules in names.items()]


def _scheme(values: Mapping[str, Any], where: str, known: list[str]) -> QuantizationConfig:
    algorithm = values.get("quant_algo")
    if algorithm not in tuple(_ALGORITHMS):
        raise CheckpointError(where + one_of("quant_algo", algorithm, known))
    scheme, group_size = _ALGORITHMS[algorithm], values.get("group_size") or NVFP4_GROUP
    if scheme is MODELOPT_NVFP4 and group_size != NVFP4_GROUP:
        raise CheckpointError(f"{where}group_size is {group_size}; NVFP4 has groups of {NVFP4_GROUP}")
    return scheme
