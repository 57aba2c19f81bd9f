"""A gang of Ray actors: one a GPU, or one a CPU worker, ranks of a node together, nodes in the order of their IPs.

Works on a private cluster of this machine, on a running cluster, inside a Ray job, and inside a placement group that
the caller is in already. The driver asks Ray what there is and never touches CUDA. Sections: the gang and its actors;
placement groups and the room for them; the cluster, joined or started.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe_ep
from moe_ep import env
from moe_ep.errors import GangError, one_of
from moe_ep.launch.gangs import elastic, interrupts, progress, waiting
from moe_ep.launch.gangs.control import ControlServer
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
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
from moe_ep.launch.gangs.rendezvous import listen_store, open_clients_store
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    from moe_ep.layer.elastic import ElasticConfig

_POLL_S = 0.5
# Starting a cluster, or workers that import torch, takes some seconds on a busy machine.
_START_QUIET_S = 15.0
# Ray frees what a gang before held a moment after its workers have ended.
_FREE_LIMIT_S = 5.0
# A worker of a running cluster gets these of the driver's variables; workers of a private one inherit them all.
_PASSED_ON = ("MOE_EP_", "NCCL_", "NVSHMEM_", "GLOO_", "TORCH_", "TRITON_", "CUDA_MODULE_LOADING")
# After ctrl-C: Ray looks for a cluster where no signal is heard.
_JOIN_LIMIT_S = 1.5
# How long a server may take to answer.
_ANSWER_LIMIT_S = 20.0
# A call that every cluster answers, if the caller may make it.
_HARMLESS_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# What a client of gRPC says first, and the kind of frame that its server answers with (RFC 9113, 3.4 and 6.5).
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4
# Without one of these a cluster of one machine is none.
_SERVERS = ("gcs_server", "raylet")


class RayGang(Gang):
    """`world_size` actors on the cluster at `address`.

    Args:
        world_size: workers; None means one a GPU of the cluster, or `default_world_size` where it has none.
        device: "cpu", "cuda", or "auto": the GPUs if the cluster has any.
        address: host:port of a running cluster or "auto"; None means the cluster this process belongs to already
            (RAY_ADDRESS, a Ray job), else a private one on loopback that ends with the gang.

    Raises:
        GangError: nothing answers at the address, or the cluster is too small.
    """

    def __init__(
        self,
        world_size: int | None = None,
        device: str = "auto",
        address: str | None = None,
        timeout_s: float | None = None,
        default_world_size: int = 4,
    ) -> None:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(one_of("device", device, ("auto", "cpu", "cuda")))
        self._timeout_s = timeout_s
        self.cluster: PrivateCluster | None = None
        self._display = progress.ProgressDisplay()
        try:
            self._display.say("waiting for Ray")
            with waiting.said("Ray", _START_QUIET_S):
                self.cluster = connect(address, world_size or default_world_size, device, timeout_s)
            num_gpus = total_of("GPU")
            if device == "auto":
                device = "cuda" if num_gpus else "cpu"
            self.device = device
            self._resource = "GPU" if device == "cuda" else "CPU"
            self.world_size = world_size or (num_gpus if device == "cuda" and num_gpus else default_world_size)
            self._check_room()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the private cluster, if there is one; `run` does it too."""
        self._display.close()
        if self.cluster is not None:
            self.cluster.end()
            self.cluster = None

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        with self._started() as workers:
            first = workers[0]
            wait = self._start_wait("rank 0 to listen")
            port = _get(
                first.actor.listen.remote(first.rank_env.master_addr, self._timeout_s), 0, first.place.node_ip, wait
            )
            return self._watch([worker.at_port(port) for worker in workers], fn, args, on_item)

    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        import ray

        with self._started() as workers, ControlServer() as control:
            here = ray.util.get_node_ip_address()
            address = LOOPBACK if {worker.place.node_ip for worker in workers} == {here} else here
            store = listen_store(address, self._timeout_s)
            with _ElasticActors(self, here, (address, store.port), (self._timeout_s, fn, args)) as actors:
                ranks = [worker.rank_env.rank for worker in workers]
                outcomes = elastic.ElasticOutcomes(store, ranks, config, actors.end, on_item)
                outcomes.take_requests(control, actors.start_rank, replaces=True)
                for worker in workers:
                    actors.start(worker)
                news = _News(workers[0].actor, self._display)
                while not outcomes.are_final:
                    self._check()
                    for rank, outcome in actors.outcomes(elastic.POLL_S):
                        outcomes.add(rank, outcome)
                    outcomes.look()
                    news.look()
                return outcomes.results(), outcomes.recoveries

    @contextlib.contextmanager
    def _started(self) -> Iterator[list[_RankActor]]:
        """The workers in rank order during the block, at whose end nothing of the gang is left."""
        actors: list[Any] = []
        self._display.say(f"starting {progress.workers(self.world_size)}")
        try:
            with slots(self._resource, self.world_size, self._timeout_s) as found:
                try:
                    yield self._start(found, actors)
                finally:
                    _end(actors)
        finally:
            self.close()

    def _start_wait(self, what: str) -> Wait:
        return Wait(what, waiting.limit_of(self._timeout_s), _START_QUIET_S)

    def _check(self) -> None:
        interrupts.check()
        if self.cluster is not None:
            self.cluster.check()

    def _check_room(self) -> None:
        from ray.util import get_current_placement_group

        if get_current_placement_group() is None:
            plan(self._resource, self.world_size)

    def _start(self, slots: list[Slot], actors: list[Any]) -> list[_RankActor]:
        """Starts an actor in each slot, listing it in `actors`; returns the workers in rank order."""
        actors.extend(map(self.start_actor, slots))
        ips = [slot.node_ip for slot in slots]
        wait = self._start_wait(f"{progress.workers(len(actors))} to start")
        asked = [actor.place.remote() for actor in actors]
        places = [_get(ref, rank, ips[rank], wait) for rank, ref in enumerate(asked)]
        order = sorted(range(len(actors)), key=lambda i: (ip_key(ips[i]), places[i].gpu, i))
        ordered = [ips[i] for i in order]
        nodes = list(dict.fromkeys(ordered))
        return [
            _RankActor(
                actor=actors[i],
                slot=slots[i],
                place=places[i],
                rank_env=RankEnv(
                    rank=rank,
                    world_size=len(order),
                    local_rank=rank - ordered.index(ips[i]),
                    local_world_size=ordered.count(ips[i]),
                    node_rank=nodes.index(ips[i]),
                    master_addr=LOOPBACK if len(nodes) == 1 else nodes[0],
                    source="ray",
                    device=places[i].device,
                ),
            )
            for rank, i in enumerate(order)
        ]

    def start_actor(self, slot: Slot | None) -> Any:
        """Starts an actor, wherever Ray has room for it where there is no slot."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind: Any = ray.remote
        remote = kind(concurrency_groups={"watch": 1}, max_restarts=0, max_task_retries=0)(_Worker)
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if self._resource == "GPU" else {"num_cpus": 1}
        if self.cluster is None:
            options["runtime_env"] = {"env_vars": worker_variables()}
        elif slot is None and self._resource == "CPU":
            options["num_cpus"] = 0  # a private cluster has as many as the workers of the start
        if slot is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                slot.placement_group, placement_group_bundle_index=slot.bundle
            )
        return remote.options(**options).remote()

    def _watch(
        self, workers: list[_RankActor], fn: Callable[..., Any], args: tuple[Any, ...], on_item: OnItem
    ) -> list[Any]:
        """Waits until every rank has answered, or one has failed."""
        import ray

        running = {worker.start("run", self._timeout_s, fn, args): worker for worker in workers}
        outcomes = Outcomes(worker.rank_env.rank for worker in workers)
        pending = list(running)
        news = _News(workers[0].actor, self._display, on_item)
        while not outcomes.are_final:
            self._check()
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(_POLL_S, outcomes.left_s))
            for ref in ready:
                outcomes.add(running[ref].rank_env.rank, running[ref].outcome(ref))
            news.look()
        news.look(wait_s=ECHO_GRACE_S)
        return outcomes.results()


@dataclass(frozen=True)
class Place:
    """Where an actor's process is.

    Attributes:
        gpu: its GPU's index on the node, -1 for none.
        device: the torch device that this is in the process.
        host: the node's name.
    """

    gpu: int
    device: str
    host: str
    node_ip: str
    process: Process


@dataclass(frozen=True)
class _RankActor:
    """An actor with the rank that it is to be."""

    actor: Any
    slot: Slot | None
    place: Place
    rank_env: RankEnv

    def at_port(self, port: int, address: str | None = None) -> _RankActor:
        """The same with the port at which the ranks meet."""
        address = address or self.rank_env.master_addr
        return replace(self, rank_env=replace(self.rank_env, master_addr=address, master_port=port))

    def start(self, method: str, timeout_s: float | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Begins its work; returns what the outcome comes by."""
        return getattr(self.actor, method).remote(self.rank_env, timeout_s, fn, args)

    def outcome(self, ref: Any) -> Outcome:
        """What came of its work."""
        node = self.place.node_ip
        outcome = _outcome(ref, self.rank_env.rank, node)
        return Outcome(outcome.value, outcome.failure and replace(outcome.failure, node=node))


