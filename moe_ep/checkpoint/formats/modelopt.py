"""NVIDIA Model Optimizer (`quant_method: modelopt`): nvfp4, or fp8 with a scale a tensor.

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

METHOD = "modelopt"
_ALGORITHMS: dict[str, QuantizationConfig] = {
    "NVFP4": MODELOPT_NVFP4,
    "FP8": Float8Config(scale=ScaleShape(Kind.TENSOR)),
}


def modelopt_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The scheme of a checkpoint; CheckpointError for another algorithm or group size."""
    where = "config.json: quantization_config: "
    algorithm = values.get("quant_algo")
    if algorithm not in tuple(_ALGORITHMS):
        raise CheckpointError(where + one_of("quant_algo", algorithm, list(_ALGORITHMS)))
    group_size = values.get("group_size") or NVFP4_GROUP
    if algorithm == "NVFP4" and group_size != NVFP4_GROUP:
        raise CheckpointError(f"{where}group_size is {group_size}; NVFP4 has groups of {NVFP4_GROUP}")
    ignored = values.get("exclude_modules") or values.get("ignore") or ()
    return ModuleSchemes(METHOD, [((EVERY_LINEAR,), _ALGORITHMS[algorithm])], ignored)
