"""The choices of a model's router: `moe_ep.routing.router` cleans and records them, `moe_ep.hf.routed_experts` counts
them."""

from __future__ import annotations

import torch

from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, tl
from moe_ep.routing.router import ChoiceLog

_BLOCK = 256
# Numbers: 256 bytes, so that ids start where kernels may read many at once.
_ALIGNMENT = 64


@TritonKernel
def _pack_kernel(
    ids_ptr, weights_ptr, mask_ptr, choices_ptr, rows_ptr, ids_log_ptr, weights_log_ptr,
    num_slots, num_experts, id_token_stride, id_slot_stride, weight_token_stride, weight_slot_stride, plane_stride,
    TOP_K: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LOG: tl.constexpr, LOGS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies each token's weights and ids, replacing those of unknown experts by 0 and -1.

    Before: ids and weights `[T, TOP_K]`, mask `[T]`, rows int64 `[T]`. After: int32 bits of the f32 weights of all
    slots, and all ids plane_stride numbers after the first of these; with HAS_LOG the ids as int16 in each token's row
    of a log, with LOGS_WEIGHTS the weights in another. Program b makes slots b * BLOCK ... of all T * TOP_K.

    Example: ids [[5, 2]], weights [[.5, .25]], 4 experts, plane_stride 3: 0, bits of .25, (unused), -1, 2; with rows
    [7], row 7 of the logs becomes [-1, 2] and [0, .25].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    token, column = slot // TOP_K, slot % TOP_K
    expert = tl.load(ids_ptr + token * id_token_stride + column * id_slot_stride, mask=inside, other=-1)
    weight = tl.load(weights_ptr + token * weight_token_stride + column * weight_slot_stride, mask=inside, other=0.0)
    known = (expert >= 0) & (expert < num_experts)
    if HAS_MASK:
        known &= tl.load(mask_ptr + token, mask=inside, other=0) != 0
    weight, expert = tl.where(known, weight.to(tl.float32), 0.0), tl.where(known, expert, -1)
    tl.store(choices_ptr + slot, weight.to(tl.int32, bitcast=True), mask=inside)
    tl.store(choices_ptr + plane_stride + slot, expert.to(tl.int32), mask=inside)
    if HAS_LOG:
        place = tl.load(rows_ptr + token, mask=inside, other=0) * TOP_K + column
        tl.store(ids_log_ptr + place, expert.to(tl.int16), mask=inside)
        if LOGS_WEIGHTS:
            tl.store(weights_log_ptr + place, weight, mask=inside)


@TritonKernel
def _count_kernel(ids_ptr, counts_ptr, num_slots, BLOCK: tl.constexpr):
    """Adds each id of `[T, top_k]` that is not negative to counts int64 `[num_experts]`.

    Example: ids [[0, -1], [0, 1]]: counts grow by [2, 1].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
    tl.atomic_add(counts_ptr + expert, tl.full([BLOCK], 1, tl.int64), mask=expert >= 0, sem="relaxed")


def triton_known_choices(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    row_mask: torch.Tensor | None,
    log: ChoiceLog | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moe_ep.routing.router.known_choices` of at least one slot; weights and ids share one allocation."""
    num_tokens, top_k = topk_ids.shape
    num_slots = num_tokens * top_k
    plane = cdiv(num_slots, _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(2, plane, dtype=torch.int32, device=topk_ids.device)
    rows, ids_log, weights_log = (None, None, None) if log is None else log
    _pack_kernel[(cdiv(num_slots, _BLOCK),)](
        topk_ids, topk_weights, None if row_mask is None else row_mask.contiguous(), memory,
        rows, ids_log, weights_log,
        num_slots, num_experts, *topk_ids.stride(), *topk_weights.stride(), plane,
        TOP_K=top_k, HAS_MASK=row_mask is not None, HAS_LOG=log is not None,
        LOGS_WEIGHTS=weights_log is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    weights, ids = memory[:, :num_slots].unbind()
    return weights.view(torch.float32).view(num_tokens, top_k), ids.view(num_tokens, top_k)


def triton_count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """`count_choices` of at least one slot."""
    ids = topk_ids.contiguous()
    _count_kernel[(cdiv(ids.numel(), _BLOCK),)](ids, counts, ids.numel(), BLOCK=_BLOCK)
