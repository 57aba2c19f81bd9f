"""Experts with packed 4- and 8-bit weights: packing, functions, and classes for the modular kernel."""

from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.repack import PackedWeights, pack_marlin, unpack_marlin

__all__ = [
    "BatchedMarlinExperts",
    "MarlinExperts",
    "PackedWeights",
    "batched_fused_marlin_moe",
    "fused_marlin_moe",
    "pack_marlin",
    "unpack_marlin",
]
