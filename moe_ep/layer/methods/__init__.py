"""The parameters of a layer's experts, how they are loaded, and which experts run them."""

from moe_ep.layer.methods.base import (
    FusedMoEMethodBase,
    UnquantizedFusedMoEMethod,
    make_method,
    relative_error,
    tolerance,
)
from moe_ep.layer.methods.canonical import ONLINE, OnlineFp8Config, OnlineIntConfig

__all__ = [
    "ONLINE",
    "FusedMoEMethodBase",
    "OnlineFp8Config",
    "OnlineIntConfig",
    "UnquantizedFusedMoEMethod",
    "make_method",
    "relative_error",
    "tolerance",
]
