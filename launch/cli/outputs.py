"""What a command found: shown to people, and written as JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from moe_ep.files import naming, write_text


def tell(text: str, path: Path | None, json_lines: Callable[[], Iterable[str]]) -> None:
    """Prints `text`, then writes the lines where there is a `path`: whether anybody reads what is printed or not, as
    behind `head`; and people have the text even where the file cannot be written.

    Args:
        json_lines: with their ends of lines; asked for when the text is out.
    """
    try:
        show(text)
    finally:
        if path is not None:
            write_text(path, "".join(json_lines()))


def show(text: str = "", end: str = "\n") -> None:
    """Prints what is to be seen now; an OSError says that it is stdout's."""
    with naming("stdout"):
        print(text, end=end, flush=True)
