"""A gang of Ray actors, one for each GPU or CPU worker. Ranks of a node are consecutive; nodes are sorted by IP.

Works on a private cluster of this machine, on a running cluster, inside a Ray job, and inside a placement group of the
caller. The driver asks Ray for the resources and never touches CUDA. Sections: the gang and its actors; placement
groups and free resources; joining or starting a cluster.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe_ep
from moe_ep import env
from moe_ep.errors import GangError, one_of
from moe_ep.launch.gangs import elastic, interrupts, progress, waiting
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
    POLL_S,
    Gang,
    OnItem,
    Outcome,
    Outcomes,
    WorkerFailure,
    check_room,
    gang_error,
    ignore,
    not_enough,
    num_cpus,
    run_member,
    run_rank,
)
from moe_ep.launch.gangs.processes import (
    Process,
    children,
    end_process,
    end_trees,
    has_ended,
    named,
    process_of,
    start_guard,
)
from moe_ep.launch.gangs.rank_env import LOOPBACK, RankEnv
from moe_ep.launch.gangs.rendezvous import listen_store
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    from moe_ep.distributed.membership import Membership
    from moe_ep.layer.elastic import ElasticConfig

# Reports that a worker keeps until the driver asks for them; the oldest are dropped.
_MOST_REPORTS = 64
# Starting a cluster, or workers that import torch, takes seconds on a busy machine.
_START_QUIET_S = 15.0
# Ray frees the resources of an earlier gang a moment after its workers have ended.
FREE_LIMIT_S = 5.0
# Prefixes of the driver's variables that workers of a running cluster get; those of a private one inherit all.
_PASSED_ON = ("MOE_EP_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TRITON_", "CUDA_MODULE_LOADING", "HF_HUB_OFFLINE")
# Limit after ctrl-C: while Ray looks for a cluster, no signal is handled.
_JOIN_LIMIT_S = 1.5
# Limit for a server's answer.
_ANSWER_LIMIT_S = 20.0
# A call without effect, which every cluster answers if the caller is authorized.
_HARMLESS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_HOST_PORT = re.compile(r"(.+):(\d+)", re.ASCII)
_NO_TOKEN = "this process sends no token"
# The processes that a cluster of one machine cannot do without.
_SERVERS = ("gcs_server", "raylet")


class RayGang(Gang):
    """`world_size` actors on the cluster at `address`.

    Args:
        world_size: workers; None means one for each GPU of the cluster, or `default_world_size` if it has none.
        device: "cpu", "cuda", or "auto": GPUs if the cluster has any.
        address: host:port of a running cluster or "auto"; None means the cluster that this process belongs to
            (RAY_ADDRESS, a Ray job), or else a private one on loopback that ends with the gang.

    Raises:
        GangError: nothing answers at the address, or the cluster is too small.
    """

    def __init__(
        self,
        world_size: int | None = None,
        device: str = "auto",
        address: str | None = None,
        default_world_size: int = 4,
    ) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(one_of("device", device, ("auto", "cpu", "cuda")))
        self.cluster: PrivateCluster | None = None
        self._is_elastic = False
        self._display = progress.ProgressDisplay()
        try:
            self._display.say("waiting for Ray")
            with waiting.said("Ray", _START_QUIET_S):
                self.cluster = connect(address, world_size or default_world_size, device)
            from ray.util import get_current_placement_group

            num_gpus = total_of("GPU")
            if device == "auto":
                device = "cuda" if num_gpus else "cpu"
            self.device = device
            self._resource = "GPU" if device == "cuda" else "CPU"
            self.world_size = world_size or (num_gpus if device == "cuda" and num_gpus else default_world_size)
            if get_current_placement_group() is None:
                check_free(self._resource, self.world_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the private cluster, if there is one. `run` does so too."""
        self._display.close()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        with self._started() as actors:
            outcomes = Outcomes(range(self.world_size))
            first = actors.workers[0]
            port = _get(
                first.actor.listen.remote(first.rank_env.master_addr), 0, first.place.node_ip, self._start_wait()
            )
            actors.work("run", (first.rank_env.master_addr, port), (fn, args))
            news = _News(first.actor, self._display, on_item)
            outcomes.gather(lambda timeout_s: self._poll(actors, news, timeout_s))
            news.look(wait_s=ECHO_GRACE_S)
            return outcomes.results()

    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        import ray

        self._is_elastic = True
        with self._started() as actors:
            here = ray.util.get_node_ip_address()
            address = LOOPBACK if {worker.place.node_ip for worker in actors.workers.values()} == {here} else here
            store = listen_store(address)
            outcomes = elastic.ElasticOutcomes(
                store, range(self.world_size), config, actors.end, actors.start_rank, on_item
            )
            news = _News(actors.workers[0].actor, self._display)
            actors.work("run_member", (address, store.port), (fn, args))
            return outcomes.run(lambda timeout_s: self._poll(actors, news, timeout_s))

    @contextlib.contextmanager
    def _started(self) -> Iterator[_Actors]:
        """Yields the workers' actors; everything of the gang is freed after the block."""
        self._display.say(f"starting {progress.workers(self.world_size)}")
        try:
            with slots(self._resource, self.world_size) as found, _Actors(self._create, self._is_elastic) as actors:
                actors.start(found, self._start_wait())
                yield actors
        finally:
            self.close()

    def _start_wait(self) -> Wait:
        what = f"{progress.workers(self.world_size)} to start"
        return Wait(what, env.DISPATCH_TIMEOUT_S.get(), _START_QUIET_S)

    def _poll(self, actors: _Actors, news: _News, timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        interrupts.check()
        if self.cluster is not None:
            self.cluster.check()
        news.look()
        return actors.outcomes(timeout_s)

    def _create(self, slot: Slot | None) -> Any:
        """Creates an actor in the slot; without one, Ray chooses the place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind: Any = ray.remote
        remote = kind(concurrency_groups={"watch": 1}, max_restarts=0, max_task_retries=0)(_Worker)
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if self._resource == "GPU" else {"num_cpus": 1}
        if self.cluster is None:
            options["runtime_env"] = {"env_vars": worker_variables()}
        elif slot is None and self._resource == "CPU":
            options["num_cpus"] = 0  # a private cluster has only as many CPUs as initial workers
        if slot is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                slot.placement_group, placement_group_bundle_index=slot.bundle
            )
        return remote.options(**options).remote(self._is_elastic)


@dataclass(frozen=True)
class Place:
    """The place of an actor's process: its GPU's index on the node (-1 for none), and the node's name and address."""

    gpu: int
    device: str
    host: str
    node_ip: str
    process: Process


@dataclass(frozen=True)
class _RankActor:
    """An actor and its rank."""

    actor: Any
    slot: Slot | None
    place: Place
    rank_env: RankEnv

    def outcome(self, ref: Any) -> Outcome:
        """The outcome of its work."""
        import ray

        node = self.place.node_ip
        try:
            outcome = ray.get(ref)
        except ray.exceptions.RayError as error:
            return Outcome(failure=actor_failure(error, self.rank_env.rank, node))
        return Outcome(outcome.value, outcome.failure and replace(outcome.failure, node=node))


class _Actors:
    """The actors of a gang; a context manager that ends them.

    Args:
        create: creates an actor in a slot, or where Ray chooses.

    Attributes:
        workers: those that have a rank, by rank.
    """

    def __init__(self, create: Callable[[Slot | None], Any], is_elastic: bool) -> None:
        self._create, self._is_elastic = create, is_elastic
        self.workers: dict[int, _RankActor] = {}
        self._all: list[Any] = []
        self._running: dict[Any, _RankActor] = {}
        # Joining actors with their ranks and slots, by the reference of their place.
        self._joining: dict[Any, tuple[int, Slot | None, Any]] = {}
        self._free: list[Slot] = []

    def __enter__(self) -> _Actors:
        return self

    def __exit__(self, *error: object) -> None:
        _end(self._all)

    def start(self, slots: list[Slot], wait: Wait) -> None:
        """Starts an actor in each slot, and numbers them: ranks of a node are consecutive, nodes sorted by IP."""
        actors = self._all
        for slot in slots:
            actors.append(self._create(slot))
        ips = [slot.node_ip for slot in slots]
        asked = [actor.place.remote() for actor in actors]
        places = [_get(ref, number, ips[number], wait) for number, ref in enumerate(asked)]
        order = sorted(range(len(actors)), key=lambda i: (ip_key(ips[i]), places[i].gpu, i))
        ordered = [ips[i] for i in order]
        nodes = list(dict.fromkeys(ordered))
        for rank, i in enumerate(order):
            rank_env = RankEnv(
                rank=rank,
                world_size=len(order),
                local_rank=rank - ordered.index(ips[i]),
                local_world_size=ordered.count(ips[i]),
                node_rank=nodes.index(ips[i]),
                master_addr=LOOPBACK if len(nodes) == 1 else nodes[0],
                source="ray",
                device=places[i].device,
            )
            self.workers[rank] = _RankActor(actors[i], slots[i], places[i], rank_env)

    def work(self, method: str, store: tuple[str, int], work: tuple[Any, ...]) -> None:
        """Starts the work of all workers, and of those that join later.

        Args:
            method: of `_Worker`.
            store: address and port of the rendezvous store.
            work: the arguments of `method` after the rank: function and its arguments.
        """
        self._method, self._store, self._work = method, store, work
        for worker in list(self.workers.values()):
            self._begin(worker)

    def _begin(self, worker: _RankActor) -> None:
        address, port = self._store
        rank_env = replace(worker.rank_env, master_addr=address, master_port=port)
        self.workers[rank_env.rank] = worker
        if self._is_elastic:
            elastic.say_started(rank_env.rank, worker.place.process[0], worker.place.host)
        self._running[getattr(worker.actor, self._method).remote(rank_env, *self._work)] = worker

    def start_rank(self, rank: int) -> None:
        """Starts an actor for a new rank, in the slot of a lost one if there is one."""
        slot = self._free.pop() if self._free else None
        actor = self._create(slot)
        self._all.append(actor)
        self._joining[actor.place.remote()] = rank, slot, actor

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        """Waits for outcomes of ranks and yields them; starts the work of ranks that join."""
        import ray

        waiting_for = [*self._running, *self._joining]
        if not waiting_for:
            return
        for ref in ray.wait(waiting_for, num_returns=1, timeout=timeout_s)[0]:
            if ref in self._running:
                worker = self._running.pop(ref)
                outcome = worker.outcome(ref)
                if self._is_elastic and outcome.failure is not None:
                    self._leave(worker.rank_env.rank)
                yield worker.rank_env.rank, outcome
                continue
            rank, slot, actor = self._joining.pop(ref)
            try:
                place = ray.get(ref)
            except ray.exceptions.RayError as error:
                yield rank, Outcome(failure=actor_failure(error, rank, slot.node_ip if slot else "unknown"))
                continue
            beside = sum(worker.place.node_ip == place.node_ip for worker in self._running.values())
            rank_env = RankEnv(
                rank=rank,
                world_size=rank + 1,
                local_rank=min(beside, rank),
                local_world_size=min(beside, rank) + 1,
                source="ray",
                device=place.device,
            )
            self._begin(_RankActor(actor, slot, place, rank_env))

    def _leave(self, rank: int) -> _RankActor | None:
        """Ends a rank's actor and frees its slot."""
        worker = self.workers.pop(rank, None)
        if worker is not None:
            _end([worker.actor])
            if worker.slot is not None:
                self._free.append(worker.slot)
        return worker

    def end(self, rank: int) -> None:
        """Kills a rank's process, even a stopped one, if it exists."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        worker = self._leave(rank)
        if worker is None:
            return
        if worker.place.node_ip == ray.util.get_node_ip_address():
            end_process(worker.place.process)
            return
        # ray.kill needs the process to respond, and a stopped one does not.
        kind: Any = ray.remote
        with contextlib.suppress(Exception):
            node_id = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == worker.place.node_ip)
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            kind(num_cpus=0, scheduling_strategy=strategy)(end_process).remote(worker.place.process)


class _Worker:
    """The actor. `run` or `run_member` is the one long call; `news` is answered concurrently.

    Args:
        is_elastic: whether SIGUSR1 asks this rank to leave; otherwise it ends the process.
    """

    def __init__(self, is_elastic: bool) -> None:
        self._membership: Membership | None = None
        if is_elastic:
            interrupts.call_on_signal(signal.SIGUSR1, self._leave)
        # Ray's Python handler never runs, because the main thread stays in Ray's own loop; the default one ends the
        # process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._store: Any = None
        self._reports: deque[progress.Progress] = deque(maxlen=_MOST_REPORTS)
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        progress.set_sink(self._reports.append)
        progress.set_receiver(self._items.put)

    def _leave(self) -> None:
        if self._membership is not None:
            self._membership.ask_to_leave()

    def place(self) -> Place:
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        index = -1
        if ids:
            visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
            index = visible.index(ids[0]) if ids[0] in visible else int(ids[0])
        device = f"cuda:{index}" if ids else "cpu"
        return Place(index, device, socket.gethostname(), ray.util.get_node_ip_address(), process_of(os.getpid()))

    def listen(self, address: str) -> int:
        """Serves the rendezvous store, which lives as long as this actor; returns its port."""
        self._store = listen_store(address)
        return self._store.port

    def run(self, rank_env: RankEnv, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        return run_rank(rank_env, fn, args, self._store)

    def run_member(self, rank_env: RankEnv, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        def note(membership: Membership) -> None:
            self._membership = membership

        return run_member(rank_env, fn, args, on_membership=note)

    def news(self) -> tuple[list[progress.Progress], list[Any]]:
        """The reports and the items since the last call."""
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        return reports, [self._items.get() for _ in range(self._items.qsize())]


class _News:
    """Polls a worker's progress and items; one request is always open."""

    def __init__(self, actor: Any, display: Callable[[progress.Progress], None], on_item: OnItem = ignore) -> None:
        self._ask = actor.news.options(concurrency_group="watch").remote
        self._display, self._on_item = display, on_item
        self._asked = self._ask()

    def look(self, wait_s: float = 0.0) -> None:
        """Shows and passes on the answer to the open request, if it has arrived, and sends another.

        Args:
            wait_s: if not 0, waits for that answer and for one more, the last.
        """
        import ray

        for _ in range(2 if wait_s else 1):
            if not ray.wait([self._asked], timeout=wait_s)[0]:
                return
            with contextlib.suppress(ray.exceptions.RayError):
                reports, items = ray.get(self._asked)
                for report in reports:
                    self._display(report)
                for item in items:
                    self._on_item(item)
            self._asked = self._ask()


def _get(ref: Any, rank: int, node: str, wait: Wait) -> Any:
    """Waits for the answer of a starting worker."""
    import ray

    try:
        while not ray.wait([ref], timeout=POLL_S)[0]:
            wait.look(f"rank {rank} on node {node} failed: the worker did not start within {wait.limit_s:g} s")
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        raise gang_error(actor_failure(error, rank, node)) from None


def actor_failure(error: Exception, rank: int, node: str) -> WorkerFailure:
    """Converts Ray's error about an actor to a failure."""
    import ray

    text, traceback = str(error), ""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        cause = "Ray killed the process because the node's memory ran out"
    elif re.search("node has (crashed|died)", text):
        cause = "Ray gave up its node or the driver's: a raylet ended, or the network no longer reaches it"
    elif isinstance(error, ray.exceptions.ActorDiedError) and "Worker exit detail" in text:
        pid = re.search(r"pid: (\d+)", text)
        cause = (
            f"the process{f' (pid {pid[1]})' if pid else ''} died: killed by a signal (SIGKILL if memory ran out; see "
            f"dmesg on the node) or crashed"
        )
    else:
        cause, traceback = type(error).__name__, text
    return WorkerFailure(rank=rank, node=node, cause=cause, traceback=traceback)


def _end(actors: list[Any]) -> None:
    import ray

    if not ray.is_initialized():  # the cluster is gone; Ray would start another
        return
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True)
class Slot:
    """Resources for one worker: a bundle of a placement group, and its node."""

    node_ip: str
    placement_group: Any
    bundle: int


