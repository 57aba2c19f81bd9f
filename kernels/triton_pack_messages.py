"""Writes messages of fixed size in one Triton kernel; `moe_ep.dispatch.messages` calls it and describes the messages.

A message has two views: words of the rows, for copying, and int32, for header, ids, positions and weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.triton_dispatch_rows import as_words, row_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2

_BLOCK_TOKENS = 64
_BLOCK_EXPERTS = 32


@TritonKernel
@triton.jit
def _pack_messages_kernel(
    rows_ptr,
    ids_ptr,
    weights_ptr,
    owners_ptr,
    send_rows_ptr,
    send_meta_ptr,
    headers_ptr,
    slots_ptr,
    num_tokens,
    num_experts,
    num_words,
    row_stride,
    send_row_stride,
    send_rank_stride,
    meta_row_stride,
    meta_rank_stride,
    capacity,
    NUM_RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the messages to all ranks.

    Before: rows `[T, W]` words, ids int32 and weights f32 `[T, TOPK]`, owners int32 `[E]`. After: headers int32 `[E]`,
    rows and meta int32 `[capacity, 3, TOPK]` in the message to each rank, slots int32 `[T, NUM_RANKS]`.
    Program (t, b) with t < capacity copies block b of token t to the ranks of its experts; b = 0 also finds the
    token's position within each of its experts, by going through the tokens before it, and writes the meta. Programs
    (capacity + i, 0) count the tokens of BLOCK_EXPERTS experts each.

    Example: two ranks, owners [0, 1], ids [[1], [1]], capacity 3: to rank 1 go header [0, 2], both rows and ids
    [1, 1, -1] with positions [0, 1, 0]; to rank 0 header [0, 0] and ids [-1, -1, -1]; slots [[-1, 3], [-1, 4]].
    """
    token = tl.program_id(0)
    block = tl.program_id(1)
    if token >= capacity:
        if block == 0:
            _write_header(
                ids_ptr, owners_ptr, headers_ptr, (token - capacity) * BLOCK_EXPERTS, num_tokens, num_experts,
                meta_rank_stride, NUM_RANKS, TOPK, BLOCK_TOKENS, BLOCK_EXPERTS,
            )  # fmt: skip
        return
    slot = tl.arange(0, BLOCK_TOPK)
    in_slots = slot < TOPK
    expert = tl.load(ids_ptr + token * TOPK + slot, mask=slot < tl.where(token < num_tokens, TOPK, 0), other=-1)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1)
    owner = tl.load(owners_ptr + expert, mask=expert >= 0, other=-1)

    column = block * BLOCK + tl.arange(0, BLOCK)
    in_row = column < tl.where(token < num_tokens, num_words, 0)
    values = tl.load(rows_ptr + token.to(tl.int64) * row_stride + column, mask=in_row, other=0)
    for rank in tl.static_range(NUM_RANKS):
        goes = tl.max(tl.where(owner == rank, 1, 0), axis=0)
        target = send_rows_ptr + tl.full([], rank, tl.int64) * send_rank_stride + token * send_row_stride + column
        tl.store(target, values, mask=column < tl.where(goes == 1, num_words, 0))

    if block == 0:
        position = tl.zeros([BLOCK_TOPK], dtype=tl.int32)
        for start in range(0, tl.minimum(token, num_tokens), BLOCK_TOKENS):
            other = start + tl.arange(0, BLOCK_TOKENS)
            chose = _chose(ids_ptr, other, token, expert, TOPK, BLOCK_TOKENS, BLOCK_TOPK)
            position += tl.sum(chose, axis=0)
        weight = tl.load(weights_ptr + token * TOPK + slot, mask=expert >= 0, other=0.0)
        for rank in tl.static_range(NUM_RANKS):
            theirs = owner == rank
            meta = send_meta_ptr + tl.full([], rank, tl.int64) * meta_rank_stride + token * meta_row_stride + slot
            tl.store(meta, tl.where(theirs, expert, -1), mask=in_slots)
            tl.store(meta + TOPK, tl.where(theirs, position, 0), mask=in_slots)
            bits = tl.where(theirs, weight, 0.0).to(tl.int32, bitcast=True)
            tl.store(meta + 2 * TOPK, bits, mask=in_slots)
            if token < num_tokens:
                goes = tl.max(tl.where(theirs, 1, 0), axis=0)
                tl.store(slots_ptr + token * NUM_RANKS + rank, tl.where(goes == 1, rank * capacity + token, -1))


@triton.jit
def _chose(
    ids_ptr, token, num_tokens, expert, TOPK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr
):
    """Whether a token chose an expert, int32 0 or 1 `[BLOCK_TOKENS, BLOCK_EXPERTS]`; experts of -1 were chosen by
    nobody."""
    chose = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], dtype=tl.int32)
    for slot in tl.static_range(TOPK):
        chosen = tl.load(ids_ptr + token * TOPK + slot, mask=token < num_tokens, other=-2)
        chose |= (chosen[:, None] == tl.where(expert >= 0, expert, -3)[None, :]).to(tl.int32)
    return chose


@triton.jit
def _write_header(
    ids_ptr,
    owners_ptr,
    headers_ptr,
    first_expert,
    num_tokens,
    num_experts,
    rank_stride,
    NUM_RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Counts the tokens of BLOCK_EXPERTS experts, into the message to their owner; 0 into the others."""
    expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
    count = tl.zeros([BLOCK_EXPERTS], dtype=tl.int32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        count += tl.sum(_chose(ids_ptr, token, num_tokens, expert, TOPK, BLOCK_TOKENS, BLOCK_EXPERTS), axis=0)
    owner = tl.load(owners_ptr + expert, mask=expert < num_experts, other=-1)
    for rank in tl.static_range(NUM_RANKS):
        header = headers_ptr + tl.full([], rank, tl.int64) * rank_stride
        tl.store(header + expert, tl.where(owner == rank, count, 0), mask=expert < num_experts)


def triton_pack_messages(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    owners: torch.Tensor,
    message_rows: torch.Tensor,
    message_meta: torch.Tensor,
    headers: torch.Tensor,
) -> torch.Tensor:
    """Writes messages and returns slots; arguments as in `pack_messages`, with the views of a MessageLayout."""
    num_ranks, capacity = message_rows.shape[:2]
    num_tokens, topk = topk_ids.shape
    num_experts = owners.numel()
    rows, message_rows = as_words(rows.contiguous(), message_rows.view(rows.dtype))
    num_words = rows.size(1)
    slots = topk_ids.new_empty((num_tokens, num_ranks))
    block, num_warps = row_blocks(capacity, num_words, rows.element_size())
    grid = (capacity + cdiv(num_experts, _BLOCK_EXPERTS), cdiv(num_words, block))
    _pack_messages_kernel[grid](
        rows,
        topk_ids,
        topk_weights,
        owners,
        message_rows,
        message_meta,
        headers,
        slots,
        num_tokens,
        num_experts,
        num_words,
        rows.stride(0),
        message_rows.stride(1),
        message_rows.stride(0),
        message_meta.stride(1),
        message_meta.stride(0),
        capacity,
        NUM_RANKS=num_ranks,
        TOPK=topk,
        BLOCK_TOPK=next_power_of_2(topk),
        BLOCK_TOKENS=_BLOCK_TOKENS,
        BLOCK_EXPERTS=_BLOCK_EXPERTS,
        BLOCK=block,
        num_warps=num_warps,
    )
    return slots
