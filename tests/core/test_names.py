"""Names that are imported from a module other than the one that defines them."""

from __future__ import annotations

import importlib

import pytest

import moe_ep

_REDUCE = ["", "Delegate", "NoOP", "Contiguous", "NaiveBatched"]
NAMES = {
    "moe_ep.layer": ["FusedMoE", "FusedMoEMethodBase", "UnquantizedFusedMoEMethod", "FusedMoeWeightScaleSupported"],
    "moe_ep.modular_kernel": [
        "ExpertTokensMetadata", "FusedMoEActivationFormat", "FusedMoEConfig", "FusedMoEModularKernel",
        "FusedMoEPermuteExpertsUnpermute", "FusedMoEPrepareAndFinalize", "FusedMoEQuantConfig", "make_experts",
        "make_prepare_finalize", *(f"TopKWeightAndReduce{kind}" for kind in _REDUCE),
    ],
    "moe_ep.kernels.marlin": [
        "BatchedMarlinExperts", "MarlinExperts", "batched_fused_marlin_moe", "fused_marlin_moe", "pack_marlin",
        "unpack_marlin",
    ],
    "moe_ep.eplb": ["EPLBManager", "balancedness", "rearrange_expert_weights", "rebalance_experts"],
    "moe_ep": moe_ep.__all__,
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_are_looked_for(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
