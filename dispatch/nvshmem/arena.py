"""Symmetric memory, which every rank of a host can write: blocks from NVSHMEM, and the address of each peer's copy.

NVSHMEM is initialized once per process, over all ranks of the default group; its unique id is sent through the group's
store. An arena is one process group's view of it, shared by everything in the process that moves rows in that group.
Allocation is collective over the default group. Sub-groups work if they partition it and all of them make the same
allocations; otherwise an error names the missing ranks (`moe_ep.distributed.exchange`).

A block can be freed once nothing refers to its tensor any more. It is freed at the next collective step in which all
ranks report that, in the same order and after their GPUs have finished; `SymmetricArena.close` frees everything. A
process that just exits leaves its memory to the driver and waits for no other.

NVSHMEM's set of ranks is fixed at its start: allocating, freeing and finalizing wait for all of them, dead ones
included. So the ranks of an elastic gang (`moe_ep.distributed.membership`) share memory through CUDA IPC handles
instead, and set it up again after each change.
"""

from __future__ import annotations

import logging
import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.dispatch.nvshmem import kernels
from moe_ep.dispatch.nvshmem.order import Order
from moe_ep.distributed.exchange import gather_texts, gather_values, this_host
from moe_ep.distributed.membership import is_elastic
from moe_ep.distributed.peer_memory import PeerMemory, driver_call
from moe_ep.errors import BackendUnavailableError, DispatchTimeoutError, missing_extra
from moe_ep.kernels import jit

logger = logging.getLogger(__name__)

# Physical memory is taken from the driver in pieces of this size; NVSHMEM's own default of 512 MB would be most of it.
_GRANULARITY = 16 << 20
_ALIGNMENT = 512
# The driver makes several allocations of one block of this size, which other processes can only map as a whole.
_IPC_ALIGNMENT = 2 << 20


@dataclass(frozen=True)
class Region:
    """A symmetric block as one rank of an arena's group sees it.

    Attributes:
        local: uint8 `[nbytes]`, this rank's copy; zero when it is handed out, on every rank.
        peers: where each rank's copy is mapped here, 0 where it cannot be.
        pes: the PE number of each rank, as NVSHMEM's device library takes it (cuda/device_api.cuh).
    """

    local: torch.Tensor
    peers: list[int]
    pes: tuple[int, ...]


