"""Kernels that wait for other ranks run in the order of their calls, whatever streams they are queued on.

The buffers of a batch are given to the next when its combine is queued, which must not be overtaken on another stream.
And a kernel may fill a GPU while it waits: if two ranks began the batches of two streams in different orders, each GPU
could be full of a kernel that waits for one which has no room on the other, a deadlock. On H200 this was not seen, as
blocks that have sent make room. All ranks make the calls in one order, and in that order no kernel waits for one behind
it.

Work of one stream is in order anyway, and costs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.kernels import jit
from moe_ep.modular_kernel.workspace import current_stream

# Launches on one stream after which it is taken for the only one again.
_MEMORY = 256


@dataclass
class _Launches:
    """The launches of one capture, or those outside of captures.

    Attributes:
        handle, stream: of the last launch.
        event: behind the last launch, while there are several streams.
        left: launches until one stream is taken for the only one.
    """

    handle: int | None = None
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    left: int = 0


class Order:
    """The order of one process's launches on its GPU, `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Launches by the number of the capture, 0 for none; only the last capture is kept.
        self._launches = {0: _Launches()}
        self._now = self._launches[0]

    def __enter__(self) -> None:
        """A launch: what is queued inside runs behind what was queued in launches before.

        A launch that is captured runs behind those of its own capture: graphs must be launched in one order on all
        ranks, and in the order of the batches that share buffers with theirs.
        """
        capture, handle = number_of_capture(self.device), current_stream(self.device)
        if capture not in self._launches:
            self._launches = {0: self._launches[0], capture: _Launches()}
        self._now = launches = self._launches[capture]
        if handle != launches.handle:
            stream = torch.cuda.current_stream(self.device)
            if launches.stream is not None:
                # Without an event of that launch, later work of its stream is waited for too.
                stream.wait_event(launches.event or launches.stream.record_event())
                launches.left = _MEMORY
            launches.handle, launches.stream = handle, stream

    def __exit__(self, *exception: object) -> None:
        launches = self._now
        launches.event = None
        if launches.left and launches.stream is not None:
            launches.left -= 1
            launches.event = launches.stream.record_event()


def number_of_capture(device: torch.device) -> int:
    """The number of the capture that the current stream is part of; 0 for none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    driver = jit.driver_bindings()
    status, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(current_stream(device)))
    return int(jit.checked((status, number)))
