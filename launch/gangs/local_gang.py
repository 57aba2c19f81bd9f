"""A gang on this machine without any launcher: one process a rank, watched over pipes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any

from moe_ep.launch.gangs import interrupts, progress
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
    Gang,
    OnItem,
    Outcome,
    WorkerFailure,
    check_room,
    death_of,
    end_with,
    failure_of,
    first_cause,
    gang_error,
    ignore,
    run_rank,
    use_loopback_for_gloo,
    wait_for_fork_server,
    warm_fork_server,
)
from moe_ep.launch.gangs.rank_env import LOOPBACK, RankEnv
from moe_ep.launch.gangs.rendezvous import listen_store

if TYPE_CHECKING:
    import torch.distributed as dist


_POLL_S = 0.5


class LocalGang(Gang):
    """`world_size` processes of this machine; rank i has GPU i where device is "cuda".

    They are forked from a server process that has imported torch once, and end when this process or the server does.

    Raises:
        NoRoomError: fewer GPUs here than ranks, or far fewer cores.
    """

    def __init__(self, world_size: int, device: str = "cpu", timeout_s: float | None = None) -> None:
        check_room(world_size, device)
        self.world_size = world_size
        self.device = device
        self._timeout_s = timeout_s
        self._context = warm_fork_server()

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        workers: dict[Connection, tuple[int, ForkServerProcess]] = {}
        display = progress.ProgressDisplay()
        display.say(f"starting {progress.workers(self.world_size)}")
        try:
            wait_for_fork_server(self._context)
            for rank in range(self.world_size):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_serve,
                    args=(theirs, os.getpid(), self._rank_env(rank), self._timeout_s, fn, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                workers[ours] = (rank, process)
            return _watch(workers, display, on_item)
        finally:
            display.close()
            for _, process in workers.values():
                process.kill()
            for connection, (_, process) in workers.items():
                process.join()
                connection.close()

    def _rank_env(self, rank: int) -> RankEnv:
        return RankEnv(
            rank=rank,
            world_size=self.world_size,
            local_rank=rank,
            local_world_size=self.world_size,
            source="local",
            device=f"cuda:{rank}" if self.device == "cuda" else "cpu",
        )


def _watch(
    workers: dict[Connection, tuple[int, ForkServerProcess]],
    display: Callable[[progress.Progress], None],
    on_item: OnItem,
) -> list[Any]:
    """Serves the workers' messages until all have answered, or one has failed."""
    results: dict[int, Any] = {}
    failures: list[WorkerFailure] = []
    pending = dict(workers)
    deadline = float("inf")
    while pending and time.monotonic() < deadline:
        interrupts.check()
        for ready in wait(list(pending), timeout=min(deadline - time.monotonic(), _POLL_S)):
            connection: Connection = ready  # type: ignore[assignment]
            rank, process = pending[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionError):
                process.join(ECHO_GRACE_S)
                kind, content = "outcome", Outcome(failure=death_of(process.exitcode, rank))
            if kind == "port":
                for other in workers:
                    if other is not connection:
                        _tell(other, content)
            elif kind == "progress":
                display(content)
            elif kind == "item":
                on_item(content)
            else:
                del pending[connection]
                if content.failure is None:
                    results[rank] = content.value
                else:
                    failures.append(content.failure)
        if any(not failure.echo for failure in failures):
            break
        if failures:
            deadline = min(deadline, time.monotonic() + ECHO_GRACE_S)
    if failures:
        raise gang_error(first_cause(failures))
    return [results[rank] for rank in range(len(workers))]


def _tell(connection: Connection, message: Any) -> None:
    # One that died does not hear it; the end of its pipe says so.
    with contextlib.suppress(OSError):
        connection.send(message)


def _serve(
    connection: Connection,
    driver_pid: int,
    rank_env: RankEnv,
    timeout_s: float | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The worker process: finds its peers through rank 0's store, runs the function and answers."""
    end_with(driver_pid)
    use_loopback_for_gloo()
    if rank_env.rank == 0:
        progress.set_sink(lambda report: connection.send(("progress", report)))
        progress.set_receiver(lambda item: connection.send(("item", item)))
    try:
        try:
            port, store = _meet(connection, rank_env.rank, timeout_s)
            outcome = run_rank(replace(rank_env, master_port=port), fn, args, timeout_s, store)
            progress.set_sink(None)
            connection.send(("outcome", outcome))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            connection.send(("outcome", Outcome(failure=failure_of(error, rank_env.rank))))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # The driver is gone, or is ending the gang.
    # Rank 0 holds the store: nobody leaves before the driver has heard from everybody and ends the gang.
    threading.Event().wait()


def _meet(connection: Connection, rank: int, timeout_s: float | None) -> tuple[int, dist.Store | None]:
    """The port of rank 0's store, and on rank 0 the store."""
    if rank != 0:
        return connection.recv(), None
    store = listen_store(LOOPBACK, timeout_s)
    connection.send(("port", store.port))
    return store.port, store
