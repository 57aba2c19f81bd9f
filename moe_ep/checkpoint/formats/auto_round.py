"""AutoRound (`quant_method: auto-round`): integers in the tensors of GPTQ or AWQ, as `packing_format` says.

Linear layers that are quantized otherwise, or not at all, stand in `extra_config` by name or regular expression; 16
bits and more mean plain ones. The keys are those of https://github.com/intel/auto-round (export/export_to_autoround).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.gptq import GPTQConfig
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.checkpoint.formats.modules import EVERY_LINEAR, ModuleSchemes
from moe_ep.errors import CheckpointError, one_of

METHOD = "auto-round"
# GPTQ's zero points are stored less one, and there is no g_idx.
_PACKINGS: dict[str, type[AWQConfig | GPTQConfig]] = {
    "auto_gptq": GPTQConfig,
    "auto_awq": AWQConfig,
}
# What is none is a regular expression, to be found anywhere in a name.
_NAME = re.compile(r"[\w.-]+")
_SETTINGS = ("bits", "group_size", "sym")
_WHERE = "config.json: quantization_config: "


def auto_round_schemes(values: Mapping[str, Any]) -> ModuleSchemes:
    """The schemes of a checkpoint; CheckpointError for another packing, or bits and groups that it does not have."""
    packing = str(values.get("packing_format") or "auto_gptq").removeprefix("auto_round:")
    if packing not in tuple(_PACKINGS):
        raise CheckpointError(_WHERE + one_of("packing_format", packing, list(_PACKINGS)))
    exceptions = values.get("extra_config") or {}
    if not isinstance(exceptions, Mapping):
        raise CheckpointError(f"{_WHERE}extra_config: expected an object, found {exceptions!r}")
    settings = {key: values[key] for key in _SETTINGS if key in values}
    # There may be a name for every layer, and each is looked for in the name of every matrix: by scheme they are few.
    names: dict[QuantizationConfig | None, list[str]] = {}
    expressions: list[tuple[list[str], QuantizationConfig | None]] = []
    for name, changes in exceptions.items():
        if not isinstance(changes, Mapping):
            raise CheckpointError(f"{_WHERE}extra_config: {name}: expected an object of settings, found {changes!r}")
        scheme = _scheme(packing, settings | {key: changes[key] for key in _SETTINGS if key in changes})
        if _NAME.fullmatch(name):
            names.setdefault(scheme, []).append(name)
        else:
            expressions.append(([f"re:.*(?:{name})"], scheme))
    named = [(modules, scheme) for scheme, modules in names.items()]
    return ModuleSchemes(METHOD, [*named, *expressions, ([EVERY_LINEAR], _scheme(packing, settings))])


def _scheme(packing: str, settings: Mapping[str, Any]) -> QuantizationConfig | None:
    bits = settings.get("bits")
    return None if isinstance(bits, int) and bits >= 16 else _PACKINGS[packing].from_dict(settings)
