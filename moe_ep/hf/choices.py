"""Counts the choices of a model's own router."""

from __future__ import annotations

import torch

from moe_ep.registry import optional_kernel


def count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds 1 to counts[id] for every id of int32 `[T, top_k]` that is not negative; counts is int64 `[num_experts]`."""
    fused = (
        optional_kernel("moe_ep.kernels.triton_choices:triton_count_choices")
        if topk_ids.is_cuda and topk_ids.numel()
        else None
    )
    if fused is not None:
        fused(topk_ids, counts)
        return
    flat = topk_ids.flatten().long()
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())
