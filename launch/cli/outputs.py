"""What a command found: shown to people, and added to a file as JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from moe_ep.files import naming, write_whole

# Said by every --json.
ADDS_LINES = "; they are added to the file, so that no measurement is lost"


def tell(text: str, path: Path | None, json_lines: Callable[[], Iterable[str]]) -> None:
    """Prints `text`, then adds the lines to the file at `path`, if there is one: whether anybody reads what is printed
    or not, as behind `head`; and people have the text even where the file cannot be written.

    Args:
        json_lines: with their ends of lines; asked for when the text is out.
    """
    try:
        show(text)
    finally:
        if path is not None:
            with naming(path), path.open("ab", buffering=0) as file:
                for line in json_lines():
                    write_whole(file, line)


def show(text: str = "", end: str = "\n") -> None:
    """Prints what is to be seen now; an OSError says that it is stdout's."""
    with naming("stdout"):
        print(text, end=end, flush=True)
