"""Scratch memory shared by all layers of a process.

One buffer a thread, device and stream, as large as the largest request so far (a high-water mark), so that sixty layers
need the scratch of one and the decode path never allocates. Threads have their own, since one may come to its experts
while another's results are still to be read. A CUDA graph keeps the addresses it was captured with: buffers handed out
under capture are never freed, and nothing is allocated under capture. Run a pass of the same size once before
capturing, in the same thread, and on the same streams where a graph forks into several: a stream without a buffer of
its own borrows another's, which is safe only for graphs that replay one after the other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

_ALIGNMENT = 256

Request = tuple[Sequence[int], torch.dtype]


class _OfThread(threading.local):
    """What goes with its thread."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


class WorkspaceManager:
    """Hands out views of one growing buffer for each thread, device and stream.

    A view is valid until the next `get` of the same thread on the same stream; two streams never share a buffer while
    both run eagerly.
    """

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._captured: list[torch.Tensor] = []

    def get(self, requests: Sequence[Request], device: torch.device, least_bytes: int = 0) -> list[torch.Tensor]:
        """Uninitialised tensors of the given shapes and dtypes, side by side in the scratch of this stream.

        Args:
            least_bytes: make the scratch at least so large, for later requests.

        Raises:
            RuntimeError: under CUDA-graph capture, when no buffer is large enough.
        """
        offsets, end = [], 0
        for request in requests:
            offsets.append(end)
            end += _aligned_bytes(*request)
        buffer = self._buffer(max(end, least_bytes), device)
        return [
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
            for start, (shape, dtype) in zip(offsets, requests, strict=True)
        ]

    def num_bytes(self, device: torch.device | None = None) -> int:
        """Bytes held by this thread, on one device or on all."""
        return sum(b.numel() for (where, _), b in self._of_thread.buffers.items() if device is None or where == device)

    def _buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        key = (device, current_stream(device) if device.type == "cuda" else 0)
        buffers = self._of_thread.buffers
        buffer = buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            if capturing:
                buffer = self._borrow(num_bytes, device)
            else:
                # Its memory, if no graph needs it, is there for the larger one.
                del buffer
                buffers.pop(key, None)
                buffer = self._grow(num_bytes, device)
            buffers[key] = buffer
        if capturing and all(buffer is not kept for kept in self._captured):
            self._captured.append(buffer)
        return buffer

    @staticmethod
    def _grow(num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(max(num_bytes, _ALIGNMENT), dtype=torch.uint8, device=device)

    def _borrow(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The scratch of the stream that the warm-up ran on: graphs that replay in turn share it."""
        for (where, _), buffer in self._of_thread.buffers.items():
            if where == device and buffer.numel() >= num_bytes:
                return buffer
        raise RuntimeError(
            f"a pass under CUDA-graph capture needs {num_bytes} bytes of scratch and no buffer of that size is there; "
            f"run one pass of the same size, in the same thread, before capturing"
        )


def num_bytes(requests: Sequence[Request]) -> int:
    """Bytes that `get` takes for these tensors."""
    return sum(_aligned_bytes(*request) for request in requests)


def _aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def current_stream(device: torch.device) -> int:
    """The handle of the stream that is current on a GPU; torch makes no object for it, which would take longer."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)  # type: ignore[attr-defined]


_manager = WorkspaceManager()


def workspace_manager() -> WorkspaceManager:
    """The manager of this process."""
    return _manager
