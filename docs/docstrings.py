"""Turns a docstring of this project into reStructuredText that cannot fail to parse.

Docstrings are plain text with Google's sections (Args, Returns, Raises, Example), `code` in single backticks, lists
with hyphens, and indented blocks that are drawings or code. Everything else is escaped, so a drawing or a star in a
docstring cannot break the build of the documentation.
"""

from __future__ import annotations

import re

_SECTION = re.compile(r"(Args|Arguments|Returns|Yields|Raises|Attributes|Example|Examples|Note):(?:\s+(.*))?")
_ITEM = re.compile(r"(?:[-*]|\d+\.)\s+")


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, without their common indentation, as reStructuredText."""
    out: list[str] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        section = _SECTION.fullmatch(line)
        below = position + 1
        while below < len(lines) and (not lines[below].strip() or lines[below].startswith(" ")):
            below += 1
        block = lines[position + 1 : below]
        if not line.strip():
            position += 1
        elif section and any(text.strip() for text in block):
            out += [f"**{section[1]}**" + (f": {_inline(section[2])}" if section[2] else ""), ""]
            out += _literal(block) if section[1].startswith("Example") else _entries(block)
            position = below
        elif line.startswith((" ", ">>>")):
            end = position
            while end < len(lines) and (lines[end].startswith((" ", ">>>")) or not lines[end].strip()):
                end += 1
            out += _literal(lines[position:end])
            position = end
        elif _ITEM.match(line):
            end = position + 1
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
            out += ["- " + _inline(_ITEM.sub("", _joined(lines[position:end]), count=1)), ""]
            position = end
        else:
            end = position + 1
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(" ") and not _stops(lines[end]):
                end += 1
            out += [_inline(_joined(lines[position:end])), ""]
            position = end
    return out


def _stops(line: str) -> bool:
    return bool(_ITEM.match(line) or _SECTION.fullmatch(line))


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines if line.strip())


def _literal(lines: list[str]) -> list[str]:
    return ["::", "", *(f"    {line}" for line in lines), ""]


def _entries(block: list[str]) -> list[str]:
    """The entries of a section: "name: text", continued by deeper lines."""
    margin = min(len(line) - len(line.lstrip()) for line in block if line.strip())
    entries: list[list[str]] = []
    for line in filter(str.strip, block):
        if entries and len(line) - len(line.lstrip()) > margin:
            entries[-1].append(line)
        else:
            entries.append([line])
    out = []
    for entry in map(_joined, entries):
        name, colon, text = entry.partition(": ")
        is_named = colon and "`" not in name
        out.append(f"- **{_inline(name)}**: {_inline(text)}" if is_named else f"- {_inline(entry)}")
    return [*out, ""]


def _inline(text: str) -> str:
    """One line: `code` as literals, everything that reStructuredText would interpret escaped."""
    parts = re.split(r"``([^`]+)``|`([^`]+)`", text)
    out = ""
    for index in range(0, len(parts), 3):
        plain = re.sub(r"([\\*|`])", r"\\\1", parts[index])
        plain = re.sub(r"_(?!\w)", r"\\_", plain).replace("::", ":\\:")
        if index and plain[:1].isalnum():
            out += "\\ "
        out += plain
        code = next((part for part in parts[index + 1 : index + 3] if part), None)
        if code:
            out += ("\\ " if out[-1:].isalnum() else "") + f"``{code.strip()}``"
    return re.sub(r"^(\.\.|:|\+|-|#|>)", r"\\\1", out)
