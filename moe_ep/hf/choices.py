"""Choices that a model's own router made, as one tensor that travels in the place of router logits.

It is int32 `[T, 2, top_k]`: of every token the bits of its weights in f32, then its ids. In memory all weights come
first and then all ids, so taking it apart costs nothing, of a part of the tokens too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moe_ep.arguments import check_integers

# Numbers: 256 bytes, as fresh memory has it.
_ALIGNMENT = 64


def empty_choices(num_tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Room for choices; weights and ids both start where kernels may read many at once."""
    plane = -(-num_tokens * top_k // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(2 * plane, dtype=torch.int32, device=device)
    return memory.as_strided((num_tokens, 2, top_k), (top_k, plane, 1))


def pack_choices(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, row_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Choices of weights and ids; on CUDA tensors one kernel. No host synchronisation.

    Example: ids [[5, 2]], weights [[.5, .25]], 4 experts: [[[0, bits of .25], [-1, 2]]].

    Args:
        topk_ids: integer `[T, top_k]`; outside of [0, num_experts) for no expert, which becomes id -1 of weight 0.
        topk_weights: `[T, top_k]`, any float dtype.
        row_mask: bool `[T]`, rows that count; the others go to no expert. None where all do.

    Raises:
        ValueError: other shapes or dtypes.
    """
    check_integers(topk_ids=topk_ids)
    if not topk_weights.is_floating_point():
        raise ValueError(f"topk_weights is {topk_weights.dtype}; it must be of a float dtype")
    if topk_ids.dim() != 2 or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_ids has shape {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; both must be "
            f"(T, top_k), a weight for each choice"
        )
    choices = empty_choices(topk_ids.size(0), topk_ids.size(1), topk_ids.device)
    fused = _fused("triton_pack_choices") if topk_ids.is_cuda and topk_ids.numel() else None
    if fused is not None:
        fused(topk_ids, topk_weights, num_experts, row_mask, choices)
        return choices
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    if row_mask is not None:
        known &= row_mask[:, None]
    choices[:, 0] = torch.where(known, topk_weights.float(), 0.0).view(torch.int32)
    choices[:, 1] = torch.where(known, topk_ids, -1)
    return choices


def unpack_choices(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights f32 `[T, top_k]`, ids int32 `[T, top_k]`) of `pack_choices`, as views of it."""
    bits, ids = choices.unbind(1)
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
