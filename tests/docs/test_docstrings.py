"""Docstrings become reStructuredText that parses, whatever is in them."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from moe_ep import FusedMoE

PATH = Path(__file__).parents[2] / "docs" / "docstrings.py"


@pytest.fixture(scope="module")
def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(text: str) -> list[str]:
    return inspect.cleandoc(text).splitlines()


def test_sections_lists_and_drawings(docstrings: ModuleType) -> None:
    out = docstrings.to_rst(
        lines_of("""Sums *all of `x`s and y_.

        - one, that
          goes on
        - two
            a drawing | of `bits`

        Args:
            x, y: `[T, K]`, of
                two lines.

        Raises:
            ValueError: never::
        """)
    )
    assert "Sums \\*all of ``x``\\ s and y\\_." in out
    assert "- one, that goes on" in out
    assert "- **x, y**: ``[T, K]``, of two lines." in out
    assert "- **ValueError**: never:\\:" in out


@pytest.mark.parametrize("text", ["", "One line.", "Ends with a colon:\n\n    code *here*\n\nand goes on", "a `broken"])
def test_nothing_is_lost(docstrings: ModuleType, text: str) -> None:
    out = " ".join(docstrings.to_rst(lines_of(text))).replace("\\", "").replace("``", "`")
    assert all(word in out for word in text.split())


def test_a_long_docstring_parses_without_a_warning(docstrings: ModuleType) -> None:
    core = pytest.importorskip("docutils.core")
    source = "\n".join(docstrings.to_rst(lines_of(FusedMoE.__doc__ or "")))
    core.publish_string(source, settings_overrides={"halt_level": 2, "report_level": 2})
