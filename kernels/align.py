"""Index lists for grouped GEMMs: the rows of every block of each expert.

The sizes of the lists are static, and there is no host synchronisation. The lists are deterministic, with each expert's
rows in ascending order. There is a plain-torch form for any device and one kernel for CUDA tensors, with equal results.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.arguments import as_int32, check_expert_map, check_integers, check_same_device, check_tensors
from moe_ep.errors import check_at_least, check_flags
from moe_ep.kernels import jit
from moe_ep.kernels.triton_kernel import (
    TritonKernel,
    cdiv,
    comes_early,
    next_power_of_2,
    take_over,
    tl,
    triton_jit,
)
from moe_ep.registry import Form, choose_form


def moe_align_block_size(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups slots by expert, and pads each expert's list to whole blocks.

    Slot t * top_k + j is the j-th choice of token t. Ids below 0 or from num_experts on are no expert and appear
    nowhere.

    Example: topk_ids [[1, 0], [1, -1]], block_size 2, num_experts 3, so the sentinel is 4 and the length 4 + 3 * 1:
    sorted_token_ids [1, 4, 0, 2, 4, 4, 4], expert_ids [0, 1, -1, -1], num_tokens_post_padded [4].

    Args:
        topk_ids: integer `[T, top_k]`, global ids.
        num_experts: number of global ids that can occur.
        expert_map: integer `[num_experts]`, global -> local, -1 if not local; expert_ids are then local. Slots of
            experts that are not local keep their blocks, with expert id -1.
        pad_sorted_ids: make the length of sorted_token_ids a multiple of block_size.
        ignore_invalid_experts: with an expert_map, leave out the blocks of experts that are not local, and order the
            others by local index.

    Returns:
        sorted_token_ids: int32 `[length]`, slots by expert; the padding of each expert and the rest of the list are the
            sentinel topk_ids.numel(). length is numel + num_experts * (block_size - 1), or numel * block_size if there
            are fewer slots than experts and that is smaller.
        expert_ids: int32 `[ceil(length / block_size)]`, the expert of each block, -1 for unused blocks.
        num_tokens_post_padded: int32 `[1]`, the number of entries in use, a multiple of block_size.

    Raises:
        ValueError: a block size or a number of experts below 1, a map of another length or device, or what is not
            integers.
    """
    check_at_least(1, block_size=block_size, num_experts=num_experts)
    check_flags(pad_sorted_ids=pad_sorted_ids, ignore_invalid_experts=ignore_invalid_experts)
    check_tensors(topk_ids=topk_ids)
    check_integers(topk_ids=topk_ids)
    if expert_map is not None:
        check_expert_map(expert_map)
        check_same_device("topk_ids", topk_ids.device, expert_map=expert_map)
    if expert_map is not None and expert_map.shape != (num_experts,):
        raise ValueError(
            f"expert_map has shape {tuple(expert_map.shape)}; it must have one entry for each of num_experts "
            f"({num_experts})"
        )
    if expert_map is not None and not expert_map.is_cuda and int(expert_map.max()) >= num_experts:
        raise ValueError(
            f"expert_map names local expert {int(expert_map.max())}; there are fewer local experts than num_experts "
            f"({num_experts})"
        )
    numel = topk_ids.numel()
    length = numel + num_experts * (block_size - 1)
    if numel < num_experts:
        length = min(length, numel * block_size)
    if pad_sorted_ids:
        length = cdiv(length, block_size) * block_size
    key_map, names = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    align = _choose_form(align_reference, cuda_align, topk_ids, num_experts)
    sorted_ids, expert_ids, _, used = align(topk_ids, block_size, num_experts, length, key_map, names)
    return sorted_ids, expert_ids, used