def total_of(resource: str) -> int:
    """Number of GPUs or CPUs of the cluster, free or not."""
    import ray

    return int(ray.cluster_resources().get(resource, 0))


def check_free(resource: str, count: int) -> None:
    """Raises NoRoomError if the cluster has too few free GPUs or CPUs, also in a moment, when an earlier gang's are."""
    import ray

    total = total_of(resource)
    deadline = time.monotonic() + (FREE_LIMIT_S if total >= count else 0)
    while (num_free := int(ray.available_resources().get(resource, 0))) < count:
        if time.monotonic() > deadline:
            there = f"{num_free} free of {total} in the Ray cluster (ray status lists them)"
            raise not_enough(f"{resource}s", count, there)
        time.sleep(0.1)


@contextlib.contextmanager
def slots(resource: str, count: int) -> Iterator[list[Slot]]:
    """Yields as many slots: of the placement group of this process, or else of a new one on as few nodes as possible,
    which is removed after the block."""
    import ray
    from ray.util import get_current_placement_group, placement_group_table
    from ray.util.placement_group import placement_group, remove_placement_group

    with contextlib.ExitStack() as stack:
        group = get_current_placement_group()
        if group is None:
            check_free(resource, count)
            group = placement_group([{resource: 1}] * count, strategy="PACK")
            # Without a cluster there is nothing to remove.
            stack.callback(lambda: remove_placement_group(group) if ray.is_initialized() else None)
            wait, ready = Wait("Ray to place the workers", env.DISPATCH_TIMEOUT_S.get()), group.ready()
            while not ray.wait([ready], timeout=POLL_S)[0]:
                wait.look(
                    f"Ray did not place {count} workers within {wait.limit_s:g} s; others took the resources: try "
                    f"again or lower --ep-size"
                )
        table = placement_group_table(group)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        found = [
            Slot(addresses[table["bundles_to_node_id"][index]], group, index)
            for index, bundle in table["bundles"].items()
            for _ in range(int(bundle.get(resource, 0)))
        ]
        if len(found) < count:
            raise not_enough(f"{resource}s", count, f"{len(found)} in the placement group this process runs in")
        yield sorted(found, key=lambda slot: (ip_key(slot.node_ip), slot.bundle))[:count]


