"""The map of the tree in docs/architecture.md is the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WINGS = ("moe_ep", "kernels", "dispatch", "launch")


def test_every_package_has_a_line() -> None:
    mapped = {
        path.rstrip("/")
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for path in re.findall(r"`([^`]+/)`", line)
    }
    packages = {
        str(folder.relative_to(ROOT))
        for wing in WINGS
        for folder in (ROOT / wing, *(ROOT / wing).iterdir())
        if folder.is_dir() and not folder.is_symlink() and any(folder.glob("*.py"))
    }
    assert packages <= mapped


def test_every_path_is_there() -> None:
    named = set(re.findall(r"`((?:moe_ep|kernels|dispatch|launch|examples|docs|scripts|tests)/[\w./]*)`", PAGE))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
