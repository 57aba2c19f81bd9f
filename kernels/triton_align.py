"""The index lists of grouped GEMMs as Triton kernels; `moe_ep.kernels.align` is how they are called.

A stable counting sort without atomics. A piece is what one program sorts; within a piece, a few slots at a time are
ranked by comparing each with those before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_EXPERTS = 2048
_BLOCK = 128
_PIECE = 1024
_FILLERS = 32
_NUM_WARPS = 4


@triton.jit
def _keys(ids_ptr, map_ptr, slot, end, num_experts, HAS_MAP: tl.constexpr):
    """The list that each slot belongs to, num_experts where it belongs to none."""
    expert = tl.load(ids_ptr + slot, mask=slot < end, other=-1).to(tl.int32)
    exists = (expert >= 0) & (expert < num_experts)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=exists, other=-1).to(tl.int32)
        exists &= expert >= 0
    return tl.where(exists, expert, num_experts)


@triton.jit
def _piece_counts(
    ids_ptr, map_ptr, first, end, num_experts, HAS_MAP: tl.constexpr, BINS: tl.constexpr, PIECE: tl.constexpr
):
    slot = first + tl.arange(0, PIECE)
    return tl.histogram(_keys(ids_ptr, map_ptr, slot, end, num_experts, HAS_MAP), BINS)


@triton.jit
def _count_kernel(
    ids_ptr, map_ptr, counts_ptr, numel, num_experts, HAS_MAP: tl.constexpr, BINS: tl.constexpr, PIECE: tl.constexpr
):
    """Counts the slots of each expert in each piece.

    Before: ids `[numel]`, map `[E]`. After: counts int32 `[pieces, BINS]`, entry E for slots of no expert.

    Example: ids [1, 0, 1, -1], E 3, PIECE 2, BINS 4: [[1, 1, 0, 0], [0, 1, 0, 1]].
    """
    piece = tl.program_id(0)
    counts = _piece_counts(ids_ptr, map_ptr, piece * PIECE, numel, num_experts, HAS_MAP, BINS, PIECE)
    tl.store(counts_ptr + piece * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _place_kernel(
    ids_ptr,
    map_ptr,
    names_ptr,
    counts_ptr,
    sorted_ptr,
    experts_ptr,
    num_tokens_ptr,
    used_ptr,
    numel,
    num_experts,
    num_pieces,
    length,
    num_blocks,
    HAS_MAP: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    ONE_PIECE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES_AT_ONCE: tl.constexpr,
):
    """Writes every slot to its place, and what lies between and behind the lists.

    Before: ids `[numel]`, counts of `_count_kernel` (unused with ONE_PIECE). After: sorted int32 `[length]`, experts
    int32 `[num_blocks]` (names: the number that stands for an expert there), num_tokens int32 `[E]`, used int32 `[1]`.
    Program p places piece p, and fills the padding of experts p, p + programs, ... and a strip of the unused rest.

    Example: ids [1, 0, 1, -1], E 3, BLOCK_SIZE 2: lists of 1, 2 and 0 slots start at 0, 2 and 4: sorted [1, 4, 0, 2,
    4, ...], experts [0, 1, -1, ...], used 4.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    expert = tl.arange(0, BINS)
    if ONE_PIECE:
        total = _piece_counts(ids_ptr, map_ptr, 0, numel, num_experts, HAS_MAP, BINS, PIECE)
        before = tl.zeros([BINS], dtype=tl.int32)
    else:
        total = tl.zeros([BINS], dtype=tl.int32)
        before = tl.zeros([BINS], dtype=tl.int32)
        for start in range(0, num_pieces, PIECES_AT_ONCE):
            piece = start + tl.arange(0, PIECES_AT_ONCE)[:, None]
            part = tl.load(counts_ptr + piece * BINS + expert[None, :], mask=piece < num_pieces, other=0)
            total += tl.sum(part, axis=0)
            before += tl.sum(tl.where(piece < program, part, 0), axis=0)
    total = tl.where(expert < num_experts, total, 0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    used = tl.sum(padded)
    if program == 0:
        tl.store(num_tokens_ptr + expert, total, mask=expert < num_experts)
        tl.store(used_ptr, used)

    place = starts + before
    end = tl.minimum((program + 1) * PIECE, numel)
    for first in range(program * PIECE, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        key = _keys(ids_ptr, map_ptr, slot, end, num_experts, HAS_MAP)
        # The same keys along the other axis: those of the slots before.
        other = first + tl.arange(0, BLOCK)[None, :]
        earlier = (_keys(ids_ptr, map_ptr, other, end, num_experts, HAS_MAP) == key[:, None]) & (other < slot[:, None])
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        target = tl.gather(place, key, 0) + rank
        tl.store(sorted_ptr + target, slot, mask=key < num_experts)
        place += tl.histogram(key, BINS)

    for e in range(program, num_experts, num_programs):
        this = expert == e
        list_end = tl.sum(tl.where(this, ends, 0))
        list_start = tl.sum(tl.where(this, starts, 0))
        name = e
        if HAS_NAMES:
            name = tl.load(names_ptr + e).to(tl.int32)
        for start in range(list_start + tl.sum(tl.where(this, total, 0)), list_end, BLOCK):
            position = start + tl.arange(0, BLOCK)
            tl.store(sorted_ptr + position, numel, mask=position < list_end)
        for start in range(list_start // BLOCK_SIZE, list_end // BLOCK_SIZE, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + block, name, mask=block < list_end // BLOCK_SIZE)
    _fill_rest(sorted_ptr, used, length, numel, program, num_programs, BLOCK)
    _fill_rest(experts_ptr, used // BLOCK_SIZE, num_blocks, -1, program, num_programs, BLOCK)


@triton.jit
def _fill_rest(list_ptr, used, length, value, program, num_programs, BLOCK: tl.constexpr):
    """Program p writes `value` into every num_programs-th block of list[used:length], from block p on."""
    for start in range(used + program * BLOCK, length, num_programs * BLOCK):
        position = start + tl.arange(0, BLOCK)
        tl.store(list_ptr + position, value, mask=position < length)


@triton.jit
def _batched_kernel(
    counts_ptr,
    sorted_ptr,
    experts_ptr,
    used_ptr,
    num_experts,
    max_rows,
    length,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e writes the list of expert e of batched rows, and a strip of the unused rest.

    Before: counts int `[El]`. After: sorted int32 `[length]`, experts int32 `[num_blocks]`, used int32 `[1]`.

    Example: counts [1, 3], max_rows 3, BLOCK_SIZE 2: sorted [0, 6, 3, 4, 5, 6, 6, 6], experts [0, 1, 1, -1], used 6.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0).to(tl.int32)
    padded = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    used = tl.sum(padded)
    if program == 0:
        tl.store(used_ptr, used)
    first = tl.sum(tl.where(expert < program, padded, 0))
    count = tl.sum(tl.where(expert == program, counts, 0))
    list_length = tl.sum(tl.where(expert == program, padded, 0))
    sentinel = num_experts * max_rows
    for start in range(0, list_length, BLOCK):
        row = start + tl.arange(0, BLOCK)
        value = tl.where(row < count, program * max_rows + row, sentinel)
        tl.store(sorted_ptr + first + row, value, mask=row < list_length)
    for start in range(0, list_length // BLOCK_SIZE, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + first // BLOCK_SIZE + block, program, mask=block < list_length // BLOCK_SIZE)
    _fill_rest(sorted_ptr, used, length, sentinel, program, num_experts, BLOCK)
    _fill_rest(experts_ptr, used // BLOCK_SIZE, num_blocks, -1, program, num_experts, BLOCK)


class Lists(NamedTuple):
    """Slots by expert; all int32.

    Attributes:
        sorted_token_ids: `[length]`.
        expert_ids: `[num_blocks]`.
        expert_num_tokens: `[E]`, slots of each expert.
        num_used: `[1]`, entries of sorted_token_ids in use.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    expert_num_tokens: torch.Tensor
    num_used: torch.Tensor


def triton_align(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    length: int,
    key_map: torch.Tensor | None,
    names: torch.Tensor | None,
) -> Lists:
    """The lists of `moe_align_block_size`, one launch for up to 1024 slots and two above; arguments not checked.

    Args:
        topk_ids: integer ids of any shape, contiguous.
        length: entries of sorted_token_ids.
        key_map: integer `[num_experts]`, the list of each id, -1 for none; None: its own.
        names: integer `[num_experts]`, what stands for an expert in expert_ids; None: its number.
    """
    numel = topk_ids.numel()
    bins = triton.next_power_of_2(num_experts + 1)
    num_pieces = max(triton.cdiv(numel, _PIECE), 1)
    lists = Lists(
        topk_ids.new_empty(length, dtype=torch.int32),
        topk_ids.new_empty(triton.cdiv(length, block_size), dtype=torch.int32),
        topk_ids.new_empty(num_experts, dtype=torch.int32),
        topk_ids.new_empty(1, dtype=torch.int32),
    )
    counts = None
    common = {"HAS_MAP": key_map is not None, "BINS": bins, "PIECE": _PIECE, "num_warps": _NUM_WARPS}
    with torch.cuda.device_of(topk_ids):
        if num_pieces > 1:
            counts = topk_ids.new_empty((num_pieces, bins), dtype=torch.int32)
            _count_kernel[(num_pieces,)](topk_ids, key_map, counts, numel, num_experts, **common)
        _place_kernel[(max(num_pieces, min(num_experts, _FILLERS)),)](
            topk_ids,
            key_map,
            names,
            counts,
            lists.sorted_token_ids,
            lists.expert_ids,
            lists.expert_num_tokens,
            lists.num_used,
            numel,
            num_experts,
            num_pieces,
            length,
            lists.expert_ids.numel(),
            HAS_NAMES=names is not None,
            ONE_PIECE=num_pieces == 1,
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
            PIECES_AT_ONCE=max(1, 4096 // bins),
            **common,
        )
    return lists


def triton_batched_align(
    max_rows: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of `batched_moe_align_block_size` in one launch; arguments not checked."""
    num_experts = expert_num_tokens.numel()
    num_blocks = num_experts * triton.cdiv(max_rows, block_size)
    sorted_token_ids = expert_num_tokens.new_empty(num_blocks * block_size, dtype=torch.int32)
    expert_ids = expert_num_tokens.new_empty(num_blocks, dtype=torch.int32)
    used = expert_num_tokens.new_empty(1, dtype=torch.int32)
    with torch.cuda.device_of(expert_num_tokens):
        _batched_kernel[(num_experts,)](
            expert_num_tokens.contiguous(),
            sorted_token_ids,
            expert_ids,
            used,
            num_experts,
            max_rows,
            sorted_token_ids.numel(),
            num_blocks,
            BLOCK_SIZE=block_size,
            BINS=triton.next_power_of_2(num_experts),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return sorted_token_ids, expert_ids, used
