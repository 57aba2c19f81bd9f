"""Names of the package that the pages mention exist: dotted names, and paths of files."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.test_links import PAGES, ROOT

# Ranges of traces, and operators of torch.ops.
NOT_PYTHON = re.compile(r"moe_ep\.(route|dispatch|experts|combine|eplb_\w+|moe_forward(_shared)?)$")


def exists(dotted: str) -> bool:
    """Whether the longest importable front of the name has the rest as attributes."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    dotted = {name for name in re.findall(r"\bmoe_ep(?:\.[A-Za-z_]\w*)+", text) if not NOT_PYTHON.match(name)}
    files = {name for name in re.findall(r"`([a-z_][\w/]*\.(?:py|cuh?|sh))`", text) if "/" in name}
    missing = {name for name in dotted if not exists(name)}
    missing |= {name for name in files if not any((ROOT / front / name).exists() for front in ("", "moe_ep", "tests"))}
    assert not missing
