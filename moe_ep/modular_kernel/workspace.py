"""Scratch memory shared by all layers of a process.

There is one buffer for each thread, device and stream, as large as the largest request so far, so sixty layers need no
more scratch than one, and the decode path never allocates. Threads have separate buffers, since one may run its experts
before another's results have been read. A CUDA graph keeps the addresses that it was captured with: buffers used under
capture are never freed, and nothing is allocated under capture. Before capturing, run one pass of the same size in the
same thread, and on the same streams if the graph forks into several. A stream without a buffer borrows another
stream's, which is safe only for graphs that replay one after the other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

_ALIGNMENT = 256
# Bounds the cache of views: the number of rows that arrive, and so the requests, vary from pass to pass.
_MOST_KEPT = 256

Request = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Scratch:
    """A buffer and views of it, cached by request because other layers and passes make the same requests."""

    buffer: torch.Tensor
    kept: dict[tuple[Request, ...], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def add(self, requests: tuple[Request, ...]) -> tuple[torch.Tensor, ...]:
        """Creates and caches views for these requests, one after the other in the buffer."""
        views, start = [], 0
        for shape, dtype in requests:
            strides = [math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)]
            views.append(self.buffer.view(dtype).as_strided(shape, strides, start // dtype.itemsize))
            start += _aligned_bytes(shape, dtype)
        if len(self.kept) == _MOST_KEPT:
            self.kept.clear()
        return self.kept.setdefault(requests, tuple(views))


class _OfThread(threading.local):
    """The buffers of one thread, by device and stream."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[torch.device, int], _Scratch] = {}


class WorkspaceManager:
    """Hands out views of one growing buffer for each thread, device and stream.

    A view is valid until the next `get` of the same thread on the same stream; two streams never share a buffer while
    both run eagerly.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._captured: list[torch.Tensor] = []

    def get(self, device: torch.device, *requests: Request, least_bytes: int = 0) -> tuple[torch.Tensor, ...]:
        """Returns uninitialized tensors of the given shapes and dtypes, side by side in this stream's scratch.

        Args:
            least_bytes: make the buffer at least this large, for later requests.

        Raises:
            RuntimeError: under CUDA-graph capture, when no buffer is large enough.
        """
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        key = (device, current_stream(device) if device.type == "cuda" else 0)
        scratch = self._of_thread.scratch.get(key)
        views = None if scratch is None or scratch.buffer.numel() < least_bytes else scratch.kept.get(requests)
        if scratch is None or views is None:
            del scratch  # and its views, so that a buffer that is too small can be freed
            # Ordinary tensors, which passes can write to in and out of inference mode.
            with torch.inference_mode(False):
                scratch = self._with_room(key, max(num_bytes(*requests), least_bytes), capturing)
                views = scratch.add(requests)
        if capturing and all(scratch.buffer is not kept for kept in self._captured):
            self._captured.append(scratch.buffer)
        return views

    def num_bytes(self, device: torch.device | None = None) -> int:
        """The number of bytes that this thread holds, on one device or on all."""
        held = self._of_thread.scratch.items()
        return sum(scratch.buffer.numel() for (where, _), scratch in held if device is None or where == device)

    def _with_room(self, key: tuple[torch.device, int], num_bytes: int, capturing: bool) -> _Scratch:
        """Returns the current scratch if it is large enough, otherwise a larger one."""
        held = self._of_thread.scratch
        if key in held and held[key].buffer.numel() >= num_bytes:
            return held[key]
        if capturing:
            # Not cached: this stream may run eagerly later, at the same time as the stream that it borrows from.
            return _Scratch(self._borrow(num_bytes, key[0]))
        # Freed first, unless a graph needs it, so that the larger one can take its memory.
        held.pop(key, None)
        device, size = key[0], max(num_bytes, _ALIGNMENT)
        held[key] = _Scratch(outside_of_pools(lambda: torch.empty(size, dtype=torch.uint8, device=device), device))
        return held[key]

    def _borrow(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The buffer of the stream that the warm-up ran on; graphs that replay one after the other share it."""
        for (where, _), scratch in self._of_thread.scratch.items():
            if where == device and scratch.buffer.numel() >= num_bytes:
                return scratch.buffer
        raise RuntimeError(
            f"a pass under CUDA-graph capture needs {num_bytes} bytes of scratch and no buffer of that size is there; "
            f"run one pass of the same size, in the same thread, before capturing"
        )


def num_bytes(*requests: Request) -> int:
    """The number of bytes that `get` needs for these tensors."""
    return sum(_aligned_bytes(*request) for request in requests)


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def current_stream(device: torch.device) -> int:
    """The handle of a GPU's current stream; faster than torch.cuda.current_stream, which creates an object."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


def outside_of_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Calls make() so that its memory may outlive the pass. While torch.compile warms up a CUDA graph, all memory that
    the thread allocates comes from the graph's own pool and must be given back, so another thread allocates."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def make_there() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make_there).result()


_manager = WorkspaceManager()


def workspace_manager() -> WorkspaceManager:
    """The workspace manager of this process."""
    return _manager
