"""What experts need that run while their rows arrive (host mirror of kernels/cuda/arrival.cuh), or that combine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Limits(ctypes.Structure):
    """`Limits` of cuda/deadline.cuh."""

    _fields_ = (("status", ctypes.c_void_p), ("record", ctypes.c_void_p), ("timeout_ns", ctypes.c_uint64))


class ArrivalParams(ctypes.Structure):
    """`Arrival` of cuda/arrival.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row_flags", "source_flags", "first_rows", "epoch", "finished")),
        ("limits", Limits),
        ("num_sources", ctypes.c_int),
        ("leaving", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows of a batch whose ids have arrived and which themselves are sent while the experts run.

    Attributes:
        params: for the kernel that waits for them.
        start: sends the rows, unless it was called before; to be called directly before that kernel is launched on the
            same stream, which may then start as soon as all blocks that send have.
        most_blocks: blocks that the kernel may have; None for one on every SM.
    """

    params: ArrivalParams
    start: Callable[[], None]
    most_blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class PeerBuild:
    """What a kernel that combines the batches of a backend is compiled with.

    Attributes:
        defines, folder: constants, and where its headers are.
        topk: slots of a row.
    """

    defines: tuple[tuple[str, str], ...]
    folder: Path
    topk: int


@dataclass(frozen=True, kw_only=True)
class PeerBatch:
    """A batch that lies in its senders' packets, and whose results the experts return to the tokens' ranks.

    Attributes:
        params: what the kernel needs for that, with the address of `output` still to be set.
        build: of the kernel.
        rows: address of the packets of all rows.
        num_rows: the most rows.
        launching: what the launch runs in.
    """

    params: Any
    build: PeerBuild
    rows: int
    num_rows: int
    launching: AbstractContextManager[None]
