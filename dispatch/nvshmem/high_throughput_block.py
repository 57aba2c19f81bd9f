"""The symmetric block that prefill batches of one shape go through, and the kernels' parameters.

cuda/high_throughput.cuh says what the parts of a block hold and why no barrier is needed between batches.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.faults import FailureRecord
from moe_ep.dispatch.nvshmem.layout import align
from moe_ep.dispatch.nvshmem.meeting import agree, meet
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.quantize import quantized_row_bytes

NAME = "nvshmem_high_throughput"
KERNELS = ("counts", "dispatch", "combine")
_LINE_BYTES = 16
_LINES_OF_COUNTS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The symmetric block, the same on every rank; cuda/high_throughput.cuh says what its parts hold.

    Attributes:
        num_ranks, capacity, hidden_size, topk: R, tokens per rank, K, slots of a token.
        fp8: rows travel as e4m3 codes with scales.
    """

    num_ranks: int
    capacity: int
    hidden_size: int
    topk: int
    fp8: bool

    @property
    def max_rows(self) -> int:
        """Rows that can arrive."""
        return self.num_ranks * self.capacity

    @property
    def row_bytes(self) -> int:
        return align(quantized_row_bytes(self.hidden_size), 16) if self.fp8 else 2 * self.hidden_size

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each part, in the order in which they lie."""
        return {
            "counts": _LINE_BYTES * _LINES_OF_COUNTS * self.num_ranks,
            "done": 2 * _LINE_BYTES * self.num_ranks,
            "ids": 4 * self.topk * self.max_rows,
            "weights": 4 * self.topk * self.max_rows,
            "rows": self.row_bytes * self.max_rows,
            "results": 2 * self.hidden_size * self.capacity * min(self.num_ranks, self.topk),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part begins."""
        found, end = {}, 0
        for name, size in self.sizes.items():
            found[name] = end
            end += align(size)
        return found

    @property
    def symmetric_bytes(self) -> int:
        return sum(align(size) for size in self.sizes.values())


def kernel_source(name: str, layout: Layout, dtype: torch.dtype) -> jit.KernelSource:
    """One of KERNELS for batches of that layout and dtype."""
    defines = {
        "HIDDEN": layout.hidden_size,
        "TOPK": layout.topk,
        "RANKS": layout.num_ranks,
        "FP8": int(layout.fp8),
        "ACT_BF16": int(dtype == torch.bfloat16),
    }
    entry = f"high_throughput_{name}"
    path = Path(__file__).parent / "cuda" / f"{entry}.cu"
    return jit.KernelSource(path, entry, tuple((key, str(value)) for key, value in defines.items()))


_blocks: WeakKeyDictionary[arena.SymmetricArena, WeakValueDictionary[str, Block]] = WeakKeyDictionary()


class Block:
    """The symmetric block of one shape, and what this rank's kernels share.

    Attributes:
        batches: how many were dispatched; only the last can be combined.
        record: failed waits, for the host.
    """

    def __init__(self, symmetric: arena.SymmetricArena, layout: Layout, ranks: RankGroup) -> None:
        self.layout, self.batches = layout, 0
        self._region = symmetric.reserve(layout.symmetric_bytes, "high throughput")
        self._peers = self._region.peer_pointers.tolist()
        unreachable = [rank for rank, pointer in enumerate(self._peers) if not pointer]
        if unreachable:
            raise BackendUnavailableError(
                f"{NAME} needs every rank's memory within reach and EP rank {ranks.rank} cannot reach "
                f"{', '.join(map(str, unreachable))}; use all2all_backend='all_to_all' across hosts"
            )
        self._rank = ranks.rank
        self.record = FailureRecord(ranks, env.NVSHMEM_TIMEOUT_S.get())
        # Status of two words, epoch, finished blocks; then the placement.
        self._numbers = torch.zeros(4 + 4 * layout.num_ranks + 1, dtype=torch.int32, device=symmetric.device)
        torch.cuda.synchronize(symmetric.device)

    @classmethod
    def of(cls, layout: Layout, ranks: RankGroup, facts: dict[str, object]) -> Block:
        """The block of this shape, made where any rank has none; a collective step of the ranks."""
        symmetric = arena.SymmetricArena.of(ranks.group)
        members = dist.get_process_group_ranks(ranks.group)
        agree(NAME, members, facts)
        known = _blocks.setdefault(symmetric, WeakValueDictionary())
        found = known.get(repr(layout))
        everywhere = meet("block", members, "lacks" if found is None else "has")
        if found is None or "lacks" in everywhere:
            found = known[repr(layout)] = cls(symmetric, layout, ranks)
        return found

    @property
    def total(self) -> torch.Tensor:
        """A view: int32 `[1]`, rows of the last batch that arrive here."""
        return self._numbers[-1:]

    def part(self, name: str, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        """A view: the first `rows` rows of a part, None for all."""
        start, size = self.layout.offsets[name], self.layout.sizes[name]
        whole = self._region.local[start : start + size]
        known = self.layout.max_rows if name != "results" else size // (2 * self.layout.hidden_size)
        return whole.view(known, -1)[:rows].view(dtype)

    def common(self) -> Any:
        numbers = self._numbers.data_ptr()
        return common_type(self.layout.num_ranks)(
            peers=(ctypes.c_uint64 * self.layout.num_ranks)(*self._peers),
            **self.layout.offsets,
            status=numbers,
            record=self.record.words.data_ptr(),
            timeout_ns=int(self.record.timeout_s * 1e9),
            epoch=numbers + 8,
            finished=numbers + 12,
            placement=numbers + 16,
            rank=self._rank,
        )


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/high_throughput.cuh."""
    offsets = ("counts", "done", "ids", "weights", "rows", "results")

    class Common(ctypes.Structure):
        _fields_ = (
            ("peers", ctypes.c_uint64 * num_ranks),
            *((name, ctypes.c_uint64) for name in offsets),
            *((name, ctypes.c_void_p) for name in ("status", "record")),
            ("timeout_ns", ctypes.c_uint64),
            *((name, ctypes.c_void_p) for name in ("epoch", "finished", "placement")),
            ("rank", ctypes.c_int),
        )

    return Common


@functools.cache
def params_type(num_ranks: int, num_pointers: int, num_ints: int) -> Any:
    """`Params` of the kernels: what they share, then their pointers and numbers in order."""

    class Params(ctypes.Structure):
        _fields_ = (
            ("common", common_type(num_ranks)),
            ("pointers", ctypes.c_void_p * num_pointers),
            ("numbers", ctypes.c_int * num_ints),
        )

    return Params
