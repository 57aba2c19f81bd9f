"""Messages from workers to the driver while they work: progress, what they wait for, and partial results.

Rank 0 calls `report(label, done, total)`, `say(text)` and `hand_over(item)`. The gang decides where they go: over a
pipe or an actor to the driver, which shows them with `ProgressDisplay` and passes items on, or directly if rank 0 is
the driver.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

# (label, done, total) of some work, or a sentence.
Progress = tuple[str, int, int] | str
_CLEAR_LINE = "\r\x1b[2K"

_sink: Callable[[Progress], None] | None = None
_receiver: Callable[[Any], None] | None = None


def report(label: str, done: int, total: int) -> None:
    """Reports that `done` of `total` steps of `label` are done; costs nothing without a sink."""
    if _sink is not None:
        _sink((label, done, total))


def say(text: str) -> None:
    """Shows a sentence on its own line of the driver's stderr, or of this process's if it has no driver."""
    if _sink is not None:
        _sink(text)
    else:
        _write(f"{_CLEAR_LINE if sys.stderr.isatty() else ''}moe-ep: {text}\n")


def say_plain(text: str) -> None:
    """Writes a line to this process's stderr unchanged."""
    _write(f"{_CLEAR_LINE if sys.stderr.isatty() else ''}{text}\n")


def set_sink(sink: Callable[[Progress], None] | None) -> None:
    """Sets the receiver of this process's reports."""
    global _sink
    _sink = sink


def hand_over(item: Any) -> None:
    """Passes a picklable item to the driver at once (see `Gang.run`). Only rank 0's items arrive."""
    if _receiver is not None:
        _receiver(item)


def set_receiver(receiver: Callable[[Any], None] | None) -> None:
    """Sets the receiver of this process's items."""
    global _receiver
    _receiver = receiver


class ProgressDisplay:
    """One line on the terminal, erased at the end: a sentence, then a bar for each label. Nothing if stderr is no
    terminal.

    Args:
        quiet_s: work that ends sooner gets no bar.
    """

    def __init__(self, quiet_s: float = 2.0) -> None:
        self._quiet_s = quiet_s
        self._on = sys.stderr.isatty()
        self._said = False
        self._label = ""
        self._started = 0.0
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Shows a sentence until a bar or another sentence replaces it."""
        if self._on:
            self.close()
            _write(f"{_CLEAR_LINE}{text} ...")
            self._said = True

    def __call__(self, progress: Progress) -> None:
        """Shows a worker's report."""
        if isinstance(progress, str):
            self.close()
            _write(f"moe-ep: {progress}\n")
            return
        label, done, total = progress
        if not self._on:
            return
        if label != self._label:
            self._end_bar()
            self._label, self._started = label, time.monotonic()
        if self._bar is None:
            if time.monotonic() - self._started < self._quiet_s or done >= total:
                return
            from tqdm import tqdm

            self._clear()
            self._bar = tqdm(total=total, initial=done, desc=label, leave=False, file=sys.stderr)
        self._bar.n = done
        self._bar.refresh()

    def close(self) -> None:
        """Erases the line."""
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
    """Writes to stderr; errors of a closed terminal are ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def workers(count: int) -> str:
    """The number of workers in words."""
    return f"{count} worker{'' if count == 1 else 's'}"
