"""Kernels that wait for other ranks run in the order of their calls, whatever streams they are queued on.

The next batch gets a batch's buffers as soon as its combine is queued, so work on another stream must not overtake the
combine. Also, a waiting kernel may fill a GPU: if two ranks started the batches of two streams in different orders,
each GPU could be full of a kernel that waits for one without room on the other GPU, a deadlock. This was not observed
on H200, because blocks that have sent make room. All ranks make the calls in the same order, in which no kernel waits
for a later one.

Work of one stream is in order anyway, so a single stream costs nothing here.
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
        handle, stream: the stream of the last launch.
        event: recorded after the last launch while there are several streams.
        left: launches on one stream until it is assumed to be the only one.
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
        """Begins a launch: work queued inside the block runs after the work of earlier launches.

        A captured launch runs after the earlier ones of its own capture only: all ranks must launch graphs in the same
        order, and in the order of the batches that share buffers with theirs.
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
