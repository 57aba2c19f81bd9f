"""The index lists of grouped GEMMs as Triton kernels; `moe_ep.kernels.align` is how they are called.

A stable counting sort: pieces of the slots are counted, the counts of all pieces become places, and a slot finds its
own by its rank among the slots of its piece. Up to 128 slots one launch does all of it by comparing every slot with
every other. Counts are sums of integers, so their atomics leave nothing to chance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_EXPERTS = 2048
_BLOCK = 128
_PIECE = 512
_EXPERTS_AT_ONCE = 64
_PIECES_AT_ONCE = 64
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
    ids_ptr,
    map_ptr,
    counts_ptr,
    num_tokens_ptr,
    numel,
    num_experts,
    HAS_MAP: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts BLOCK slots into their piece's counts and into all of them.

    Before: ids `[numel]`, map `[E]`, zeros. After: counts int32 `[pieces, E]`, num_tokens int32 `[E]`.

    Example: ids [1, 0, 1, -1], E 3, PIECE 2: counts [[1, 1, 0], [0, 1, 0]], num_tokens [1, 2, 0].
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _keys(ids_ptr, map_ptr, slot, numel, num_experts, HAS_MAP)
    one = tl.full([BLOCK], 1, tl.int32)
    tl.atomic_add(counts_ptr + slot // PIECE * num_experts + key, one, mask=key < num_experts, sem="relaxed")
    tl.atomic_add(num_tokens_ptr + key, one, mask=key < num_experts, sem="relaxed")


@triton.jit
def _scan_kernel(
    counts_ptr,
    num_tokens_ptr,
    ends_ptr,
    num_experts,
    num_pieces,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Turns the counts of EXPERTS experts into places.

    Before: counts int32 `[pieces, E]`, num_tokens int32 `[E]`. After: counts[p, e] is the place of piece p's first slot
    of expert e, ends int32 `[E]` where the padded list of each expert ends.

    Example: counts [[1, 1, 0], [0, 1, 0]], BLOCK_SIZE 2: places [[0, 2, 4], [1, 3, 4]], ends [2, 4, 4].
    """
    first = tl.program_id(0) * EXPERTS
    every = tl.arange(0, BINS)
    total = tl.load(num_tokens_ptr + every, mask=every < first, other=0)
    before = tl.sum((total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE)
    expert = first + tl.arange(0, EXPERTS)
    total = tl.load(num_tokens_ptr + expert, mask=expert < num_experts, other=0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    ends = before + tl.cumsum(padded, axis=0)
    tl.store(ends_ptr + expert, ends, mask=expert < num_experts)
    place = ends - padded
    for start in range(0, num_pieces, PIECES):
        piece = start + tl.arange(0, PIECES)[:, None]
        pointer = counts_ptr + piece * num_experts + expert[None, :]
        exists = (piece < num_pieces) & (expert < num_experts)[None, :]
        part = tl.load(pointer, mask=exists, other=0)
        tl.store(pointer, place[None, :] + tl.cumsum(part, axis=0) - part, mask=exists)
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
        place = tl.load(places_ptr + piece * num_experts + key, mask=key < num_experts, other=0)
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
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All of it for at most SLOTS slots; every program compares all slots for itself and writes BLOCK of each list.

    Before and after: as `_count_kernel`, `_scan_kernel` and `_place_kernel` together.
    The first slot of an expert stands for its list: lists begin behind those of all smaller keys.

    Example: ids [1, 0, 1, -1], E 3, BLOCK_SIZE 2: slots 1 and 0 are first, with lists of 1 and 2 from 0 and 2 on.
    """
    program = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    key = _keys(ids_ptr, map_ptr, slot, numel, num_experts, HAS_MAP)
    # The same slots along the other axis.
    other = tl.arange(0, SLOTS)[None, :]
    other_key = _keys(ids_ptr, map_ptr, other, numel, num_experts, HAS_MAP)
    same = other_key == key[:, None]
    rank = tl.sum((same & (other < slot[:, None])).to(tl.int32), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    is_list = (rank == 0) & (key < num_experts)
    padded = tl.where(is_list, (count + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE, 0)
    # Sums over the first axis come out along the other one.
    starts_across = tl.sum(tl.where(key[:, None] < other_key, padded[:, None], 0), axis=0)
    start = tl.sum(tl.where(other == slot[:, None], starts_across[None, :], 0), axis=1)
    used = tl.sum(padded)
    if program == 0:
        tl.store(used_ptr, used)
        tl.store(sorted_ptr + start + rank, slot, mask=key < num_experts)

    mine = program * BLOCK + tl.arange(0, BLOCK)
    across = mine[None, :]
    in_list = is_list[:, None] & (start[:, None] <= across) & (across < (start + padded)[:, None])
    slots_end = tl.sum(tl.where(in_list, (start + count)[:, None], 0), axis=0)
    tl.store(sorted_ptr + mine, numel, mask=(mine < length) & (mine >= slots_end))
    in_list = is_list[:, None] & (start[:, None] <= across * BLOCK_SIZE)
    in_list &= across * BLOCK_SIZE < (start + padded)[:, None]
    owner = tl.sum(tl.where(in_list, key[:, None] + 1, 0), axis=0) - 1
    name = owner
    if HAS_NAMES:
        name = tl.load(names_ptr + owner, mask=owner >= 0, other=-1).to(tl.int32)
    tl.store(experts_ptr + mine, name, mask=mine < num_blocks)
    tokens = tl.sum(tl.where(is_list[:, None] & (key[:, None] == across), count[:, None], 0), axis=0)
    tl.store(num_tokens_ptr + mine, tokens, mask=mine < num_experts)


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
    """The lists of `moe_align_block_size`, one launch for up to 128 slots and four above; arguments not checked.

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
    common = {"HAS_MAP": key_map is not None, "num_warps": _NUM_WARPS}
    listed = {"HAS_NAMES": names is not None, "BLOCK_SIZE": block_size, "BLOCK": _BLOCK, **common}
    blocks = triton.cdiv(max(numel, length, num_experts), _BLOCK)
    with torch.cuda.device_of(topk_ids):
        if numel <= _BLOCK:
            # A tile of slots by slots; one warp has no need to meet others for its sums.
            slots = max(16, triton.next_power_of_2(numel))
            listed["num_warps"] = 1 if slots <= 32 else 4
            _small_kernel[(blocks,)](topk_ids, key_map, names, *outputs, SLOTS=slots, **listed)
            return lists
        num_pieces = triton.cdiv(numel, _PIECE)
        tables = topk_ids.new_zeros((num_pieces + 1, num_experts), dtype=torch.int32)
        lists = lists._replace(expert_num_tokens=tables[num_pieces])
        ends = topk_ids.new_empty(num_experts, dtype=torch.int32)
        _count_kernel[(triton.cdiv(numel, _BLOCK),)](
            topk_ids, key_map, tables, lists.expert_num_tokens, numel, num_experts,
            PIECE=_PIECE, BLOCK=_BLOCK, **common,
        )  # fmt: skip
        _scan_kernel[(triton.cdiv(num_experts, _EXPERTS_AT_ONCE),)](
            tables, lists.expert_num_tokens, ends, num_experts, num_pieces,
            BLOCK_SIZE=block_size, BINS=triton.next_power_of_2(num_experts), EXPERTS=_EXPERTS_AT_ONCE,
            PIECES=min(_PIECES_AT_ONCE, triton.next_power_of_2(num_pieces)), num_warps=_NUM_WARPS,
        )  # fmt: skip
        _place_kernel[(blocks,)](
            topk_ids, key_map, names, tables, ends, lists.expert_num_tokens, *outputs[1:],
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
