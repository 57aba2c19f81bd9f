"""`torch.ops.moe_ep.*`: one node a layer for torch.compile and CUDA-graph capture.

A graph cannot hold a module, so a layer is named in it and found here by its name when the node runs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE

_layers: WeakValueDictionary[str, FusedMoE] = WeakValueDictionary()
_numbers = itertools.count()


def unique_name(prefix: str) -> str:
    """`prefix`, with a number where it is empty or the name of a living layer."""
    name = prefix or f"moe_layer_{next(_numbers)}"
    while name in _layers:
        name = f"{prefix or 'moe_layer'}#{next(_numbers)}"
    return name


def register_layer(layer: FusedMoE) -> None:
    """Files the layer under its `layer_name`, held weakly."""
    _layers[layer.layer_name] = layer


def find_layer(name: str) -> FusedMoE:
    """The layer filed under `name`; RuntimeError when it is gone."""
    layer = _layers.get(name)
    if layer is None:
        raise RuntimeError(
            f"there is no MoE layer named {name!r}; a graph runs only while the layer it was made from exists"
        )
    return layer


@torch.library.custom_op("moe_ep::moe_forward", mutates_args=())
def moe_forward(hidden_states: torch.Tensor, router_logits: torch.Tensor, layer_name: str) -> torch.Tensor:
    """`FusedMoE.forward_impl` of a layer without shared experts: `[T, K]` from `[T, K]` and `[T, E]`."""
    output = find_layer(layer_name).forward_impl(hidden_states, router_logits)
    if isinstance(output, tuple):
        raise RuntimeError(f"layer {layer_name!r} has shared experts; call torch.ops.moe_ep.moe_forward_shared")
    return output


@moe_forward.register_fake
def _(hidden_states: torch.Tensor, router_logits: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(hidden_states)


@torch.library.custom_op("moe_ep::moe_forward_shared", mutates_args=())
def moe_forward_shared(
    hidden_states: torch.Tensor, router_logits: torch.Tensor, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`FusedMoE.forward_impl` of a layer with shared experts: (shared, routed), both `[T, K]`."""
    output = find_layer(layer_name).forward_impl(hidden_states, router_logits)
    if not isinstance(output, tuple):
        raise RuntimeError(f"layer {layer_name!r} has no shared experts; call torch.ops.moe_ep.moe_forward")
    return output


@moe_forward_shared.register_fake
def _(hidden_states: torch.Tensor, router_logits: torch.Tensor, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden_states), torch.empty_like(hidden_states)
