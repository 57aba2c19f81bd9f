"""Waits on the host for what comes within microseconds as a rule."""

from __future__ import annotations

import time
from collections.abc import Callable

# A wait yields for this long, then sleeps in small steps.
_YIELD_S = 2e-3
_SLEEP_S = 5e-5


def comes_within(seconds: float, has_come: Callable[[], bool]) -> bool:
    """Returns True as soon as `has_come()` does, False where it has not for so many seconds."""
    started = time.monotonic()
    while not has_come():
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(_SLEEP_S if waited > _YIELD_S else 0)
    return True
