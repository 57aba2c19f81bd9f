"""The index lists of grouped GEMMs as Triton kernels; `moe_ep.kernels.align` is how they are called.

A stable counting sort without atomics: pieces of the slots are counted, the counts of all pieces become places, and a
slot finds its own by its rank among the slots of its piece. Up to 1024 slots one launch does all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_EXPERTS = 2048
_BLOCK = 128
_PIECE = 1024
# One launch serves few slots of not too many experts: every program then makes all counts for itself.
_MAX_BINS_IN_ONE_LAUNCH = 512
_NUM_WARPS = 8


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
def _count_kernel(
    ids_ptr, map_ptr, counts_ptr, numel, num_experts, HAS_MAP: tl.constexpr, BINS: tl.constexpr, PIECE: tl.constexpr
):
    """Counts the slots of each expert in each piece.

    Before: ids `[numel]`, map `[E]`. After: counts int32 `[pieces, BINS]`, entry E for slots of no expert.

    Example: ids [1, 0, 1, -1], E 3, PIECE 2, BINS 4: [[1, 1, 0, 0], [0, 1, 0, 1]].
    """
    piece = tl.program_id(0)
    keys = _keys(ids_ptr, map_ptr, piece * PIECE + tl.arange(0, PIECE), numel, num_experts, HAS_MAP)
    tl.store(counts_ptr + piece * BINS + tl.arange(0, BINS), tl.histogram(keys, BINS))


@triton.jit
def _scan_kernel(
    counts_ptr,
    num_tokens_ptr,
    ends_ptr,
    num_experts,
    num_pieces,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    PIECES_AT_ONCE: tl.constexpr,
):
    """Turns the counts of pieces into places, in one program.

    Before: counts int32 `[pieces, BINS]`. After: counts[p, e] is the place of piece p's first slot of expert e,
    num_tokens int32 `[E]`, ends int32 `[BINS]` where the padded list of each expert ends.

    Example: counts [[1, 1, 0], [0, 1, 0]], BLOCK_SIZE 2: places [[0, 2, 4], [1, 3, 4]], ends [2, 4, 4].
    """
    expert = tl.arange(0, BINS)
    total = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_pieces, PIECES_AT_ONCE):
        piece = start + tl.arange(0, PIECES_AT_ONCE)[:, None]
        total += tl.sum(tl.load(counts_ptr + piece * BINS + expert[None, :], mask=piece < num_pieces, other=0), axis=0)
    total = tl.where(expert < num_experts, total, 0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    ends = tl.cumsum(padded, axis=0)
    tl.store(num_tokens_ptr + expert, total, mask=expert < num_experts)
    tl.store(ends_ptr + expert, ends)
    place = ends - padded
    for start in range(0, num_pieces, PIECES_AT_ONCE):
        piece = start + tl.arange(0, PIECES_AT_ONCE)[:, None]
        pointer = counts_ptr + piece * BINS + expert[None, :]
        part = tl.load(pointer, mask=piece < num_pieces, other=0)
        tl.store(pointer, place[None, :] + tl.cumsum(part, axis=0) - part, mask=piece < num_pieces)
        place += tl.sum(part, axis=0)


@triton.jit
def _rank(ids_ptr, map_ptr, slot, key, piece_start, numel, num_experts, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots of the piece before each slot have the same key."""
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(piece_start, tl.max(slot) + 1, BLOCK):
        other = first + tl.arange(0, BLOCK)[None, :]
        other_key = _keys(ids_ptr, map_ptr, other, numel, num_experts, HAS_MAP)
        rank += tl.sum(((other_key == key[:, None]) & (other < slot[:, None])).to(tl.int32), axis=1)
    return rank


