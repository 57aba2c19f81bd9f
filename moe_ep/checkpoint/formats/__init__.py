"""Quantization formats on disk: one module per format, and the table of formats by `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_ep.checkpoint.config_values import LANGUAGE_PARTS, QUANT_CONFIG, as_object, refuse_rotation, unexpected
from moe_ep.checkpoint.formats import auto_round, compressed_tensors, modelopt, quark
from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.compressed_tensors import IntQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MXFP4Config
from moe_ep.checkpoint.formats.fp8 import MXFP8_GROUP, Float8Config, input_dtype_of_scheme
from moe_ep.checkpoint.formats.gptq import GPTQConfig, pack_gptq
from moe_ep.checkpoint.formats.layout import QuantizationConfig, ScaleShape
from moe_ep.checkpoint.formats.modules import (
    EVERY_LINEAR,
    LayerQuantization,
    ModuleSchemes,
    PerGemm,
    Scheme,
    if_readable,
    ignored_modules,
)
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

__all__ = [
    "GPTQConfig",
    "LayerQuantization",
    "ModelQuantization",
    "ModuleSchemes",
    "PerGemm",
    "QuantizationConfig",
    "pack_gptq",
    "quantization_config",
]

# The quantization of a whole model; `of_module` gives that of one linear layer.
ModelQuantization = QuantizationConfig | ModuleSchemes


def _with_exceptions(
    scheme_of: Callable[[Mapping[str, Any]], QuantizationConfig], values: Mapping[str, Any]
) -> ModelQuantization:
    """One scheme, with exceptions by GPTQModel's `dynamic` or a list of plain modules."""
    scheme = scheme_of(values)
    ignored = ignored_modules(values)
    if not values.get("dynamic") and not ignored:
        return scheme
    return ModuleSchemes(scheme.quant_method, [*_dynamic(values, scheme_of), ((EVERY_LINEAR,), scheme)], ignored)


def _dynamic(
    values: Mapping[str, Any], scheme_of: Callable[[Mapping[str, Any]], QuantizationConfig]
) -> list[tuple[tuple[str, ...], Scheme]]:
    """The first matching expression decides; "-:" excludes modules, "+:" or no prefix changes settings."""
    schemes: list[tuple[tuple[str, ...], Scheme]] = []
    for name, changes in as_object(values.get("dynamic") or {}, "dynamic").items():
        scheme = None
        if not name.startswith("-:"):
            scheme = if_readable(partial(scheme_of, {**values, **as_object(changes, f"dynamic: {name}")}))
        schemes.append(((f"re:{name.removeprefix('-:').removeprefix('+:')}",), scheme))
    return schemes


def _fp8(values: Mapping[str, Any]) -> ModelQuantization:
    scheme = Float8Config.from_dict(values)
    schemes = [*_dynamic(values, Float8Config.from_dict), ((EVERY_LINEAR,), scheme)]
    of_experts = str(values.get("expert_dtype") or "fp8")
    if of_experts not in ("fp8", "fp4"):
        raise CheckpointError(f"config.json: {one_of('expert_dtype', of_experts, ['fp8', 'fp4'])}")
    if values.get("moe_quant_algo"):  # DeepSeek-V4 by Model Optimizer
        schemes.insert(0, (("experts",), modelopt.scheme_of(values, key="moe_quant_algo")))
    elif of_experts == "fp4" or values.get("store_dtype") == "mxfp4":  # DeepSeek-V4, MiMo-V2
        schemes.insert(0, (("experts",), MXFP4Config(input_dtype=input_dtype_of_scheme(values))))
    # What `ignore` lists is plain to the experts' algorithm alone, and fp8 here.
    ignored = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
    return ModuleSchemes("fp8", schemes, ignored)


def _mxfp8(values: Mapping[str, Any]) -> ModelQuantization:
    return _fp8({"weight_block_size": [1, MXFP8_GROUP], "activation_scheme": "dynamic", **values})


def _everywhere(method: str, scheme: Scheme, values: Mapping[str, Any]) -> ModelQuantization:
    """One scheme for all linear layers but the ignored ones."""
    return ModuleSchemes(method, [((EVERY_LINEAR,), scheme)], ignored_modules(values))


def _int8_blocks(values: Mapping[str, Any]) -> ModelQuantization:
    shape = ScaleShape.of_blocks(f"{QUANT_CONFIG}weight_block_size", values.get("weight_block_size"))
    return _everywhere("blockwise_int8", IntQuantizedConfig(scale=shape, input_dtype=torch.int8), values)


