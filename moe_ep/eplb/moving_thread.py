"""The thread that carries out rearrangements, and looks for errors of other ranks between them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.rearrangement import POLL_S, Job
from moe_ep.errors import EplbError


class MovingThread:
    """Takes jobs one after the other, from `start` until `close` or until something goes wrong.

    Args:
        carry_out: all of a job; what goes wrong is returned.
        stop: told once what went wrong, here or on another rank.

    Attributes:
        is_open: whether it was started and not closed.
    """

    def __init__(
        self,
        device: torch.device,
        channel: SideChannel,
        carry_out: Callable[[Job], EplbError | None],
        stop: Callable[[EplbError], None],
    ) -> None:
        self.is_open = False
        self._device, self._channel, self._carry_out, self._stop = device, channel, carry_out, stop
        # A SimpleQueue, since its put is reentrant: garbage collected inside it may close this object.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Callable[[], None] | None = None
        self._has_ended, self._once = False, threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="moe_ep-eplb", daemon=True)

    def start(self) -> None:
        """Begins to take jobs."""
        self._thread.start()
        self.is_open = True

    def put(self, job: Job) -> None:
        """Has a job carried out, soon."""
        self._jobs.put(job)

    def close(self) -> None:
        """Returns when the thread has ended, or will at once: it may itself collect this object as garbage."""
        self.is_open = False
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def end(self, last: Callable[[], None]) -> None:
        """As `close`, without waiting; `last` is called by the thread, or here where it has ended already."""
        self.is_open = False
        self._last = last
        self._jobs.put(None)
        if self._has_ended:
            self._call_last()

    def _call_last(self) -> None:
        # Two threads may come here.
        if self._last is not None and self._once.acquire(blocking=False):
            self._last()

    def _serve(self) -> None:
        try:
            self._take_jobs()
        finally:
            self._has_ended = True
            self._call_last()

    def _take_jobs(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        error: EplbError | None = None
        try:
            while error is None:
                try:
                    job = self._jobs.get(timeout=POLL_S)
                except queue.Empty:
                    error = self._channel.heard()
                    continue
                if job is None:
                    return
                error = self._carry_out(job)
        except BaseException as cause:
            error = interrupted(self._channel, cause)
        self._stop(error)


def interrupted(channel: SideChannel, cause: BaseException) -> EplbError:
    """For what is no error but ends a thread all the same, as SystemExit of a listener does; all ranks learn it."""
    return channel.failed(f"EPLB was interrupted on EP rank {channel.rank}: {cause!r}")