def sort_slots_by_expert(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the local experts, expert by expert and in ascending order, without padding.

    Example: ids [[1, -1], [0, 1]], 2 experts: slots [2, 0, 3, ?], counts [1, 2].

    Args:
        topk_ids: integer `[T, top_k]`, global ids; those that are no expert (see moe_align_block_size) appear nowhere.
        expert_map: integer `[global experts]`, global -> local, -1 if not local; None if the ids are local.

    Returns:
        (slots int32 `[T * top_k]`, undefined after the last expert's; counts int32 `[num_experts]`).
    """
    num_ids = num_experts if expert_map is None else expert_map.numel()
    slots, counts = _choose_form(_sort_reference, cuda_sort, topk_ids, num_ids)(topk_ids, num_ids, expert_map)
    return slots, counts[:num_experts]


def batched_moe_align_block_size(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same lists for batched rows `[El, max_tokens_per_batch, K]`, numbered as El * max_tokens_per_batch rows.

    Example: 2 experts, at most 3 rows each, block_size 2, counts [1, 3], sentinel 6: sorted_token_ids
    [0, 6, 3, 4, 5, 6, 6, 6], expert_ids [0, 1, 1, -1], num_tokens_post_padded [6].

    Args:
        max_tokens_per_batch: the number of rows that each expert has room for.
        expert_num_tokens: integer `[El]`, the rows in use of each expert, at most max_tokens_per_batch.

    Returns:
        sorted_token_ids: int32 `[El * max_tokens_per_batch rounded up to blocks]`: row e * max_tokens_per_batch + i for
            the i-th row of expert e, padded with the sentinel El * max_tokens_per_batch.
        expert_ids: int32, the local expert of each block, -1 for unused blocks.
        num_tokens_post_padded: int32 `[1]`, the number of entries in use, a multiple of block_size.

    Raises:
        ValueError: a size below 1, or counts that are not integers in one dimension.
    """
    check_at_least(1, block_size=block_size, max_tokens_per_batch=max_tokens_per_batch)
    check_tensors(expert_num_tokens=expert_num_tokens)
    check_integers(expert_num_tokens=expert_num_tokens)
    if expert_num_tokens.dim() != 1:
        raise ValueError(f"expert_num_tokens has shape {tuple(expert_num_tokens.shape)}; it must be (El,)")
    if not expert_num_tokens.is_cuda and expert_num_tokens.numel():
        least, most = (int(bound) for bound in expert_num_tokens.aminmax())
        if least < 0 or most > max_tokens_per_batch:
            raise ValueError(
                f"expert_num_tokens holds {least} to {most}; it must be at least 0 and at most "
                f"max_tokens_per_batch ({max_tokens_per_batch})"
            )
    align = choose_form(batched_align_reference, triton_batched_align, expert_num_tokens)
    return align(max_tokens_per_batch, block_size, expert_num_tokens)


def batched_align_reference(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """batched_moe_align_block_size in plain torch, on any device."""
    counts = expert_num_tokens.long()
    num_local_experts = counts.numel()
    num_blocks = num_local_experts * cdiv(max_tokens_per_batch, block_size)
    expert, row, is_row, total = _padded_lists(counts, block_size, num_blocks * block_size)
    sentinel = num_local_experts * max_tokens_per_batch
    sorted_token_ids = torch.where(is_row, expert * max_tokens_per_batch + row, sentinel)
    expert_ids = _expert_of_blocks(counts, block_size, num_blocks)
    return sorted_token_ids.to(torch.int32), expert_ids.to(torch.int32), total.to(torch.int32)


def _choose_form(plain: Form, kernel: Form, topk_ids: torch.Tensor, num_experts: int) -> Form:
    return choose_form(plain, kernel, topk_ids, needs="nvrtc") if num_experts <= MAX_EXPERTS else plain


def _sort_reference(
    topk_ids: torch.Tensor, num_experts: int, key_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuda_sort in plain torch, on any device."""
    slots, _, counts, _ = align_reference(topk_ids, 1, num_experts, topk_ids.numel(), key_map, None)
    return slots, counts


def align_reference(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    length: int,
    key_map: torch.Tensor | None,
    names: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists in plain torch, on any device; arguments and results as in cuda_align."""
    flat = topk_ids.reshape(-1).long()
    numel = flat.numel()
    keys = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    if key_map is not None:
        lists = F.pad(key_map.long(), (0, 1), value=-1)[keys]  # in int64, as uint8 has no -1
        keys = torch.where(lists >= 0, lists, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:num_experts]
    slots_by_expert = torch.cat([keys.argsort(stable=True), keys.new_full((1,), numel)])
    expert, row, is_row, total = _padded_lists(counts, block_size, length)
    first = (counts.cumsum(0) - counts)[expert]
    sorted_token_ids = slots_by_expert[torch.where(is_row, first + row, numel)]
    expert_ids = _expert_of_blocks(counts, block_size, cdiv(length, block_size))
    if names is not None:
        expert_ids = torch.where(expert_ids >= 0, names.long()[expert_ids.clamp(min=0)], -1)
    int32 = torch.int32
    return sorted_token_ids.to(int32), expert_ids.to(int32), counts.to(int32), total.to(int32)


def _padded_lists(
    counts: torch.Tensor, block_size: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Describes each of `length` positions when the experts' lists follow each other in whole blocks.

    Returns:
        (expert, row of that expert, whether that row exists, positions in use `[1]`), int64 and bool. If the row does
        not exist, expert is still a valid index and row is meaningless.
    """
    ends = _padded_ends(counts, block_size)
    position = torch.arange(length, device=counts.device)
    expert = torch.searchsorted(ends, position, right=True).clamp(max=max(counts.numel() - 1, 0))
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    row = position - starts[expert]
    return expert, row, row < counts[expert], ends[-1:] if ends.numel() else ends.new_zeros(1)


def _expert_of_blocks(counts: torch.Tensor, block_size: int, num_blocks: int) -> torch.Tensor:
    """The expert of each block, -1 after the last one's blocks, int64 `[num_blocks]`."""
    ends = _padded_ends(counts, block_size)
    expert = torch.searchsorted(ends, torch.arange(num_blocks, device=counts.device) * block_size, right=True)
    return torch.where(expert < counts.numel(), expert, -1)


def _padded_ends(counts: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where each expert's padded list ends, int64 `[El]`."""
    return (-(-counts // block_size) * block_size).cumsum(0)


_SOURCE = Path(__file__).parent / "cuda" / "align.cu"
_WARP = 32
# A launch has a multiple of so many warps.
_MIN_WARPS, _MAX_WARPS = 8, 32
# Rounds of a warp's slots that are worth another warp.
_ROUNDS = 2
# From so many slots on a cluster of blocks outweighs its barriers, where the GPU has clusters.
_MANY_SLOTS, _CLUSTER = 2048, 8
# Shared memory that a block has on smaller GPUs too.
_MAX_SHARED = 96 * 1024
# Slots that a warp of a cluster's blocks keeps in registers (kRounds in align.cu).
_KEPT_SLOTS = 4 * _WARP
# With fewer warps the kernel would be slower than the plain form.
MAX_EXPERTS = (_MAX_SHARED // 4 - _WARP - _MIN_WARPS * _KEPT_SLOTS) // (_MIN_WARPS + 3)


class AlignParams(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "key_map", "names", "num_tokens", "sorted", "expert_ids", "used")
        ),
        *((name, ctypes.c_int) for name in ("numel", "experts", "length", "num_blocks", "block_size")),
        *((name, ctypes.c_int) for name in ("run", "key_bits")),
    )


def kernel_source(ids: torch.dtype, blocks: int) -> jit.KernelSource:
    """The kernel for int32 or int64 ids, with one block or a cluster of them (from sm_90 on)."""
    return jit.KernelSource(_SOURCE, "align", (("IDS_64", str(int(ids == torch.int64))), ("BLOCKS", str(blocks))))


def cuda_align(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    length: int,
    key_map: torch.Tensor | None,
    names: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (sorted ids, expert ids, tokens of each expert, entries in use), int32; does not check its arguments.

    Args:
        length: number of entries of the sorted ids.
        key_map: integer `[num_experts]`, the list that each id goes to, -1 for none; None if it is the id's own.
        names: integer `[num_experts]`, the number that stands for each list in the expert ids; None for its own.
    """
    sizes = (length, cdiv(length, block_size), num_experts, 1)
    sorted_ids, expert_ids, num_tokens, used = (topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)
    names = None if names is None else names.to(torch.int32).contiguous()
    params = AlignParams(
        names=jit.pointer(names),
        expert_ids=expert_ids.data_ptr(),
        used=used.data_ptr(),
        num_blocks=expert_ids.numel(),
        block_size=block_size,
    )
    _launch(params, topk_ids, key_map, sorted_ids, num_tokens)
    return sorted_ids, expert_ids, num_tokens, used


def cuda_sort(
    topk_ids: torch.Tensor, num_experts: int, key_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sorted ids of blocks of one, as many as there are ids, and the tokens of each expert; nothing else."""
    slots = topk_ids.new_empty(topk_ids.numel(), dtype=torch.int32)
    num_tokens = topk_ids.new_empty(num_experts, dtype=torch.int32)
    _launch(AlignParams(block_size=1), topk_ids, key_map, slots, num_tokens)
    return slots, num_tokens


def _launch(
    params: AlignParams,
    topk_ids: torch.Tensor,
    key_map: torch.Tensor | None,
    sorted_ids: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    """Launches the kernel with what all its uses have in common added to `params`."""
    ids = topk_ids.contiguous() if topk_ids.dtype == torch.int64 else as_int32(topk_ids).contiguous()
    key_map = None if key_map is None else as_int32(key_map).contiguous()
    numel, num_experts = ids.numel(), num_tokens.numel()
    shape = _shape(numel, num_experts, jit.capability(ids.device.index) >= (9, 0))
    params.ids, params.key_map = ids.data_ptr(), jit.pointer(key_map)
    params.sorted, params.num_tokens = sorted_ids.data_ptr(), num_tokens.data_ptr()
    params.numel, params.experts, params.length = numel, num_experts, sorted_ids.numel()
    params.run, params.key_bits = shape.run, (num_experts - 1).bit_length()
    kernel = _kernels(ids.dtype, ids.device)[shape.blocks]
    kernel.launch(params, (shape.blocks,), shape.warps * _WARP, shape.shared_bytes, early=True)


class _Shape(NamedTuple):
    """The shape of a launch: blocks, warps of each, the ids that a warp takes, and a block's shared memory."""

    blocks: int
    warps: int
    run: int
    shared_bytes: int


@functools.lru_cache(maxsize=1024)
def _shape(numel: int, num_experts: int, has_clusters: bool) -> _Shape:
    blocks = _CLUSTER if numel > _MANY_SLOTS and has_clusters else 1
    none, one = (_shared_bytes(num_experts, warps, blocks) for warps in (0, 1))
    # As many as have room for their counts in a block's shared memory.
    warps = min(_MAX_WARPS, (_MAX_SHARED - none) // (one - none), -(-numel // (blocks * _ROUNDS * _WARP)))
    warps = max(_MIN_WARPS, warps // _MIN_WARPS * _MIN_WARPS)
    run = -(-numel // (blocks * warps * _WARP)) * _WARP
    return _Shape(blocks, warps, run, _shared_bytes(num_experts, warps, blocks))


@functools.cache
def _kernels(ids: torch.dtype, device: torch.device) -> dict[int, jit.Kernel]:
    """The kernels by number of blocks, all at once, since a captured pass may have more slots than its warm-up."""
    sizes = (1, _CLUSTER) if jit.capability(device.index) >= (9, 0) else (1,)
    kernels = jit.load_all({blocks: kernel_source(ids, blocks) for blocks in sizes}, device)
    for kernel in kernels.values():
        kernel.allow_shared(_MAX_SHARED)
    return kernels


def _shared_bytes(num_experts: int, warps: int, blocks: int) -> int:
    """Shared memory for the warps' sums, places and totals, each warp's counts, and in a cluster the sorted slots."""
    gathered = num_experts + warps * _KEPT_SLOTS if blocks > 1 else 0
    return 4 * (_WARP + num_experts * (warps + 2) + gathered)


_BLOCK = 128
_NUM_WARPS = 4


@triton_jit
def _fill_rest(list_ptr, used, length, value, program, num_programs, BLOCK: tl.constexpr):
    """Program p writes `value` into every num_programs-th block of list[used:length], from block p on."""
    for start in range(used + program * BLOCK, length, num_programs * BLOCK):
        position = start + tl.arange(0, BLOCK)
        tl.store(list_ptr + position, value, mask=position < length)


@TritonKernel
def batched_kernel(
    counts_ptr, sorted_ptr, experts_ptr, used_ptr,
    num_experts, max_rows, length, num_blocks,
    BLOCK_SIZE: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e writes the list of expert e of batched rows, and a strip of the unused rest.

    Before: counts int `[El]`. After: sorted int32 `[length]`, experts int32 `[num_blocks]`, used int32 `[1]`.

    Example: counts [1, 3], max_rows 3, BLOCK_SIZE 2: sorted [0, 6, 3, 4, 5, 6, 6, 6], experts [0, 1, 1, -1], used 6.
    """
    take_over(EARLY)
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


def triton_batched_align(
    max_rows: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of `batched_moe_align_block_size` in one launch; arguments not checked."""
    num_experts = expert_num_tokens.numel()
    num_blocks = num_experts * cdiv(max_rows, block_size)
    sorted_token_ids = expert_num_tokens.new_empty(num_blocks * block_size, dtype=torch.int32)
    expert_ids = expert_num_tokens.new_empty(num_blocks, dtype=torch.int32)
    used = expert_num_tokens.new_empty(1, dtype=torch.int32)
    early = comes_early(expert_num_tokens.device)
    batched_kernel[(num_experts,)](
        expert_num_tokens.contiguous(), sorted_token_ids, expert_ids, used,
        num_experts, max_rows, sorted_token_ids.numel(), num_blocks,
        BLOCK_SIZE=block_size, BINS=next_power_of_2(num_experts), BLOCK=_BLOCK, EARLY=early,
        launch_pdl=early, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return sorted_token_ids, expert_ids, used
