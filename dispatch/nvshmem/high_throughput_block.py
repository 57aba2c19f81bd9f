"""The symmetric block that prefill batches of one shape go through, and the kernels' parameters.

cuda/high_throughput.cuh says what the parts of a block hold and why no barrier is needed between batches.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.dispatch.nvshmem import arena, kernels
from moe_ep.dispatch.nvshmem.faults import FailureRecord
from moe_ep.dispatch.nvshmem.layout import align, offsets_of
from moe_ep.dispatch.nvshmem.meeting import agree, collect_garbage, meet
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.quantize import GROUP_SIZE

NAME = "nvshmem_high_throughput"
KERNELS = ("plan", "dispatch", "combine")
_LINE_BYTES = 16
_LINES_OF_COUNTS = 4
_FLAG_BYTES = 8
# What links carry at once.
_LINK_LINE_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The symmetric block, the same on every rank; cuda/high_throughput.cuh says what its parts hold.

    Attributes:
        num_ranks, capacity, hidden_size, topk: R, tokens per rank, K, slots of a token.
        fp8: rows travel as e4m3 codes, from which and the largest magnitude of each 128 columns they are made plain.
        device_api: rows travel through NVSHMEM's device library, with their ids and weights.
        batches_in_flight: how many batches between prepare and finalize have parts of their own.
    """

    num_ranks: int
    capacity: int
    hidden_size: int
    topk: int
    fp8: bool
    device_api: bool = False
    batches_in_flight: int = 1

    @property
    def max_rows(self) -> int:
        """Rows that can arrive."""
        return self.num_ranks * self.capacity

    @property
    def max_results(self) -> int:
        """Rows that can come home."""
        return self.capacity * min(self.num_ranks, self.topk)

    @property
    def takes_rows(self) -> bool:
        """Rows do not stay where they arrive."""
        return self.fp8 or self.device_api

    @property
    def row_bytes(self) -> int:
        """Of a row on the wire; cuda/high_throughput_dispatch.cu draws those that are converted."""
        columns = 2 * self.hidden_size
        if self.fp8:
            columns = self.hidden_size + align(2 * -(-self.hidden_size // GROUP_SIZE), 4)
        return align(columns + 8 * self.topk, _LINK_LINE_BYTES) if self.takes_rows else columns

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each part of a batch, in the order in which they lie."""
        return {
            "counts": 2 * _LINE_BYTES * _LINES_OF_COUNTS * self.num_ranks,
            "done": _LINE_BYTES * self.num_ranks,
            "row_flags": _FLAG_BYTES * self.max_rows,
            "result_flags": _FLAG_BYTES * self.max_results,
            "ids": 4 * self.topk * self.max_rows,
            "weights": 4 * self.topk * self.max_rows,
            "rows": self.row_bytes * self.max_rows,
            "results": 2 * self.hidden_size * self.max_results,
            "staged_rows": self.row_bytes * self.capacity if self.device_api else 0,
            "staged_results": 2 * self.hidden_size * self.max_rows if self.device_api else 0,
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part begins."""
        return offsets_of(self.sizes)

    @property
    def batch_bytes(self) -> int:
        return sum(align(size) for size in self.sizes.values())

    @property
    def symmetric_bytes(self) -> int:
        """What all batches in flight take of the arena."""
        return self.batches_in_flight * self.batch_bytes

    @property
    def plain_bytes(self) -> int:
        """Of plain device memory beside it: rows as the experts read them where they were taken, and slots."""
        rows = 2 * self.hidden_size * self.max_rows if self.takes_rows else 0
        return self.batches_in_flight * (rows + 4 * self.capacity * self.num_ranks)


def kernel_source(name: str, layout: Layout, dtype: torch.dtype) -> jit.KernelSource:
    """One of KERNELS for batches of that layout and dtype."""
    return kernels.kernel_source(f"high_throughput_{name}", layout, dtype)


_blocks: WeakKeyDictionary[arena.SymmetricArena, WeakValueDictionary[str, Block]] = WeakKeyDictionary()


class Block:
    """The symmetric block of one shape, and what this rank's kernels share.

    Attributes:
        alive: the EP ranks that take part.
        record: failed waits, for the host.
        order: of this process's kernels.
        recoveries: how often `recover` gave up all open batches.
    """

    def __init__(
        self, symmetric: arena.SymmetricArena, layout: Layout, ranks: RankGroup, in_dtype: torch.dtype
    ) -> None:
        self.layout, self._ranks, self._device, self.order = layout, ranks, symmetric.device, symmetric.order
        self._region = symmetric.reserve(layout.symmetric_bytes, "high throughput")
        self._peers = self._region.peer_pointers.tolist()
        unreachable = [rank for rank, pointer in enumerate(self._peers) if not pointer]
        if unreachable and not layout.device_api:
            raise BackendUnavailableError(
                f"{NAME} needs every rank's memory within reach and EP rank {ranks.rank} cannot reach "
                f"{', '.join(map(str, unreachable))}; use all2all_backend='all_to_all' across hosts"
            )
        self.record = FailureRecord(ranks, env.NVSHMEM_TIMEOUT_S.get())
        self.alive = list(range(ranks.size))
        self.recoveries = 0
        self._status = torch.zeros(2, dtype=torch.int32, device=self._device)
        self.batches = [BatchParts(self, index, in_dtype) for index in range(layout.batches_in_flight)]
        self._start(0)

    @classmethod
    def of(cls, layout: Layout, ranks: RankGroup, in_dtype: torch.dtype, facts: dict[str, object]) -> Block:
        """The block of this shape, made where any rank has none; a collective step of the ranks.

        Args:
            facts: what must be the same on every rank.
        """
        symmetric = arena.SymmetricArena.of(ranks.group)
        members = dist.get_process_group_ranks(ranks.group)
        agree(NAME, members, facts)
        collect_garbage(members)
        known = _blocks.setdefault(symmetric, WeakValueDictionary())
        key = f"{layout} {in_dtype}"
        found = known.get(key)
        everywhere = meet("block", members, "lacks" if found is None else "has")
        if found is None or "lacks" in everywhere:
            found = known[key] = cls(symmetric, layout, ranks, in_dtype)
        return found

    def take(self) -> BatchParts:
        """For a new batch: parts that no batch has, or else those of the oldest, which is given up.

        Ranks that make the same calls in the same order take the same ones.
        """
        parts = min(self.batches, key=lambda parts: (parts.is_open, parts.number))
        parts.number = 1 + max(each.number for each in self.batches)
        parts.is_open = True
        return parts

    def part(self, batch: int, name: str) -> torch.Tensor:
        """A view: the bytes of a part of a batch."""
        start = batch * self.layout.batch_bytes + self.layout.offsets[name]
        return self._region.local[start : start + self.layout.sizes[name]]

    def common(self, batch: int, numbers: torch.Tensor) -> Any:
        """`Common` of cuda/high_throughput.cuh; `numbers` are those of BatchParts."""
        layout, first = self.layout, numbers.data_ptr()
        return common_type(layout.num_ranks)(
            peers=(ctypes.c_uint64 * layout.num_ranks)(*(peer + batch * layout.batch_bytes for peer in self._peers)),
            pes=(ctypes.c_int * layout.num_ranks)(*self._region.pes),
            **layout.offsets,
            status=self._status.data_ptr(),
            record=self.record.words.data_ptr(),
            timeout_ns=int(self.record.timeout_s * 1e9),
            epoch=first,
            finished=first + 8,
            taken=first + 16,
            placement=first + 24,
            rank=self._ranks.rank,
        )

    def recover(self, dead: Sequence[int]) -> None:
        """Goes on without the EP ranks in `dead`; collective over the others, which must give up open batches too."""
        members = dist.get_process_group_ranks(self._ranks.group)
        alive = [rank for rank in range(self._ranks.size) if rank not in dead]
        torch.cuda.synchronize(self._device)
        epoch = max(int(parts.epoch) for parts in self.batches)
        epochs = meet(f"recovery of {NAME}", [members[rank] for rank in alive], str(epoch))
        self.alive = alive
        self.recoveries += 1
        self._start(max(map(int, epochs)))
        self.record.clear()
        meet(f"{NAME} recovered", [members[rank] for rank in alive])

    def _start(self, epoch: int) -> None:
        for parts in self.batches:
            parts.numbers.zero_()
            parts.epoch.fill_(epoch)
            parts.arriving.zero_()
            parts.number, parts.is_open = 0, False
        self._status.copy_(torch.tensor([0, sum(1 << rank for rank in self.alive)], dtype=torch.int32))
        torch.cuda.synchronize(self._device)


class BatchParts:
    """What one batch in flight has for itself.

    Attributes:
        number: of the batch that has it; later ones have larger numbers.
        is_open: it is between prepare and finalize.
        common: what the kernels share.
        numbers: int32: epoch (2), finished blocks, nothing, what was taken (2), the placement.
        epoch: int64 `[1]`, a view: the number of the last batch.
        slots: int32 `[C, R]`, of this rank's tokens.
        rows, ids, weights: `[R * C, …]`, what arrives, as the experts read it.
        arriving: int64 `[1]` in host memory, where the first kernel writes number << 32 | rows that arrive.
    """

    def __init__(self, block: Block, index: int, in_dtype: torch.dtype) -> None:
        layout, device = block.layout, block.part(index, "ids").device
        self._num_ranks = layout.num_ranks
        self.number, self.is_open = 0, False
        self.numbers = torch.zeros(6 + 4 * layout.num_ranks + 1, dtype=torch.int32, device=device)
        self.epoch = self.numbers[:2].view(torch.int64)
        self.slots = torch.empty((layout.capacity, layout.num_ranks), dtype=torch.int32, device=device)
        self.common = block.common(index, self.numbers)
        self._params: dict[str, Any] = {}
        self.arriving = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._arriving = self.arriving.numpy()
        if layout.takes_rows:
            self.rows = torch.empty((layout.max_rows, layout.hidden_size), dtype=in_dtype, device=device)
        else:
            self.rows = block.part(index, "rows").view(in_dtype).view(layout.max_rows, layout.hidden_size)
        self.ids = block.part(index, "ids").view(torch.int32).view(layout.max_rows, layout.topk)
        self.weights = block.part(index, "weights").view(torch.float32).view(layout.max_rows, layout.topk)

    def params(self, name: str, pointers: Sequence[int | None], numbers: Sequence[int]) -> Any:
        """`Params` of the kernel of that name, the same object in every call."""
        params = self._params.get(name)
        if params is None:
            params = params_type(self._num_ranks, len(pointers), len(numbers))(common=self.common)
            self._params[name] = params
        params.pointers[:], params.numbers[:] = pointers, numbers
        return params

    def rows_of(self, number: int) -> int | None:
        """Rows of the batch of that number that arrive here, once the first kernel has told."""
        word = int(self._arriving[0])
        return word & 0xFFFFFFFF if (word >> 32) - number & 0xFFFFFFFF == 0 else None


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/high_throughput.cuh."""
    offsets = ("counts", "done", "row_flags", "result_flags", "ids", "weights", "rows", "results")
    staged = ("staged_rows", "staged_results")

    class Common(ctypes.Structure):
        _anonymous_ = ("limits",)
        _fields_ = (
            ("peers", ctypes.c_uint64 * num_ranks),
            *((name, ctypes.c_uint64) for name in (*offsets, *staged)),
            ("limits", kernels.Limits),
            *((name, ctypes.c_void_p) for name in ("epoch", "finished", "taken", "placement")),
            ("rank", ctypes.c_int),
            ("pes", ctypes.c_int * num_ranks),
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
