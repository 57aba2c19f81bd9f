"""Which rank each expert id is sent to, and which ids are this rank's: the tables of a layer, on each device."""

from __future__ import annotations

import weakref
import zlib

import torch

from moe_ep.arguments import check_expert_map
from moe_ep.config import FusedMoEConfig
from moe_ep.expert_map import expert_owner_table


class Placement:
    """The tables of one rank.

    Args:
        owners: int32 `[E + shared]` on the host, the rank that each id is sent to.

    Attributes:
        num_local: how many ids this rank has.
    """

    def __init__(self, owners: torch.Tensor, rank: int) -> None:
        self.num_ids = owners.numel()
        self.num_local = int((owners == rank).sum())
        self.on_host, self._rank = owners, rank
        self._owners: dict[torch.device, torch.Tensor] = {owners.device: owners}
        self._maps: dict[torch.device, torch.Tensor] = {}
        self._known_maps: dict[int, weakref.ref[torch.Tensor]] = {}

    def owners(self, device: torch.device) -> torch.Tensor:
        """int32 `[E + shared]`: the rank that each id is sent to."""
        found = self._owners.get(device)
        if found is None:
            found = self._owners[device] = self.on_host.to(device)
        return found

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32 `[E + shared]`: the index of each id among those of this rank, in their order; -1 where it is on
        another."""
        found = self._maps.get(device)
        if found is None:
            here = self.owners(device) == self._rank
            found = self._maps[device] = torch.where(here, here.cumsum(0) - 1, -1).to(torch.int32)
        return found

    def checksum(self, num_experts: int) -> int:
        """A number that is the same on ranks that send the first num_experts ids alike."""
        return zlib.crc32(self.on_host[:num_experts].numpy().tobytes())

    def check(self, expert_map: torch.Tensor) -> None:
        """ValueError where rows would be sent to other ranks than those whose maps have their experts.

        Each map is read once, with a wait for the GPU where it lies on one; none is while a CUDA graph is captured.
        """
        known = self._known_maps.get(id(expert_map))
        if known is not None and known() is expert_map:
            return
        check_expert_map(expert_map)
        if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        own = self.expert_map(expert_map.device)
        if expert_map.shape != own.shape or bool((expert_map != own).any()):
            raise ValueError(
                f"expert_map has experts {_experts(expert_map)} on EP rank {self._rank} and rows of {_experts(own)} "
                f"are sent to it, in this order; pass the map of the placement that moe_config names "
                f"(expert_placement_strategy), or make the backend with owners="
            )
        self._known_maps[id(expert_map)] = weakref.ref(expert_map)


def owners_of(moe_config: FusedMoEConfig) -> torch.Tensor:
    """int32 `[E + shared]`: the rank that this one sends each id to, by the layer's placement."""
    return expert_owner_table(
        moe_config.ep_size,
        moe_config.num_experts,
        moe_config.moe_parallel_config.expert_placement_strategy,
        moe_config.num_fused_shared_experts,
        moe_config.ep_rank,
    )


def _experts(expert_map: torch.Tensor) -> str:
    """The experts of this rank in the order of their local indices, as text. Example: [1, 0, -1] gives "1, 0"."""
    order = expert_map.argsort(stable=True)
    numbers = order[expert_map[order] >= 0].tolist()
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
