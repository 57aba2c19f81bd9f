"""moe_ep: an expert-parallel runtime for mixture-of-experts layers.

The names below are imported from their modules when first used, so `import moe_ep` and `moe-ep --help` do not wait
for torch.

Names that look alike:

- `serving(model)` is a block in which a rank makes its requests; from its end on the rank serves the others until they
  are through too. `serve(model)` is that second half alone, for a rank without requests.
- `EplbConfig` says when and how experts are moved; `EPLBManager` moves them.
- `FusedMoE(all2all_backend=)` and `make_prepare_finalize(backend=)` take the same names, of
  `moe_ep.registry.ALL2ALL_BACKENDS`: the argument of a layer keeps the name that vLLM gave it.
- `n_shared_experts` counts shared experts that are fused: loaded and computed as further routed experts of weight 1.
  `shared_experts` is a module that runs beside the routed experts.
- `dispatch_dtype` is what rows are rounded to while they are sent; `input_dtype` is what experts may round their inputs
  to while they compute.
- `FusedMoE.from_checkpoint` makes a layer and loads it; `load_moe_layer` loads one that was made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from moe_ep.activation import MoEActivation
    from moe_ep.checkpoint.loading import load_moe_layer
    from moe_ep.checkpoint.model_spec import model_spec
    from moe_ep.checkpoint.reader import CheckpointReader
    from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
    from moe_ep.distributed.passes import one_pass
    from moe_ep.eplb.config import EplbConfig
    from moe_ep.eplb.manager import EPLBManager
    from moe_ep.expert_map import determine_expert_map, get_compressed_expert_map
    from moe_ep.generation.decoder import batch_invariant_passes
    from moe_ep.hf.parallelize import parallelize, serve, serving
    from moe_ep.layer import FusedMoE
    from moe_ep.layer.stack import MoEStack
    from moe_ep.modular_kernel import (
        ExpertTokensMetadata,
        FusedMoEActivationFormat,
        FusedMoEModularKernel,
        FusedMoEPermuteExpertsUnpermute,
        FusedMoEPrepareAndFinalize,
        make_experts,
        make_prepare_finalize,
    )
    from moe_ep.rollouts.logprobs import token_logprobs
    from moe_ep.rollouts.recording import recording
    from moe_ep.rollouts.replay import replaying
    from moe_ep.rollouts.routing_file import read_routed_experts
    from moe_ep.rollouts.update import update_weights
    from moe_ep.routing import select_experts

# The module of each name, by name.
_MODULES = {
    name: module
    for module, names in {
        "activation": "MoEActivation",
        "checkpoint.loading": "load_moe_layer",
        "checkpoint.model_spec": "model_spec",
        "checkpoint.reader": "CheckpointReader",
        "config": "FusedMoEConfig FusedMoEParallelConfig FusedMoEQuantConfig",
        "distributed.passes": "one_pass",
        "eplb.config": "EplbConfig",
        "eplb.manager": "EPLBManager",
        "expert_map": "determine_expert_map get_compressed_expert_map",
        "generation.decoder": "batch_invariant_passes",
        "hf.parallelize": "parallelize serve serving",
        "layer": "FusedMoE",
        "layer.stack": "MoEStack",
        "modular_kernel": "ExpertTokensMetadata FusedMoEActivationFormat FusedMoEModularKernel "
        "FusedMoEPermuteExpertsUnpermute FusedMoEPrepareAndFinalize make_experts make_prepare_finalize",
        "rollouts.logprobs": "token_logprobs",
        "rollouts.recording": "recording",
        "rollouts.replay": "replaying",
        "rollouts.routing_file": "read_routed_experts",
        "rollouts.update": "update_weights",
        "routing": "select_experts",
    }.items()
    for name in names.split()
}

__all__ = [
    "CheckpointReader",
    "EPLBManager",
    "EplbConfig",
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
    "MoEStack",
    "__version__",
    "batch_invariant_passes",
    "determine_expert_map",
    "get_compressed_expert_map",
    "load_moe_layer",
    "make_experts",
    "make_prepare_finalize",
    "model_spec",
    "one_pass",
    "parallelize",
    "read_routed_experts",
    "recording",
    "replaying",
    "select_experts",
    "serve",
    "serving",
    "token_logprobs",
    "update_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'moe_ep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"moe_ep.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
