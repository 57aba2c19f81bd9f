"""The index lists of grouped GEMMs as one CUDA kernel, called through `moe_ep.kernels.align`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep.kernels import jit

_SOURCE = Path(__file__).parent / "cuda" / "align.cu"
_WARP = 32
# Warps come in eights.
_MIN_WARPS, _MAX_WARPS = 8, 32
# Rounds of a warp's slots that are worth another warp.
_ROUNDS = 2
# From so many slots on a cluster of blocks is worth its meetings, where the GPU has clusters.
_MANY_SLOTS, _CLUSTER = 2048, 8
# A block that serves smaller GPUs too.
_MAX_SHARED = 96 * 1024
# What a warp of a cluster's blocks keeps in registers, align.cu's kRounds.
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
        topk_ids: integer ids of any shape.
        length: number of entries of the sorted ids.
        key_map: integer `[num_experts]`, the list that each id goes to, -1 for none; None if it is the id's own.
        names: integer `[num_experts]`, the number that stands for each list in the expert ids; None for its own.
    """
    sizes = (length, -(-length // block_size), num_experts, 1)
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
    ids = topk_ids.to(topk_ids.dtype if topk_ids.dtype == torch.int64 else torch.int32).contiguous()
    key_map = None if key_map is None else key_map.to(torch.int32).contiguous()
    numel, num_experts = ids.numel(), num_tokens.numel()
    shape = _shape(numel, num_experts, jit.capability(ids.device.index) >= (9, 0))
    params.ids, params.key_map = ids.data_ptr(), jit.pointer(key_map)
    params.sorted, params.num_tokens = sorted_ids.data_ptr(), num_tokens.data_ptr()
    params.numel, params.experts, params.length = numel, num_experts, sorted_ids.numel()
    params.run, params.key_bits = shape.run, (num_experts - 1).bit_length()
    kernel = _kernels(ids.dtype, ids.device)[shape.blocks]
    kernel.launch(params, (shape.blocks,), shape.warps * _WARP, shape.shared_bytes, early=True)


class _Shape(NamedTuple):
    """Of a launch: blocks, warps of each, the ids that a warp takes, and a block's shared memory."""

    blocks: int
    warps: int
    run: int
    shared_bytes: int


@functools.lru_cache(maxsize=1024)
def _shape(numel: int, num_experts: int, has_clusters: bool) -> _Shape:
    blocks = _CLUSTER if numel > _MANY_SLOTS and has_clusters else 1
    warps = min(_MAX_WARPS, _most_warps(num_experts, blocks), -(-numel // (blocks * _ROUNDS * _WARP)))
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


def _most_warps(num_experts: int, blocks: int) -> int:
    """The most warps whose counts fit into a block's shared memory."""
    none, one = (_shared_bytes(num_experts, warps, blocks) for warps in (0, 1))
    return (_MAX_SHARED - none) // (one - none)
