"""Index lists for grouped GEMMs: the rows of every block of each expert.

The sizes of the lists are static, and there is no host synchronisation. The lists are deterministic, with each expert's
rows in ascending order. There is a plain-torch form for any device and one kernel for CUDA tensors, with equal results.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TypeVar

import torch

from moe_ep.arguments import check_expert_map, check_integers, check_same_device, check_tensors
from moe_ep.errors import check_at_least
from moe_ep.kernels import jit
from moe_ep.kernels.forms import form_for

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


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
        length = _ceil_div(length, block_size) * block_size
    key_map, names = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    cuda = _cuda_align(topk_ids, num_experts)
    align = align_reference if cuda is None else cuda.cuda_align
    sorted_ids, expert_ids, _, used = align(topk_ids, block_size, num_experts, length, key_map, names)
    return sorted_ids, expert_ids, used


def sort_slots_by_expert(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the local experts, expert by expert and in ascending order, without padding.

    Example: ids [[1, -1], [0, 1]], 2 experts: slots [2, 0, 3, ?], counts [1, 2].

    Args:
        topk_ids: integer `[T, top_k]`, global ids; those that are no expert (see moe_align_block_size) appear nowhere.
        num_experts: number of local experts.
        expert_map: integer `[global experts]`, global -> local, -1 if not local; None if the ids are local.

    Returns:
        (slots int32 `[T * top_k]`, undefined after the last expert's; counts int32 `[num_experts]`).
    """
    num_ids = num_experts if expert_map is None else expert_map.numel()
    cuda = _cuda_align(topk_ids, num_ids)
    if cuda is not None:
        slots, counts = cuda.cuda_sort(topk_ids, num_ids, expert_map)
    else:
        slots, _, counts, _ = align_reference(topk_ids, 1, num_ids, topk_ids.numel(), expert_map, None)
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
    align = form_for(batched_align_reference, "triton_align.triton_batched_align", expert_num_tokens)
    return align(max_tokens_per_batch, block_size, expert_num_tokens)


def batched_align_reference(
    max_tokens_per_batch: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """batched_moe_align_block_size in plain torch, on any device."""
    counts = expert_num_tokens.long()
    num_local_experts = counts.numel()
    num_blocks = num_local_experts * _ceil_div(max_tokens_per_batch, block_size)
    expert, row, is_row, total = _padded_lists(counts, block_size, num_blocks * block_size)
    sentinel = num_local_experts * max_tokens_per_batch
    sorted_token_ids = torch.where(is_row, expert * max_tokens_per_batch + row, sentinel)
    expert_ids = _expert_of_blocks(counts, block_size, num_blocks)
    return sorted_token_ids.to(torch.int32), expert_ids.to(torch.int32), total.to(torch.int32)


def _cuda_align(topk_ids: torch.Tensor, num_experts: int) -> ModuleType | None:
    """The module of the CUDA kernel; None if it cannot sort these ids."""
    found = _imported_cuda_align() if topk_ids.is_cuda else None
    return found if found is not None and num_experts <= found.MAX_EXPERTS else None


@cache
def _imported_cuda_align() -> ModuleType | None:
    if jit.unusable_reason() is not None:
        return None
    from moe_ep.kernels import cuda_align

    return cuda_align


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
        lists = torch.cat([key_map, key_map.new_full((1,), -1)]).long()[keys]
        keys = torch.where(lists >= 0, lists, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts = counts[:num_experts]
    slots_by_expert = torch.cat([keys.argsort(stable=True), keys.new_full((1,), numel)])
    expert, row, is_row, total = _padded_lists(counts, block_size, length)
    first = (counts.cumsum(0) - counts)[expert]
    sorted_token_ids = slots_by_expert[torch.where(is_row, first + row, numel)]
    expert_ids = _expert_of_blocks(counts, block_size, _ceil_div(length, block_size))
    if names is not None:
        expert_ids = torch.where(expert_ids >= 0, names.long()[expert_ids.clamp(min=0)], -1)
    int32 = torch.int32
    return sorted_token_ids.to(int32), expert_ids.to(int32), counts.to(int32), total.to(int32)


def _padded_lists(
    counts: torch.Tensor, block_size: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is at each of `length` positions if the experts' lists follow each other in whole blocks.

    Returns:
        (expert, row of that expert, whether that row exists, positions in use `[1]`), int64 and bool. If the row does
        not exist, expert is still a valid index and row is meaningless.
    """
    ends = _padded_ends(counts, block_size)
    position = torch.arange(length, device=counts.device)
    expert = torch.searchsorted(ends, position, right=True).clamp(max=max(counts.numel() - 1, 0))
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    row = position - starts[expert]
    return expert, row, row < counts[expert], _last_or_zero(ends)


def _expert_of_blocks(counts: torch.Tensor, block_size: int, num_blocks: int) -> torch.Tensor:
    """The expert of each block, -1 after the last one's blocks, int64 `[num_blocks]`."""
    ends = _padded_ends(counts, block_size)
    expert = torch.searchsorted(ends, torch.arange(num_blocks, device=counts.device) * block_size, right=True)
    return torch.where(expert < counts.numel(), expert, -1)


def _padded_ends(counts: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where each expert's padded list ends, int64 `[El]`."""
    return (_ceil_div(counts, block_size) * block_size).cumsum(0)


def _last_or_zero(ends: torch.Tensor) -> torch.Tensor:
    return ends[-1:] if ends.numel() else ends.new_zeros(1)


def _ceil_div(value: IntOrTensor, divisor: int) -> IntOrTensor:
    return -(-value // divisor)