class _Memory:
    """Raw device memory that torch can make a tensor of; it lives as long as that tensor."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None
        }  # fmt: skip


class SymmetricBlock(NamedTuple):
    pointer: int
    memory: weakref.ref[_Memory]


class SymmetricArena:
    """The symmetric memory of one process group on this process's current device; use `of` to get it.

    Attributes:
        device: the CUDA device.
        order: the order of kernels that wait for other ranks; one for all arenas of the process.
    """

    def __init__(self, runtime: Runtime, process_group: dist.ProcessGroup) -> None:
        self._runtime = runtime
        self._pes = dist.get_process_group_ranks(process_group)
        self.device, self.order = runtime.device, runtime.order

    @property
    def is_mapped(self) -> bool:
        """Whether the group's ranks are on one host, so that each can have the others' memory mapped."""
        hosts = {self._runtime.hosts[pe] for pe in self._pes}
        return len(hosts) == 1 and (len(self._pes) == 1 or not env.NVSHMEM_FORCE_DEVICE_API.get())

    @property
    def carries_packets(self) -> bool:
        """Whether a warp's store to another rank's memory arrives as a whole (cuda/protocol.cuh), as over NVLink."""
        return self.is_mapped and all(self._runtime.joined[pe] for pe in self._pes)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None = None) -> SymmetricArena:
        """The arena of a group (None for the default one); its first call in a process is collective.

        Raises:
            ImportError: nvshmem4py is missing.
            BackendUnavailableError: no GPU.
            DispatchTimeoutError: the other ranks did not join.
        """
        group = process_group or dist.distributed_c10d._get_default_group()
        runtime = _runtime()
        members = tuple(dist.get_process_group_ranks(group))
        if members not in runtime.arenas:
            runtime.arenas[members] = cls(runtime, group)
        return runtime.arenas[members]

    @torch.inference_mode(False)
    def reserve(self, nbytes: int, name: str) -> Region:
        """Allocates a block, zeroed on every rank; collective over the default group, with the same sizes in the same
        order everywhere.

        Raises:
            ValueError: the ranks request different blocks.
            DispatchTimeoutError: some rank did not join.
            torch.OutOfMemoryError: not enough memory is left.
        """
        local = self._runtime.allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, name)
        peers = [self._runtime.peer_pointer(local.data_ptr(), pe) for pe in self._pes]
        return Region(local, peers, tuple(self._pes))

    @staticmethod
    def close() -> None:
        """Frees every block and finalizes NVSHMEM; collective over the default group, before it is destroyed.

        Tensors of the arena must not be used any more. If a rank does not join, nothing is freed until the process
        exits. Does nothing if there is no arena.
        """
        global _the_runtime
        runtime, _the_runtime = _the_runtime, None
        if runtime is not None:
            runtime.close()


class Runtime(ABC):
    """Symmetric memory of this process and the other ranks of the default group.

    Attributes:
        hosts: the host of each rank.
        joined: whether NVLink joins each rank's GPU to its peers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.order = device, Order(device)
        self.blocks: list[SymmetricBlock] = []
        self.arenas: dict[tuple[int, ...], SymmetricArena] = {}

    def start(self) -> None:
        """Initializes the runtime; a collective step of the default group."""
        torch.cuda.synchronize(self.device)  # Makes the primary context current.
        told = gather_values("start of symmetric memory", (this_host(), joins_peers(self.device)))
        self.hosts, self.joined = zip(*told, strict=True)

    @abstractmethod
    def peer_pointer(self, pointer: int, pe: int) -> int:
        """Returns where another rank's copy is mapped; 0 if it cannot or must not be mapped."""

    @abstractmethod
    def _malloc(self, nbytes: int) -> int:
        """Allocates a block on this rank; returns 0 if no memory is left."""

    @abstractmethod
    def _share(self, local: torch.Tensor, name: str) -> None:
        """Lets the other ranks map a block, and maps theirs; a collective step."""

    @abstractmethod
    def _free(self, pointer: int) -> None:
        """Frees a block."""

    @abstractmethod
    def _end(self) -> None:
        """Undoes `start`."""

    def allocate(self, nbytes: int, name: str) -> torch.Tensor:
        """Allocates zeros, uint8 `[nbytes]`, on every rank of the default group."""
        idle = [index for index, block in enumerate(self.blocks) if block.memory() is None]
        asked, idle_there = zip(*gather_values("symmetric memory", (f"{nbytes} {name}", idle)), strict=True)
        if len(set(asked)) > 1:
            who = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(asked))
            raise ValueError(
                f"the ranks of the default group ask for different symmetric blocks ({who}); its groups must "
                f"make the same backends in the same order, or use all2all_backend='all_to_all'"
            )
        everywhere = set.intersection(*map(set, idle_there))
        self.give_back([self.blocks[index] for index in sorted(everywhere)])
        pointer = self._malloc(nbytes)
        if not pointer:
            raise torch.OutOfMemoryError(f"there are no {nbytes} bytes left for {name}; lower max_num_tokens")
        memory = _Memory(pointer, nbytes)
        self.blocks.append(SymmetricBlock(pointer, weakref.ref(memory)))
        local = torch.as_tensor(memory, device=self.device).zero_()
        self._share(local, name)
        torch.cuda.synchronize(self.device)
        gather_texts("symmetric memory is zero")
        return local

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
            gather_texts("end of symmetric memory")
        except RuntimeError as error:
            logger.warning("symmetric memory stays until the process ends: %s", error)
            return
        self.give_back(list(self.blocks))
        self._end()

    def give_back(self, blocks: list[SymmetricBlock]) -> None:
        """Frees blocks that no rank uses any more."""
        if blocks:
            torch.cuda.synchronize(self.device)
        for block in blocks:
            self.blocks.remove(block)
            self._free(block.pointer)


class NvshmemRuntime(Runtime):
    """NVSHMEM in this process; core and bindings are modules of nvshmem4py."""

    def __init__(self, core: Any, bindings: Any, device: torch.device) -> None:
        super().__init__(device)
        self._core, self._bindings = core, bindings

    def start(self) -> None:
        import numpy as np
        from cuda.core import Device

        super().start()
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        os.environ.setdefault("NVSHMEM_CUMEM_GRANULARITY", str(_GRANULARITY))
        if len({host.split("#")[0] for host in self.hosts}) == 1:
            os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        rank = dist.get_rank()
        uid = self._core.get_unique_id(empty=rank != 0)
        bits = uid._data.view(np.uint8).reshape(-1)
        bits[:] = np.frombuffer(bytes.fromhex(gather_texts("NVSHMEM id", bits.tobytes().hex())[0]), dtype=np.uint8)
        device = Device(self.device.index)
        device.set_current()
        self._core.init(device=device, uid=uid, rank=rank, nranks=dist.get_world_size(), initializer_method="uid")
        kernels.restart_device_library()

    def peer_pointer(self, pointer: int, pe: int) -> int:
        if pe == dist.get_rank():
            return pointer
        if env.NVSHMEM_FORCE_DEVICE_API.get() or self.hosts[pe] != self.hosts[dist.get_rank()]:
            return 0
        return int(self._bindings.ptr(pointer, pe))

    def _malloc(self, nbytes: int) -> int:
        return int(self._bindings.malloc(nbytes))

    def _share(self, local: torch.Tensor, name: str) -> None:
        """Does nothing, because NVSHMEM maps its own blocks."""

    def _free(self, pointer: int) -> None:
        self._bindings.free(pointer)

    def _end(self) -> None:
        kernels.stop_device_library()
        self._core.finalize()