def ip_key(ip: str) -> tuple[int, tuple[int, ...], str]:
    """A sort key: IPv4 addresses by number, and anything else after them alphabetically."""
    parts = ip.split(".")
    numeric = all(part.isdecimal() for part in parts)
    return (0, tuple(map(int, parts)), ip) if numeric else (1, (), ip)


def connect(address: str | None, num_workers: int, device: str = "auto") -> PrivateCluster | None:
    """Joins the cluster at `address` or the one that this process belongs to, or else starts a private one on loopback.

    Returns:
        The private cluster, which the caller ends; None if another one was joined.

    Raises:
        GangError: nothing answers at the address.
        NoRoomError: a private cluster could not hold this many workers.
        ImportError: Ray is not installed.
    """
    address = joined_address(address)
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "--launcher ray needs Ray, which is not installed; run: pip install 'ray[default]'"
        ) from error
    if ray.is_initialized():
        return None
    talks = env.LOG_LEVEL.get() in ("DEBUG", "INFO")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": talks}
    # Ray would report a dead worker on stdout too; the gang's error does.
    ray._private.worker._worker_logs_enabled = talks
    if address:
        address = resolve_address(address)
        _check_listening(address, min(_ANSWER_LIMIT_S, env.DISPATCH_TIMEOUT_S.get()))
        try:
            # Ray waits up to a minute for a node of this machine, without handling signals.
            limited = interrupts.ending_after(
                env.DISPATCH_TIMEOUT_S.get(),
                f"joining the Ray cluster at {address}",
                "see there whether `ray status` lists this machine as a node, or raise MOE_EP_DISPATCH_TIMEOUT_S",
            )
            with _own_sigterm_handler(), interrupts.ending_within(_JOIN_LIMIT_S), limited:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise GangError(f"no Ray cluster answers at {address}: {first_line(error)}") from None
        return None
    check_room(num_workers, "cuda" if device == "cuda" else "cpu")
    return PrivateCluster(max(num_cpus(), num_workers), quiet)


