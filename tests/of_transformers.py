"""What the installed transformers has: tests of anything else are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import transformers


def is_known(name: str) -> bool:
    """Whether transformers has a class of that name."""
    return hasattr(transformers, name)


def known(name: str) -> Any:
    """The class of transformers of that name; skips the test where there is none."""
    if not is_known(name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)
