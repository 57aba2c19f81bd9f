"""Kernels that wait for other ranks run in the order of their calls, whatever streams they are queued on.

The buffers of a batch are given to the next when its combine is queued, which must not be overtaken on another stream.
And a kernel may fill a GPU while it waits: were two batches on two streams to begin in another order on another rank,
each GPU could be full of a kernel that waits for one which has no room on the other. On H200 this was not seen, as the
halves of blocks that have sent make room. All ranks make the calls in one order, and in that order no kernel waits for
one behind it.

Work of one stream is in order anyway, and costs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.kernels import jit
from moe_ep.modular_kernel.workspace import current_stream

# Turns on one stream after which it is taken for the only one again.
_MEMORY = 256


@dataclass
class _Turns:
    """Those of one capture, or those that no capture is part of.

    Attributes:
        handle, stream: of the last turn.
        event: behind the last turn, while there are several streams.
        left: turns until one stream is taken for the only one.
    """

    handle: int | None = None
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    left: int = 0


class Order:
    """Turns of one process's kernels on its GPU, `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # By the number of the capture, 0 for none; of captures the last one alone.
        self._turns = {0: _Turns()}
        self._now = self._turns[0]

    def __enter__(self) -> None:
        """A turn: what is queued inside runs behind what was queued in turns before.

        A turn that is captured runs behind those of its own capture: graphs must be launched in one order on all ranks,
        and in the order of the batches that share buffers with theirs.
        """
        capture, handle = _capture(self.device), current_stream(self.device)
        if capture not in self._turns:
            self._turns = {0: self._turns[0], capture: _Turns()}
        self._now = turns = self._turns[capture]
        if handle != turns.handle:
            stream = torch.cuda.current_stream(self.device)
            if turns.stream is not None:
                # Where no event was made in time, what else was queued behind that turn is waited for too.
                stream.wait_event(turns.event or turns.stream.record_event())
                turns.left = _MEMORY
            turns.handle, turns.stream = handle, stream

    def __exit__(self, *exception: object) -> None:
        turns = self._now
        turns.event = None
        if turns.left and turns.stream is not None:
            turns.left -= 1
            turns.event = turns.stream.record_event()


def _capture(device: torch.device) -> int:
    """The number of the capture that the current stream is part of; 0 for none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    driver = jit.driver_bindings()
    status, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(current_stream(device)))
    return int(jit.checked((status, number)))
