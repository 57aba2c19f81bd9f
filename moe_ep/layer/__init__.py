"""The MoE layer: router, experts, dispatcher and shared experts of one layer, and how its weights are loaded."""

from moe_ep.layer.batch_balance import BatchBalance
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.layer.methods.base import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported

__all__ = [
    "BatchBalance",
    "FusedMoE",
    "FusedMoEMethodBase",
    "FusedMoeWeightScaleSupported",
    "UnquantizedFusedMoEMethod",
]
