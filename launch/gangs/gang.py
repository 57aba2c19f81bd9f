"""A gang: worker processes that share a process group, run one function, and live and die together.

    results = LocalGang(4).run(function, arg, ...)      # function(rank_env, arg, ...) in every worker

The first worker that fails ends the whole gang. The error names its rank, its node and the cause, not the errors that
follow from it in other workers.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from moe_ep import env
from moe_ep.errors import (
    ConfigError,
    CoverError,
    DispatchTimeoutError,
    GangError,
    MinorityError,
    MoeEpError,
    NoRoomError,
)
from moe_ep.launch.gangs import interrupts, mailbox, progress
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.gangs.rendezvous import (
    destroy_process_group,
    init_process_group,
    open_clients_store,
    use_interface_of,
)

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_ep.distributed.membership import Membership
    from moe_ep.layer.elastic import ElasticConfig

POLL_S = 0.5
# A failure that looks like the consequence (echo) of another waits this long for the other to be reported.
ECHO_GRACE_S = 3.0
# Limit for leaving the process groups and freeing symmetric memory, which takes a second.
_LEAVING_S = 30.0
# Workers on CPUs wait more than they compute, so more of them than cores are allowed, up to this factor.
WORKERS_PER_CORE = 16
_SMALLER = "lower --ep-size or add machines"
_ECHO = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe|TCPStore|socketPoll|recvValue", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """Why a worker ended before its work was done.

    Attributes:
        node: address or name of its machine.
        traceback: of the exception; empty if the process died.
        echo: whether it looks like the consequence of a peer's failure.
        refusal: whether the worker refused its settings, so that only the command is wrong.
        is_final: whether an elastic gang cannot go on after it.
    """

    rank: int
    node: str
    cause: str
    traceback: str = ""
    echo: bool = False
    refusal: bool = False
    is_final: bool = False

    def __str__(self) -> str:
        where = f"rank {self.rank} on node {self.node} failed: {self.cause}"
        return f"{where}\n{self.traceback.rstrip()}" if self.traceback else where


@dataclass(frozen=True)
class Outcome:
    """The value that one rank's function returned, or its failure."""

    value: Any = None
    failure: WorkerFailure | None = None


class Outcomes:
    """Collects the outcomes of a gang's ranks, and decides when the gang ends.

    It ends when every rank has answered, or at the first failure. After an echo it waits `ECHO_GRACE_S` for the failure
    that caused it.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.pending = set(ranks)
        self.failures: list[WorkerFailure] = []
        self._values: dict[int, Any] = {}
        self._deadline = float("inf")

    def add(self, rank: int, outcome: Outcome) -> None:
        """Records a rank's outcome. A second one of the same rank is ignored."""
        if rank not in self.pending:
            return
        self.pending.discard(rank)
        if outcome.failure is None:
            self._values[rank] = outcome.value
            return
        self.failures.append(outcome.failure)
        grace_s = ECHO_GRACE_S if outcome.failure.echo else 0.0
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def gather(self, poll: Callable[[float], Iterable[tuple[int, Outcome]]]) -> None:
        """Takes outcomes until they are final.

        Args:
            poll: waits for at most this many seconds, and returns the outcomes that have arrived, by rank.
        """
        while not self.are_final:
            for rank, outcome in poll(min(self.left_s, POLL_S)):
                self.add(rank, outcome)

    @property
    def are_final(self) -> bool:
        return not self.pending or time.monotonic() >= self._deadline

    @property
    def left_s(self) -> float:
        """Seconds until the outcomes are final in any case; infinite while no rank has failed."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def cause(self) -> WorkerFailure | None:
        """The failure to report; None if no rank has failed."""
        return first_cause(self.failures) if self.failures else None

    def results(self) -> list[Any]:
        """The values in rank order; raises the gang's error if a rank has failed."""
        if self.failures:
            raise gang_error(first_cause(self.failures))
        return [value for _, value in sorted(self._values.items())]


OnItem = Callable[[Any], None]


def ignore(item: object) -> None:
    """Drops an item."""


