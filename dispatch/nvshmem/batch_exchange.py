"""Balancing a batch without the host: counts in symmetric memory, and experts copied out of the peers' weights.

Ranks leave their counts in each other's memory (cuda/batch_counts.cu), the plan and the places of rows are kernels of
`moe_ep.kernels.batch_plan`, and a few SMs copy experts on a stream of their own while rows are dispatched
(cuda/batch_copies.cu). The host learns how many copies there are when it has queued the resident experts, and then
queues nothing for scratch slots that stay empty.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_ep.dispatch.nvshmem import arena, kernels
from moe_ep.dispatch.nvshmem.backend import FailureRecord
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.distributed.exchange import gather_values
from moe_ep.distributed.peer_memory import PeerMemory
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import jit
from moe_ep.kernels.arrival import Limits
from moe_ep.modular_kernel.contracts import Copied, Pending

# Constants of cuda/batch_balance.cuh.
_LINE_BYTES, _MOST_LINES = 16, 512
MOST_EXPERTS = 2 * _MOST_LINES
THREADS = {"batch_counts": 1024, "batch_copies": 512, "batch_release": 32}
# Blocks that copy: a few SMs, with 512 KB of loads in flight, as much as a link holds at 290 GB/s for 1.8 us.
_COPY_BLOCKS = 16
# Batches whose numbers of copies lie in host memory at a time.
_TOLD = 8


def symmetric_bytes(num_ranks: int) -> int:
    """Bytes of the symmetric block of one exchange."""
    return _LINE_BYTES * num_ranks * (2 * _MOST_LINES + 1)


@functools.cache
def kernel_source(name: str, num_ranks: int, num_experts: int = 0, ids: torch.dtype = torch.int32) -> jit.KernelSource:
    """One of THREADS; the number of experts and the dtype of ids are those of counts."""
    defines = {"RANKS": num_ranks, "THREADS": THREADS[name]}
    if name == "batch_counts":
        defines |= {"EXPERTS": num_experts, "IDS_64": int(ids == torch.int64)}
    return jit.KernelSource(kernels.CUDA / f"{name}.cu", name, tuple((key, str(n)) for key, n in defines.items()))


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/batch_balance.cuh."""
    peers = ("peers", ctypes.c_uint64 * num_ranks)
    return kernels.structure(peers, ("limits", Limits), ("epoch", ctypes.c_uint32), ("rank", ctypes.c_int))


