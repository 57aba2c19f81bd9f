"""What workers tell the driver while they work: how far they are, and results that must outlive them.

Rank 0 calls `report(label, done, total)` and `hand_over(item)`; the gang that started it decides where that goes: over
its pipe or actor to the driver, which draws a bar with `ProgressDisplay` and passes items on, or straight there where
rank 0 speaks to the user itself. What comes before the first report, the gang says itself.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

Progress = tuple[str, int, int]
# Work that ends sooner than this is not worth a bar.
_QUIET_S = 2.0
_CLEAR_LINE = "\r\x1b[2K"

_sink: Callable[[Progress], None] | None = None
_receiver: Callable[[Any], None] | None = None


def report(label: str, done: int, total: int) -> None:
    """Says that `done` of `total` steps of `label` are over; costs nothing where nobody listens."""
    if _sink is not None:
        _sink((label, done, total))


def set_sink(sink: Callable[[Progress], None] | None) -> None:
    """Where this process's reports go."""
    global _sink
    _sink = sink


def hand_over(item: Any) -> None:
    """Gives the driver something at once that can be pickled: `Gang.run` says what becomes of it. Rank 0's alone is
    heard."""
    if _receiver is not None:
        _receiver(item)


def set_receiver(receiver: Callable[[Any], None] | None) -> None:
    """Where this process's items go."""
    global _receiver
    _receiver = receiver


class ProgressDisplay:
    """One line on stderr, gone when the work is: a sentence, then a bar a label; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._said = False
        self._label = ""
        self._started = 0.0
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Shows what is waited for until a bar or another sentence takes its place."""
        if self._on:
            self.close()
            _write(f"{_CLEAR_LINE}{text} ...")
            self._said = True

    def __call__(self, progress: Progress) -> None:
        label, done, total = progress
        if not self._on:
            return
        if label != self._label:
            self._end_bar()
            self._label, self._started = label, time.monotonic()
        if self._bar is None:
            if time.monotonic() - self._started < _QUIET_S or done >= total:
                return
            from tqdm import tqdm

            self._clear()
            self._bar = tqdm(total=total, initial=done, desc=label, leave=False, file=sys.stderr)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        """Leaves nothing on the line."""
        self._end_bar()
        self._clear()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._label = None, ""

    def _clear(self) -> None:
        if self._said:
            _write(_CLEAR_LINE)
            self._said = False


def _write(text: str) -> None:
    """Onto a terminal that may be gone: as tqdm's bars, a sentence less ends no work."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def workers(count: int) -> str:
    """How many, in words."""
    return f"{count} worker{'' if count == 1 else 's'}"