class Gang(ABC):
    """Worker processes with ranks 0 to world_size - 1, on devices of one kind: "cpu" or "cuda"."""

    world_size: int
    device: str

    @property
    def is_driver(self) -> bool:
        """Whether this process is the one that reports to the user."""
        return True

    def close(self) -> None:
        """Frees what the gang holds besides its workers. `run` does so too; a second call does nothing."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """As `run`, but when a worker dies the others go on without it, and workers may leave and join.

        Args:
            fn: also gets `membership=`, this worker's `Membership`, and makes the process group through it.

        Returns:
            The results of the remaining ranks, in rank order, and an account of each loss (`ElasticOutcomes`).

        Raises:
            GangError: fewer ranks remain than config allows, or their slots are too few for all experts.
            ConfigError: this launcher does not support it, or as `run`.
        """

    @abstractmethod
    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        """Runs fn(rank_env, *args) in every worker, with the process group initialised; results in rank order.

        Workers must be able to import `fn`; arguments and results are pickled between the driver and its workers. The
        workers start with the call and have ended when it returns or raises.

        Args:
            on_item: called in the driver with each item that rank 0 hands over (`progress.hand_over`), while the
                workers go on; items are pickled too.

        Raises:
            GangError: a worker failed or died.
            ConfigError: a worker refused its settings, or the machines cannot hold the gang.
        """


def run_rank(
    rank_env: RankEnv,
    fn: Callable[..., Any],
    args: Sequence[Any],
    store: dist.Store | None = None,
    *,
    exports: bool = True,
) -> Outcome:
    """The worker's side: joins the process group and calls the function.

    Args:
        store: the rendezvous store, if this process serves it.
        exports: whether to write rank_env to the environment.
    """

    def work() -> Any:
        init_process_group(rank_env, store=store)
        value = fn(rank_env, *args)
        with interrupts.ending_after(_LEAVING_S, "leaving the process group"):
            destroy_process_group()
        return value

    return _outcome_of(work, rank_env, exports=exports)


def _leave_on_signal(membership: Membership) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda number, frame: membership.ask_to_leave())


def run_member(
    rank_env: RankEnv,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    on_membership: Callable[[Membership], None] = _leave_on_signal,
) -> Outcome:
    """As `run_rank`, for an elastic gang, whose launcher serves the store.

    Args:
        on_membership: called with this rank's membership before `fn`; by default it lets SIGUSR1 ask to leave.
    """

    def work() -> Any:
        from moe_ep.distributed.membership import Membership

        use_interface_of(rank_env)
        store = open_clients_store(rank_env.master_addr, rank_env.master_port)
        membership = Membership(store, rank_env.rank, device=rank_env.device)
        progress.set_receiver(mailbox.ItemSender(membership))
        on_membership(membership)
        return fn(rank_env, *args, membership=membership)

    return _outcome_of(work, rank_env)


def _outcome_of(work: Callable[[], Any], rank_env: RankEnv, *, exports: bool = True) -> Outcome:
    """Prepares a worker's process and does its work; an exception becomes a failure."""
    try:
        import torch

        set_up_logging(rank_env.rank)
        if exports:
            rank_env.export()
        torch.set_num_threads(_num_threads(rank_env))
        return Outcome(work())
    except Exception as error:
        return Outcome(failure=failure_of(error, rank_env.rank))


def failure_of(error: BaseException, rank: int) -> WorkerFailure:
    """Converts a worker's exception to a failure. Errors of moe_ep explain themselves and get no traceback."""
    own = isinstance(error, MoeEpError) and env.LOG_LEVEL.get() != "DEBUG"
    text = "".join(traceback.format_exception(error))
    return WorkerFailure(
        rank=rank,
        node=socket.gethostname(),
        cause=str(error) if own else f"{type(error).__name__}: {error}".split("\n")[0],
        traceback="" if own else text,
        echo=isinstance(error, (DispatchTimeoutError, ConnectionError)) or bool(_ECHO.search(str(error))),
        refusal=isinstance(error, ConfigError),
        is_final=isinstance(error, (CoverError, MinorityError)),
    )


def death_of(exitcode: int | None, rank: int) -> WorkerFailure:
    """The failure of a worker whose process ended without an answer, from its exit code (-signal, as in Python)."""
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        cause = f"the process was killed by {name}"
        if name == "SIGKILL":
            cause += "; if nobody sent it, the kernel did because memory ran out (see dmesg)"
    else:
        cause = f"the process ended with exit code {exitcode} before its work was done"
    return WorkerFailure(rank=rank, node=socket.gethostname(), cause=cause)


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure to report: the first that is not an echo, or else the first."""
    return next((failure for failure in failures if not failure.echo), failures[0])


def gang_error(failure: WorkerFailure) -> MoeEpError:
    """The error that ends the gang. A refusal does not name the rank, because all ranks have the same settings."""
    return ConfigError(failure.cause) if failure.refusal else GangError(str(failure))


def not_enough(kind: str, asked: int, there: str, way_out: str = _SMALLER) -> NoRoomError:
    """The error for a gang that does not fit on the machines."""
    return NoRoomError(f"the gang asks for {asked} {kind} (one a worker) and there are {there}; {way_out}")


def check_room(num_workers: int, device: str) -> None:
    """Raises NoRoomError for more workers than this machine has GPUs, or than its cores can serve."""
    if device == "cuda" and (found := num_local_gpus()) < num_workers:
        way_out = _SMALLER if found else "leave out --device cuda to run on CPUs, or check CUDA_VISIBLE_DEVICES"
        raise not_enough("GPUs", num_workers, f"{found} on this machine", way_out)
    if device == "cpu" and num_workers > WORKERS_PER_CORE * num_cpus():
        raise not_enough("CPUs", num_workers, f"{num_cpus()} here, each for at most {WORKERS_PER_CORE}")


def num_cpus() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_threads(rank_env: RankEnv) -> int:
    """This rank's share of the cores, or OMP_NUM_THREADS if that is less. Under Ray it is ignored, because Ray sets it
    for every actor."""
    share = max(1, num_cpus() // rank_env.local_world_size)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdecimal() and int(asked) and rank_env.source != "ray" else share


def num_local_gpus() -> int:
    """NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible, counted without touching CUDA."""
    try:
        devices = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    except OSError:
        devices = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    return min(len(devices), len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))


def set_up_logging(rank: int | None = None) -> None:
    """Sends the moe_ep loggers to stderr at MOE_EP_LOG_LEVEL.

    Args:
        rank: named in every line; None for a process that is not a worker.
    """
    logger = logging.getLogger("moe_ep")
    logger.setLevel(env.LOG_LEVEL.get())
    name = "" if rank is None else f" [rank {rank}]"
    handler = next((handler for handler in logger.handlers if isinstance(handler, _Handler)), None)
    if handler is None and not logger.handlers:
        handler = _Handler()
        logger.addHandler(handler)
    if handler is not None:
        handler.setFormatter(logging.Formatter(f"%(levelname)s{name} %(name)s: %(message)s"))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes each INFO message once, because many layers of a model make the same choice."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno == logging.INFO and text in self._shown:
            return False
        self._shown.add(text)
        return bool(super().filter(record))
