"""Writes messages of fixed size in one Triton kernel, for `moe_ep.dispatch.batched_all_to_all`.

A message has two views: words of the rows, for copying, and int32, for header, ids, positions and weights.
"""

from __future__ import annotations

import torch

from moe_ep.kernels.dispatch_rows import as_words, row_blocks
from moe_ep.kernels.quantize import GROUP_SIZE, decode_e4m3, scale_offset
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2, tl, triton_jit

# Tokens and experts that a program compares at a time.
_PACK_TOKENS, _PACK_EXPERTS = 64, 32
_OPEN_EXPERTS = 128
_PLAN_TOKENS = 1024


@TritonKernel
def pack_messages_kernel(
    rows_ptr, ids_ptr, weights_ptr, owners_ptr, send_rows_ptr, send_meta_ptr, headers_ptr, slots_ptr,
    num_tokens, num_experts, num_words, row_stride, send_row_stride, send_rank_stride, meta_row_stride,
    meta_rank_stride, capacity,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton_jit
def _chose(
    ids_ptr, token, num_tokens, expert, TOPK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr
):
    """Whether a token chose an expert, int32 0 or 1 `[BLOCK_TOKENS, BLOCK_EXPERTS]`; an expert of -1
    counts as not chosen."""
    chose = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], dtype=tl.int32)
    for slot in tl.static_range(TOPK):
        chosen = tl.load(ids_ptr + token * TOPK + slot, mask=token < num_tokens, other=-2)
        chose |= (chosen[:, None] == tl.where(expert >= 0, expert, -3)[None, :]).to(tl.int32)
    return chose


