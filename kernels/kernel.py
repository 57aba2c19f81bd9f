"""A kernel on one GPU, launched by the driver's own function.

The driver's Python bindings build a launch's structures anew in every call; here they are packed as bytes, in the
layout of CUlaunchConfig and CUlaunchAttribute in cuda.h.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch

from moe_ep.modular_kernel.workspace import current_stream

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# Grid, block, dynamic shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@3I3IIPPI4x")
# One attribute: its id, and a value of 64 bytes.
_EARLY = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)


class Kernel:
    """A kernel on one device. Its parameters lie in one block of memory; those of CUDA sources are one struct.

    Args:
        function: the driver's handle, of the context that is current.
        owner: keeps the code loaded.
    """

    def __init__(
        self, entry: str, function: int, device: torch.device, owner: object, offsets: Sequence[int] = (0,)
    ) -> None:
        self.entry = entry
        self.function, self._device, self._owner = function, device, owner
        self._can_come_early = torch.cuda.get_device_capability(device) >= (9, 0)
        self._driver = driver()
        self._offsets, self._pointers = offsets, struct.Struct(f"@{len(offsets)}P")
        context = ctypes.c_void_p()
        self._check(self._driver.cuCtxGetCurrent(ctypes.addressof(context)))
        self._context = context.value
        self._shared_bytes = 0

    def allow_shared(self, num_bytes: int) -> None:
        """Raises the limit of dynamic shared memory per launch; must be called before capture."""
        if num_bytes > max(self._shared_bytes, 48 * 1024):
            self._check(self._driver.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, num_bytes))
            self._shared_bytes = num_bytes

    def launch(
        self,
        params: ctypes.Structure | ctypes.Array[Any],
        grid: tuple[int, ...],
        block: int,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Launches on the current stream of the device; `params` is copied before this returns.

        Args:
            grid: up to three sizes, in blocks.
            early: allow it to start before the previous kernel has ended (programmatic dependent launch, from Hopper
                on); the kernel itself must wait for that one with griddepcontrol.wait.
        """
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.launch(params, grid, block, shared_bytes, early)
        early = early and self._can_come_early
        config = _config(grid, block, shared_bytes, current_stream(self._device), early)
        start = ctypes.addressof(params)
        pointers = self._pointers.pack(*[start + offset for offset in self._offsets])
        status = self._driver.cuLaunchKernelEx(config, self.function, pointers, None)
        if status == _INVALID_CONTEXT:
            # A thread that has not used the GPU yet has no current context.
            self._check(self._driver.cuCtxSetCurrent(self._context))
            status = self._driver.cuLaunchKernelEx(config, self.function, pointers, None)
        if status:
            self._check(status)
        return None

    def _check(self, status: int) -> None:
        """RuntimeError with the error's name if a driver call failed."""
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.addressof(name))
            cause = (name.value or b"an unknown error").decode()
            raise RuntimeError(f"CUDA driver call for kernel {self.entry} failed with {cause}")


def param_places(function: int) -> list[tuple[int, int]]:
    """(offset, bytes) of a function's parameters; none from a driver before 12.4, which does not tell."""
    found: list[tuple[int, int]] = []
    info = getattr(driver(), "cuFuncGetParamInfo", None)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    where = ctypes.byref(offset), ctypes.byref(size)
    while info is not None and not info(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), *where):
        found.append((offset.value, size.value))
    return found


@functools.lru_cache(maxsize=4096)
def _config(grid: tuple[int, ...], block: int, shared_bytes: int, stream: int, early: bool) -> bytes:
    sizes = (*(*grid, 1, 1)[:3], block, 1, 1, shared_bytes)
    return _CONFIG.pack(*sizes, stream, ctypes.addressof(_EARLY) if early else 0, int(early))


@functools.cache
def driver() -> Any:
    """NVIDIA's driver, its functions taking addresses and handles as integers, and structures as bytes."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, bytes_ = ctypes.c_void_p, ctypes.c_char_p
    library.cuLaunchKernelEx.argtypes = (bytes_, pointer, bytes_, pointer)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuCtxGetCurrent.argtypes = library.cuCtxSetCurrent.argtypes = (pointer,)
    library.cuGetErrorName.argtypes = (ctypes.c_int, pointer)
    return library
