"""A gang on this machine without any launcher: one process a rank, watched over pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any

from moe_ep import env
from moe_ep.errors import ConfigError, GangError, rank_list
from moe_ep.launch.gangs import elastic, interrupts, progress, waiting
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
    Gang,
    OnItem,
    Outcome,
    Outcomes,
    check_room,
    death_of,
    failure_of,
    ignore,
    num_local_gpus,
    run_member,
    run_rank,
)
from moe_ep.launch.gangs.processes import Process, children
from moe_ep.launch.gangs.rank_env import LOOPBACK, RankEnv
from moe_ep.launch.gangs.rendezvous import listen_store
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    from moe_ep.layer.elastic import ElasticConfig

# Workers import torch and the program before they answer, which takes seconds on a busy machine.
_START_QUIET_S, _LEAST_START_LIMIT_S = 15.0, 120.0
# Exit code of a worker whose program starts a gang when the worker imports it.
_UNGUARDED = 117
_fork_server: set[Process] = set()
# Modules that the server imports.
_preloaded = ["torch", "torch.distributed"]


class LocalGang(Gang):
    """`world_size` processes of this machine; rank i has GPU i where device is "cuda".

    They are forked from a server process that has imported torch once, and end when this process or the server does.

    Args:
        source: the launcher's name in `RankEnv`.

    Raises:
        NoRoomError: fewer GPUs here than ranks, or far fewer cores.
    """

    def __init__(self, world_size: int, device: str = "cpu", source: str = "local") -> None:
        check_room(world_size, device)
        self.world_size = world_size
        self.device = device
        self._source = source
        self._context = warm_fork_server()

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        ranks = local_rank_envs(self.world_size, self.device, source=self._source)
        outcomes = Outcomes(range(self.world_size))
        with LocalWorkers(self._context, ranks, fn, args, on_item=on_item) as workers:
            outcomes.gather(workers.outcomes)
        return outcomes.results()

    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        ranks = local_rank_envs(self.world_size, self.device, source=self._source)
        store = listen_store(LOOPBACK)
        workers = LocalWorkers(self._context, ranks, fn, args, port=store.port)
        outcomes = elastic.ElasticOutcomes(
            store,
            range(self.world_size),
            config,
            workers.kill,
            lambda rank: workers.start_joining(joining_rank_env(rank, self.device, source=self._source)),
            on_item,
            replaces=self._source == "torchrun",  # as torchrun's own agent does
        )
        with workers:
            return outcomes.run(workers.outcomes)


def local_rank_envs(
    count: int, device: str, *, source: str, first: int = 0, world_size: int | None = None, node_rank: int = 0,
    master_addr: str = LOOPBACK,
) -> list[RankEnv]:  # fmt: skip
    """The ranks of this machine, from `first` on; GPUs are shared where there are fewer."""
    num_gpus = max(num_local_gpus(), 1)
    return [
        RankEnv(
            rank=first + i,
            world_size=world_size or count,
            local_rank=i,
            local_world_size=count,
            node_rank=node_rank,
            master_addr=master_addr,
            source=source,
            device=f"cuda:{i % num_gpus}" if device == "cuda" else "cpu",
        )
        for i in range(count)
    ]


def joining_rank_env(
    rank: int, device: str, *, source: str, node_rank: int = 0, master_addr: str = LOOPBACK
) -> RankEnv:
    """The place of a worker that joins on this machine: the last of as many as there are ranks up to it."""
    places = local_rank_envs(rank + 1, device, source=source, node_rank=node_rank, master_addr=master_addr)
    return places[rank]


def freest_gpu(taken: Collection[str]) -> str:
    """The GPU of this machine that the fewest workers have, the first of several; taken: "cuda:N" of each."""
    gpus = [f"cuda:{number}" for number in range(max(num_local_gpus(), 1))]
    return min(gpus, key=list(taken).count)


class LocalWorkers:
    """Worker processes of this machine, which wait for rank 0's port, run a function and answer. A context manager that
    ends all of them.

    Args:
        port: of the elastic gang's store, which may be replaced for workers that are started later; None if rank 0
            serves the store.
        on_item: called with each item of rank 0.
        on_port: called with the port of the store that rank 0 serves, after the other ranks here are told.
    """

    def __init__(
        self,
        context: ForkServerContext,
        ranks: Sequence[RankEnv],
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        port: int | None = None,
        on_item: OnItem = ignore,
        on_port: Callable[[int], None] = ignore,
    ) -> None:
        _check_importable(fn)
        self.port = port
        self._on_item, self._on_port = on_item, on_port
        self._context, self._ranks = context, ranks
        self._fn, self._args = fn, args
        self._processes: dict[Connection, tuple[int, ForkServerProcess]] = {}
        self._open: set[Connection] = set()
        self._devices: dict[int, str] = {}  # of the ranks that run
        self._silent = {rank_env.rank for rank_env in ranks}
        self._display = progress.ProgressDisplay()

    def __enter__(self) -> LocalWorkers:
        limit_s = max(env.DISPATCH_TIMEOUT_S.get(), _LEAST_START_LIMIT_S)
        self._display.say(f"starting {progress.workers(len(self._ranks))}")
        self._start = Wait(lambda: f"{rank_list(sorted(self._silent))} to start", limit_s, _START_QUIET_S)
        try:
            _wait_for_fork_server(self._context, self._start)
            for rank_env in self._ranks:
                self.start(rank_env)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._display.close()
        for _, worker in self._processes.values():
            worker.kill()
        for connection, (_, worker) in self._processes.items():
            worker.join()
            connection.close()

    def start_joining(self, rank_env: RankEnv) -> None:
        """Starts a worker that joins, if on a GPU then on the one that the fewest have."""
        if rank_env.device != "cpu":
            rank_env = replace(rank_env, device=freest_gpu(self._devices.values()))
        self.start(rank_env)

    def start(self, rank_env: RankEnv) -> None:
        """Starts another worker."""
        ours, theirs = self._context.Pipe()
        worker = self._context.Process(
            target=_serve,
            args=(theirs, os.getpid(), dict(os.environ), rank_env, self._fn, self._args, self.port),
            daemon=True,
        )
        worker.start()
        theirs.close()
        self._processes[ours] = (rank_env.rank, worker)
        self._open.add(ours)
        self._devices[rank_env.rank] = rank_env.device
        if self.port is not None:
            elastic.say_started(rank_env.rank, worker.pid or 0, socket.gethostname())

    def kill(self, rank: int) -> None:
        """Ends a rank's process, stopped or not, if it is there."""
        self._devices.pop(rank, None)
        for number, worker in self._processes.values():
            if number == rank:
                worker.kill()

    def outcomes(self, timeout_s: float, also: Sequence[Any] = ()) -> Iterator[tuple[int, Outcome]]:
        """Waits for messages of workers and handles them; yields the outcomes. That of a worker that died is a failure.

        Args:
            also: sockets that end the wait too when they are readable.
        """
        interrupts.check()
        if self._silent:
            self._start.look()
        for ready in wait([*self._open, *also], timeout=timeout_s):
            if isinstance(ready, Connection) and ready in self._open:
                yield from self._receive(ready)

    def tell(self, port: int) -> None:
        """Tells all ranks but rank 0 the port of the store."""
        for connection, (rank, _) in self._processes.items():
            if rank != 0:
                with contextlib.suppress(OSError):  # a dead worker is found by the end of its pipe
                    connection.send(port)

    def _receive(self, connection: Connection) -> Iterator[tuple[int, Outcome]]:
        rank, worker = self._processes[connection]
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionError):
            worker.join(ECHO_GRACE_S)
            failure = death_of(worker.exitcode, rank)
            if rank in self._silent and (worker.exitcode or 0) > 0:
                failure = replace(failure, cause=_why_not_started(worker.exitcode))
            kind, content = "outcome", Outcome(failure=failure)
        self._silent.discard(rank)
        if kind == "outcome":
            self._open.discard(connection)
            self._devices.pop(rank, None)
            yield rank, content
        elif kind == "progress":
            self._display(content)
        elif kind == "item":
            self._on_item(content)
        elif kind == "port":
            self.tell(content)
            self._on_port(content)


