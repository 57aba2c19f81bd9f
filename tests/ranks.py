"""Real processes for tests: a pool of ranks that share a process group and run functions sent to them.

    pool = ranks(3)                                  # three gloo processes, kept for the whole test run
    results = pool.run(function, arg, ...)           # function(rank, world_size, arg, ...) in each; results by rank

`function` must be importable (a module-level function of a test module). It draws the same random numbers whatever ran
before it. A failing rank fails the call with its traceback; the pool is thrown away then, since its ranks may wait in a
collective.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

# Ranks of a pool meet within so long, on a busy machine too; deadlines of tests begin when they have met.
_MEETING_S = 240.0
# After a rank has failed, the others have so long to say what became of them.
_ECHO_S = 240.0

# Several ranks are on one GPU, whose driver runs them in turns; NCCL refuses that and NVSHMEM does not.
_SHARED = os.environ.get("MOE_EP_TEST_SHARED_GPUS") == "1"
_MOST_SHARING = 8

_pools: dict[tuple[int, str], RankPool] = {}


class RankError(AssertionError):
    """A rank raised; the message holds the tracebacks of all that did.

    Attributes:
        results: what the others returned, by rank.
    """

    def __init__(self, message: str, results: dict[int, Any] | None = None) -> None:
        super().__init__(message)
        self.results = results or {}


def ranks(world_size: int, backend: str = "gloo", timeout_s: float = 60) -> RankPool:
    """The pool of that size and backend, started on first use; "nccl" gives rank i the GPU i, its current device.

    With MOE_EP_TEST_SHARED_GPUS=1 ranks share the GPUs that there are, and "nccl" is gloo.
    """
    key = (world_size, backend)
    pool = _pools.get(key)
    if pool is None or not pool.alive():
        pool = _pools[key] = RankPool(world_size, backend, timeout_s)
    return pool


def forkserver() -> ForkServerContext:
    """Makes processes that have imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    return context


def num_gpu_ranks() -> int:
    """How many ranks can have a GPU here."""
    import torch

    num_gpus = torch.cuda.device_count()
    return _MOST_SHARING if _SHARED and num_gpus else num_gpus


def needs_gpu_ranks(number: int) -> pytest.MarkDecorator:
    """Skips a test of so many ranks where they cannot have GPUs of one host."""
    return pytest.mark.skipif(num_gpu_ranks() < number, reason=f"needs {number} GPUs of one host")


class RankPool:
    """`world_size` processes joined in one process group."""

    def __init__(self, world_size: int, backend: str = "gloo", timeout_s: float = 60) -> None:
        context = forkserver()
        self.world_size, self.timeout_s = world_size, timeout_s
        self._rendezvous = tempfile.NamedTemporaryFile(prefix="moe_ep_ranks_")  # noqa: SIM115
        address = f"file://{self._rendezvous.name}"
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, backend, address, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 600) -> list[Any]:
        """Runs function(rank, world_size, *args) on every rank; results in rank order."""
        for connection in self._connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = dict(zip(self._connections, range(self.world_size), strict=True))
        while pending:
            ready = wait(list(pending), timeout=limit_s)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(pending.values())} did not answer in {limit_s} s; errors: {errors}")
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else errors)[rank] = value
            if errors:
                limit_s = min(limit_s, _ECHO_S)
        if errors:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())), results)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []


def _preloaded() -> list[str]:
    """Modules that ranks need not import each for themselves."""
    import torch

    modules = ["torch", "torch.distributed"]
    # On GPU machines an import may look for GPUs, and CUDA does not survive a fork.
    if not torch.cuda.is_available():
        modules += ["moe_ep.layer.stack", "moe_ep.hf.parallelize"]
    return modules


def _serve(connection: Connection, rank: int, world_size: int, backend: str, address: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # The rendezvous file is unique to the pool; gloo listens on loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device_id = None
    if backend == "nccl":
        device_id = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device_id)
        backend, device_id = ("gloo", None) if _SHARED else ("cpu:gloo,cuda:nccl", device_id)
    dist.init_process_group(
        backend,
        init_method=address,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(timeout_s, _MEETING_S)),
        device_id=device_id,
    )
    if timeout_s < _MEETING_S:
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            connection.send((True, function(rank, world_size, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
