"""What must be closed before Python ends.

A thread that is in C++ by then, or one of gloo's that still holds a tensor, aborts the process when it wants Python.
"""

from __future__ import annotations

import atexit
import logging
from typing import Protocol
from weakref import WeakSet

logger = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None:
        """May be called again."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(what: Closable) -> None:
    """Has it closed when Python ends, if it still exists."""
    _open.add(what)


@atexit.register
def _close_all() -> None:
    for what in list(_open):
        try:
            what.close()
        except Exception:
            logger.exception("%s could not be closed", type(what).__name__)
