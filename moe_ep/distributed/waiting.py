"""Waits on the host for events that usually happen within microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

# A wait yields the processor for this long, then sleeps for a fiftieth of the time it has waited, within these bounds.
_YIELD_S = 2e-3
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-2


def comes_within(seconds: float, has_come: Callable[[], bool]) -> bool:
    """Returns True as soon as `has_come()` does, and False if it has not after this many seconds."""
    started = time.monotonic()
    while not has_come():
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(0 if waited < _YIELD_S else min(max(waited / 50, _SHORTEST_S), _LONGEST_S))
    return True
