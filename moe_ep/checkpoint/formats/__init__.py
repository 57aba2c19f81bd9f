"""Quantized forms on disk: one module a format, and the table that picks it by `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_ep.checkpoint.formats.canonical import CanonicalWeights, dequantize
from moe_ep.checkpoint.formats.gptq import GPTQConfig, pack_gptq, unpack_gptq
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.checkpoint.formats.plain import quantize_int
from moe_ep.errors import CheckpointError, one_of

__all__ = [
    "CanonicalWeights",
    "GPTQConfig",
    "QuantizationConfig",
    "dequantize",
    "pack_gptq",
    "quantization_config",
    "quantize_int",
    "unpack_gptq",
]

FORMATS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    GPTQConfig.quant_method: GPTQConfig.from_dict,
}


def quantization_config(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """How a checkpoint's experts are quantized, from its config.json; None where they are plain.

    Raises:
        CheckpointError: a quant_method that is not known (the known ones are listed), or one with bad settings.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json: quantization_config: expected an object, found {values!r}")
    method = values.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(f"config.json: quantization_config: {one_of('quant_method', method, list(FORMATS))}")
    return FORMATS[method](values)
