"""The EPLB mapping as one CUDA kernel, equal to `moe_ep.eplb.mapping` bit for bit."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ep.eplb.mapping import TILE_SLOTS, map_reference, rows_per_tile
from moe_ep.kernels import jit

_SOURCE = Path(__file__).parent / "cuda" / "eplb_map.cu"
_WARP = 32
_LEAST_THREADS = 256
_MOST_THREADS = 1024
# Slots of a thread in tiles that the least threads can take one each, and in larger ones.
_FEW_SLOTS, _MANY_SLOTS = 1, 2
# A block that serves smaller GPUs too.
_MAX_SHARED = 96 * 1024


class MapParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "num_counted_on_device", "load", "table", "counts", "out")),
        *((name, ctypes.c_int) for name in ("num_counted", "tokens", "slots", "rows_per_tile", "experts", "width")),
        *((name, ctypes.c_int) for name in ("row_stride", "column_stride", "max_replicated", "stride", "words")),
        *((name, ctypes.c_int) for name in ("ranks", "ep_rank")),
        ("rank_factor", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("dividing", "expert_threads", "physical")),
    )


class _Block(NamedTuple):
    """The shape of a block of the kernel; the names are those of its parameters."""

    max_replicated: int
    stride: int
    words: int
    dividing: int
    expert_threads: int
    slots_each: int
    threads: int
    shared_bytes: int

    @classmethod
    @cache
    def of(cls, tile_slots: int, num_experts: int, num_physical: int, num_ranks: int) -> _Block:
        max_replicated = min(max(num_physical - num_experts, 0), num_experts)
        stride, words = max_replicated | 1, -(-tile_slots // _WARP)
        numbers = _WARP + 1 + num_ranks + num_physical
        dividing = _whole_warps(max(max_replicated, 1))
        slots_each = _FEW_SLOTS if tile_slots <= _LEAST_THREADS else _MANY_SLOTS
        slot_threads = max(_LEAST_THREADS, _whole_warps(-(-tile_slots // slots_each)))
        room = max(_MOST_THREADS - dividing - slot_threads, _WARP)
        expert_threads = min(_whole_warps(num_experts), _LEAST_THREADS, room)
        return cls(
            max_replicated=max_replicated,
            stride=stride,
            words=words,
            dividing=dividing,
            expert_threads=expert_threads,
            slots_each=slots_each,
            threads=dividing + expert_threads + slot_threads,
            shared_bytes=26 * max_replicated + 6 * words * stride + 4 * numbers + 8 * num_experts,
        )

    @property
    def fits(self) -> bool:
        """Whether the kernel can have such a block."""
        return self.words * _WARP <= TILE_SLOTS and self.threads <= _MOST_THREADS and self.shared_bytes <= _MAX_SHARED


def kernel_source(ids: torch.dtype, maps: torch.dtype, out: torch.dtype, slots: int = _MANY_SLOTS) -> jit.KernelSource:
    """The kernel for these integers, int32 or int64 each, and so many slots of a thread."""
    kinds = {"IDS_64": ids, "MAP_64": maps, "OUT_64": out}
    defines = tuple((name, str(int(dtype == torch.int64))) for name, dtype in kinds.items())
    return jit.KernelSource(_SOURCE, "eplb_map", (*defines, ("SLOTS", str(slots))))


@cache
def _kernels(ids: torch.dtype, maps: torch.dtype, out: torch.dtype, device: torch.device) -> dict[int, jit.Kernel]:
    """The kernels by slots of a thread; both at once, since a graph of another size may be captured next."""
    return jit.load_all({slots: kernel_source(ids, maps, out, slots) for slots in (_FEW_SLOTS, _MANY_SLOTS)}, device)


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    num_counted: int | torch.Tensor,
    ep_rank: int,
    slots_per_rank: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Physical ids `[T, top_k]` of CUDA tensors; arguments as in `map_reference`, which takes what the kernel cannot:
    more than about 400 experts with several replicas, which do not fit in shared memory, or 1024 slots a row.

    The kernel reads the maps while the kernel before it ends, so that one must not be what writes them.
    """
    num_tokens, top_k = topk_ids.shape
    if topk_ids.numel() == 0:
        return torch.empty(num_tokens, top_k, dtype=dtype, device=topk_ids.device)
    num_experts, width = logical_to_physical_map.shape
    num_physical = expert_load_view.numel()
    num_ranks = -(-num_physical // slots_per_rank)
    block = _Block.of(min(num_tokens, rows_per_tile(top_k)) * top_k, num_experts, num_physical, num_ranks)
    if not block.fits:
        maps = logical_to_physical_map, logical_replica_count
        return map_reference(topk_ids, expert_load_view, *maps, num_counted, ep_rank, slots_per_rank, dtype)

    ids, table = _integers(topk_ids).contiguous(), _integers(logical_to_physical_map)
    counts = logical_replica_count.to(table.dtype).contiguous()
    load = expert_load_view if expert_load_view.is_contiguous() else expert_load_view.contiguous()
    on_device = num_counted.to(torch.int32) if isinstance(num_counted, torch.Tensor) else None
    out = torch.empty(num_tokens, top_k, dtype=dtype if dtype == torch.int64 else torch.int32, device=ids.device)
    params = MapParams(
        ids=ids.data_ptr(),
        num_counted_on_device=None if on_device is None else on_device.data_ptr(),
        load=load.data_ptr(),
        table=table.data_ptr(),
        counts=counts.data_ptr(),
        out=out.data_ptr(),
        num_counted=num_counted if isinstance(num_counted, int) else 0,
        tokens=num_tokens,
        slots=top_k,
        rows_per_tile=rows_per_tile(top_k),
        experts=num_experts,
        width=width,
        row_stride=table.stride(0),
        column_stride=table.stride(1),
        ranks=num_ranks,
        ep_rank=ep_rank,
        rank_factor=-(-(1 << 32) // slots_per_rank) % (1 << 32),
        max_replicated=block.max_replicated,
        stride=block.stride,
        words=block.words,
        dividing=block.dividing,
        expert_threads=block.expert_threads,
        physical=num_physical,
    )
    kernel = _kernels(ids.dtype, table.dtype, out.dtype, ids.device)[block.slots_each]
    kernel.allow_shared(block.shared_bytes)
    # Maps that were converted here are written by the kernel before.
    early = table is logical_to_physical_map and counts is logical_replica_count
    kernel.launch(params, (-(-num_tokens // rows_per_tile(top_k)), 1, 1), block.threads, block.shared_bytes, early)
    if load is not expert_load_view:
        expert_load_view.copy_(load)
    return out.to(dtype)


def _whole_warps(threads: int) -> int:
    return -(-threads // _WARP) * _WARP


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """int32 unless it is int64."""
    return tensor.to(tensor.dtype if tensor.dtype == torch.int64 else torch.int32)
