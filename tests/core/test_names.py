"""Names that are imported from a module other than the one that defines them."""

from __future__ import annotations

import importlib
import subprocess
import sys

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
    "moe_ep": [
        "CheckpointReader", "EPLBManager", "EplbConfig", "FusedMoE", "FusedMoEParallelConfig", "MoEActivation",
        "MoEStack", "determine_expert_map", "get_compressed_expert_map", "load_moe_layer", "one_pass", "parallelize",
        "select_experts", "serve", "serving",
    ],
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_are_looked_for(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", ["moe_ep", "moe_ep.layer", "moe_ep.modular_kernel", "moe_ep.routing", "moe_ep.eplb"])
def test_lists_of_names_agree(module: str) -> None:
    """`__all__`, `dir()` and `from module import *` have the same names, each once."""
    found = importlib.import_module(module)
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    names.pop("__builtins__")
    assert len(set(found.__all__)) == len(found.__all__)
    assert set(names) == set(found.__all__) <= set(dir(found))
    assert all(getattr(found, name) is value for name, value in names.items())


def test_what_backends_use_is_not_among_the_names_of_users() -> None:
    assert not [name for name in moe_ep.__all__ if name.startswith("TopKWeightAndReduce")]
    assert set(moe_ep.__all__) == set(dir(moe_ep))
    with pytest.raises(AttributeError, match="Fused"):
        moe_ep.Fused  # noqa: B018


def test_torch_is_imported_when_a_name_needs_it() -> None:
    code = "import sys, moe_ep; assert moe_ep.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
