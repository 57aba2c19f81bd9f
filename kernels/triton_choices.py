"""Packing, unpacking and counting choices, a Triton kernel each; called by `moe_ep.integrations.choices`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit
def _pack_kernel(
    ids_ptr,
    weights_ptr,
    mask_ptr,
    choices_ptr,
    num_slots,
    num_experts,
    id_token_stride,
    id_slot_stride,
    weight_token_stride,
    weight_slot_stride,
    TOP_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Puts each token's weights and ids side by side, those of no expert as 0 and -1.

    Before: ids and weights `[T, TOP_K]`, mask `[T]`. After: choices int32 `[T, 2 * TOP_K]`, bits of f32, then ids.
    Program b makes slots b * BLOCK ... of all T * TOP_K.

    Example: ids [[5, 2]], weights [[.5, .25]], 4 experts: [[0, bits of .25, -1, 2]].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    token, column = slot // TOP_K, slot % TOP_K
    expert = tl.load(ids_ptr + token * id_token_stride + column * id_slot_stride, mask=inside, other=-1)
    weight = tl.load(weights_ptr + token * weight_token_stride + column * weight_slot_stride, mask=inside, other=0.0)
    known = (expert >= 0) & (expert < num_experts)
    if HAS_MASK:
        known &= tl.load(mask_ptr + token, mask=inside, other=0) != 0
    bits = tl.where(known, weight.to(tl.float32), 0.0).to(tl.int32, bitcast=True)
    target = choices_ptr + token * (2 * TOP_K) + column
    tl.store(target, bits, mask=inside)
    tl.store(target + TOP_K, tl.where(known, expert, -1).to(tl.int32), mask=inside)


@triton.jit
def _unpack_kernel(
    choices_ptr, weights_ptr, ids_ptr, num_slots, token_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Takes choices int32 `[T, 2 * TOP_K]` apart: weights f32 and ids int32, `[T, TOP_K]` each.

    Example: [[0, bits of .25, -1, 2]]: weights [[0, .25]], ids [[-1, 2]].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    source = choices_ptr + (slot // TOP_K) * token_stride + slot % TOP_K
    tl.store(weights_ptr + slot, tl.load(source, mask=inside).to(tl.float32, bitcast=True), mask=inside)
    tl.store(ids_ptr + slot, tl.load(source + TOP_K, mask=inside), mask=inside)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, num_slots, BLOCK: tl.constexpr):
    """Adds each id of `[T, top_k]` that is not negative to counts int64 `[num_experts]`.

    Example: ids [[0, -1], [0, 1]]: counts grow by [2, 1].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    tl.atomic_add(counts_ptr + expert, tl.full([BLOCK], 1, tl.int64), mask=expert >= 0, sem="relaxed")


def triton_pack_choices(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, row_mask: torch.Tensor | None
) -> torch.Tensor:
    """`pack_choices` of at least one slot."""
    num_tokens, top_k = topk_ids.shape
    choices = torch.empty(num_tokens, 2 * top_k, dtype=torch.int32, device=topk_ids.device)
    with torch.cuda.device_of(topk_ids):
        _pack_kernel[(triton.cdiv(num_tokens * top_k, _BLOCK),)](
            topk_ids,
            topk_weights,
            row_mask,
            choices,
            num_tokens * top_k,
            num_experts,
            *topk_ids.stride(),
            *topk_weights.stride(),
            TOP_K=top_k,
            HAS_MASK=row_mask is not None,
            BLOCK=_BLOCK,
        )
    return choices


def triton_unpack_choices(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`unpack_choices` of at least one slot."""
    num_tokens, top_k = choices.size(0), choices.size(1) // 2
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=choices.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=choices.device)
    with torch.cuda.device_of(choices):
        _unpack_kernel[(triton.cdiv(num_tokens * top_k, _BLOCK),)](
            choices, weights, ids, num_tokens * top_k, choices.stride(0), TOP_K=top_k, BLOCK=_BLOCK
        )
    return weights, ids


def triton_count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """`count_choices` of at least one slot."""
    ids = topk_ids.contiguous()
    with torch.cuda.device_of(ids):
        _count_kernel[(triton.cdiv(ids.numel(), _BLOCK),)](ids, counts, ids.numel(), BLOCK=_BLOCK)
