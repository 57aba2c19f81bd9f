"""Tensors of other processes' GPUs on one host, opened here through CUDA's inter-process memory handles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

_HANDLE_BYTES = 64
# A handle as int64 words, and the offset in its allocation.
_WORDS = _HANDLE_BYTES // 8 + 1

# Open handles of this process with their address and number of users: the driver opens a handle once.
_opened: dict[bytes, list[int]] = {}


class PeerMemory:
    """The addresses here of each rank's tensors; making it is a collective step.

    Args:
        gather: gives the numbers of all ranks; its first argument says which.
        rank: of this process.
        tensors: this rank's, as many as of every other; they stay where they are until `close`.
        refusal: why this rank cannot share memory with the others; empty where it can.

    Attributes:
        addresses: of each rank's tensors, `[R][len(tensors)]`; 0 for one without elements.

    Raises:
        RuntimeError: on all ranks, where one cannot: no peer access, memory that cannot be shared.
    """

    def __init__(
        self,
        gather: Callable[[str, list[int]], Sequence[Sequence[int]]],
        rank: int,
        tensors: Sequence[torch.Tensor],
        refusal: str = "",
    ) -> None:
        self._handles: list[bytes] = []
        self.addresses: list[list[int]] = []

        def anybody(reason: str) -> str:
            """This rank's reason, or that another one has one."""
            failed = [other for other, row in enumerate(gather("what they can", [bool(reason)])) if row[0]]
            return reason or (f"EP rank {failed[0]} cannot" if failed else "")

        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            words: list[int] = [0] * (_WORDS * len(tensors))
            if not refusal:
                try:
                    words = [word for tensor in tensors for word in _export(tensor)]
                except (RuntimeError, ImportError) as error:
                    refusal = str(error)
            refusal = anybody(refusal)
            table = gather("their weights' addresses", words)
            if not refusal:
                try:
                    for other, row in enumerate(table):
                        here = [tensor.data_ptr() for tensor in tensors]
                        self.addresses.append(here if other == rank else self._open(row))
                except RuntimeError as error:
                    refusal = str(error)
            refusal = anybody(refusal)
            if refusal:
                raise RuntimeError(refusal)
            on_failure.pop_all()

    def close(self) -> None:
        """Lets go of the peers' memory; nothing may read it any more."""
        for handle in self._handles:
            _opened[handle][1] -= 1
            if not _opened[handle][1]:
                driver_call("cuIpcCloseMemHandle", _opened.pop(handle)[0])
        self._handles.clear()

    def _open(self, words: Sequence[int]) -> list[int]:
        """The addresses here of what a rank exported."""
        addresses = []
        for first in range(0, len(words), _WORDS):
            *of_handle, offset = words[first : first + _WORDS]
            if not any(of_handle):
                addresses.append(0)
                continue
            handle = b"".join(word.to_bytes(8, "little", signed=True) for word in of_handle)
            if handle not in self._handles:
                known = _opened.setdefault(handle, [0, 0])
                if not known[1]:
                    try:
                        known[0] = _import(handle)
                    except RuntimeError:
                        del _opened[handle]
                        raise
                known[1] += 1
                self._handles.append(handle)
            addresses.append(_opened[handle][0] + offset)
        return addresses


def _export(tensor: torch.Tensor) -> list[int]:
    if not tensor.numel():  # it has no memory, as the experts of a rank without any
        return [0] * _WORDS
    base, _ = driver_call("cuMemGetAddressRange", tensor.data_ptr())
    handle = driver_call("cuIpcGetMemHandle", base)  # owns what getPtr points to
    content = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
    words = [int.from_bytes(content[i : i + 8], "little", signed=True) for i in range(0, _HANDLE_BYTES, 8)]
    return [*words, tensor.data_ptr() - int(base)]


def _import(handle: bytes) -> int:
    from cuda.bindings import driver

    opened = driver.CUipcMemHandle()
    ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(driver_call("cuIpcOpenMemHandle", opened, int(flag)))


def driver_call(name: str, *args: Any) -> Any:
    """A call of the CUDA driver; RuntimeError with its name and result where it fails."""
    from cuda.bindings import driver

    result, *values = getattr(driver, name)(*args)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed with {result.name}")
    return values[0] if len(values) == 1 else tuple(values)