_FP8_ROWS = Float8Config(scale=ScaleShape(Kind.CHANNEL), input_dtype=torch.float8_e4m3fn)
_INT8_ROWS = IntQuantizedConfig(scale=ScaleShape(Kind.CHANNEL), input_dtype=torch.int8)


FORMATS: dict[str, Callable[[Mapping[str, Any]], ModelQuantization | None]] = {
    "gptq": partial(_with_exceptions, GPTQConfig.from_dict),
    "awq": partial(_with_exceptions, AWQConfig.from_dict),
    compressed_tensors.METHOD: compressed_tensors.compressed_tensors_schemes,
    "fp8": _fp8,
    "fbgemm_fp8": partial(_everywhere, "fbgemm_fp8", _FP8_ROWS),
    "mxfp4": partial(_everywhere, "mxfp4", MXFP4Config()),
    "mxfp8": _mxfp8,
    "w8a8_int8": partial(_everywhere, "w8a8_int8", _INT8_ROWS),
    "blockwise_int8": _int8_blocks,
    **dict.fromkeys(modelopt.METHODS, modelopt.modelopt_schemes),
    **dict.fromkeys(auto_round.METHODS, auto_round.auto_round_schemes),
    quark.METHOD: quark.quark_schemes,
    modelopt.W4AFP8: modelopt.w4afp8_schemes,
}


# Files of settings beside config.json, and the quant_method of settings without one.
SETTINGS_BESIDE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "hf_quant_config.json": lambda settings: modelopt.METHODS[0],
    "quantize_config.json": lambda settings: (
        "awq" if settings.keys() & {"w_bit", "q_group_size", "zero_point"} else "gptq"
    ),
    "quant_config.json": lambda settings: "awq",
    "quantization_config.json": lambda settings: auto_round.METHOD,
    "quant_cfg.json": lambda settings: modelopt.METHODS[0],
}


def with_settings_beside(
    config: dict[str, Any], directory: Path, read: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """A config.json with all quantization settings under `quantization_config`.

    They may be under compressed-tensors' former key, or in a file beside config.json. config.json takes precedence; a
    file of the same method adds missing keys.
    """
    if config.get("quantization_config") is None and "compression_config" in config:
        config["quantization_config"] = config.pop("compression_config")
    for name, method_of in SETTINGS_BESIDE.items():
        file = directory / name
        if not file.is_file():
            continue
        content = read(file)
        settings = next((content[key] for key in ("quantization", "quantization_config") if key in content), content)
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{file}: expected an object of settings, found {settings!r}")
        settings = {"quant_method": method_of(settings), **settings}
        found = _settings(config)
        if found is None:
            config["quantization_config"] = settings
        elif found.get("quant_method", settings["quant_method"]) == settings["quant_method"]:
            found.update({key: value for key, value in settings.items() if found.get(key) is None})
    return config


def _settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = _first_of_parts(config, "quantization_config")
    if found is not None and not isinstance(found, dict):
        raise unexpected("quantization_config", "an object", found)
    return found


def _first_of_parts(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key of the model, or of its language model's part."""
    parts = [config, *(part for key in LANGUAGE_PARTS if isinstance(part := config.get(key), Mapping))]
    return next(filter(None, (part.get(key) for part in parts)), None)


def quantization_config(config: Mapping[str, Any]) -> ModelQuantization | None:
    """The quantization of a checkpoint, from its config.json; None if it is plain.

    Raises:
        CheckpointError: an unknown quant_method (the known ones are listed), or invalid settings.
    """
    values = _settings(config)
    if not values and config.get("model_type") == "inkling2" and not config.get("transformers_version"):
        # Its config does not say so; transformers knows (INKLING2_QUANTIZATION_CONFIG).
        values = {"quant_method": "mxfp8"}
    if not values:
        return None
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(QUANT_CONFIG + one_of("quant_method", method, list(FORMATS)))
    refuse_rotation(values, "rotation", "rotation_config", "spinquant_config")  # of GPTQModel and AutoRound
    # DeepSeek-V4 has the experts' dtype outside of quantization_config.
    of_experts = _first_of_parts(config, "expert_dtype")
    return FORMATS[method](({} if of_experts is None else {"expert_dtype": of_experts}) | dict(values))
