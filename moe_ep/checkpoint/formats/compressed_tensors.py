"""compressed-tensors (`quant_method: compressed-tensors`): config groups, each a scheme for the modules it names.

A group's `format` gives the layout of its weights, by default the model's. A model of `mixed-precision` has groups of
several formats. The keys are those of https://github.com/vllm-project/compressed-tensors
(src/compressed_tensors/quantization/quant_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, unexpected
from moe_ep.checkpoint.formats.fp4 import PACKED_MXFP4, PACKED_NVFP4
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.int_quantized import IntQuantizedConfig
from moe_ep.checkpoint.formats.layout import QuantizationConfig, ScaleShape
from moe_ep.checkpoint.formats.modules import ModuleSchemes, Scheme, if_readable
from moe_ep.checkpoint.formats.pack_quantized import PackQuantizedConfig
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

METHOD = "compressed-tensors"
# Formats without further settings: the scheme and the bits of its codes.
_FIXED: dict[str, tuple[QuantizationConfig, int]] = {
    "mxfp4-pack-quantized": (PACKED_MXFP4, 4),
    "mxfp8-quantized": (MXFP8, 8),
    "nvfp4-pack-quantized": (PACKED_NVFP4, 4),
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *_FIXED)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# Values of actorder, as text, that scatter the columns of a group.
_SCATTERED = ("group", "dynamic", "true")
_INPUT_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}


def compressed_tensors_schemes(values: Mapping[str, Any]) -> ModuleSchemes | None:
    """The schemes of a checkpoint; None where only activations or cached keys are quantized.

    Raises:
        CheckpointError: no group in a format and with a strategy and bits that are known, sparse weights, or no groups.
    """
    sparsity = values.get("sparsity_config") or {}
    sparsity = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparsity != "dense":
        raise CheckpointError(f"{QUANT_CONFIG}sparsity_config: {one_of('format', sparsity, ['dense'])}")
    _check_transforms(values.get("transform_config"))
    groups = values.get("config_groups")
    if not groups and values.get("kv_cache_scheme"):
        return None
    if not isinstance(groups, Mapping) or not groups:
        raise unexpected("quantization_config", "config_groups with a scheme in it", groups)
    names: list[tuple[list[str], Scheme]] = []
    expressions: list[tuple[list[str], Scheme]] = []
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
            raise unexpected(f"quantization_config: {name}", "targets, a list of modules", targets)
        scheme = if_readable(partial(_of_group, name, group, values.get("format")))
        names.append(([target for target in targets if not target.startswith("re:")], scheme))
        expressions += [([target], scheme) for target in targets if target.startswith("re:")]
    # Names take precedence over expressions, which are tried in alphabetical order, as in the library's match_targets.
    expressions.sort(key=lambda entry: entry[0])
    schemes = names + expressions
    if all(scheme is None for _, scheme in schemes):
        return None
    return ModuleSchemes(METHOD, schemes, values.get("ignore") or ())


def _of_group(name: str, group: Mapping[str, Any], form: Any) -> QuantizationConfig | None:
    # A group may be for activations alone, such as queries and keys.
    if "weights" in group and group["weights"] is None:
        return None
    try:
        scheme = _scheme(group, str(group.get("format") or form or ""))
    except CheckpointError as error:
        raise CheckpointError(f"{QUANT_CONFIG}{name}: {error}") from None
    return replace(scheme, input_dtype=_input_dtype(group.get("input_activations")))


def _input_dtype(activations: Any) -> torch.dtype | None:
    """The 8-bit dtype that input_activations quantize activations to; None for any other."""
    if not isinstance(activations, Mapping) or activations.get("num_bits") != 8:
        return None
    return _INPUT_DTYPES.get(str(activations.get("type", "int")).lower())


def _check_transforms(transforms: Any) -> None:
    """Refuses transforms of activations; those of weights are part of the weights."""
    if not transforms:
        return
    try:
        groups = transforms["config_groups"].values()
        locations = [str(part["location"]) for group in groups for part in group["apply"]]
    except (AttributeError, KeyError, TypeError):
        raise unexpected(
            "quantization_config: transform_config", "config_groups, each with apply", transforms
        ) from None
    of_activations = [location for location in locations if not location.startswith("weight_")]
    if of_activations:
        raise unexpected(
            "quantization_config: transform_config",
            "transforms of weights alone",
            of_activations[0],
            ", which is not computed; quantize without it",
        )


def _scheme(group: Mapping[str, Any], form: str) -> QuantizationConfig:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"expected weights, found {weights!r}")
    lower = {key: weights[key].lower() for key in ("type", "strategy") if isinstance(weights.get(key), str)}
    weights = {**weights, **lower}
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if form == "naive-quantized":
        form = f"{kind}-quantized"
    if form not in FORMATS:
        raise CheckpointError(one_of("format", form, FORMATS))
    if form in _FIXED:
        scheme, num_bits = _FIXED[form]
        _require(weights, group_size=scheme.column_block, num_bits=num_bits)
        return scheme
    symmetric = bool(weights.get("symmetric", True))
    scale = _scale_shape(weights)
    if form == "pack-quantized":
        if bits not in (4, 8) or kind != "int":
            raise CheckpointError(f"weights of {bits} bits ({kind}); pack-quantized ones must be int of 4 or 8 bits")
        scattered = str(weights.get("actorder")).lower() in _SCATTERED
        return PackQuantizedConfig(bits=bits, scale=scale, symmetric=symmetric, scattered=scattered)
    _require(weights, symmetric=True, type=form.removesuffix("-quantized"))
    if form == "int-quantized" and bits == 4:
        # One byte per code, as 8-bit ones.
        return IntQuantizedConfig(scale=scale)
    _require(weights, num_bits=8)
    return IntQuantizedConfig(scale=scale) if form == "int-quantized" else Float8Config(scale=scale)


def _require(weights: Mapping[str, Any], **expected: Any) -> None:
    for key, value in expected.items():
        found = weights.get(key, value)
        if found != value:
            raise CheckpointError(f"{key} of the weights is {found!r}; this format is read where it is {value!r}")


def _scale_shape(weights: Mapping[str, Any]) -> ScaleShape:
    group_size, block = weights.get("group_size"), weights.get("block_structure")
    grouped = isinstance(group_size, int) and group_size > 0
    strategy = weights.get("strategy") or ("group" if grouped else "channel" if group_size == -1 else "tensor")
    if strategy not in STRATEGIES:
        raise CheckpointError(one_of("strategy", strategy, STRATEGIES))
    if strategy in ("tensor", "channel"):
        return ScaleShape(Kind(strategy))
    if strategy == "block":
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block, re.ASCII):  # as it was written first: 128x128
            block = [int(size) for size in block.split("x")]
        return ScaleShape.of_blocks("block_structure", block)
    if not isinstance(group_size, int) or group_size < 1:
        raise CheckpointError(f"group_size is {group_size!r}; with strategy {strategy} it must be at least 1")
    return ScaleShape(Kind.GROUP, columns=group_size)
