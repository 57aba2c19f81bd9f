"""A disk that is full at a chosen place."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file that this process writes meanwhile grows beyond so many bytes: what fits is written, and the rest fails
    with "File too large". Compiled modules are not written either: Python would leave half of one."""
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none
