"""AMD Quark (`quant_method: quark`): one scheme for all linear layers, and others by name or pattern.

    fp4 in groups of 32, scales e8m0       weight u8 [N, K / 2], weight_scale u8 [N, K / 32]
    fp4 in groups of 16, scales fp8_e4m3   weight u8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_scale_2 f32 []
    fp8_e4m3, of a tensor or row           weight e4m3 [N, K], weight_scale [] or [N]
    fp8_e4m3 in blocks, as they were       weight e4m3 [N, K], weight_scale_inv [ceil(N / bn), ceil(K / bk)]
    int8, of a tensor or row               weight i8 [N, K], weight_scale [] or [N]

Grouped integers and those of 4 bits have several layouts under the same settings, and are not read. Keys and tensors
are those of amd-quark 0.13 (https://quark.docs.amd.com).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, as_object, refuse_rotation, unexpected
from moe_ep.checkpoint.formats.compressed_tensors import IntQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, MXFP4_GROUP, NVFP4_GROUP, MXFP4Config
from moe_ep.checkpoint.formats.fp8 import Float8Config
from moe_ep.checkpoint.formats.layout import QuantizationConfig, ScaleShape
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes, Scheme, by_scheme, if_readable
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

METHOD = "quark"
_BY_TYPE = "layer_type_quant_config"
_PLAIN = ("bfloat16", "float16", "float32")
_SHAPES = {"per_tensor": ScaleShape(Kind.TENSOR), "per_channel": ScaleShape(Kind.CHANNEL)}
# Schemes by the description that `_said` makes.
_SCHEMES: dict[str, QuantizationConfig] = {
    f"fp4 per_group of {MXFP4_GROUP} with scales e8m0": MXFP4Config(),
    f"fp4 per_group of {NVFP4_GROUP} with scales fp8_e4m3 per_tensor": MODELOPT_NVFP4,
    **{f"fp8_e4m3 {qscheme}": Float8Config(scale=shape) for qscheme, shape in _SHAPES.items()},
    **{f"int8 {qscheme}": IntQuantizedConfig(scale=shape) for qscheme, shape in _SHAPES.items()},
}
_BLOCKS = "fp8_e4m3 per_block"
_INPUT_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def quark_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint.

    Raises:
        CheckpointError: an unknown scheme of all layers or none, or rotated activations.
    """
    _check_algorithms(values.get("algo_config"))
    by_name, by_type = (as_object(values.get(key) or {}, key) for key in ("layer_quant_config", _BY_TYPE))
    # Names take precedence over patterns, which are tried in order.
    names: list[tuple[str, Scheme]] = []
    patterns: list[tuple[list[str], Scheme]] = []
    for name, layer in by_name.items():
        scheme = if_readable(partial(_scheme, "layer_quant_config", layer))
        if _is_pattern(name):
            patterns.append(([_as_module(name)], scheme))
        else:
            names.append((name, scheme))
    of_all = f"{_BY_TYPE}: {EVERY_LINEAR}" if EVERY_LINEAR in by_type else "global_quant_config"
    every = if_readable(partial(_scheme, of_all, by_type.get(EVERY_LINEAR, values.get("global_quant_config"))))
    excluded = values.get("exclude") or ()
    if isinstance(excluded, list):
        excluded = [_as_module(name) for name in excluded]
    return ModuleSchemes(METHOD, [*by_scheme(names), *patterns, ([EVERY_LINEAR], every)], excluded)


def _check_algorithms(algorithms: Any) -> None:
    """Refuses rotations of activations: R4, and R1 if it is online. R1 and R2 can be part of the weights."""
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, Mapping):
            refuse_rotation(algorithm, "r4", "online_r1_rotation", where="algo_config: ")


def _is_pattern(name: str) -> bool:
    # Regular expressions are not Quark's, but serving engines accept them.
    return not name.startswith("re:") and any(letter in name for letter in "*?[")


def _as_module(name: Any) -> Any:
    """A name as `ModulePatterns` takes it."""
    return f"re:{fnmatch.translate(name)}" if isinstance(name, str) and _is_pattern(name) else name


def _scheme(key: str, layer: Any) -> QuantizationConfig | None:
    layer = as_object(layer, key)
    weight = layer.get("weight")
    if weight is None:
        return None
    stages = weight if isinstance(weight, list) else [weight]
    if not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise unexpected(f"quantization_config: {key}: weight", "an object or a list of them", weight)
    first, *others = stages
    # A second stage quantizes the scales of the first, or its numbers.
    how = ("with scales" if stage.get("is_scale_quant") else "then" for stage in others)
    said = " ".join([_said(first), *(f"{word} {_said(stage)}" for word, stage in zip(how, others, strict=True))])
    if first.get("dtype") in _PLAIN:
        return None
    rows = layer.get("input_tensors")
    input_dtype = _INPUT_DTYPES.get(str(rows.get("dtype"))) if isinstance(rows, Mapping) else None
    if said == _BLOCKS:
        shape = ScaleShape.of_blocks(f"{QUANT_CONFIG}{key}: block_size", first.get("block_size"))
        return Float8Config(scale=shape, input_dtype=input_dtype)
    if said not in _SCHEMES:
        raise CheckpointError(f"{QUANT_CONFIG}{key}: {one_of('weight', said, [*_SCHEMES, _BLOCKS])}")
    return replace(_SCHEMES[said], input_dtype=input_dtype)


def _said(stage: Mapping[str, Any]) -> str:
    """One stage of a quantization in words."""
    words = [str(stage.get("dtype")), str(stage.get("qscheme"))]
    if stage.get("qscheme") == "per_group":
        words.append(f"of {stage.get('group_size')}")
    if stage.get("scale_format") in ("e8m0", "e5m3"):
        words.append(f"with scales {stage['scale_format']}")
    if stage.get("symmetric") is False:
        words.append("with zero points")
    return " ".join(words)
