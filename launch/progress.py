"""Progress of work that happens in workers, shown where the user looks.

A worker calls `report(label, done, total)`; the gang that started it decides where that goes: over its pipe or
actor to the driver, which draws it with `ProgressDisplay`, or straight to the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Progress = tuple[str, int, int]
# Work that ends sooner than this is not worth a bar.
_QUIET_S = 2.0

_sink: Callable[[Progress], None] | None = None


def report(label: str, done: int, total: int) -> None:
    """Says that `done` of `total` steps of `label` are over; costs nothing where nobody listens."""
    if _sink is not None:
        _sink((label, done, total))


def set_sink(sink: Callable[[Progress], None] | None) -> None:
    """Where this process's reports go."""
    global _sink
    _sink = sink


class ProgressDisplay:
    """Draws reports as one bar a label on stderr; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._label = ""
        self._started = 0.0
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        label, done, total = progress
        if not self._on:
            return
        if label != self._label:
            self.close()
            self._label, self._started = label, time.monotonic()
        if self._bar is None:
            if time.monotonic() - self._started < _QUIET_S or done >= total:
                return
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, leave=False, file=sys.stderr)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        """Ends the bar that is being drawn."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._label = None, ""
