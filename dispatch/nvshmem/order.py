"""Kernels that wait for other ranks run in the order of their calls, whatever streams they are queued on.

The buffers of a batch are given to the next when its combine is queued, which must not be overtaken on another stream.
And a kernel may fill a GPU while it waits: were two batches on two streams to begin in another order on another rank,
each GPU could be full of a kernel that waits for one which has no room on the other. On H200 this was not seen, as the
halves of blocks that have sent make room. All ranks make the calls in one order, and in that order no kernel waits for
one behind it.

Work of one stream is in order anyway, and costs nothing here.
"""

from __future__ import annotations

import torch

from moe_ep.kernels import jit
from moe_ep.workspace import current_stream

# Turns on one stream after which it is taken for the only one again.
_MEMORY = 256


class Order:
    """Turns of one process's kernels on its GPU, `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of the last turn: its stream, and the capture that it is part of, 0 for none.
        self._last = (0, 0)
        self._stream: torch.cuda.Stream | None = None
        # Behind the last turn, while there are several streams.
        self._event: torch.cuda.Event | None = None
        self._left = 0

    def __enter__(self) -> None:
        """A turn: what is queued inside runs behind what was queued in turns before.

        A turn that is captured runs behind those of its own capture: graphs must be launched in one order on all ranks.
        """
        now = (current_stream(self.device), _capture(self.device))
        if now != self._last or self._stream is None:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and now[1] == self._last[1]:
                # Where no event was made in time, what else was queued behind that turn is waited for too.
                stream.wait_event(self._event or self._stream.record_event())
                self._left = _MEMORY
            self._last, self._stream = now, stream

    def __exit__(self, *exception: object) -> None:
        self._event = None
        if self._left and self._stream is not None:
            self._left -= 1
            self._event = self._stream.record_event()


def _capture(device: torch.device) -> int:
    """The number of the capture that the current stream is part of; 0 for none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    driver = jit.driver_bindings()
    status, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(current_stream(device)))
    return int(jit.checked((status, number)))
