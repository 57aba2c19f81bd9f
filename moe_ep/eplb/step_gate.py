"""The steps of the model as two threads see them: the one that serves, and the one that moves experts.

A commit must come after the same step on every rank, and the ranks learn which step that is while they go on. So a rank
that announces its present step also promises not to begin step `present + margin` before it knows the answer; the
answer is the largest present step and the margin, which no rank has passed. Ranks that are as fast as the exchange of
two numbers never wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moe_ep.errors import EplbError


class StepGate:
    """Counts steps, and holds the serving thread where a decision is due.

    Attributes:
        step: how many steps have ended.
    """

    def __init__(self) -> None:
        self.step = 0
        self._changed = threading.Condition()
        self._hold: int | None = None
        self._due: int | None = None
        self._error: EplbError | None = None

    @property
    def failed(self) -> bool:
        """Whether `check` raises."""
        return self._error is not None

    def advance(self, timeout_s: float) -> bool:
        """Ends a step; True where a commit is due before the next begins, which `done` then confirms.

        Raises:
            EplbError: the moving thread failed.
            TimeoutError: it did not decide before the deadline.
        """
        with self._changed:
            self.step += 1
            self.wait_for(lambda: self._hold is None or self.step < self._hold, timeout_s)
            return self._due == self.step

    def wait_decided(self) -> None:
        """Waits for the next decision without ending a step; a commit is due then. For ranks that stand at one step.

        Raises:
            EplbError: the moving thread failed.
        """
        with self._changed:
            self.wait_for(lambda: self._due is not None, None)

    def done(self) -> None:
        """The commit was made."""
        with self._changed:
            self._due = None
            self._changed.notify_all()

    def announce(self, margin: int) -> int:
        """The present step, with the promise."""
        with self._changed:
            self._hold = self.step + margin
            return self.step

    def decide(self, step: int) -> None:
        """The commit comes after this step, and the promise is kept."""
        with self._changed:
            self._due, self._hold = step, None
            self._changed.notify_all()

    def wait_done(self, limit_s: float) -> bool:
        """Waits for the commit to be made, which takes as long as the model stands still; False at the limit.

        Raises:
            EplbError: `fail` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._due is None or self._error is not None, limit_s)
            self.check()
            return self._due is None

    def fail(self, error: EplbError) -> None:
        """Has the serving thread raise this, or what it was to raise already."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what the moving thread failed with."""
        if self._error is not None:
            raise self._error

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Waits while the lock is held; TimeoutError at the deadline, and what `check` raises once it would."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._error is None and not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._changed.wait(left)
        self.check()
