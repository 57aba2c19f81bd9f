"""Counts the choices of a model's own router."""

from __future__ import annotations

import torch

from moe_ep.registry import choose_form


def count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds 1 to counts[id] for every id of int32 `[T, top_k]` that is not negative; counts is int64 `[num_experts]`."""
    choose_form(_count_reference, "choices:triton_count_choices", topk_ids)(topk_ids, counts)


def _count_reference(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    flat = topk_ids.flatten().long()
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())
