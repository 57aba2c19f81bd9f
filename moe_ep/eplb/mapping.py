"""Logical expert ids to physical ones, and the record of where the load falls."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.arguments import check_id_range, check_integers, check_same_device, check_tensors
from moe_ep.eplb.levelling import map_reference
from moe_ep.errors import check_at_least, one_of
from moe_ep.registry import choose_form

_INDICES_TYPES = (torch.int32, torch.int64)


def eplb_map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    indices_type: torch.dtype | None = None,
    num_unpadded_tokens: int | torch.Tensor | None = None,
    *,
    ep_rank: int = 0,
    ep_size: int | None = None,
) -> torch.Tensor:
    """Chooses a replica for every slot of this rank's tokens and counts it.

    The rule is that of `moe_ep.eplb.levelling`: tokens go where this rank's tokens leave room, whole batches at a time,
    without asking other ranks. On CUDA tensors it is one kernel. No host synchronisation.

    Example: ids [[0, -1], [1, 0]], map [[0, 2], [1, -1]], count [2, 1]: expert 0 has two tokens and two replicas and
    gives each one. Result [[0, -1], [1, 2]], and the load grows by [1, 1, 1].

    Args:
        topk_ids: integer `[T, top_k]`, logical, -1 for none. On a GPU, where to check them would wait for it, ids of E
            and more are none too.
        expert_load_view: int32 `[num_physical]`, this layer's counts, added to in place.
        logical_to_physical_map: integer `[E, max_replicas]`, -1 padded.
        logical_replica_count: integer `[E]`, at least 1 each.
        indices_type: dtype of the result, int32 or int64; None keeps that of topk_ids, which must have room for
            physical ids.
        num_unpadded_tokens: rows that are real, an int or a 0-dim integer tensor on the device; rows behind them are
            mapped and not counted. None means all.
        ep_rank: whose tokens these are; ranks begin with different replicas.
        ep_size: ranks that hold the physical experts, as many each; their loads are levelled. None levels those of the
            physical experts themselves.

    Returns:
        Physical ids `[T, top_k]`; -1 stays -1 and is not counted.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an ep_size that does not divide the physical
            experts, or on the CPU an id of E or more, or maps that name replicas or physical experts that are not.
        TypeError: a rank or a number of tokens that is not a whole number.
    """
    _check(topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count)
    num_physical = expert_load_view.numel()
    check_at_least(0, ep_rank=ep_rank)
    if ep_size is not None:
        check_at_least(1, ep_size=ep_size)
        if num_physical % ep_size or ep_rank >= ep_size:
            raise ValueError(
                f"ep_rank is {ep_rank} and ep_size {ep_size} with {num_physical} physical experts; ep_size must divide "
                f"them and ep_rank be below it"
            )
    if indices_type is not None and indices_type not in _INDICES_TYPES:
        raise ValueError(one_of("indices_type", str(indices_type), [str(dtype) for dtype in _INDICES_TYPES]))
    dtype = indices_type or topk_ids.dtype
    check_id_range(num_physical, dtype)
    slots_per_rank = 1 if ep_size is None else num_physical // ep_size
    num_counted = _num_counted(num_unpadded_tokens, topk_ids)
    arguments = topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, num_counted
    form = choose_form(_map_plain, "eplb_map:map_and_record", topk_ids, needs="nvrtc")
    return form(*arguments, ep_rank, slots_per_rank, dtype)


def _map_plain(topk_ids: torch.Tensor, *more: Any) -> torch.Tensor:
    return (map_reference(topk_ids, *more[:-1]) if topk_ids.numel() else topk_ids).to(more[-1])


def _num_counted(num_unpadded_tokens: int | torch.Tensor | None, topk_ids: torch.Tensor) -> int | torch.Tensor:
    """How many rows are real, checked."""
    if num_unpadded_tokens is None:
        return topk_ids.size(0)
    if isinstance(num_unpadded_tokens, torch.Tensor):
        check_integers(num_unpadded_tokens=num_unpadded_tokens)
        check_same_device("topk_ids", topk_ids.device, num_unpadded_tokens=num_unpadded_tokens)
        if num_unpadded_tokens.dim():
            raise ValueError(f"num_unpadded_tokens has shape {tuple(num_unpadded_tokens.shape)}; it must be one number")
        return num_unpadded_tokens
    check_at_least(0, num_unpadded_tokens=num_unpadded_tokens)
    return int(num_unpadded_tokens)


def _check(
    topk_ids: torch.Tensor, expert_load_view: torch.Tensor, table: torch.Tensor, replica_count: torch.Tensor
) -> None:
    others = {"logical_to_physical_map": table, "logical_replica_count": replica_count}
    check_tensors(topk_ids=topk_ids, expert_load_view=expert_load_view, **others)
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}; it must be (T, top_k)")
    if table.dim() != 2 or replica_count.shape != table.shape[:1]:
        raise ValueError(
            f"logical_to_physical_map has shape {tuple(table.shape)} and logical_replica_count "
            f"{tuple(replica_count.shape)}; they must be (E, max_replicas) and (E,), one layer's rows"
        )
    if expert_load_view.dim() != 1:
        raise ValueError(
            f"expert_load_view has shape {tuple(expert_load_view.shape)}; it must be (num_physical,), one layer's row"
        )
    # The kernel reads them by their addresses.
    if expert_load_view.dtype is not torch.int32:
        raise ValueError(f"expert_load_view is {expert_load_view.dtype}; it must be torch.int32")
    check_integers(topk_ids=topk_ids, **others)
    check_same_device("topk_ids", topk_ids.device, expert_load_view=expert_load_view, **others)
    # On a GPU this would wait for the device.
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    if (largest := int(topk_ids.max())) >= len(table):
        raise ValueError(f"topk_ids holds expert {largest}; the maps are of experts 0 to {len(table) - 1}")
    _check_maps(table, replica_count, expert_load_view.numel())


def _check_maps(table: torch.Tensor, replica_count: torch.Tensor, num_physical: int) -> None:
    """ValueError unless every expert has replicas, and all of them are physical experts."""
    if not len(table):
        return
    least, most = (int(bound) for bound in replica_count.aminmax())
    if least < 1 or most > table.size(1):
        raise ValueError(
            f"logical_replica_count goes from {least} to {most}; every expert must have at least 1 and at most the "
            f"{table.size(1)} of logical_to_physical_map"
        )
    named = table[torch.arange(table.size(1), device=table.device) < replica_count[:, None]]
    least, most = (int(bound) for bound in named.aminmax())
    if least < 0 or most >= num_physical:
        raise ValueError(
            f"logical_to_physical_map names physical experts from {least} to {most}; they must be at least 0 and below "
            f"those of expert_load_view ({num_physical})"
        )
