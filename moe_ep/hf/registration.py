"""Registers moe_ep with transformers: as an experts implementation, and as an EP implementation if it has those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from transformers.integrations.moe import ExpertsInterface

from moe_ep.arguments import check_no_gradients
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.process_groups import is_initialized
from moe_ep.errors import ConfigError
from moe_ep.hf.experts import experts_shape, gemm_tensors
from moe_ep.hf.routed_experts import load_shard, make_routed_experts

NAME = "moe_ep"


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts_implementation="moe_ep"`: the first pass shards the module's experts over all ranks of the default group
    and frees the others. Ranks must make their passes in lockstep."""
    layer = self._modules.get(NAME)
    if layer is None:
        kind = type(self).__name__
        check_no_gradients(f"the experts of {kind} with experts_implementation {NAME!r}", hidden_states, top_k_weights)
        layer = _shard(self, top_k_index.size(-1))
    return layer(hidden_states, top_k_index, top_k_weights)


def _check_whole(module: Any) -> None:
    """ConfigError if the module's weights may change between passes: sharding happens once."""
    if any(param.is_meta for param in module.parameters()):
        raise ConfigError(
            f"the experts of {type(module).__name__} are on the meta device and have no values; load the model without "
            f"device_map='meta'"
        )
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
        raise ConfigError(
            f"the experts of {type(module).__name__} are offloaded, their weights come and go with each pass; load the "
            f"model with a device_map that keeps them, or use moe_ep.parallelize with the folder of its checkpoint"
        )
    if parametrize.is_parametrized(module):
        raise ConfigError(
            f"the experts of {type(module).__name__} have weights that are computed in each pass, as adapters of peft "
            f"for parameters do; merge the adapters first (merge_and_unload)"
        )


@torch.compiler.disable(reason="the first pass shards the experts; make it before torch.compile")
def _shard(module: Any, top_k: int) -> nn.Module:
    """Makes the layer with this rank's experts, and puts it into the module."""
    _check_whole(module)
    ranks = dist.get_world_size() if is_initialized() else 1
    parallel = FusedMoEParallelConfig.make(ep_size=ranks, rank=dist.get_rank() if ranks > 1 else 0, world_size=ranks)
    shape = experts_shape(type(module).__name__, module)
    layer = make_routed_experts(shape, top_k, parallel, device=module.down_proj.device)
    load_shard(layer, module)
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(param.new_empty(0), requires_grad=False))
    hooks = _Hooks()
    module.register_state_dict_pre_hook(hooks.before_saving)
    module.register_forward_pre_hook(hooks.before)
    module.add_module(NAME, layer)
    return layer


class _Hooks:
    """Hooks of a module whose experts a pass has sharded: it cannot be saved, or used by another implementation."""

    def before(self, module: Any, args: tuple[Any, ...]) -> None:
        if (chosen := module.config._experts_implementation) != NAME:
            raise ConfigError(
                f"experts_implementation is {chosen!r} and a pass with {NAME!r} has sharded the experts of this "
                f"{type(module).__name__}; load the model again"
            )

    def before_saving(self, module: Any, prefix: str, keep_vars: bool) -> None:
        raise ConfigError(
            f"state_dict of {prefix.removesuffix('.')}: a rank holds its own experts alone since the first pass; save "
            f"the model before that"
        )

    def __reduce__(self) -> Any:
        raise ConfigError(
            "the model cannot be pickled, nor saved by torch.save: a rank holds its own experts alone since the first "
            "pass; save the model before that"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        return self


def register() -> None:
    """Makes the name known to the installed transformers; a second time does no harm."""
    ExpertsInterface.register(NAME, experts_forward)
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:  # before 5.21
        return

    class MoeEpImplementation(EPImplementation):
        """`ep_implementation="moe_ep"`: transformers shards the experts, moe_ep dispatches tokens and computes."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1:
                raise ConfigError(
                    f"tp_size is {tp_mesh.size()} and ep_implementation {NAME!r} is for ranks with their own batches; "
                    f"use tp_size=1 and fsdp_size=ep_size"
                )
            self._experts = experts
            self._layer: nn.Module | None = None

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            if self._layer is None:
                self._layer = self._make_layer(top_k_index.size(-1))
            return self._layer(hidden_states, top_k_index, top_k_weights)

        def _make_layer(self, top_k: int) -> nn.Module:
            shape = experts_shape(type(self._experts).__name__, self._experts)
            shape = replace(shape, num_experts=shape.num_experts * self.ep_mesh.size())
            group = self.ep_mesh.get_group()
            parallel = FusedMoEParallelConfig.make(
                ep_size=self.ep_mesh.size(), rank=dist.get_rank(group), world_size=self.ep_mesh.size()
            )
            tensors = gemm_tensors(self._experts)
            layer = make_routed_experts(shape, top_k, parallel, device=tensors["w2_weight"].device, process_group=group)
            for name, tensor in tensors.items():
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            return layer

    EPImplementationInterface.register(NAME, MoeEpImplementation)