@triton_jit
def _write_header(
    ids_ptr, owners_ptr, headers_ptr,
    first_expert, num_tokens, num_experts, rank_stride,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
):  # fmt: skip
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
    grid = (capacity + cdiv(num_experts, _PACK_EXPERTS), cdiv(num_words, block))
    pack_messages_kernel[grid](
        rows, topk_ids, topk_weights, owners, message_rows, message_meta, headers, slots,
        num_tokens, num_experts, num_words, rows.stride(0), message_rows.stride(1), message_rows.stride(0),
        message_meta.stride(1), message_meta.stride(0), capacity,
        NUM_RANKS=num_ranks, TOPK=topk, BLOCK_TOPK=next_power_of_2(topk), BLOCK_TOKENS=_PACK_TOKENS,
        BLOCK_EXPERTS=_PACK_EXPERTS, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
    return slots


@TritonKernel
def open_messages_kernel(
    rows_ptr, scales_ptr, meta_ptr, headers_ptr, map_ptr, batch_ptr, slots_ptr, weights_ptr, totals_ptr,
    num_experts, num_columns, max_rows, row_stride, rank_stride, meta_row_stride, meta_rank_stride, capacity,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, QUANTIZED: tl.constexpr,
    INT8: tl.constexpr, GROUP: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies received rows to the experts that they are for, and dequantizes QUANTIZED ones, of INT8 or e4m3 codes.

    Before: in the message of each rank a header int32 `[E]`, rows and meta int32 `[capacity, 3, TOPK]`. After: batch
    `[El, max_rows, K]`, slots int32 and weights f32 `[NUM_RANKS * capacity, TOPK]`, totals int32 `[El]`.
    Program (i, b) with i < NUM_RANKS * capacity handles block b of received row i: its row in an expert's batch is the
    number of tokens that earlier ranks have for the expert, from their headers, plus the position its sender gave it.
    Programs (NUM_RANKS * capacity + e, 0) add up the rows of local expert e.

    Example: headers [[2], [1]], row 0 of rank 1 with id 0 and position 0: batch row 2 of expert 0; totals [3].
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    if row >= NUM_RANKS * capacity:
        if block == 0:
            _total_rows(
                headers_ptr, map_ptr, totals_ptr, row - NUM_RANKS * capacity, num_experts, meta_rank_stride,
                NUM_RANKS, BLOCK_EXPERTS,
            )  # fmt: skip
        return
    source = (row // capacity).to(tl.int64)
    token = row % capacity
    slot = tl.arange(0, BLOCK_TOPK)
    in_slots = slot < TOPK
    meta = meta_ptr + source * meta_rank_stride + token * meta_row_stride + slot
    expert = tl.load(meta, mask=in_slots, other=-1)
    local = tl.load(map_ptr + expert, mask=expert >= 0, other=-1)
    wanted = local >= 0
    position = tl.load(meta + TOPK, mask=wanted, other=0)
    for earlier in tl.static_range(NUM_RANKS):
        header = headers_ptr + tl.full([], earlier, tl.int64) * meta_rank_stride
        position += tl.load(header + expert, mask=wanted & (slot < tl.where(earlier < source, TOPK, 0)), other=0)
    target = tl.where(wanted, local * max_rows + position, -1)
    if block == 0:
        weight = tl.load(meta + 2 * TOPK, mask=in_slots, other=0).to(tl.float32, bitcast=True)
        tl.store(slots_ptr + row * TOPK + slot, target, mask=in_slots)
        tl.store(weights_ptr + row * TOPK + slot, weight, mask=in_slots)
    if tl.max(target, axis=0) < 0:
        return

    column = block * BLOCK + tl.arange(0, BLOCK)
    in_row = column < num_columns
    values = tl.load(rows_ptr + source * rank_stride + token * row_stride + column, mask=in_row, other=0)
    if QUANTIZED:
        scales = scales_ptr + source * meta_rank_stride + token * meta_row_stride + column // GROUP
        if INT8:
            numbers = values.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            numbers = decode_e4m3(values)
        values = (numbers * tl.load(scales, mask=in_row, other=0.0)).to(batch_ptr.dtype.element_ty)
    for index in tl.static_range(TOPK):
        to = tl.max(tl.where(slot == index, target, -1), axis=0).to(tl.int64)
        tl.store(batch_ptr + to * num_columns + column, values, mask=column < tl.where(to >= 0, num_columns, 0))


@triton_jit
def _total_rows(
    headers_ptr, map_ptr, totals_ptr,
    local_expert, num_experts, rank_stride,
    NUM_RANKS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
):  # fmt: skip
    """totals[e] = rows that all ranks send for local expert e."""
    total = 0
    for start in range(0, num_experts, BLOCK_EXPERTS):
        expert = start + tl.arange(0, BLOCK_EXPERTS)
        local = tl.load(map_ptr + expert, mask=expert < num_experts, other=-1)
        mine = (local == local_expert) & (expert < num_experts)
        for rank in tl.static_range(NUM_RANKS):
            header = headers_ptr + tl.full([], rank, tl.int64) * rank_stride
            total += tl.sum(tl.load(header + expert, mask=mine, other=0), axis=0)
    tl.store(totals_ptr + local_expert, total)


def triton_open_messages(
    message_rows: torch.Tensor,
    message_meta: torch.Tensor,
    headers: torch.Tensor,
    expert_map: torch.Tensor,
    batch: torch.Tensor,
    code_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots, weights, expert_num_tokens); arguments as in `open_messages`, with the views of a MessageLayout."""
    num_ranks, capacity, _, topk = message_meta.shape
    num_local_experts, max_rows, hidden_size = batch.shape
    num_rows = num_ranks * capacity
    slots = message_meta.new_empty((num_rows, topk))
    weights = message_meta.new_empty((num_rows, topk), dtype=torch.float32)
    totals = message_meta.new_empty(num_local_experts)
    if code_dtype is not None:
        scales = message_rows[:, :, scale_offset(hidden_size) :].view(torch.float32)
        target = batch
    else:
        scales = None
        message_rows, target = as_words(message_rows.view(batch.dtype), batch)
    num_columns = target.size(2)
    block, num_warps = row_blocks(num_rows, num_columns, target.element_size())
    open_messages_kernel[(num_rows + num_local_experts, cdiv(num_columns, block))](
        message_rows, scales, message_meta, headers, expert_map, target, slots, weights, totals,
        headers.size(1), num_columns, max_rows, message_rows.stride(1), message_rows.stride(0), message_meta.stride(1),
        message_meta.stride(0), capacity,
        NUM_RANKS=num_ranks, TOPK=topk, BLOCK_TOPK=next_power_of_2(topk), QUANTIZED=code_dtype is not None,
        INT8=code_dtype == torch.int8, GROUP=GROUP_SIZE, BLOCK_EXPERTS=_OPEN_EXPERTS, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip
    return slots, weights, totals


@TritonKernel
def send_plan_kernel(
    ids_ptr, owners_ptr, slots_ptr, counts_ptr,
    num_tokens, num_experts, capacity,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton_jit
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
    send_plan_kernel[(num_ranks,)](
        topk_ids, owners, slots, counts,
        num_tokens, owners.numel(), capacity or 0,
        NUM_RANKS=num_ranks, TOPK=topk, EXACT=capacity is None, BLOCK=min(_PLAN_TOKENS, next_power_of_2(num_tokens)),
    )  # fmt: skip
    return slots, counts
