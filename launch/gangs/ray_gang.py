"""A gang of Ray actors: one a GPU, or one a CPU worker, ranks of a node together, nodes in the order of their IPs.

Works on a private cluster of this machine, on a running cluster, inside a Ray job, and inside a placement group that
the caller is in already. The driver asks Ray what there is and never touches CUDA.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moe_ep.errors import one_of
from moe_ep.launch.gangs import interrupts, progress, ray_cluster, ray_slots
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
    Gang,
    OnItem,
    Outcome,
    WorkerFailure,
    first_cause,
    gang_error,
    ignore,
    run_rank,
    use_loopback_for_gloo,
)
from moe_ep.launch.gangs.rank_env import LOOPBACK, RankEnv
from moe_ep.launch.gangs.ray_slots import Slot, ip_key
from moe_ep.launch.gangs.rendezvous import listen_store

_START_LIMIT_S = 120.0
_POLL_S = 0.5


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
        self._cluster: ray_cluster.PrivateCluster | None = None
        self._display = progress.ProgressDisplay()
        try:
            self._display.say("waiting for Ray")
            self._cluster = ray_cluster.connect(address, world_size or default_world_size, device)
            num_gpus = ray_slots.total_of("GPU")
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
        if self._cluster is not None:
            self._cluster.end()
            self._cluster = None

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        actors: list[Any] = []
        self._display.say(f"starting {progress.workers(self.world_size)}")
        try:
            with ray_slots.slots(self._resource, self.world_size) as slots:
                try:
                    return self._watch(*self._start(slots, actors), fn, args, on_item)
                finally:
                    _end(actors)
        finally:
            self.close()

    def _check_room(self) -> None:
        from ray.util import get_current_placement_group

        if get_current_placement_group() is None:
            ray_slots.plan(self._resource, self.world_size)

    def _start(self, slots: list[Slot], actors: list[Any]) -> tuple[list[Any], list[RankEnv], list[str]]:
        """Starts an actor in each slot, listing it in `actors`; returns actors, ranks and node IPs in rank order."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind: Any = ray.remote
        remote = kind(concurrency_groups={"watch": 1}, max_restarts=0, max_task_retries=0)(_Worker)
        for slot in slots:
            strategy = PlacementGroupSchedulingStrategy(slot.placement_group, placement_group_bundle_index=slot.bundle)
            options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 0} if self._resource == "GPU" else {"num_cpus": 1}
            if self._cluster is None:
                options["runtime_env"] = {"env_vars": ray_cluster.worker_variables()}
            actors.append(remote.options(**options, scheduling_strategy=strategy).remote())
        ips = [slot.node_ip for slot in slots]
        places = [_get(actor.place.remote(), rank, ips[rank]) for rank, actor in enumerate(actors)]
        order = sorted(range(len(actors)), key=lambda i: (ip_key(ips[i]), places[i][0], i))
        ips = [ips[i] for i in order]
        nodes = list(dict.fromkeys(ips))
        address = LOOPBACK if len(nodes) == 1 else nodes[0]
        port = _get(actors[order[0]].listen.remote(address, self._timeout_s), 0, nodes[0])
        rank_envs = [
            RankEnv(
                rank=rank,
                world_size=len(order),
                local_rank=rank - ips.index(ips[rank]),
                local_world_size=ips.count(ips[rank]),
                node_rank=nodes.index(ips[rank]),
                master_addr=address,
                master_port=port,
                source="ray",
                device=places[i][1],
            )
            for rank, i in enumerate(order)
        ]
        return [actors[i] for i in order], rank_envs, ips

    def _watch(
        self,
        actors: list[Any],
        rank_envs: list[RankEnv],
        ips: list[str],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        on_item: OnItem,
    ) -> list[Any]:
        """Waits until every rank has answered, or one has failed."""
        import ray

        ranks = {
            actor.run.remote(rank_env, self._timeout_s, fn, args): rank_env.rank
            for actor, rank_env in zip(actors, rank_envs, strict=True)
        }
        results: dict[int, Any] = {}
        failures: list[WorkerFailure] = []
        pending, deadline = list(ranks), float("inf")
        news = _News(actors[0], self._display, on_item)
        while pending and time.monotonic() < deadline:
            interrupts.check()
            if self._cluster is not None:
                self._cluster.check()
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
            for ref in ready:
                rank = ranks[ref]
                outcome = _outcome(ref, rank, ips[rank])
                if outcome.failure is None:
                    results[rank] = outcome.value
                else:
                    failures.append(replace(outcome.failure, node=ips[rank]))
            if any(not failure.echo for failure in failures):
                break
            if failures:
                deadline = min(deadline, time.monotonic() + ECHO_GRACE_S)
            news.look()
        news.look(wait_s=ECHO_GRACE_S)
        if failures:
            raise gang_error(first_cause(failures))
        return [results[rank] for rank in range(len(actors))]


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

    def place(self) -> tuple[int, str]:
        """This worker's GPU: its index on the node (-1 for none) and the torch device it is in this process."""
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if not ids:
            return -1, "cpu"
        visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        index = visible.index(ids[0]) if ids[0] in visible else int(ids[0])
        return index, f"cuda:{index}"

    def listen(self, address: str, timeout_s: float | None) -> int:
        """Opens the rendezvous store, which lives as long as this actor; returns its port."""
        self._store = listen_store(address, timeout_s)
        return self._store.port

    def run(self, rank_env: RankEnv, timeout_s: float | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        if rank_env.master_addr == LOOPBACK:
            use_loopback_for_gloo()
        return run_rank(rank_env, fn, args, timeout_s, self._store)

    def news(self) -> tuple[progress.Progress | None, list[Any]]:
        """The last report, and what was handed over since the question before."""
        return self._progress, [self._items.get() for _ in range(self._items.qsize())]


class _News:
    """What rank 0 says beside its work: a question is always open."""

    def __init__(self, actor: Any, display: Callable[[progress.Progress], None], on_item: OnItem) -> None:
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


def _get(ref: Any, rank: int, node: str) -> Any:
    """The answer of a worker that is starting."""
    import ray

    try:
        return ray.get(ref, timeout=_START_LIMIT_S)
    except ray.exceptions.RayError as error:
        raise gang_error(_failure(error, rank, node)) from None


def _outcome(ref: Any, rank: int, node: str) -> Outcome:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return Outcome(failure=_failure(error, rank, node))


def _failure(error: Exception, rank: int, node: str) -> WorkerFailure:
    """What Ray knows of an actor that did not answer."""
    import ray

    text, traceback = str(error), ""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        cause = "Ray killed the process because the node's memory ran out"
    elif isinstance(error, ray.exceptions.GetTimeoutError):
        cause = f"the worker did not start within {_START_LIMIT_S:g} s"
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
