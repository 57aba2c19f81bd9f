"""Kernels of the NVSHMEM backends as the host sees them: their sources, and of the two low-latency ones parameters, and
launches in one or two halves."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_ep.dispatch.batch import keep_for
from moe_ep.dispatch.nvshmem.device_api import device_archive
from moe_ep.dispatch.nvshmem.layout import BUFFERS
from moe_ep.dispatch.nvshmem.order import Order
from moe_ep.kernels import jit
from moe_ep.modular_kernel.workspace import current_stream

SEND, RECEIVE = 1, 2
KERNELS = ("low_latency_dispatch", "low_latency_combine")
_THREADS = 512
# Of a block, that receive.
WARPS = _THREADS // 64


class Shape(Protocol):
    """What is compiled into a kernel; layout.py and high_throughput_block.py say more."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def fp8(self) -> bool: ...
    @property
    def device_api(self) -> bool: ...


def kernel_source(name: str, layout: Shape, dtype: torch.dtype) -> jit.KernelSource:
    """The kernel of cuda/{name}.cu for batches of that layout and dtype."""
    defines = {
        "HIDDEN": layout.hidden_size,
        "TOPK": layout.topk,
        "RANKS": layout.num_ranks,
        "FP8": int(layout.fp8),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "DEVICE_API": int(layout.device_api),
    }
    path = Path(__file__).parent / "cuda" / f"{name}.cu"
    archive = device_archive() if layout.device_api else None
    return jit.KernelSource(path, name, tuple((key, str(value)) for key, value in defines.items()), archive)


class Halves:
    """A kernel launched as one, or first what sends and later what receives, on whatever stream is current then.

    Args:
        check: raises where it must not run any more.
        held: what it reads and writes; memory of the stream that is current now.
    """

    def __init__(
        self,
        kernel: jit.Kernel,
        params: Any,
        to_send: int,
        to_receive: int,
        blocks: int,
        order: Order,
        check: Callable[[], None],
        held: Sequence[torch.Tensor],
        then: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._params = kernel, params
        self._tasks = {SEND: to_send, RECEIVE: to_receive}
        self._blocks, self._order, self._check, self._then = blocks, order, check, then
        self._held, self._stream = held, current_stream(order.device)
        self._left = SEND | RECEIVE

    def send(self) -> None:
        self._launch(SEND & self._left)

    def receive(self) -> None:
        """Everything that was not launched yet; may be called again."""
        if self._left:
            self._launch(self._left)
            if current_stream(self._order.device) != self._stream:
                keep_for(torch.cuda.current_stream(self._order.device), self._held)
            self._held = ()
            if self._then is not None:
                self._then()

    def _launch(self, phases: int) -> None:
        self._check()
        self._params.common.phases = phases
        tasks = max(count for phase, count in self._tasks.items() if phase & phases)
        with self._order:
            self._kernel.launch(self._params, (min(max(tasks, 1), self._blocks), 1, 1), _THREADS, early=True)
        self._left &= ~phases


@functools.cache
def buffers_type(num_ranks: int) -> Any:
    """`Buffers` of cuda/low_latency.cuh."""

    class Buffers(ctypes.Structure):
        _fields_ = (
            ("peers", ctypes.c_uint64 * num_ranks),
            *((name, ctypes.c_uint64) for name in BUFFERS),
            ("pes", ctypes.c_int * num_ranks),
            ("reachable", ctypes.c_uint32),
            *((name, ctypes.c_int) for name in ("rank", "capacity", "row_packet_tokens")),
        )

    return Buffers


class Limits(ctypes.Structure):
    """`Limits` of cuda/protocol.cuh."""

    _fields_ = (("status", ctypes.c_void_p), ("record", ctypes.c_void_p), ("timeout_ns", ctypes.c_uint64))


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/low_latency.cuh."""

    class Common(ctypes.Structure):
        _anonymous_ = ("limits",)
        _fields_ = (
            ("buffers", buffers_type(num_ranks)),
            ("limits", Limits),
            *((name, ctypes.c_void_p) for name in ("counters", "topk_ids", "owners")),
            *((name, ctypes.c_int) for name in ("num_ids", "num_tokens", "phases", "packet_parts", "packet_tasks")),
        )

    return Common


@functools.cache
def dispatch_type(num_ranks: int) -> Any:
    """`Params` of cuda/low_latency_dispatch.cu."""
    pointers = ("rows", "weights", "locals", "out", "expert_num_tokens", "expert_row_ids", "positions")

    class Params(ctypes.Structure):
        _fields_ = (
            ("common", common_type(num_ranks)),
            *((name, ctypes.c_void_p) for name in pointers),
            ("num_local_experts", ctypes.c_int),
            ("shares", ctypes.c_int),
            ("take_parts", ctypes.c_int),
        )

    return Params


@functools.cache
def combine_type(num_ranks: int) -> Any:
    """`Params` of cuda/low_latency_combine.cu."""

    class Params(ctypes.Structure):
        _fields_ = (
            ("common", common_type(num_ranks)),
            *((name, ctypes.c_void_p) for name in ("results", "positions", "output")),
            ("weighted", ctypes.c_int),
            ("output_parts", ctypes.c_int),
        )

    return Params
