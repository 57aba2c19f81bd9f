"""Logical expert ids to physical ones, and the record of where the load falls.

A logical expert with several replicas must spread its tokens evenly over them, on every rank, without asking anyone.
The rule is a fixed hash of the token's row t and the logical id e:

    replica = floor(count * frac(t * A + e * B)),   A = 0x9E3779B1 / 2**32, B = 0x85EBCA6B / 2**32

computed exactly in integers. A is the golden ratio's fraction (Knuth, TAOCP vol. 3, 6.4): of any run of consecutive
rows each replica gets its share to within a few rows. B keeps the experts of one row from all taking the same replica.
"""

from __future__ import annotations

import torch

_ROW_STEP = 0x9E3779B1
_EXPERT_STEP = 0x85EBCA6B
_BITS = 32


def eplb_map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    indices_type: torch.dtype | None = None,
    num_unpadded_tokens: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Chooses a replica for every slot of this rank's tokens and counts it.

    No host synchronisation. Example: ids [[0, -1], [1, 0]], map [[0, 2], [1, -1]], count [2, 1]: row 0 hashes to 0 and
    takes physical 0; row 1 takes 1 for expert 1, and for expert 0 floor(2 * 0.618) = 1, which is physical 2. Result
    [[0, -1], [1, 2]], and the load grows by [1, 1, 1].

    Args:
        topk_ids: integer `[T, top_k]`, logical, -1 for none.
        expert_load_view: int32 `[num_physical]`, this layer's counts, added to in place.
        logical_to_physical_map: integer `[E, max_replicas]`, -1 padded.
        logical_replica_count: integer `[E]`, at least 1 each.
        indices_type: dtype of the result; None keeps that of topk_ids.
        num_unpadded_tokens: rows that are real, an int or a 0-dim tensor on the device; rows behind them are mapped and
            not counted. None means all.

    Returns:
        Physical ids `[T, top_k]`; -1 stays -1 and is not counted.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}; it must be (T, top_k)")
    if logical_to_physical_map.dim() != 2 or logical_replica_count.shape != logical_to_physical_map.shape[:1]:
        raise ValueError(
            f"logical_to_physical_map has shape {tuple(logical_to_physical_map.shape)} and logical_replica_count "
            f"{tuple(logical_replica_count.shape)}; they must be (E, max_replicas) and (E,), one layer's rows"
        )
    if expert_load_view.dim() != 1:
        raise ValueError(
            f"expert_load_view has shape {tuple(expert_load_view.shape)}; it must be (num_physical,), one layer's row"
        )

    row = torch.arange(topk_ids.size(0), device=topk_ids.device)[:, None]
    is_expert = topk_ids >= 0
    logical = topk_ids.long().clamp(min=0)
    fraction = (row * _ROW_STEP + logical * _EXPERT_STEP) & ((1 << _BITS) - 1)
    replica = (fraction * logical_replica_count.long()[logical]) >> _BITS
    physical = logical_to_physical_map.long()[logical, replica]

    counted = is_expert
    if num_unpadded_tokens is not None:
        counted = is_expert & (row < num_unpadded_tokens)
    slots = torch.where(counted, physical, 0).flatten()
    expert_load_view.scatter_add_(0, slots, counted.flatten().to(expert_load_view.dtype))
    return torch.where(is_expert, physical, -1).to(indices_type or topk_ids.dtype)
