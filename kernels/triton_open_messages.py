"""Reads messages of fixed size in one Triton kernel; `moe_ep.dispatch.messages` calls it and describes the messages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.quantize import GROUP_SIZE, scale_offset
from moe_ep.kernels.triton_dispatch_rows import as_words, row_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2
from moe_ep.kernels.triton_quantize import decode_e4m3

_BLOCK_EXPERTS = 128


@TritonKernel
@triton.jit
def _open_messages_kernel(
    rows_ptr,
    scales_ptr,
    meta_ptr,
    headers_ptr,
    map_ptr,
    batch_ptr,
    slots_ptr,
    weights_ptr,
    totals_ptr,
    num_experts,
    num_columns,
    max_rows,
    row_stride,
    rank_stride,
    meta_row_stride,
    meta_rank_stride,
    capacity,
    NUM_RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    HAS_MAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies received rows to the experts that they are for, and dequantizes them if they are e4m3.

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
                NUM_RANKS, HAS_MAP, BLOCK_EXPERTS,
            )  # fmt: skip
        return
    source = (row // capacity).to(tl.int64)
    token = row % capacity
    slot = tl.arange(0, BLOCK_TOPK)
    in_slots = slot < TOPK
    meta = meta_ptr + source * meta_rank_stride + token * meta_row_stride + slot
    expert = tl.load(meta, mask=in_slots, other=-1)
    wanted = expert >= 0
    local = expert
    if HAS_MAP:
        local = tl.load(map_ptr + expert, mask=wanted, other=-1)
        wanted = wanted & (local >= 0)
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
        values = (decode_e4m3(values) * tl.load(scales, mask=in_row, other=0.0)).to(batch_ptr.dtype.element_ty)
    for index in tl.static_range(TOPK):
        to = tl.max(tl.where(slot == index, target, -1), axis=0).to(tl.int64)
        tl.store(batch_ptr + to * num_columns + column, values, mask=column < tl.where(to >= 0, num_columns, 0))


@triton.jit
def _total_rows(
    headers_ptr,
    map_ptr,
    totals_ptr,
    local_expert,
    num_experts,
    rank_stride,
    NUM_RANKS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """totals[e] = rows that all ranks send for local expert e."""
    total = 0
    for start in range(0, num_experts, BLOCK_EXPERTS):
        expert = start + tl.arange(0, BLOCK_EXPERTS)
        local = expert
        if HAS_MAP:
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
    expert_map: torch.Tensor | None,
    batch: torch.Tensor,
    quantized: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots, weights, expert_num_tokens); arguments as in `open_messages`, with the views of a MessageLayout."""
    num_ranks, capacity, _, topk = message_meta.shape
    num_local_experts, max_rows, hidden_size = batch.shape
    num_rows = num_ranks * capacity
    slots = message_meta.new_empty((num_rows, topk))
    weights = message_meta.new_empty((num_rows, topk), dtype=torch.float32)
    totals = message_meta.new_empty(num_local_experts)
    if quantized:
        scales = message_rows[:, :, scale_offset(hidden_size) :].view(torch.float32)
        target = batch
    else:
        scales = None
        message_rows, target = as_words(message_rows.view(batch.dtype), batch)
    num_columns = target.size(2)
    block, num_warps = row_blocks(num_rows, num_columns, target.element_size())
    _open_messages_kernel[(num_rows + num_local_experts, cdiv(num_columns, block))](
        message_rows,
        scales,
        message_meta,
        headers,
        None if expert_map is None else expert_map.to(torch.int32).contiguous(),
        target,
        slots,
        weights,
        totals,
        headers.size(1),
        num_columns,
        max_rows,
        message_rows.stride(1),
        message_rows.stride(0),
        message_meta.stride(1),
        message_meta.stride(0),
        capacity,
        NUM_RANKS=num_ranks,
        TOPK=topk,
        BLOCK_TOPK=next_power_of_2(topk),
        HAS_MAP=expert_map is not None,
        QUANTIZED=quantized,
        GROUP=GROUP_SIZE,
        BLOCK_EXPERTS=_BLOCK_EXPERTS,
        BLOCK=block,
        num_warps=num_warps,
    )
    return slots, weights, totals
