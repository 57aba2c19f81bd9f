"""Waits for other processes before a gang exists.

Each wait reports what it waits for, has a limit and reacts to ctrl-C.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from moe_ep import env
from moe_ep.errors import GangError
from moe_ep.launch.gangs import interrupts, progress

T = TypeVar("T")
# Shorter waits are not reported.
QUIET_S = 3.0
_POLL_S = 0.05
# For a function with the wait's own limit: a thread that comes back from C++ while Python ends aborts the process.
_GRACE_S = 1.0


class Wait:
    """One wait of a polling loop.

    Args:
        what: what is waited for, or a function that returns it; completes "waiting for".
        limit_s: seconds until the wait ends with an error.
        quiet_s: seconds until the wait is reported.
    """

    def __init__(self, what: str | Callable[[], str], limit_s: float, quiet_s: float = QUIET_S) -> None:
        self._what = what if callable(what) else lambda: what
        self.limit_s = limit_s
        self._started = time.monotonic()
        self._says_at = self._started + quiet_s

    @property
    def left_s(self) -> float:
        return self._started + self.limit_s - time.monotonic()

    def look(self, why: str = "") -> None:
        """Checks the limit and signals; to be called in every pass of the loop.

        Args:
            why: the message at the limit; by default it names what was waited for.

        Raises:
            GangError: the limit is reached.
            KeyboardInterrupt: a signal was received that Python has dropped.
        """
        interrupts.check()
        if self.left_s <= 0:
            raise GangError(
                why
                or f"waited {self.limit_s:g} s in vain for {self._what()}; find out what keeps it, or allow more time "
                f"with {env.DISPATCH_TIMEOUT_S.name}"
            )
        if time.monotonic() >= self._says_at:
            self._says_at = float("inf")
            progress.say(f"waiting for {self._what()}, for at most {self.limit_s:g} s")

    def pause(self, seconds: float = _POLL_S, why: str = "") -> None:
        """As `look`, and sleeps until the next pass."""
        self.look(why)
        time.sleep(max(0.0, min(seconds, self.left_s)))


def said(what: str, quiet_s: float = QUIET_S) -> AbstractContextManager[None]:
    """Reports what the block waits for if it takes longer; for a library's wait, which has its own limit."""
    return interrupts.calling_after(quiet_s, progress.say, f"waiting for {what}")


def call(function: Callable[[], T], wait: Wait, why: str = "") -> T:
    """Runs a function that no signal interrupts, such as one of a C++ library, in a thread, and returns its result.

    Soon after the wait's limit, or after a signal, the thread is abandoned.
    """
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, daemon=True, name="moe_ep-waiting")
    thread.start()
    while thread.is_alive():
        try:
            wait.look(why)
        except GangError:
            thread.join(_GRACE_S)
            raise
        thread.join(_POLL_S)
    if error:
        raise error[0]
    return result[0]
