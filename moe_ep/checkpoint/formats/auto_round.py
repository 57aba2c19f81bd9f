"""AutoRound (`quant_method: auto-round`): integers in the tensors of GPTQ or AWQ, as `packing_format` says, and floats.

    auto_round:auto_gptq, auto_round:gptq         GPTQ, zero points stored less one
    auto_round, auto_round:exllamav2, :gptqmodel  GPTQ, zero points as they are: asymmetric ones by default
    auto_round:auto_awq, auto_round:awq           AWQ

A kernel's name may follow. Before version 0.5 the method was called intel/auto-round and the key `backend`. A float
`data_type` overrides the packing: mx_fp (mxfp4, mxfp8) and nv_fp (nvfp4) have the layout of compressed-tensors, and fp
(fp8) has a scale per tensor (group_size 0), row (-1) or block (two numbers).

`extra_config` lists exceptions by name or regular expression; 16 bits and more mean plain weights. The keys are those
of https://github.com/intel/auto-round (export/export_to_autoround).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, as_object
from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.fp4 import PACKED_MXFP4, PACKED_NVFP4
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.gptq import GPTQConfig
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes, Scheme, by_scheme, if_readable
from moe_ep.errors import CheckpointError, one_of

METHOD = "auto-round"
METHODS = (METHOD, "intel/auto-round")
_Scheme = Callable[[Mapping[str, Any]], QuantizationConfig]


def _zero_points_as_they_are(settings: Mapping[str, Any]) -> GPTQConfig:
    return GPTQConfig.from_dict({**settings, "checkpoint_format": "gptq_v2"})


# There is no g_idx.
_PACKINGS: dict[str, _Scheme] = {
    "auto_gptq": GPTQConfig.from_dict,
    "gptq": GPTQConfig.from_dict,
    "auto_awq": AWQConfig.from_dict,
    "awq": AWQConfig.from_dict,
    "auto_round": _zero_points_as_they_are,
    "exllamav2": _zero_points_as_they_are,
    "tritonv2": _zero_points_as_they_are,
    "gptqmodel": _zero_points_as_they_are,
}
_FLOATS: dict[tuple[str, Any], QuantizationConfig] = {
    **dict.fromkeys((("mx_fp", 4), ("mx_fp_rceil", 4)), PACKED_MXFP4),
    **dict.fromkeys((("mx_fp", 8), ("mx_fp_rceil", 8)), MXFP8),
    **dict.fromkeys((("nv_fp", 4), ("nv_fp4_with_static_gs", 4)), PACKED_NVFP4),
}
# Other keys are regular expressions, searched for anywhere in a name.
_NAME = re.compile(r"[\w.-]+")
_SETTINGS = ("bits", "group_size", "sym", "data_type")


def auto_round_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint.

    Raises:
        CheckpointError: another packing, or bits and groups that it does not have.
    """
    exceptions = as_object(values.get("extra_config") or {}, "extra_config")
    settings = {key: values[key] for key in _SETTINGS if key in values}
    of_settings = partial(_scheme_beside_activations, values)
    names: list[tuple[str, Scheme]] = []
    expressions: list[tuple[list[str], Scheme]] = []
    for name, changes in exceptions.items():
        changes = as_object(changes, f"extra_config: {name}")
        changed = settings | {key: changes[key] for key in _SETTINGS if key in changes}
        scheme = if_readable(partial(of_settings, changed))
        if _NAME.fullmatch(name):
            names.append((name, scheme))
        else:
            expressions.append(([f"re:.*(?:{name})"], scheme))
    return ModuleSchemes(METHOD, [*by_scheme(names), *expressions, ([EVERY_LINEAR], of_settings(settings))])


def _scheme_beside_activations(values: Mapping[str, Any], settings: Mapping[str, Any]) -> QuantizationConfig | None:
    scheme, bits = _scheme(values, settings), values.get("act_bits")
    if scheme is None or bits is None:
        return scheme
    is_int = str(values.get("act_data_type") or settings.get("data_type") or "int").startswith("int")
    return replace(scheme, input_dtype=None if bits != 8 else torch.int8 if is_int else torch.float8_e4m3fn)


def _integers(values: Mapping[str, Any]) -> _Scheme:
    """The scheme of a packing, without the tool's name before it and the kernel's after it."""
    key = "backend" if values.get("packing_format") is None and values.get("backend") else "packing_format"
    name = str(values.get(key) or "auto")
    packing = "auto_gptq" if name == "auto" else name.removeprefix("auto_round:").split(":")[0]
    if packing not in tuple(_PACKINGS):
        raise CheckpointError(QUANT_CONFIG + one_of(key, name, [f"auto_round:{known}" for known in _PACKINGS]))
    return _PACKINGS[packing]


def _scheme(values: Mapping[str, Any], settings: Mapping[str, Any]) -> QuantizationConfig | None:
    bits, kind = settings.get("bits"), str(settings.get("data_type") or "int")
    if isinstance(bits, int) and bits >= 16:
        return None
    if kind.startswith("int"):
        return _integers(values)(settings)
    if kind == "fp" and bits == 8:
        size = settings.get("group_size") or 0
        if isinstance(size, list) or size in (0, -1):
            block, rows = (size, None) if isinstance(size, list) else (None, "row" if size else None)
            form = {"fmt": values.get("fmt"), "weight_block_size": block, "weight_scale_method": rows}
            return Float8Config.from_dict(form)
        raise CheckpointError(
            f"{QUANT_CONFIG}group_size is {size!r}; with fp of 8 bits it must be 0, -1 or two numbers"
        )
    if (kind, bits) not in _FLOATS:
        known = ["int", "fp of 8 bits", *(f"{name} of {width} bits" for name, width in _FLOATS)]
        raise CheckpointError(QUANT_CONFIG + one_of("data_type", f"{kind} of {bits} bits", known))
    return _FLOATS[kind, bits]