class _ElasticActors:
    """The actors of a gang whose ranks come and go; a context manager, at whose end those that joined have ended.

    Args:
        here: the IP of this process's node.
        store: address and port at which the ranks meet.
        work: what each actor runs: the timeout, the function and its arguments.
    """

    def __init__(self, gang: RayGang, here: str, store: tuple[str, int], work: tuple[Any, ...]) -> None:
        self._gang, self._here, self._store, self._work = gang, here, store, work
        self._workers: dict[int, _RankActor] = {}
        self._running: dict[Any, _RankActor] = {}
        # Actors that join, by what their place comes by, each with its rank.
        self._joining: dict[Any, tuple[int, Slot | None, Any]] = {}
        self._free: list[Slot] = []

    def __enter__(self) -> _ElasticActors:
        return self

    def __exit__(self, *error: object) -> None:
        _end([worker.actor for worker in self._workers.values()])
        _end([actor for _, _, actor in self._joining.values()])

    def start(self, worker: _RankActor) -> None:
        """Begins a rank's work."""
        address, port = self._store
        worker = worker.at_port(port, address)
        self._workers[worker.rank_env.rank] = worker
        elastic.say_started(worker.rank_env.rank, worker.place.process[0], worker.place.host)
        self._running[worker.start("run_member", *self._work)] = worker

    def start_rank(self, rank: int) -> None:
        """Starts an actor for a new rank: in the place of a lost one, where there is one."""
        slot = self._free.pop() if self._free else None
        actor = self._gang.start_actor(slot)
        self._joining[actor.place.remote()] = rank, slot, actor

    def outcomes(self, timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        """Waits for the outcomes of ranks, and has those that join begin."""
        import ray

        waiting_for = [*self._running, *self._joining]
        if not waiting_for:
            return
        for ref in ray.wait(waiting_for, num_returns=1, timeout=timeout_s)[0]:
            if ref in self._running:
                worker = self._running.pop(ref)
                outcome = worker.outcome(ref)
                if outcome.failure is not None:
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
            self.start(_RankActor(actor, slot, place, rank_env))

    def _leave(self, rank: int) -> _RankActor | None:
        """Ends a rank's actor, whose place another one may have then."""
        worker = self._workers.pop(rank, None)
        if worker is not None:
            _end([worker.actor])
            if worker.slot is not None:
                self._free.append(worker.slot)
        return worker

    def end(self, rank: int) -> None:
        """Ends a rank's process, stopped or not, if it is there."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        worker = self._leave(rank)
        if worker is None:
            return
        if worker.place.node_ip == self._here:
            end_process(worker.place.process)
            return
        # Ray's way needs the process to answer, which one that is stopped does not.
        kind: Any = ray.remote
        with contextlib.suppress(Exception):
            node_id = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == worker.place.node_ip)
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            kind(num_cpus=0, scheduling_strategy=strategy)(end_process).remote(worker.place.process)


class _Worker:
    """The actor. `run` is the one long call; `news` answers beside it."""

    def __init__(self) -> None:
        # Ray has Python hear it, in a main thread that stays in a loop of Ray's own; nothing would end.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._store: Any = None
        self._progress: progress.Progress | None = None
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        progress.set_sink(self._note)
        progress.set_receiver(self._items.put)

    def _note(self, report: progress.Progress) -> None:
        self._progress = report

    def place(self) -> Place:
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        index = -1
        if ids:
            visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
            index = visible.index(ids[0]) if ids[0] in visible else int(ids[0])
        device = f"cuda:{index}" if ids else "cpu"
        return Place(index, device, socket.gethostname(), ray.util.get_node_ip_address(), process_of(os.getpid()))

    def listen(self, address: str, timeout_s: float | None) -> int:
        """Opens the rendezvous store, which lives as long as this actor; returns its port."""
        self._store = listen_store(address, timeout_s)
        return self._store.port

    def run(self, rank_env: RankEnv, timeout_s: float | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        return run_rank(rank_env, fn, args, timeout_s, self._store)

    def run_member(
        self, rank_env: RankEnv, timeout_s: float | None, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> Outcome:
        store = open_clients_store(rank_env.master_addr, rank_env.master_port, timeout_s)
        return run_member(rank_env, fn, args, store, timeout_s)

    def news(self) -> tuple[progress.Progress | None, list[Any]]:
        """The last report, and what was handed over since the question before."""
        return self._progress, [self._items.get() for _ in range(self._items.qsize())]


class _News:
    """What a worker says beside its work: a question is always open."""

    def __init__(self, actor: Any, display: Callable[[progress.Progress], None], on_item: OnItem = ignore) -> None:
        self._ask = actor.news.options(concurrency_group="watch").remote
        self._display, self._on_item = display, on_item
        self._asked = self._ask()

    def look(self, wait_s: float = 0.0) -> None:
        """Shows and passes on the answer to the question before, if it came, and asks again.

        Args:
            wait_s: for that answer and one more, the last, where this is not 0.
        """
        import ray

        for _ in range(2 if wait_s else 1):
            if not ray.wait([self._asked], timeout=wait_s)[0]:
                return
            with contextlib.suppress(ray.exceptions.RayError):
                report, items = ray.get(self._asked)
                if report is not None:
                    self._display(report)
                for item in items:
                    self._on_item(item)
            self._asked = self._ask()


def _get(ref: Any, rank: int, node: str, wait: Wait) -> Any:
    """The answer of a worker that is starting."""
    import ray

    try:
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            wait.look(lambda: f"rank {rank} on node {node} failed: the worker did not start within {wait.limit_s:g} s")
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        raise gang_error(actor_failure(error, rank, node)) from None


def _outcome(ref: Any, rank: int, node: str) -> Outcome:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return Outcome(failure=actor_failure(error, rank, node))


def actor_failure(error: Exception, rank: int, node: str) -> WorkerFailure:
    """What Ray knows of an actor that did not answer."""
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

    if not ray.is_initialized():  # the cluster is gone, and Ray would start another
        return
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True)
class Slot:
    """Room for one worker: a bundle of a placement group, and the node it lies on."""

    node_ip: str
    placement_group: Any
    bundle: int


@dataclass(frozen=True)
class Room:
    """Free GPUs or CPUs of one node."""

    node_ip: str
    node_id: str
    count: int


def total_of(resource: str) -> int:
    """GPUs or CPUs of the cluster, free or not."""
    import ray

    return int(ray.cluster_resources().get(resource, 0))


def plan(resource: str, world_size: int) -> list[Room]:
    """How many workers go to which node, nodes in the order of their IPs.

    Raises:
        GangError: there is not enough room; says what is asked and what is there.
    """
    total = total_of(resource)
    deadline = time.monotonic() + (_FREE_LIMIT_S if total >= world_size else 0)
    while True:
        nodes = _room(resource)
        num_free = sum(node.count for node in nodes)
        if num_free >= world_size:
            break
        if time.monotonic() > deadline:
            where = ", ".join(f"{node.node_ip}: {node.count}" for node in nodes)
            raise not_enough(f"{resource}s", world_size, f"{num_free} free of {total} in the Ray cluster ({where})")
        time.sleep(0.1)
    chosen, left = [], world_size
    for node in nodes:
        if take := min(node.count, left):
            chosen.append(Room(node.node_ip, node.node_id, take))
            left -= take
    return chosen


def _room(resource: str) -> list[Room]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        Room(node["NodeManagerAddress"], node["NodeID"], int(free.get(node["NodeID"], {}).get(resource, 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (ip_key(node.node_ip), node.node_id))


@contextlib.contextmanager
def slots(resource: str, world_size: int, timeout_s: float | None = None) -> Iterator[list[Slot]]:
    """Room for every worker: in the placement group this process runs in, else in one made for each node.

    Groups made here are removed at the end of the block.
    """
    import ray
    from ray.util import get_current_placement_group
    from ray.util.placement_group import placement_group, remove_placement_group

    inside = get_current_placement_group()
    if inside is not None:
        yield _slots_inside(inside, resource, world_size)
        return
    groups: list[Any] = []
    try:
        made = []
        for node in plan(resource, world_size):
            bundle = {resource: 1, f"node:{node.node_ip}": 0.001}
            groups.append(placement_group([bundle] * node.count, strategy="STRICT_PACK"))
            made += [Slot(node.node_ip, groups[-1], index) for index in range(node.count)]
        wait = Wait(f"Ray to place {len(groups)} placement group(s)", waiting.limit_of(timeout_s))
        ready = [group.ready() for group in groups]
        while len(ray.wait(ready, num_returns=len(ready), timeout=_POLL_S)[0]) < len(ready):
            wait.look(
                lambda: (
                    f"Ray did not place {len(groups)} placement group(s) within {wait.limit_s:g} s; others took the "
                    f"room: try again or lower --ep-size"
                )
            )
        yield made
    finally:
        if ray.is_initialized():  # no more where the cluster is gone
            for group in groups:
                remove_placement_group(group)


def _slots_inside(group: Any, resource: str, world_size: int) -> list[Slot]:
    import ray
    from ray.util import placement_group_table

    table = placement_group_table(group)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = [
        Slot(addresses[table["bundles_to_node_id"][index]], group, index)
        for index, bundle in table["bundles"].items()
        for _ in range(int(bundle.get(resource, 0)))
    ]
    if len(found) < world_size:
        raise not_enough(f"{resource}s", world_size, f"{len(found)} in the placement group this process runs in")
    return sorted(found, key=lambda slot: (ip_key(slot.node_ip), slot.bundle))[:world_size]


def ip_key(ip: str) -> tuple[int, tuple[int, ...], str]:
    """Sorts IPv4 addresses by their numbers, and anything else after them by its letters."""
    parts = ip.split(".")
    numeric = all(part.isdecimal() for part in parts)
    return (0, tuple(map(int, parts)), ip) if numeric else (1, (), ip)


def connect(
    address: str | None, num_workers: int, device: str = "auto", timeout_s: float | None = None
) -> PrivateCluster | None:
    """Joins the cluster at `address`, the one this process belongs to, or else starts a private one on loopback.

    Returns:
        The private one, which is the caller's to end.

    Raises:
        GangError: nothing answers at the address.
        NoRoomError: a private cluster could not hold as many workers.
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
    # Ray would print its own account of a dead worker on stdout; the gang's error says it.
    ray._private.worker._worker_logs_enabled = talks
    if address:
        address = resolve_address(address)
        _check_listening(address, min(_ANSWER_LIMIT_S, waiting.limit_of(timeout_s)))
        try:
            # Ray waits up to a minute for a node of this machine, and hears nothing.
            limited = interrupts.ending_after(
                waiting.limit_of(timeout_s),
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
    """The cluster to join: at the address that is given, or else in RAY_ADDRESS. None for local, which is Ray's word
    for a cluster of one's own, and where neither is set."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def first_line(error: Exception) -> str:
    """What an error of Ray says, without the pages that may follow and the full stop."""
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

    Where Ray is interrupted while it starts, it kills the raylet and leaves the agents that belong to it behind, and
    where this process is killed they stay for a minute; so the processes that it starts are looked after here.

    Args:
        options: more of `ray.init`'s.
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
                # Of no class of its own where a server of the cluster was not up in Ray's time, as on a busy machine.
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
        """Ends the cluster and raises GangError if a server of it has ended: Ray tells of a raylet after 15 s, and of a
        GCS never, but ends this process after a minute of vain calls."""
        for process, name in self.servers.items():
            if has_ended(process):
                self._session = None  # its logs stay
                with end_trees(self.processes, limit_s=0.0):
                    pass  # and not the cluster's own way, in which it would be waited for
                self.end()
                raise GangError(
                    f"Ray is gone: its {name} on this machine (pid {process[0]}) ended while the gang was at work, "
                    f"killed or crashed (if nobody killed it, see dmesg and {_newest_logs()})"
                )

    def end(self) -> None:
        """Ends the cluster; nothing of it is left. A second time does no harm."""
        import ray

        with end_trees(self.processes):
            ray.shutdown()
        if self._session is not None:
            # Logs, which nobody looks for where nothing of the cluster failed.
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
    """Keeps the handler that the program has for SIGTERM, if it has one, while Ray puts its own in its place; what came
    meanwhile is handled by ours too."""
    before = signal.getsignal(signal.SIGTERM)
    is_terminated = False
    try:
        yield
    except SystemExit:  # what Ray's handler raises
        is_terminated = True
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
            if is_terminated:
                signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def _loopback_cluster() -> Iterator[None]:
    """Has every server of a cluster that is started meanwhile listen on loopback alone.

    Ray does so by itself on systems where it runs on one machine only; this is the switch for that, as its processes
    read it and as this one has read it.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def worker_variables() -> dict[str, str]:
    """What workers need in their environment that a cluster does not give them."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    root = Path(moe_ep.__path__[0]).resolve().parent
    if str(root) != sysconfig.get_paths()["purelib"] and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        # A checkout: workers import it from where it lies. In a Ray job the working directory travels by itself.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


def resolve_address(address: str) -> str:
    """The address itself, or what auto stands for: RAY_ADDRESS, else the cluster that `ray start` started here last, or
    else the one that runs here. Private ones, which listen on loopback and which `ray start` knows nothing of, are
    somebody else's."""
    from ray._private.services import find_bootstrap_address, find_gcs_addresses

    if "://" in address:  # in RAY_ADDRESS, from where `ray job submit` and Ray's client take it
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
    """Says at once that nothing listens there, which Ray finds out in a minute, or never where a cluster is gone; or
    that something else does, or that the cluster wants a token, for which Ray asks again and again, for minutes."""
    wait = Wait(f"an answer from {address}", limit_s)
    silence = f"what listens there said nothing within {limit_s:g} s"
    try:
        reason = _why_silent(address) or waiting.call(lambda: why_no_cluster(address, limit_s), wait, lambda: silence)
    except GangError as error:
        reason = str(error)
    if reason:
        raise GangError(
            f"no Ray cluster answers at {address} ({reason}); give the address that ray start printed, or leave it out "
            f"to start a cluster on this machine"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token" and waiting.call(lambda: _wants_token(address, limit_s), wait):
        raise GangError(
            f"the Ray cluster at {address} wants a token; set RAY_AUTH_MODE=token, and see ray get-auth-token"
        )


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None where it is no HOST:PORT."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None


def _why_silent(address: str) -> str:
    """Why nobody can be reached there; empty where somebody listens, or where it is no HOST:PORT."""
    if (place := _host_and_port(address)) is not None:
        try:
            socket.create_connection(place, timeout=5).close()
        except (OSError, OverflowError) as error:
            return str(error)
    return ""


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def why_no_cluster(address: str, limit_s: float = _ANSWER_LIMIT_S) -> str:
    """What listens there, if it is no server of gRPC, as a cluster's is; empty where it is one, or cannot be asked."""
    if (place := _host_and_port(address)) is None or _uses_tls():
        return ""
    try:
        with socket.create_connection(place, timeout=limit_s) as connection:
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(16)
    except TimeoutError:
        return f"what listens there said nothing within {limit_s:g} s"
    except OSError as error:
        return str(error)
    if answer[3:4] == bytes([_SETTINGS]):
        return ""
    return "something else listens there, such as Ray's dashboard, to which ray job submit sends jobs"


def _wants_token(address: str, limit_s: float) -> bool:
    """Whether the cluster refuses a call without a token."""
    try:
        import grpc
    except ImportError:
        return False
    if _host_and_port(address) is None or _uses_tls():
        return False
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_HARMLESS_CALL)(b"", timeout=limit_s)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNAUTHENTICATED
    return False


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables that processes started meanwhile inherit."""
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
