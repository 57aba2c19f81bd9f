"""Rows of a dispatch and its combine: packed for the wire, weighted for the combine, and summed by their owner.

Each function has a Triton form for CUDA tensors and a plain one, which is the reference and is used without Triton;
both give the same bits. Slots are row numbers, -1 for none.
"""

from __future__ import annotations

import functools

import torch

from moe_ep.kernels.mul_sum import ENOUGH_PROGRAMS, choose_blocks
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2, tl
from moe_ep.registry import operator


def _has_contiguous_rows(rows: torch.Tensor) -> bool:
    return rows.stride(1) == 1


@operator("rows", suits=_has_contiguous_rows)
def pack_rows(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    send_rows: torch.Tensor,
    send_meta: torch.Tensor,
) -> None:
    """Copies each token to its row for every destination rank, with that rank's ids and weights.

    Example: owners [0, 1], ids [[0, 1]], slots [[0, 1]]: send_rows = [row, row], ids in send_meta [[0, -1], [-1, 1]].

    Args:
        rows: `[T, W]`, any dtype.
        topk_ids: int32 `[T, topk]`, contiguous.
        topk_weights: f32 `[T, topk]`, contiguous.
        owners: int32 `[E]`.
        slots: int32 `[T, R]`.
        send_rows: `[M, W]` of rows' dtype; only rows that a slot names are written.
        send_meta: int32 `[M, 2 * topk]`: ids, -1 where the expert is another rank's, then the bits of the weights,
            0 there.
    """
    token, rank = (slots >= 0).nonzero(as_tuple=True)
    target = slots[token, rank].long()
    send_rows[target] = rows[token]
    ids, topk = topk_ids[token], topk_ids.size(1)
    exists = (ids >= 0) & (ids < owners.numel())
    is_theirs = exists & (owners[ids.long().clamp(0, owners.numel() - 1)] == rank[:, None])
    send_meta[target, :topk] = torch.where(is_theirs, ids, -1)
    send_meta[target, topk:] = torch.where(is_theirs, topk_weights[token], 0.0).view(torch.int32)


@operator("expert_output", "send_rows", suits=_has_contiguous_rows)
def weighted_rows(
    expert_output: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, send_rows: torch.Tensor
) -> None:
    """send_rows[i] = sum over slots j, in order and in f32, of weights[i, j] * expert_output[slots[i, j]].

    A row without any slot reads nothing, and its result is undefined.

    Args:
        expert_output: `[X, K]`.
        slots: int32 `[M, topk]`.
        weights: f32 `[M, topk]`; None for a plain sum.
        send_rows: `[M, K]`, rounded once from f32.
    """
    _plain_sum(expert_output, slots, weights, send_rows)


@operator("output", "received", suits=_has_contiguous_rows)
def sum_rows(
    received: torch.Tensor, slots: torch.Tensor, output: torch.Tensor, weights: torch.Tensor | None = None
) -> None:
    """output[t] = sum over j, in order and in f32, of received[slots[t, j]]; zeros for a token without any.

    Args:
        received: `[M, K]`; rows that no slot names may contain anything.
        slots: int32 `[T, R]`, one for each rank, or `[T, topk]`.
        output: `[T, K]`, rounded once from f32.
        weights: f32, of the shape of slots, contiguous; None for a plain sum.
    """
    _plain_sum(received, slots, weights, output)


def _plain_sum(source: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, target: torch.Tensor) -> None:
    """Slots of -1 add 0."""
    total = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
    for slot in range(slots.size(1) if source.size(0) else 0):
        rows = source[slots[:, slot].long().clamp(min=0)].float()
        if weights is not None:
            rows = rows * weights[:, slot, None]
        total += torch.where(slots[:, slot, None] >= 0, rows, 0.0)
    target.copy_(total)


# With this many programs a thread moves two vectors, and what each program must look up is paid half as often.
_PLENTY = 8 * ENOUGH_PROGRAMS


