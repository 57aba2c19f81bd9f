"""A gang under torchrun: joins one that torchrun started, or is torchrun itself through its launcher's interface.

Started by torchrun or by srun, every process calls `run` and is a rank; rank 0 speaks to the user. Started otherwise,
this process is the agent of its node: alone, or one of `num_nodes` that find each other at `rdzv_endpoint`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from datetime import timedelta
from typing import Any

from moe_ep.errors import GangError
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
    first_cause,
    gang_error,
    ignore,
    run_rank,
    use_loopback_for_gloo,
    wait_for_fork_server,
    warm_fork_server,
)
from moe_ep.launch.gangs.mailbox import Mailbox, sender_to
from moe_ep.launch.gangs.rank_env import RankEnv, resolve_rank_env
from moe_ep.launch.gangs.rendezvous import init_process_group

_CAUSE = "moe_ep/cause"
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class TorchrunGang(Gang):
    """This node's ranks of a torchrun job.

    Args:
        num_local: ranks of this node; under torchrun or srun theirs is used.
        num_nodes: nodes, each of which makes such a gang.
        rdzv_endpoint: host:port where the agents of several nodes meet; the first of that host listens there.
        rdzv_id: name of the job at that endpoint.
        max_restarts: how often torchrun starts the ranks again after a failure.

    Raises:
        NoRoomError: fewer GPUs here than ranks of this node, or far fewer cores.
    """

    def __init__(
        self,
        num_local: int = 1,
        device: str = "cpu",
        num_nodes: int = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "moe_ep",
        max_restarts: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        if num_nodes > 1 and not rdzv_endpoint:
            raise ValueError(
                f"rdzv_endpoint is missing; with num_nodes ({num_nodes}) give the host:port where the nodes meet"
            )
        started = resolve_rank_env()
        self._env = started if started.source in ("torchrun", "slurm") else None
        num_local = self._env.local_world_size if self._env else num_local
        check_room(num_local, device)
        self.world_size = self._env.world_size if self._env else num_local * num_nodes
        self._num_local = num_local
        self.device = device
        self._num_nodes = num_nodes
        self._rdzv_endpoint = rdzv_endpoint
        self._rdzv_id = rdzv_id if num_nodes > 1 else uuid.uuid4().hex
        self._max_restarts = max_restarts
        self._timeout_s = timeout_s
        self._has_rank_0 = self._env is None or self._env.rank == 0

    @property
    def is_driver(self) -> bool:
        """Whether rank 0 is this process, or, after `run`, one of this agent's."""
        return self._has_rank_0

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        """As `Gang.run`; the list is empty on processes that are not `is_driver` afterwards.

        Started by torchrun, a rank that only suffers from a peer's failure ends the process without a word.
        """
        if self._env is not None:
            return self._run_as_rank(self._env, fn, args, on_item)
        return self._run_as_agent(fn, args, on_item)

    def _run_as_rank(
        self, rank_env: RankEnv, fn: Callable[..., Any], args: Sequence[Any], on_item: OnItem
    ) -> list[Any]:
        with interrupts.ending_within(ECHO_GRACE_S):
            outcome, speaks = _run_and_gather(rank_env, self.device, fn, args, on_item, self._timeout_s)
        if outcome.failure is None:
            return outcome.value or []
        if not speaks:
            os._exit(1)
        raise gang_error(outcome.failure)

    def _run_as_agent(self, fn: Callable[..., Any], args: Sequence[Any], on_item: OnItem) -> list[Any]:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # The gang's error says what happened; each of these loggers has a level of its own.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
        display = progress.ProgressDisplay()
        display.say(f"starting {progress.workers(self._num_local)}")
        wait_for_fork_server(warm_fork_server())
        with tempfile.TemporaryDirectory(prefix="moe_ep_torchrun_") as logs:
            config = LaunchConfig(
                min_nodes=self._num_nodes,
                max_nodes=self._num_nodes,
                nproc_per_node=self._num_local,
                run_id=self._rdzv_id,
                rdzv_backend="c10d",
                rdzv_endpoint=self._rdzv_endpoint or "localhost:0",
                local_addr="localhost" if self._num_nodes == 1 else None,
                max_restarts=self._max_restarts,
                start_method="forkserver",
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                **_quick_shutdown(LaunchConfig),
            )
            handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
            gathered: dict[int, Any] = {}
            stopped_by = None
            items = Mailbox(on_item)
            try:
                gathered = elastic_launch(config, _worker)(
                    os.getpid(), self.device, self._timeout_s, fn, list(args), items.address
                )
            except ChildFailedError as error:
                raise items.error or gang_error(_first_failure(error)) from None
            except SignalException as error:
                stopped_by = error.sigval
            except Exception as error:
                raise GangError(f"torchrun could not start the ranks: {type(error).__name__}: {error}") from None
            finally:
                display.close()
                items.close()
                # The agent takes them over and leaves them so.
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        if items.error is not None:
            raise items.error
        if stopped_by is not None:
            signal.raise_signal(stopped_by)
            raise GangError(f"torchrun ended the gang on {signal.Signals(stopped_by).name}")
        results = next((value for value in gathered.values() if value is not None), None)
        self._has_rank_0 = results is not None
        return results or []