def _check_importable(fn: Callable[..., Any]) -> None:
    """Raises ConfigError if workers could not import the function."""
    if getattr(process.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)  # a worker, which is importing the program
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(fn, "__module__", "") == "__main__" and not (file and os.path.isfile(file)):
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)} is defined in a program that was read from stdin or typed, which "
            f"workers cannot import; put it into a file"
        )


def _why_not_started(exitcode: int | None) -> str:
    file = getattr(sys.modules["__main__"], "__file__", None) or "the program"
    if exitcode == _UNGUARDED:
        return (
            f"{file} starts a gang whenever it is imported, and its workers import it; put what starts it under "
            f"if __name__ == '__main__':"
        )
    return (
        f"a worker could not import {file} or the function it is to run, and ended with exit code {exitcode} "
        f"(its traceback stands above); both must be importable from files"
    )


def preload(module: str) -> None:
    """Adds a module that is imported once for all local workers; to be called before this process's first gang.

    On machines with GPUs workers import it themselves, because CUDA does not work in a process that is forked after an
    import has looked for GPUs.
    """
    if num_local_gpus() == 0:
        _preloaded.append(module)


def warm_fork_server() -> ForkServerContext:
    """Starts the server process that local workers are forked from; it begins to import torch at once.

    The server and the workers ignore ctrl-C, which the driver handles.
    """
    if getattr(process.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)
    global _fork_server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    # Otherwise the server would start it, and it would undo the next line.
    resource_tracker.ensure_running()
    before = children(os.getpid())
    with interrupts.unheard_by_children():
        try:
            forkserver.ensure_running()
            _fork_server = children(os.getpid()) - before or _fork_server
        except OSError as error:
            raise GangError(
                f"no worker can be started with a socket in {tempfile.gettempdir()} ({error}); set TMPDIR to another "
                f"folder, with a short path"
            ) from error
    return context


