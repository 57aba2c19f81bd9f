"""Placement: which rank holds which expert, and at which local index.

There are two strategies: linear gives every rank a contiguous range of ids, round_robin assigns them in turn (rank r
holds r, r + ep_size, r + 2 * ep_size, ...). Either way, the first E % ep_size ranks hold one expert more than the rest.
Everything here is computed once, on the host, and depends on nothing but its arguments; tensors stay on the host.
"""

from __future__ import annotations

import math

import torch

from moe_ep.arguments import check_expert_map
from moe_ep.config import EXPERT_PLACEMENT_STRATEGIES, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.errors import check_at_least, check_below, check_flags, one_of
from moe_ep.registry import ALL2ALL_BACKENDS

# Regardless of the default device: on meta these tensors would have no values.
_HOST = torch.device("cpu")
# Quantized experts process input columns in groups of this size.
_PACKED_COLUMNS = 32


def determine_expert_map(
    ep_size: int,
    ep_rank: int,
    global_num_experts: int,
    expert_placement_strategy: str = "linear",
    num_fused_shared_experts: int = 0,
    return_expert_mask: bool = False,
) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Determines the experts of one rank.

    E is divided evenly, and the first E % ep_size ranks get one more each: E=10 over 4 ranks is 3, 3, 2, 2, and if
    E < ep_size the last ranks have none.

    Example: E=5, ep_size=2, ep_rank=1: linear [-1, -1, -1, 0, 1], round_robin [-1, 0, -1, 1, -1].

    Args:
        return_expert_mask: also return the mask, and extend the map by the fused shared experts, which every rank holds
            after its routed ones.

    Returns:
        (local_num_experts, expert_map, expert_mask). local_num_experts counts routed experts only. expert_map is int32
        `[E]`, or `[E + shared]` with the mask: global -> local index, -1 if not local. expert_mask is int32
        `[E + shared + 1]`: 1 for local and for shared experts, 0 for others and at the end; None unless asked for. With
        ep_size 1 every expert is local, and both are None.

    Raises:
        ValueError: a size that is not positive, a rank outside [0, ep_size), an unknown strategy.
    """
    check_flags(return_expert_mask=return_expert_mask)
    E = global_num_experts
    owners = expert_owner_table(ep_size, E, expert_placement_strategy, num_fused_shared_experts, ep_rank)
    if ep_size == 1:
        return E, None, None
    is_local = owners == ep_rank
    local_num_experts = int(is_local[:E].sum())
    expert_map = torch.where(is_local, is_local.cumsum(0) - 1, -1).to(torch.int32)
    if not return_expert_mask:
        return local_num_experts, expert_map[:E], None
    expert_mask = torch.cat([is_local, torch.tensor([False], device=_HOST)]).to(torch.int32)
    return local_num_experts, expert_map, expert_mask


def get_compressed_expert_map(expert_map: torch.Tensor) -> str:
    """The local experts of a map as text, "local->global" in local order: "0->3, 1->4, 2->5".

    Args:
        expert_map: integer `[E]`, global -> local index, -1 if not local.
    """
    check_expert_map(expert_map)
    pairs = sorted((local, expert) for expert, local in enumerate(expert_map.tolist()) if local >= 0)
    return ", ".join(f"{local}->{expert}" for local, expert in pairs)


def round_robin_routing_tables(ep_size: int, global_num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps the ids of a round-robin placement to positions in rank order, and back.

    A backend that finds the owner of an id by division needs ids in the order of the ranks that hold them: all experts
    of rank 0 first, then all of rank 1. Global id e is sent to position global_to_physical[e].

    Example: E=8, ep_size=2: global_to_physical [0, 4, 1, 5, 2, 6, 3, 7], physical_to_global [0, 2, 4, 6, 1, 3, 5, 7].
    E=5, ep_size=2: [0, 3, 1, 4, 2] and [0, 2, 4, 1, 3].

    Returns:
        (global_to_physical, physical_to_global), both int32 `[E]`, each the inverse of the other.

    Raises:
        ValueError: a size that is not positive.
    """
    owners = _owners(ep_size, global_num_experts, "round_robin")
    physical_to_global = torch.sort(owners, stable=True).indices
    global_to_physical = torch.empty_like(physical_to_global)
    global_to_physical[physical_to_global] = torch.arange(global_num_experts, device=_HOST)
    return global_to_physical.to(torch.int32), physical_to_global.to(torch.int32)


