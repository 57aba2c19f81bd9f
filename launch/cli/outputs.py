"""Output of commands: text for the terminal, and JSON lines for a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from moe_ep.files import adding_lines, naming, write_whole

# Part of the help of every --json.
ADDS_LINES = "; they are appended to the file"


def tell(text: str, path: Path | None, json_lines: Callable[[], Iterable[str]]) -> None:
    """Prints `text`, then appends the JSON lines to the file at `path`, if there is one.

    Each is written even if the other fails, as when the output goes to `head` or the disk is full.

    Args:
        json_lines: called after the text is printed; each line ends with a newline.
    """
    try:
        show(text)
    finally:
        if path is not None:
            with adding_lines(path) as file:
                for line in json_lines():
                    write_whole(file, line)


def show(text: str = "", end: str = "\n") -> None:
    """Prints and flushes; an OSError names stdout."""
    with naming("stdout"):
        print(text, end=end, flush=True)
