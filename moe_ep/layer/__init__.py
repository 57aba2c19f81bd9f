"""The MoE layer: router, experts, dispatcher and shared experts of one layer, and how its weights are loaded.

The public names are imported when first used: modules that the layer is built from can be imported before it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ep.layer.fused_moe import FusedMoE
    from moe_ep.layer.methods import FusedMoEMethodBase, UnquantizedFusedMoEMethod
    from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported

_HOME = {
    "FusedMoE": "fused_moe",
    "FusedMoEMethodBase": "methods",
    "FusedMoeWeightScaleSupported": "weight_loading",
    "UnquantizedFusedMoEMethod": "methods",
}

__all__ = ["FusedMoE", "FusedMoEMethodBase", "FusedMoeWeightScaleSupported", "UnquantizedFusedMoEMethod"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ep.layer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moe_ep.layer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