@contextlib.contextmanager
def ending_fork_server() -> Iterator[None]:
    """Kills the fork server if the block fails. While it imports torch it would hold stderr open for seconds, and a
    reader of this command's output would wait for that."""
    try:
        yield
    except BaseException:
        for pid, _ in _fork_server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def _wait_for_fork_server(context: ForkServerContext, start: Wait) -> None:
    """Waits until the server can fork. A process that is started earlier would wait for it without handling signals."""

    def fork_one() -> None:
        first = context.Process(target=int)
        try:
            first.start()
        except EOFError:
            raise GangError(
                "the process that workers are forked from was killed while it started; see dmesg, and start again"
            ) from None
        first.join()

    with ending_fork_server():
        waiting.call(fork_one, start)


def end_with(*pids: int) -> None:
    """Makes this process end when one of these processes of this machine ends in any way.

    A forked worker needs it, because its parent, the server, lives as long as any worker and not as long as the driver,
    and because nothing else ends a worker whose server was killed.
    """

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            wait([os.pidfd_open(pid) for pid in pids])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="moe_ep-end-with").start()


def _serve(
    connection: Connection,
    driver_pid: int,
    environment: dict[str, str],
    rank_env: RankEnv,
    fn: Callable[..., Any],
    args: Sequence[Any],
    port: int | None,
) -> None:
    """The worker process: joins its peers through rank 0's store or the driver's, runs the function and answers."""
    end_with(driver_pid, os.getppid())
    # The server has the environment of the driver's first gang.
    os.environ.clear()
    os.environ.update(environment)
    if rank_env.rank == 0:
        progress.set_sink(lambda report: connection.send(("progress", report)))
        progress.set_receiver(lambda item: connection.send(("item", item)))
    try:
        try:
            connection.send(("started", None))
            if port is not None:
                outcome = run_member(replace(rank_env, master_port=port), fn, args)
            else:
                store = listen_store(rank_env.master_addr) if rank_env.rank == 0 else None
                if store is not None:
                    connection.send(("port", store.port))
                port = connection.recv() if store is None else store.port
                outcome = run_rank(replace(rank_env, master_port=port), fn, args, store)
            progress.set_sink(None)
            connection.send(("outcome", outcome))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            connection.send(("outcome", Outcome(failure=failure_of(error, rank_env.rank))))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # The driver is gone, or is ending the gang.
    # Rank 0 serves the store, so all stay until the driver has every answer and ends the gang.
    while True:
        time.sleep(3600)
