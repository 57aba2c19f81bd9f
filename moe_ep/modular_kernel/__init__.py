"""The contracts of dispatch backends and experts, and the modular kernel that joins one with the other."""

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.modular_kernel.contracts import (
    Dispatched,
    Dispatcher,
    Experts,
    ExpertsCall,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    Pending,
    Routing,
)
from moe_ep.modular_kernel.kernel import FusedMoEModularKernel, make_experts, make_prepare_finalize
from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
)

__all__ = [
    "Dispatched",
    "Dispatcher",
    "ExpertTokensMetadata",
    "Experts",
    "ExpertsCall",
    "FusedMoEActivationFormat",
    "FusedMoEConfig",
    "FusedMoEModularKernel",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEQuantConfig",
    "Pending",
    "Routing",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOP",
    "make_experts",
    "make_prepare_finalize",
]
