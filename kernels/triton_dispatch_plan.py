"""Computes which token goes to which rank in one Triton kernel, called by `moe_ep.dispatch.payload.make_send_plan`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.triton_kernel import TritonKernel, next_power_of_2

_BLOCK_TOKENS = 1024


@TritonKernel
@triton.jit
def _send_plan_kernel(
    ids_ptr,
    owners_ptr,
    slots_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    capacity,
    NUM_RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes column r of the plan: each token's row among all that this rank sends, -1 if rank r does not need it.

    Before: ids int32 `[T, TOPK]`, owners int32 `[E]`. After: slots int32 `[T, NUM_RANKS]`, counts int32 `[NUM_RANKS]`.
    Program r goes through the tokens in blocks. A token's destinations are the bits of one int64, so that program r
    counts its own tokens and, for the first row of its part, those of the ranks before it in the same pass; a second
    pass writes the rows.

    Example: owners [0, 0, 1, 1], ids [[0, 1], [2, 0], [-1, 3]]: destinations [1, 3, 2]; program 1 finds 2 tokens, 2
    before its part, and writes [-1, 2, 3].
    """
    rank = tl.program_id(0)
    first = rank * capacity
    if EXACT:
        before = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, num_tokens, BLOCK):
            token = start + tl.arange(0, BLOCK)
            to = _destinations(ids_ptr, owners_ptr, token, num_tokens, num_experts, TOPK, BLOCK)
            for earlier in range(rank):
                before += ((to >> earlier) & 1).to(tl.int32)
        first = tl.sum(before, axis=0)
    count = 0
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        to = _destinations(ids_ptr, owners_ptr, token, num_tokens, num_experts, TOPK, BLOCK)
        has = ((to >> rank) & 1).to(tl.int32)
        if EXACT:
            row = first + count + tl.cumsum(has, axis=0) - 1
        else:
            row = first + token
        tl.store(slots_ptr + token * NUM_RANKS + rank, tl.where(has == 1, row, -1), mask=token < num_tokens)
        count += tl.sum(has, axis=0)
    tl.store(counts_ptr + rank, count)


@triton.jit
def _destinations(ids_ptr, owners_ptr, token, num_tokens, num_experts, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """The ranks of each token's experts as bits, int64 `[BLOCK]`."""
    to = tl.zeros([BLOCK], dtype=tl.int64)
    for slot in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + token * TOPK + slot, mask=token < num_tokens, other=-1)
        exists = (expert >= 0) & (expert < num_experts)
        owner = tl.load(owners_ptr + expert, mask=exists, other=0).to(tl.int64)
        to |= tl.where(exists, tl.full([BLOCK], 1, tl.int64) << owner, 0)
    return to


def triton_send_plan(
    topk_ids: torch.Tensor, owners: torch.Tensor, num_ranks: int, capacity: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, counts); arguments as in `make_send_plan`, not checked."""
    topk_ids = topk_ids.contiguous()
    num_tokens, topk = topk_ids.shape
    slots = topk_ids.new_empty((num_tokens, num_ranks))
    counts = topk_ids.new_empty(num_ranks)
    _send_plan_kernel[(num_ranks,)](
        topk_ids,
        owners,
        slots,
        counts,
        num_tokens,
        owners.numel(),
        capacity or 0,
        NUM_RANKS=num_ranks,
        TOPK=topk,
        EXACT=capacity is None,
        BLOCK=min(_BLOCK_TOKENS, next_power_of_2(num_tokens)),
    )
    return slots, counts
