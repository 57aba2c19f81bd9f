"""AutoRound (`quant_method: auto-round`): integers in the tensors of GPTQ or AWQ, as `packing_format` says.

    auto_round:auto_gptq, auto_round:gptq         GPTQ, zero points stored less one
    auto_round, auto_round:exllamav2, :gptqmodel  GPTQ, zero points as they are: asymmetric ones by default
    auto_round:auto_awq, auto_round:awq           AWQ

The name of a kernel may follow. Before version 0.5 the method was called intel/auto-round and the key `backend`.

Linear layers that are quantized otherwise, or not at all, stand in `extra_config` by name or regular expression; 16
bits and more mean plain ones. The keys are those of https://github.com/intel/auto-round (export/export_to_autoround).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.gptq import GPTQConfig
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes, Scheme, if_readable
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
# What is none is a regular expression, to be found anywhere in a name.
_NAME = re.compile(r"[\w.-]+")
_SETTINGS = ("bits", "group_size", "sym")
_WHERE = "config.json: quantization_config: "


def auto_round_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint.

    Raises:
        CheckpointError: another packing, or bits and groups that it does not have.
    """
    packing = _packing(values)
    exceptions = values.get("extra_config") or {}
    if not isinstance(exceptions, Mapping):
        raise CheckpointError(f"{_WHERE}extra_config: expected an object, found {exceptions!r}")
    settings = {key: values[key] for key in _SETTINGS if key in values}
    # There may be a name for every layer, and each is looked for in the name of every matrix: by scheme they are few.
    names: dict[Scheme, list[str]] = {}
    expressions: list[tuple[list[str], Scheme]] = []
    for name, changes in exceptions.items():
        if not isinstance(changes, Mapping):
            raise CheckpointError(f"{_WHERE}extra_config: {name}: expected an object of settings, found {changes!r}")
        changed = settings | {key: changes[key] for key in _SETTINGS if key in changes}
        scheme = if_readable(partial(_scheme, packing, changed))
        if _NAME.fullmatch(name):
            names.setdefault(scheme, []).append(name)
        else:
            expressions.append(([f"re:.*(?:{name})"], scheme))
    named = [(modules, scheme) for scheme, modules in names.items()]
    return ModuleSchemes(METHOD, [*named, *expressions, ([EVERY_LINEAR], _scheme(packing, settings))])


def _packing(values: Mapping[str, Any]) -> str:
    """The name of the packing, without the tool's before it and the kernel's behind it."""
    key = "backend" if values.get("packing_format") is None and values.get("backend") else "packing_format"
    name = str(values.get(key) or "auto")
    packing = "auto_gptq" if name == "auto" else name.removeprefix("auto_round:").split(":")[0]
    if packing not in tuple(_PACKINGS):
        raise CheckpointError(_WHERE + one_of(key, name, [f"auto_round:{known}" for known in _PACKINGS]))
    return packing


def _scheme(packing: str, settings: Mapping[str, Any]) -> QuantizationConfig | None:
    bits = settings.get("bits")
    return None if isinstance(bits, int) and bits >= 16 else _PACKINGS[packing](settings)