def joined_address(address: str | None) -> str | None:
    """The cluster to join: the given address, or else RAY_ADDRESS. None if neither is set, and for `local`, Ray's name
    for a new cluster."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def first_line(error: Exception) -> str:
    """The first line of an error of Ray, without the full stop; pages may follow it."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(". ")


def _newest_logs() -> Path:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder, "ray", "session_latest", "logs")


def _way_out(error: Exception) -> str:
    if "AF_UNIX path" in str(error):
        return "set TMPDIR to a folder with a short path"
    return "set HOME and TMPDIR to folders that can be written to" if isinstance(error, OSError) else "try again"


class PrivateCluster:
    """A cluster on loopback that lives until `end`.

    If Ray is interrupted while it starts, it kills the raylet but leaves the raylet's agents behind; if this process is
    killed, they stay for a minute. So this class keeps track of the processes and ends them.

    Args:
        options: further options of `ray.init`.

    Attributes:
        servers: those of them that the cluster cannot do without, with their names.
    """

    def __init__(self, num_cpus: int, options: dict[str, Any]) -> None:
        import ray

        self._guard: subprocess.Popen[bytes] | None = None
        self._session: Path | None = None
        before = children(os.getpid())
        try:
            with _loopback_cluster(), _environment(worker_variables()), _own_sigterm_handler():
                ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **options)
        except BaseException as error:
            self.processes = children(os.getpid()) - before
            self.end()
            if isinstance(error, Exception):
                # Any class: Ray has none for a server that was not up in time, as on a busy machine.
                raise GangError(
                    f"Ray did not start here: {first_line(error)}; its logs are in {_newest_logs()}; "
                    f"{_way_out(error)}, or take --launcher local, which needs no Ray"
                ) from error
            raise
        node: Any = ray._private.worker._global_node
        self._session = Path(node.get_session_dir_path())
        self.processes = children(os.getpid()) - before
        self.servers = named(self.processes, *_SERVERS)
        self._guard = start_guard(self.processes)

    def check(self) -> None:
        """Ends the cluster and raises GangError if one of its servers has ended. Ray reports a lost raylet after 15 s
        and a lost GCS never; it ends this process after a minute of failing calls."""
        for process, name in self.servers.items():
            if has_ended(process):
                self._session = None  # its logs stay
                with end_trees(self.processes, limit_s=0.0):
                    pass  # at once; ray.shutdown would wait for it
                self.end()
                raise GangError(
                    f"Ray is gone: its {name} on this machine (pid {process[0]}) ended while the gang was running, "
                    f"killed or crashed (if nobody killed it, see dmesg and {_newest_logs()})"
                )

    def end(self) -> None:
        """Ends the cluster and all its processes. A second call does nothing."""
        import ray

        with end_trees(self.processes):
            ray.shutdown()
        if self._session is not None:
            # The logs are of no use if nothing failed.
            shutil.rmtree(self._session, ignore_errors=True)
            latest = self._session.parent / "session_latest"
            with contextlib.suppress(OSError):
                if latest.is_symlink() and not latest.exists():
                    latest.unlink()
            self._session = None
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Restores the program's SIGTERM handler after Ray has replaced it in the block. A SIGTERM that arrives meanwhile
    is passed to it too."""
    before = signal.getsignal(signal.SIGTERM)
    is_terminated = False
    try:
        yield
    except SystemExit:  # raised by Ray's handler
        is_terminated = True
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
            if is_terminated:
                signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def _loopback_cluster() -> Iterator[None]:
    """Makes all servers of a cluster that is started in the block listen on loopback only, as Ray does on systems where
    it supports one machine only: sets that switch for its processes, and for this one, which has already read it."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def worker_variables() -> dict[str, str]:
    """The variables that workers need and a running cluster does not set."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    root = Path(moe_ep.__path__[0]).resolve().parent
    if str(root) != sysconfig.get_paths()["purelib"] and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        # Workers import a checkout from its folder. In a Ray job, Ray copies the working directory.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


def resolve_address(address: str) -> str:
    """Resolves `auto`: to RAY_ADDRESS, else to the cluster that `ray start` started here last, or else to the only one
    that runs here. Clusters on loopback are private ones of other commands."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    if "://" in address:  # RAY_ADDRESS may be meant for `ray job submit` or Ray's client
        others = "Ray's client connects" if address.startswith("ray:") else "jobs are submitted"
        raise GangError(
            f"RAY_ADDRESS is {address!r}, where {others}; submit a job by ray job submit, unset RAY_ADDRESS, or give "
            f"the HOST:PORT that ray start printed"
        )
    if address != "auto":
        return address
    if (given := joined_address(None)) not in (None, "auto"):
        return resolve_address(given)
    started = find_bootstrap_address(None)
    if started and not _why_silent(started):
        return started
    running = sorted(find_gcs_addresses())
    found = [address for address in running if not address.startswith(LOOPBACK)]
    if len(found) == 1:
        return found[0]
    several = f"several Ray clusters run on this machine ({', '.join(found)})"
    none = "no Ray cluster runs on this machine" + (" but other commands' private ones" if running else "")
    raise GangError(
        f"{several if found else none}, and the address is auto; give the HOST:PORT of one, start one by ray start "
        f"--head, or leave the address out"
    )


