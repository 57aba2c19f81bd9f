"""Choices that a model's own router made, as one tensor that travels in the place of router logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def pack_choices(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, row_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 `[T, 2 * top_k]`: the bits of the weights in f32, then the ids.

    On CUDA tensors one kernel. No host synchronisation.

    Example: ids [[5, 2]], weights [[.5, .25]], 4 experts: [[0, bits of .25, -1, 2]].

    Args:
        topk_ids: integer `[T, top_k]`; outside of [0, num_experts) for no expert, which becomes id -1 of weight 0.
        topk_weights: `[T, top_k]`, any float dtype.
        row_mask: bool `[T]`, rows that count; the others go to no expert. None where all do.
    """
    fused = _fused("triton_pack_choices") if topk_ids.is_cuda and topk_ids.numel() else None
    if fused is not None:
        return fused(topk_ids, topk_weights, num_experts, row_mask)
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    if row_mask is not None:
        known &= row_mask[:, None]
    ids = torch.where(known, topk_ids, -1).to(torch.int32)
    weights = torch.where(known, topk_weights.float(), 0.0)
    return torch.cat([weights.view(torch.int32), ids], dim=1)


def unpack_choices(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights f32 `[T, top_k]`, ids int32 `[T, top_k]`) of `pack_choices`."""
    fused = _fused("triton_unpack_choices") if choices.is_cuda and choices.numel() else None
    if fused is not None:
        return fused(choices)
    bits, ids = choices.chunk(2, dim=1)
    return bits.contiguous().view(torch.float32), ids.contiguous()


def count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds 1 to counts[id] for every id of int32 `[T, top_k]` that is not negative; counts is int64 `[num_experts]`."""
    fused = _fused("triton_count_choices") if topk_ids.is_cuda and topk_ids.numel() else None
    if fused is not None:
        fused(topk_ids, counts)
        return
    flat = topk_ids.flatten().long()
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())


@cache
def _fused(name: str) -> Callable[..., Any] | None:
    """The Triton form, or None where Triton is not installed."""
    try:
        from moe_ep.kernels import triton_choices
    except ImportError:
        return None
    return getattr(triton_choices, name)
