"""NVIDIA Model Optimizer (`quant_method: modelopt`): nvfp4, mxfp4, fp8, mxfp8, int8, or a list of modules of several.

fp8 has a scale per tensor, row or block of 128 x 128, and int8 a scale per row.

Settings are in config.json's quantization_config, or in a hf_quant_config.json beside it, which the reader merges (https://github.com/NVIDIA/Model-Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, unexpected
from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, MXFP4Config
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.int_quantized import IntQuantizedConfig
from moe_ep.checkpoint.formats.layout import QuantizationConfig, ScaleShape
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes, Scheme, if_readable
from moe_ep.checkpoint.formats.w4afp8 import w4afp8_schemes
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

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
    ignored = values.get("exclude_modules") or values.get("ignore") or ()
    if values.get("quant_algo") == _MIXED and values.get("quantized_layers") is None:
        # As in SGLang. The first such checkpoints had the lists in a separate file.
        return w4afp8_schemes(values)
    if values.get("quant_algo") == _MIXED:
        return ModuleSchemes(METHODS[0], _listed_schemes(values.get("quantized_layers")), ignored)
    scheme = scheme_of(values, known=[*_ALGORITHMS, _MIXED])
    return ModuleSchemes(METHODS[0], [((EVERY_LINEAR,), scheme)], ignored)


def _listed_schemes(layers: Any) -> list[tuple[list[str], Scheme]]:
    """The schemes of all listed modules; the others are plain."""
    if not isinstance(layers, Mapping) or not layers:
        raise unexpected("quantization_config: quantized_layers", "an object of modules", layers)
    # Every matrix of every expert may be listed, with few different settings.
    schemes: dict[str, tuple[list[str], Scheme]] = {}
    for name, settings in layers.items():
        where = f"{QUANT_CONFIG}quantized_layers: {name}: "
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{where}expected an object of settings, found {settings!r}")
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