def _check_listening(address: str, limit_s: float) -> None:
    """Raises GangError at once if nothing or something else listens there, or if the cluster requires a token. Ray
    itself would take minutes."""
    reason = waiting.call(lambda: why_no_cluster(address, limit_s), Wait(f"an answer from {address}", 2 * limit_s))
    if reason == _NO_TOKEN:
        raise GangError(
            f"the Ray cluster at {address} wants a token; set RAY_AUTH_MODE=token, and see ray get-auth-token"
        )
    if reason:
        raise GangError(
            f"no Ray cluster answers at {address} ({reason}); give the address that ray start printed, or leave it out "
            f"to start a cluster on this machine"
        )


def _why_silent(address: str) -> str:
    """Why nothing can be reached there; empty if something listens, or if the address is not HOST:PORT."""
    if place := _HOST_PORT.fullmatch(address):
        try:
            socket.create_connection((place[1], int(place[2])), timeout=5).close()
        except (OSError, OverflowError, UnicodeError) as error:
            return str(error)
    return ""


def why_no_cluster(address: str, limit_s: float = _ANSWER_LIMIT_S) -> str:
    """Why the server there is not a cluster that this process may use; empty if it is one, or cannot be asked."""
    import grpc

    if reason := _why_silent(address):
        return reason
    if not _HOST_PORT.fullmatch(address) or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return ""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_HARMLESS_CALL)(b"", timeout=limit_s)
        except grpc.RpcError as error:
            reasons = {
                grpc.StatusCode.DEADLINE_EXCEEDED: f"what listens there said nothing within {limit_s:g} s",
                grpc.StatusCode.UNAVAILABLE: "something else listens there, such as Ray's dashboard, to which ray job "
                "submit sends jobs",
                grpc.StatusCode.UNAUTHENTICATED: "" if os.environ.get("RAY_AUTH_MODE") == "token" else _NO_TOKEN,
            }
            return reasons.get(error.code(), "")
    return ""


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables during the block, for processes that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