def _worker(
    agent_pid: int,
    device: str,
    timeout_s: float | None,
    fn: Callable[..., Any],
    args: Sequence[Any],
    items: str,
) -> list[Any] | None:
    """A rank that the agent started; its failure goes to the agent in the file that torchrun names, and what it hands
    over to the agent's mailbox."""
    end_with(agent_pid)
    # The agent passes ctrl-C on, and waits for its workers to go.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    rank_env = resolve_rank_env()
    if rank_env.local_world_size == rank_env.world_size:
        use_loopback_for_gloo()
    on_item = sender_to(items) if rank_env.rank == 0 else ignore
    outcome, _ = _run_and_gather(rank_env, device, fn, args, on_item, timeout_s)
    if outcome.failure is not None:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            info = {"timestamp": str(int(time.time())), **asdict(outcome.failure)}
            json.dump({"message": {"message": outcome.failure.cause, "extraInfo": info}}, file)
        os._exit(1)
    return outcome.value


def _run_and_gather(
    rank_env: RankEnv,
    device: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    on_item: OnItem,
    timeout_s: float | None,
) -> tuple[Outcome, bool]:
    """One rank's part: on rank 0 the results of all, elsewhere None, or why the gang failed.

    Returns:
        The outcome, and whether this rank is the one to say it.
    """
    if device == "cuda":
        rank_env = replace(rank_env, device=f"cuda:{rank_env.local_rank}")
    display = progress.ProgressDisplay()
    if rank_env.rank == 0:
        progress.set_sink(display)
        progress.set_receiver(on_item)
    stores: list[Any] = []
    outcome = run_rank(rank_env, _gathered, (stores, fn, args), timeout_s)
    display.close()
    if outcome.failure is None or not stores:
        return outcome, True
    failure, speaks = _agree_on_failure(outcome.failure, stores[0])
    return Outcome(failure=failure), speaks


def _agree_on_failure(failure: WorkerFailure, store: Any) -> tuple[WorkerFailure, bool]:
    """The root cause as far as the ranks can tell each other, and whether this rank was the first to know it.

    A rank that suffers an echo waits a moment: the rank that failed may still be writing, and where it was killed the
    agent must see that before it sees this one end.
    """
    deadline = time.monotonic() + (ECHO_GRACE_S if failure.echo else 0)
    # The store is gone when its agent is; then nobody can tell who was first.
    with contextlib.suppress(Exception):
        while failure.echo and time.monotonic() < deadline:
            if store.check([_CAUSE]):
                return WorkerFailure(**json.loads(store.get(_CAUSE))), False
            time.sleep(0.05)
        if store.add(_CAUSE + "/count", 1) > 1:
            store.wait([_CAUSE], timedelta(seconds=1))
            return WorkerFailure(**json.loads(store.get(_CAUSE))), False
        store.set(_CAUSE, json.dumps(asdict(failure)))
    return failure, True


def _gathered(rank_env: RankEnv, stores: list[Any], fn: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
    import torch.distributed as dist

    stores.append(init_process_group(rank_env))
    value = fn(rank_env, *args)
    results: list[Any] | None = [None] * rank_env.world_size if rank_env.rank == 0 else None
    dist.gather_object(value, results)
    return results


def _quick_shutdown(launch_config: type) -> dict[str, Any]:
    """Kills what does not end within 3 s of a failure, where this torch lets that be set; torch 2.11 waits for 30 s."""
    known = any(field.name == "shutdown_timeout" for field in fields(launch_config))
    return {"shutdown_timeout": 3} if known else {}


def _first_failure(error: Any) -> WorkerFailure:
    """The root cause among the failures of this agent's ranks."""
    failures = []
    for rank, process in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        written = process.error_file_data.get("message")
        info = written.get("extraInfo", {}) if isinstance(written, dict) else {}
        info = {field.name: info[field.name] for field in fields(WorkerFailure) if field.name in info}
        failures.append(WorkerFailure(**info) if "cause" in info else death_of(process.exitcode, rank))
    return first_cause(failures)
