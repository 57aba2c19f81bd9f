"""The index lists of grouped GEMMs as one CUDA kernel; `moe_ep.kernels.align` is how it is called."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from moe_ep.kernels import jit

_SOURCE = Path(__file__).parent / "cuda" / "align.cu"
_WARP = 32
_MIN_WARPS, _MAX_WARPS = 8, 32
# A block that serves smaller GPUs too.
_MAX_SHARED = 96 * 1024
# With fewer warps the kernel would be slower than the plain form.
MAX_EXPERTS = _MAX_SHARED // (4 * (_MIN_WARPS + 2))


class _AlignParams(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "key_map", "names", "num_tokens", "sorted", "expert_ids", "used")
        ),
        *((name, ctypes.c_int) for name in ("numel", "experts", "length", "num_blocks", "block_size")),
    )


def kernel_source(ids: torch.dtype) -> jit.KernelSource:
    """The kernel for int32 or int64 ids."""
    return jit.KernelSource(_SOURCE, "align", (("IDS_64", str(int(ids == torch.int64))),))


def cuda_align(
    topk_ids: torch.Tensor,
    block_size: int,
    num_experts: int,
    length: int,
    key_map: torch.Tensor | None,
    names: torch.Tensor | None,
    *,
    wants_blocks: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sorted ids, expert ids, tokens of each expert, entries in use), int32; arguments not checked.

    Args:
        topk_ids: integer ids of any shape.
        length: entries of the sorted ids.
        key_map: integer `[num_experts]`, the list of each id, -1 for none; None: its own.
        names: integer `[num_experts]`, what stands for an expert in the expert ids; None: its number.
        wants_blocks: without it the expert ids are not made, and empty.
    """
    ids = topk_ids.to(topk_ids.dtype if topk_ids.dtype == torch.int64 else torch.int32).contiguous()
    num_blocks = -(-length // block_size) if wants_blocks else 0
    key_map, names = (None if given is None else given.to(torch.int32).contiguous() for given in (key_map, names))
    numel = ids.numel()
    sorted_ids, expert_ids, num_tokens, used = (
        ids.new_empty(size, dtype=torch.int32) for size in (length, num_blocks, num_experts, 1)
    )
    fitting = _MAX_SHARED // (4 * num_experts) - 2
    warps = max(_MIN_WARPS, min(_MAX_WARPS, fitting, -(-max(numel, length) // _WARP)))
    params = _AlignParams(
        ids=ids.data_ptr(),
        key_map=_pointer(key_map),
        names=_pointer(names),
        num_tokens=num_tokens.data_ptr(),
        sorted=sorted_ids.data_ptr(),
        expert_ids=expert_ids.data_ptr() if wants_blocks else None,
        used=used.data_ptr(),
        numel=numel,
        experts=num_experts,
        length=length,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    kernel = jit.load(kernel_source(ids.dtype), ids.device)
    shared_bytes = 4 * num_experts * (warps + 2)
    kernel.allow_shared(_MAX_SHARED)
    kernel.launch(params, (1, 1, 1), warps * _WARP, shared_bytes)
    return sorted_ids, expert_ids, num_tokens, used


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
