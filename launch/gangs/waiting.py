"""Waits for other processes before a gang exists: each says what it waits for, ends at a limit and hears ctrl-C."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from moe_ep import env
from moe_ep.errors import GangError
from moe_ep.launch.gangs import interrupts, progress

T = TypeVar("T")
# Shorter waits are not worth a line.
QUIET_S = 3.0
_POLL_S = 0.05


def limit_of(timeout_s: float | None) -> float:
    """The limit of a wait in seconds: `timeout_s`, or MOE_EP_DISPATCH_TIMEOUT_S where that is None."""
    return env.DISPATCH_TIMEOUT_S.get() if timeout_s is None else timeout_s


class Wait:
    """One wait, of a loop that looks again and again whether it is over.

    Args:
        what: what is waited for, or a function that says it anew when it is shown; after the word "for".
        limit_s: seconds until the wait ends with an error.
        quiet_s: seconds until it is said.
    """

    def __init__(self, what: str | Callable[[], str], limit_s: float, quiet_s: float = QUIET_S) -> None:
        self._what = what
        self.limit_s = limit_s
        self._started = time.monotonic()
        self._says_at = self._started + quiet_s

    @property
    def left_s(self) -> float:
        return self._started + self.limit_s - time.monotonic()

    def look(self, why: Callable[[], str] | None = None) -> None:
        """To be called between two looks.

        Args:
            why: the message at the limit, instead of the one that says what was waited for.

        Raises:
            GangError: the limit is over.
            KeyboardInterrupt: a signal came that Python has dropped.
        """
        interrupts.check()
        if self.left_s <= 0:
            raise GangError(why() if why is not None else self._over())
        if time.monotonic() >= self._says_at:
            self._says_at = float("inf")
            progress.say(f"waiting for {self._text()}, for at most {self.limit_s:g} s")

    def pause(self, seconds: float = _POLL_S, why: Callable[[], str] | None = None) -> None:
        """Looks, and sleeps until the next look."""
        self.look(why)
        time.sleep(max(0.0, min(seconds, self.left_s)))

    def _text(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def _over(self) -> str:
        return (
            f"waited {self.limit_s:g} s for {self._text()}, in vain; see what keeps it, or give it more time by "
            f"{env.DISPATCH_TIMEOUT_S.name}"
        )


@contextlib.contextmanager
def said(what: str, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Says what the block waits for, if it takes longer; for a library's wait, which has a limit of its own."""
    timer = threading.Timer(quiet_s, progress.say, (f"waiting for {what}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call(function: Callable[[], T], wait: Wait, why: Callable[[], str] | None = None) -> T:
    """The result of a function that no signal interrupts, as one of a C++ library: it runs in a thread of its own.

    At the wait's limit, and at a signal, the thread is left behind.
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
        wait.look(why)
        thread.join(_POLL_S)
    if error:
        raise error[0]
    return result[0]
