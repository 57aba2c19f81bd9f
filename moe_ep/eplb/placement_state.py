"""The placement of all layers as the model reads it: three tensors, changed in place a layer at a time."""

from __future__ import annotations

import numpy as np
import torch

from moe_ep.eplb.batch_plan import one_replica
from moe_ep.eplb.policy.maps import Array, check_placement, logical_maps


def placement_on_host(name: str, placement: Array | torch.Tensor) -> Array:
    """Converts a placement to int64 on the host; ValueError unless it is an array of whole numbers."""
    if isinstance(placement, torch.Tensor):
        if placement.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; make it on the CPU or a GPU")
        placement = placement.detach().cpu()
        # numpy has no bf16.
        values = (placement.float() if placement.is_floating_point() else placement).numpy()
    else:
        try:
            values = np.asarray(placement)
        except ValueError:
            raise ValueError(f"{name} has layers of different lengths; it must be (L, P)") from None
    if values.size and not np.issubdtype(values.dtype, np.integer):
        dtype = placement.dtype if isinstance(placement, torch.Tensor) else values.dtype
        raise ValueError(f"{name} has dtype {dtype}; it must hold integers, the logical expert of each slot")
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds expert {values.max()}; it must hold ids that fit into int64")
    return values.astype(np.int64)


class PlacementState:
    """The three maps on the device, and the same on the host.

    Args:
        physical_to_logical: integer `[L, P]`, where the experts are.
        num_ranks: ranks that hold the slots, as many each.

    Attributes:
        physical_to_logical_map: int32 `[L, P]`.
        logical_to_physical_map: int32 `[L, E, P - E + 1]`, -1 padded: as wide as an expert can have replicas, so that
            no placement needs other tensors. The first replicas of all experts, which decode uses (`one_replica`), are
            neighbours in memory, then the second ones, and so on: that is how the mapping kernel reads them.
        logical_replica_count: int32 `[L, E]`.
        host: physical_to_logical, int64 `[L, P]` in numpy; replaced, never changed in place.
    """

    def __init__(self, physical_to_logical: Array, num_experts: int, num_ranks: int, device: torch.device) -> None:
        self.host, self.num_experts = physical_to_logical.astype(np.int64), num_experts
        self.num_ranks = num_ranks
        self.num_layers, self.num_slots = physical_to_logical.shape
        self.check(self.host, "physical_to_logical")
        maps = self._maps(self.host)
        self.physical_to_logical_map, self.logical_to_physical_map, self.logical_replica_count = (
            tensor.to(device) for tensor in maps
        )
        # Pinned, so that a commit is queued on the stream and the host goes on.
        self._staged = tuple(tensor[0].pin_memory() if device.type == "cuda" else tensor[0].clone() for tensor in maps)

    def check(self, physical_to_logical: Array, name: str) -> None:
        """Raises ValueError unless this is a placement `[L, P]` of these experts."""
        check_placement(physical_to_logical, self.host.shape, self.num_experts, name)

    def stage(self, row: Array) -> None:
        """Keeps a layer's new placement `[P]` ready for `commit`; the commit before must be done on the device."""
        for staged, tensor in zip(self._staged, self._maps(row[None]), strict=True):
            staged.copy_(tensor[0])

    def commit(self, layer: int, row: Array) -> None:
        """Puts the staged placement in force, in stream order."""
        maps = (self.physical_to_logical_map, self.logical_to_physical_map, self.logical_replica_count)
        for tensor, staged in zip(maps, self._staged, strict=True):
            tensor[layer].copy_(staged, non_blocking=True)
        host = self.host.copy()
        host[layer] = row
        self.host = host

    def _maps(self, physical_to_logical: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table, counts = logical_maps(physical_to_logical, self.num_experts)
        for row, slots in zip(table, physical_to_logical, strict=True):
            first = one_replica(slots, self.num_experts, self.num_ranks)
            row[row == first[:, None]] = row[:, 0]
            row[:, 0] = first
        width = self.num_slots - self.num_experts + 1
        padded = np.pad(table, ((0, 0), (0, 0), (0, width - table.shape[2])), constant_values=-1)
        return (
            torch.from_numpy(physical_to_logical.astype(np.int32)),
            torch.from_numpy(padded.astype(np.int32).transpose(0, 2, 1).copy()).transpose(1, 2),
            torch.from_numpy(counts.astype(np.int32)),
        )