@triton.jit
def _place_kernel(
    ids_ptr,
    map_ptr,
    names_ptr,
    places_ptr,
    ends_ptr,
    num_tokens_ptr,
    sorted_ptr,
    experts_ptr,
    used_ptr,
    numel,
    num_experts,
    length,
    num_blocks,
    HAS_MAP: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Writes BLOCK slots to their places, and what BLOCK entries of each list hold beside slots.

    Before: ids `[numel]`, the tables of `_scan_kernel`. After: sorted int32 `[length]`, experts int32 `[num_blocks]`
    (names: the number that stands for an expert there), used int32 `[1]`.

    Example: ids [1, 0, 1, -1], E 3, BLOCK_SIZE 2: lists of 1, 2 and 0 slots start at 0, 2 and 4: sorted [1, 4, 0, 2,
    4, ...], experts [0, 1, -1, ...], used 4.
    """
    program = tl.program_id(0)
    used = tl.load(ends_ptr + num_experts - 1)
    if program == 0:
        tl.store(used_ptr, used)
    slot = program * BLOCK + tl.arange(0, BLOCK)
    if program * BLOCK < numel:
        piece = program * BLOCK // PIECE
        key = _keys(ids_ptr, map_ptr, slot, numel, num_experts, HAS_MAP)
        rank = _rank(ids_ptr, map_ptr, slot, key, piece * PIECE, numel, num_experts, HAS_MAP, BLOCK)
        place = tl.load(places_ptr + piece * BINS + key, mask=key < num_experts, other=0)
        tl.store(sorted_ptr + place + rank, slot, mask=key < num_experts)

    owner = _list_at(ends_ptr, slot, num_experts, STEPS)
    before = tl.load(ends_ptr + owner - 1, mask=(owner > 0) & (owner < num_experts), other=0)
    count = tl.load(num_tokens_ptr + owner, mask=owner < num_experts, other=-1)
    tl.store(sorted_ptr + slot, numel, mask=(slot < length) & (slot - before >= count))
    owner = _list_at(ends_ptr, slot * BLOCK_SIZE, num_experts, STEPS)
    name = owner
    if HAS_NAMES:
        name = tl.load(names_ptr + owner, mask=owner < num_experts, other=-1).to(tl.int32)
    tl.store(experts_ptr + slot, tl.where(owner < num_experts, name, -1), mask=slot < num_blocks)


@triton.jit
def _list_at(ends_ptr, position, num_experts, STEPS: tl.constexpr):
    """The expert in whose padded list each position lies, num_experts behind the last: a search in STEPS halvings."""
    low = tl.zeros_like(position)
    high = low + num_experts
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        ended = tl.load(ends_ptr + middle, mask=low < high, other=0) <= position
        low = tl.where((low < high) & ended, middle + 1, low)
        high = tl.where((low < high) & (ended == 0), middle, high)
    return low


@triton.jit
def _small_kernel(
    ids_ptr,
    map_ptr,
    names_ptr,
    num_tokens_ptr,
    sorted_ptr,
    experts_ptr,
    used_ptr,
    numel,
    num_experts,
    length,
    num_blocks,
    HAS_MAP: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of it for one piece: what `_place_kernel` writes, and num_tokens int32 `[E]`; every program counts alone."""
    program = tl.program_id(0)
    expert = tl.arange(0, BINS)
    if PIECE == BLOCK:
        keys = _keys(ids_ptr, map_ptr, tl.arange(0, PIECE), numel, num_experts, HAS_MAP)
        total = tl.sum((keys[:, None] == expert[None, :]).to(tl.int32), axis=0)
    else:
        total = tl.histogram(_keys(ids_ptr, map_ptr, tl.arange(0, PIECE), numel, num_experts, HAS_MAP), BINS)
    total = tl.where(expert < num_experts, total, 0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    ends = tl.cumsum(padded, axis=0)
    if program == 0:
        tl.store(num_tokens_ptr + expert, total, mask=expert < num_experts)
        tl.store(used_ptr, tl.sum(padded))
    slot = program * BLOCK + tl.arange(0, BLOCK)
    if program * BLOCK < numel:
        key = _keys(ids_ptr, map_ptr, slot, numel, num_experts, HAS_MAP)
        rank = _rank(ids_ptr, map_ptr, slot, key, 0, numel, num_experts, HAS_MAP, BLOCK)
        place = tl.sum(tl.where(key[:, None] == expert[None, :], (ends - padded)[None, :], 0), axis=1)
        tl.store(sorted_ptr + place + rank, slot, mask=key < num_experts)

    # Where the slots of the list that holds each position end; 0 for positions behind all lists.
    holds = (ends[None, :] > slot[:, None]) & ((ends - padded)[None, :] <= slot[:, None])
    slots_end = tl.sum(tl.where(holds, (ends - padded + total)[None, :], 0), axis=1)
    tl.store(sorted_ptr + slot, numel, mask=(slot < length) & (slot >= slots_end))
    owner = tl.sum((ends[None, :] <= slot[:, None] * BLOCK_SIZE).to(tl.int32), axis=1)
    name = owner
    if HAS_NAMES:
        name = tl.load(names_ptr + owner, mask=owner < num_experts, other=-1).to(tl.int32)
    tl.store(experts_ptr + slot, tl.where(owner < num_experts, name, -1), mask=slot < num_blocks)


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
    """The lists of `moe_align_block_size`, one launch for up to 1024 slots and three above; arguments not checked.

    Args:
        topk_ids: integer ids of any shape, contiguous.
        length: entries of sorted_token_ids.
        key_map: integer `[num_experts]`, the list of each id, -1 for none; None: its own.
        names: integer `[num_experts]`, what stands for an expert in expert_ids; None: its number.
    """
    numel = topk_ids.numel()
    lists = Lists(
        topk_ids.new_empty(length, dtype=torch.int32),
        topk_ids.new_empty(triton.cdiv(length, block_size), dtype=torch.int32),
        topk_ids.new_empty(num_experts, dtype=torch.int32),
        topk_ids.new_empty(1, dtype=torch.int32),
    )
    outputs = (
        lists.expert_num_tokens, lists.sorted_token_ids, lists.expert_ids, lists.num_used,
        numel, num_experts, length, lists.expert_ids.numel(),
    )  # fmt: skip
    # A bin of its own for slots of no expert.
    bins = triton.next_power_of_2(num_experts + 1)
    common = {"HAS_MAP": key_map is not None, "BINS": bins, "num_warps": _NUM_WARPS}
    listed = {"HAS_NAMES": names is not None, "BLOCK_SIZE": block_size, "BLOCK": _BLOCK, **common}
    blocks = triton.cdiv(max(numel, length, 1), _BLOCK)
    with torch.cuda.device_of(topk_ids):
        if numel <= _PIECE and bins <= _MAX_BINS_IN_ONE_LAUNCH:
            piece = _BLOCK if numel <= _BLOCK else _PIECE
            _small_kernel[(blocks,)](topk_ids, key_map, names, *outputs, PIECE=piece, **listed)
            return lists
        num_pieces = triton.cdiv(numel, _PIECE)
        places = topk_ids.new_empty((max(num_pieces, 1), bins), dtype=torch.int32)
        ends = topk_ids.new_empty(bins, dtype=torch.int32)
        if num_pieces:
            _count_kernel[(num_pieces,)](topk_ids, key_map, places, numel, num_experts, PIECE=_PIECE, **common)
        at_once = max(1, min(triton.next_power_of_2(max(num_pieces, 1)), 8192 // bins))
        _scan_kernel[(1,)](
            places, lists.expert_num_tokens, ends, num_experts, num_pieces,
            BLOCK_SIZE=block_size, BINS=bins, PIECES_AT_ONCE=at_once, num_warps=_NUM_WARPS,
        )  # fmt: skip
        _place_kernel[(blocks,)](
            topk_ids, key_map, names, places, ends, *outputs,
            PIECE=_PIECE, STEPS=num_experts.bit_length(), **listed,
        )  # fmt: skip
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