@functools.lru_cache(maxsize=1024)
def row_blocks(num_rows: int, num_columns: int, element_size: int) -> tuple[int, int]:
    """Chooses (columns per program, warps) for a kernel with one program for each row and block of columns.

    Example: bf16, 7168 columns: 4096 rows give (2048, 4), 128 rows (1024, 4), one row (256, 1).
    """
    block, num_warps = choose_blocks(num_rows, num_columns, element_size)
    if block < num_columns and num_rows * cdiv(num_columns, 2 * block) >= _PLENTY:
        block *= 2
    return block, num_warps


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same rows as words of the widest integer type that fits all of them, for kernels that only copy.

    All tensors have one dtype and end in a contiguous dimension of one length; other strides may differ.
    """
    size = tensors[0].element_size()
    row_bytes = tensors[0].size(-1) * size
    for word in (torch.int32, torch.int16):
        if word.itemsize >= size and all(
            (length * size) % word.itemsize == 0
            for tensor in tensors
            for length in (*tensor.stride()[:-1], tensor.storage_offset(), row_bytes // size)
        ):
            return tuple(tensor.view(word) for tensor in tensors)
    return tuple(tensor.view(torch.uint8) for tensor in tensors)


@TritonKernel
def pack_rows_kernel(
    rows_ptr, ids_ptr, weights_ptr, owners_ptr, slots_ptr, send_rows_ptr, send_meta_ptr,
    num_columns, num_experts, row_stride, send_stride,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one block of one token's row to every rank that needs it, reading it once.

    Before: rows `[T, W]` words, ids int32 and weights f32 `[T, TOPK]`, slots int32 `[T, NUM_RANKS]`. After: send_rows
    `[M, W]`, send_meta int32 `[M, 2 * TOPK]`. Program (t, 0) also writes ids and weights.

    Example: owners [0, 1], ids [[0, 1]], slots [[0, 1]]: rows 0 and 1 are the token, their ids [0, -1] and [-1, 1].
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(rows_ptr + token * row_stride + column, mask=column < num_columns, other=0)
    for rank in tl.static_range(NUM_RANKS):
        target = tl.load(slots_ptr + token * NUM_RANKS + rank).to(tl.int64)
        bound = tl.where(target >= 0, num_columns, 0)
        tl.store(send_rows_ptr + target * send_stride + column, values, mask=column < bound)
    if block == 0:
        slot = tl.arange(0, BLOCK_TOPK)
        in_slots = slot < TOPK
        expert = tl.load(ids_ptr + token * TOPK + slot, mask=in_slots, other=-1)
        exists = (expert >= 0) & (expert < num_experts)
        owner = tl.load(owners_ptr + expert, mask=exists, other=-1)
        weight = tl.load(weights_ptr + token * TOPK + slot, mask=in_slots, other=0.0)
        for rank in tl.static_range(NUM_RANKS):
            target = tl.load(slots_ptr + token * NUM_RANKS + rank).to(tl.int64)
            meta = send_meta_ptr + target * (2 * TOPK) + slot
            writes = slot < tl.where(target >= 0, TOPK, 0)
            tl.store(meta, tl.where(owner == rank, expert, -1), mask=writes)
            theirs = tl.where(owner == rank, weight, 0.0)
            tl.store(meta + TOPK, theirs.to(tl.int32, bitcast=True), mask=writes)


@TritonKernel
def weighted_rows_kernel(
    source_ptr, slots_ptr, weights_ptr, target_ptr,
    num_columns, source_stride, target_stride,
    TOPK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, ALWAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """target[i] = sum over j of weights[i, j] * source[slots[i, j]], in f32, for one block of columns.

    Before: source `[X, K]`, slots int32 and weights f32 `[M, TOPK]`. After: target `[M, K]`. Slots of -1 are masked out
    of the loads. A row without slots is not written, or with ALWAYS set to zero.

    Example: slots [[2, -1]], weights [[.5, ?]]: target[0] = .5 * source[2].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    some = 0
    for slot in tl.static_range(TOPK):
        index = tl.load(slots_ptr + row * TOPK + slot).to(tl.int64)
        bound = tl.where(index >= 0, num_columns, 0)
        values = tl.load(source_ptr + index * source_stride + column, mask=column < bound, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            values = values * tl.load(weights_ptr + row * TOPK + slot)
        total += tl.where(index >= 0, values, 0.0)
        some += tl.where(index >= 0, 1, 0)
    bound = num_columns
    if not ALWAYS:
        bound = tl.where(some > 0, num_columns, 0)
    target = target_ptr + row * target_stride + column
    tl.store(target, total.to(target_ptr.dtype.element_ty), mask=column < bound)


@pack_rows.on_gpu
def triton_pack_rows(rows, topk_ids, topk_weights, owners, slots, send_rows, send_meta):
    rows, send_rows = as_words(rows, send_rows)
    num_tokens, num_columns = rows.shape
    topk = topk_ids.size(1)
    block, num_warps = row_blocks(num_tokens, num_columns, rows.element_size())
    pack_rows_kernel[(num_tokens, cdiv(num_columns, block))](
        rows, topk_ids, topk_weights, owners, slots, send_rows, send_meta,
        num_columns, owners.numel(), rows.stride(0), send_rows.stride(0),
        NUM_RANKS=slots.size(1), TOPK=topk, BLOCK_TOPK=next_power_of_2(topk), BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


@weighted_rows.on_gpu
def triton_weighted_rows(expert_output, slots, weights, send_rows):
    """Does not write rows without a slot."""
    _launch_weighted_rows(expert_output, slots, weights, send_rows, always=False)


@sum_rows.on_gpu
def triton_sum_rows(received, slots, output, weights=None):
    _launch_weighted_rows(received, slots, weights, output, always=True)


def _launch_weighted_rows(
    source: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, target: torch.Tensor, always: bool
) -> None:
    """Products and sums are rounded one by one, not fused, so the bits are those of the plain form."""
    num_rows, num_columns = target.shape
    block, num_warps = row_blocks(num_rows, num_columns, target.element_size())
    weighted_rows_kernel[(num_rows, cdiv(num_columns, block))](
        source, slots, weights, target,
        num_columns, source.stride(0), target.stride(0),
        TOPK=slots.size(1), HAS_WEIGHTS=weights is not None, ALWAYS=always, BLOCK=block,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
