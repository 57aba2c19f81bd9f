"""moe_ep: an expert-parallel runtime for mixture-of-experts layers.

The names below are imported from their modules when first used, so `import moe_ep` and `moe-ep --help` do not wait
for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from moe_ep.activation import MoEActivation
    from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
    from moe_ep.distributed.passes import one_pass
    from moe_ep.expert_map import determine_expert_map, get_compressed_expert_map
    from moe_ep.hf.parallelize import parallelize, serve, serving
    from moe_ep.layer import FusedMoE
    from moe_ep.modular_kernel import (
        ExpertTokensMetadata,
        FusedMoEActivationFormat,
        FusedMoEModularKernel,
        FusedMoEPermuteExpertsUnpermute,
        FusedMoEPrepareAndFinalize,
        make_experts,
        make_prepare_finalize,
    )
    from moe_ep.modular_kernel.weight_and_reduce import (
        TopKWeightAndReduce,
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNaiveBatched,
        TopKWeightAndReduceNoOP,
    )
    from moe_ep.routing import select_experts

_HOME = {
    "MoEActivation": "activation",
    "FusedMoEConfig": "config",
    "FusedMoEParallelConfig": "config",
    "FusedMoEQuantConfig": "config",
    "determine_expert_map": "expert_map",
    "get_compressed_expert_map": "expert_map",
    "FusedMoE": "layer",
    "ExpertTokensMetadata": "modular_kernel",
    "FusedMoEActivationFormat": "modular_kernel",
    "FusedMoEModularKernel": "modular_kernel",
    "FusedMoEPermuteExpertsUnpermute": "modular_kernel",
    "FusedMoEPrepareAndFinalize": "modular_kernel",
    "make_experts": "modular_kernel",
    "make_prepare_finalize": "modular_kernel",
    "one_pass": "distributed.passes",
    "parallelize": "hf.parallelize",
    "serve": "hf.parallelize",
    "serving": "hf.parallelize",
    "select_experts": "routing",
    "TopKWeightAndReduce": "modular_kernel.weight_and_reduce",
    "TopKWeightAndReduceContiguous": "modular_kernel.weight_and_reduce",
    "TopKWeightAndReduceDelegate": "modular_kernel.weight_and_reduce",
    "TopKWeightAndReduceNaiveBatched": "modular_kernel.weight_and_reduce",
    "TopKWeightAndReduceNoOP": "modular_kernel.weight_and_reduce",
}

__all__ = [
    "ExpertTokensMetadata",
    "FusedMoE",
    "FusedMoEActivationFormat",
    "FusedMoEConfig",
    "FusedMoEModularKernel",
    "FusedMoEParallelConfig",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEQuantConfig",
    "MoEActivation",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "__version__",
    "determine_expert_map",
    "get_compressed_expert_map",
    "make_experts",
    "make_prepare_finalize",
    "one_pass",
    "parallelize",
    "select_experts",
    "serve",
    "serving",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moe_ep.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