class EpochRuntime(Runtime):
    """Memory that the current ranks of an elastic gang share through CUDA's inter-process handles.

    Args:
        before: the runtime of the previous ranks. Its memory stays until the ranks change again, because a removed rank
            may write to it until its process has ended.
    """

    def __init__(self, device: torch.device, before: EpochRuntime | None) -> None:
        super().__init__(device)
        self._before = before
        self._group, self._peers = weakref.ref(dist.distributed_c10d._get_default_group()), dict[int, PeerMemory]()

    def start(self) -> None:
        super().start()
        if len(set(self.hosts)) > 1 or env.NVSHMEM_FORCE_DEVICE_API.get():
            raise BackendUnavailableError(
                "the ranks of an elastic gang are on several hosts, and NVSHMEM's backends need one host there; choose "
                "all2all_backend='all_to_all'"
            )
        if self._before is not None:  # the GPUs of all present ranks have finished
            self._before._end()

    @property
    def is_present(self) -> bool:
        """Whether its ranks are the current ones."""
        return self._group() is dist.distributed_c10d._get_default_group()

    def peer_pointer(self, pointer: int, pe: int) -> int:
        return self._peers[pointer].addresses[pe][0]

    def _malloc(self, nbytes: int) -> int:
        for _ in range(2):
            try:
                return int(driver_call("cuMemAlloc", kernels.align(nbytes, _IPC_ALIGNMENT)))
            except RuntimeError:
                torch.cuda.empty_cache()
        return 0

    def _share(self, local: torch.Tensor, name: str) -> None:
        def gather(what: str, numbers: list[int]) -> list[list[int]]:
            return gather_values(f"{what} for {name}", numbers)

        try:
            self._peers[local.data_ptr()] = PeerMemory(gather, dist.get_rank(), [local])
        except DispatchTimeoutError:
            raise
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"the GPUs of the ranks cannot map each other's memory: {error}; choose all2all_backend='all_to_all'"
            ) from None

    def _free(self, pointer: int) -> None:
        if (peers := self._peers.pop(pointer, None)) is not None:
            peers.close()
        driver_call("cuMemFree", pointer)

    def _end(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.give_back(list(before.blocks))


_the_runtime: Runtime | None = None


def _runtime() -> Runtime:
    global _the_runtime
    if not torch.cuda.is_available():
        raise BackendUnavailableError("NVSHMEM's backends need a CUDA GPU and torch sees none")
    known, device = _the_runtime, torch.device("cuda", torch.cuda.current_device())
    if is_elastic(dist.distributed_c10d._get_default_group()):
        before = known if isinstance(known, EpochRuntime) else None
        known = before if before is not None and before.is_present else EpochRuntime(device, before)
    elif known is None:
        known = NvshmemRuntime(*_nvshmem(), device)
    if known is not _the_runtime:
        known.start()
        _the_runtime = known
    elif known.device != device:
        raise ValueError(
            f"the current CUDA device is {device.index} and symmetric memory is on {known.device.index} in this "
            f"process; use one device per process, set with torch.cuda.set_device"
        )
    return known


def joins_peers(device: torch.device) -> bool:
    """Whether NVLink leads from this GPU to all others that this process sees: over PCIe there are no atomic operations
    on another GPU's memory."""
    driver = jit.driver_bindings()
    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    peers = [peer for peer in range(torch.cuda.device_count()) if peer != device.index]
    return all(jit.checked(driver.cuDeviceGetP2PAttribute(attribute, device.index, peer)) for peer in peers)


def _nvshmem() -> tuple[Any, Any]:
    """Returns (nvshmem.core, nvshmem.bindings); raises ImportError with the pip line if they are missing."""
    try:
        import nvshmem.core
        from nvshmem import bindings
    except (ImportError, RuntimeError) as error:
        raise missing_extra("nvshmem4py-cu13", "cuda", "the NVSHMEM dispatch") from error
    return nvshmem.core, bindings


def unusable_reason() -> str | None:
    """Returns a one-line reason why symmetric memory is unavailable here, with the fix, or None if it is available."""
    if not dist.is_available():
        return "this torch was built without torch.distributed; install a build that has it"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    try:
        _nvshmem()
    except ImportError as error:
        return str(error)
    return None