def expert_owner_table(
    ep_size: int,
    global_num_experts: int,
    expert_placement_strategy: str = "linear",
    num_fused_shared_experts: int = 0,
    ep_rank: int = 0,
) -> torch.Tensor:
    """The EP rank that each expert id is sent to, int32 `[E + shared]`.

    Every rank holds the fused shared experts, so a rank sends their tokens to itself.

    Example: E=5, ep_size=2, one shared expert, ep_rank=1: linear [0, 0, 0, 1, 1, 1], round_robin [0, 1, 0, 1, 0, 1].

    Raises:
        ValueError: a size that is not positive, a rank outside [0, ep_size), an unknown strategy.
    """
    routed = _owners(ep_size, global_num_experts, expert_placement_strategy)
    check_at_least(0, num_fused_shared_experts=num_fused_shared_experts)
    check_below("ep_size", ep_size, ep_rank=ep_rank)
    return torch.cat([routed, torch.full((num_fused_shared_experts,), ep_rank, dtype=torch.int32, device=_HOST)])


def maybe_roundup_hidden_size(
    hidden_size: int,
    act_dtype: torch.dtype,
    quant_config: FusedMoEQuantConfig | None,
    parallel_config: FusedMoEParallelConfig,
) -> int:
    """The hidden size that a layer must allocate for its experts and its dispatch backend.

    Packed weights have input columns in groups of 32, and plain experts accept any size. A dispatch backend chosen by
    name may need a multiple (`hidden_size_multiple`, at most 16 for the backends here); "auto" finds a backend for any
    size. So a multiple of 32 is never changed.

    Args:
        act_dtype: dtype of the activations; nothing here depends on it.
        quant_config: the experts' quantization; None for plain weights.
        parallel_config: names the dispatch backend.

    Returns:
        The smallest size, not below `hidden_size`, that will do.

    Raises:
        ValueError: a hidden size that is not positive, or an unknown backend.
        TypeError: quant_config or parallel_config is no configuration.
    """
    check_at_least(1, hidden_size=hidden_size)
    if quant_config is not None and not isinstance(quant_config, FusedMoEQuantConfig):
        raise TypeError(
            f"quant_config is {quant_config!r}; it must be a FusedMoEQuantConfig, or None for plain weights"
        )
    if not isinstance(parallel_config, FusedMoEParallelConfig):
        raise TypeError(
            f"parallel_config is {parallel_config!r}; it must be a FusedMoEParallelConfig, as "
            f"FusedMoEParallelConfig.make() for one rank"
        )
    multiple = _PACKED_COLUMNS if quant_config is not None and quant_config.is_quantized else 1
    if parallel_config.use_all2all and parallel_config.all2all_backend != "auto":
        multiple = math.lcm(multiple, ALL2ALL_BACKENDS.load(parallel_config.all2all_backend).hidden_size_multiple)
    return -(-hidden_size // multiple) * multiple


def _owners(ep_size: int, global_num_experts: int, strategy: str) -> torch.Tensor:
    """The rank of each routed expert, int32 `[E]`."""
    check_at_least(1, ep_size=ep_size, global_num_experts=global_num_experts)
    if strategy not in EXPERT_PLACEMENT_STRATEGIES:
        raise ValueError(one_of("expert_placement_strategy", strategy, EXPERT_PLACEMENT_STRATEGIES))
    if strategy == "round_robin":
        return torch.arange(global_num_experts, dtype=torch.int32, device=_HOST) % ep_size
    base, remainder = divmod(global_num_experts, ep_size)
    ranks = torch.arange(ep_size, dtype=torch.int32, device=_HOST)
    return ranks.repeat_interleave(base + (ranks < remainder).long())
