"""Wrappers of torch that take every rank's tensors for the same, where each rank of a layer has its own.

DistributedDataParallel gives every rank those of rank 0, and fully_shard makes one tensor of parts of each.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_ep.errors import ConfigError


def check_not_sharded(name: str, tensor: torch.Tensor | None) -> None:
    """ConfigError for a tensor that is to take the place of a rank's own, and is one of several ranks."""
    # Whoever makes one has imported it.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(tensor, tensors.DTensor):
        raise ConfigError(
            f"{name} of a layer over several ranks would become a DTensor, and each rank has experts of its own there; "
            f"leave the layer out, as by fully_shard(model, ignored_params=set(layer.parameters()))"
        )


def check_not_broadcast(layer: nn.Module, layer_name: str, checked: int) -> int:
    """ConfigError in a pass of a DistributedDataParallel that has not left the layer's tensors out.

    Args:
        checked: what this returned for the layer before, 0 at first.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or id(wrapper) == checked:
        return checked
    for path, part in wrapper.module.named_modules():
        if part is not layer:
            continue
        held = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        names = {f"{path}.{name}" if path else name for name, _ in held}
        if names - wrapper.parameters_to_ignore:
            raise ConfigError(
                f"DistributedDataParallel has given every rank what rank 0 holds of {layer_name}, where each has "
                f"experts of its own; name the layer's parameters and buffers to DistributedDataParallel."
                f"_set_params_and_buffers_to_ignore_for_model before it is made, and load the layer again"
            )
    return id(wrapper)