class DeviceExchange:
    """`BatchExchange` of the ranks of one host, shared by the layers that share a block of symmetric memory.

    Args:
        status: int32 `[2]`, of that block: once a wait of its kernels or of these has failed, none waits any more.
        record: says on the host which.
    """

    on_device = opens_together = True

    def __init__(
        self, symmetric: arena.SymmetricArena, ranks: RankGroup, status: torch.Tensor, record: FailureRecord
    ) -> None:
        self._ranks, self._status, self.record = ranks, status, record
        self._symmetric, self.device, self.order = symmetric, symmetric.device, symmetric.order
        self.rank, self.size = ranks.rank, ranks.size
        self.epoch = 0
        self._region: arena.Region | None = None

    def open(self, resident: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor], num_slots: int) -> _DeviceCopies:
        if self._region is None:
            self._region = self._symmetric.reserve(symmetric_bytes(self.size), "balancing of batches")
            for name in ("batch_copies", "batch_release"):
                load_kernel(kernel_source(name, self.size), self.device)  # not while others wait
        return _DeviceCopies(self, resident, scratch, num_slots)

    def gather(self, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        ids = ids.contiguous() if ids.dtype == torch.int64 else ids.to(torch.int32).contiguous()
        counts = torch.empty((self.size, num_experts), dtype=torch.int32, device=ids.device)
        self.epoch = (self.epoch + 1) & 0xFFFFFFFF
        with self.order:
            self.launch(kernel_source("batch_counts", self.size, num_experts, ids.dtype), [ids, counts], [ids.numel()])
        return counts

    def launch(
        self, source: jit.KernelSource, tensors: Sequence[torch.Tensor], numbers: Sequence[int], blocks: int = 1
    ) -> None:
        """Launches a kernel for the last batch whose counts were gathered, on the current stream."""
        region: Any = self._region  # it is open
        params = kernels.params_type(common_type(self.size), len(tensors), len(numbers))()
        timeout_ns = int(self.record.timeout_s * 1e9)
        params.common.peers[:] = region.peers
        params.common.limits = Limits(self._status.data_ptr(), self.record.words.data_ptr(), timeout_ns)
        params.common.epoch, params.common.rank = self.epoch, self.rank
        params.pointers[:], params.numbers[:] = [tensor.data_ptr() for tensor in tensors], numbers
        load_kernel(source, self.device).launch(params, (blocks,), THREADS[source.entry])

    def gather_numbers(self, name: str, numbers: list[int]) -> list[list[int]]:
        """The numbers of all ranks."""
        return gather_values(f"{name} for balancing", numbers, self._ranks.group)

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        """Waits on the host."""
        self._ranks.wait_for_sizes("balancing of a batch", has_come)
        self.record.check()


class _DeviceCopies:
    """`ExpertCopies` of a DeviceExchange: a few SMs read them from where the peers have them.

    Attributes:
        told: int64 in host memory: the last batches' numbers of copies, as cuda/batch_copies.cu writes them.
    """

    def __init__(
        self,
        exchange: DeviceExchange,
        resident: Sequence[torch.Tensor],
        scratch: Sequence[torch.Tensor],
        num_slots: int,
    ) -> None:
        self._exchange, self._num_slots, self._tensors = exchange, num_slots, (resident, scratch)
        try:
            peers = PeerMemory(exchange.gather_numbers, exchange.rank, resident)
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"experts cannot be copied from GPU to GPU for a batch: {error}; set batch_balance='off'"
            ) from None
        rows = [
            [*(of_rank[index] for of_rank in peers.addresses), part.data_ptr(), part.size(1)]
            for index, part in enumerate(scratch)
        ]
        self._parts = torch.tensor(rows, dtype=torch.int64, device="cpu").to(exchange.device)
        self._finished = torch.zeros(1, dtype=torch.int32, device=exchange.device)
        self.told = torch.zeros(_TOLD, dtype=torch.int64, device="cpu", pin_memory=True)
        of_no_batch_to_come = exchange.epoch - (1 << 32 if exchange.epoch >> 31 else 0)
        self.told.view(torch.int32)[1::2] = of_no_batch_to_come
        self._stream = torch.cuda.Stream(exchange.device)
        weakref.finalize(self, _close, peers, exchange.device).atexit = False

    def start(self, sources: torch.Tensor) -> Pending[Copied]:
        exchange, epoch, stream = self._exchange, self._exchange.epoch, self._stream
        place = epoch % _TOLD
        stream.wait_stream(torch.cuda.current_stream(exchange.device))
        self._sources = sources  # read on a stream that their memory does not belong to
        with torch.cuda.stream(stream):
            # Not in the order of kernels that wait for other ranks: it waits for none, and runs beside them.
            exchange.launch(
                kernel_source("batch_copies", exchange.size),
                [sources, self._parts, self.told[place:], self._finished],
                [len(self._parts), self._num_slots, sources.size(1)],
                _COPY_BLOCKS,
            )
            done = stream.record_event()

        def release() -> None:
            with exchange.order:
                exchange.launch(kernel_source("batch_release", exchange.size), [], [])

        def receive() -> Copied:
            exchange.wait_for(lambda: self.copies_of(epoch) is not None)
            total, here = self.copies_of(epoch) or (0, 0)
            if not total:
                return Copied(0, 0)
            torch.cuda.current_stream(exchange.device).wait_event(done)
            return Copied(total, here, release)

        return Pending(lambda: None, receive)

    def copies_of(self, epoch: int) -> tuple[int, int] | None:
        """Copies of all ranks and here, once the kernel of that batch has begun."""
        word = int(self.told[epoch % _TOLD])
        if (word >> 32) & 0xFFFFFFFF != epoch:
            return None
        return word >> 16 & 0xFFFF, word & 0xFFFF


def _close(peers: PeerMemory, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no kernel reads them any more
    peers.close()


@functools.cache
def load_kernel(source: jit.KernelSource, device: torch.device) -> jit.Kernel:
    return jit.load(source, device)
