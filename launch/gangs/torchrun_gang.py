"""Gangs in the manner of torchrun: this process is a rank that torchrun or srun started, or the agent of its node.

All ranks call `run`; rank 0 reports to the user. An agent starts the ranks of its node with torchrun's variables.
Agents of several nodes meet at an endpoint (`moe_ep.launch.gangs.agents`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from moe_ep.errors import ConfigError
from moe_ep.launch.gangs import interrupts, mailbox, progress
from moe_ep.launch.gangs.agents import ElasticAgent, Node
from moe_ep.launch.gangs.gang import (
    ECHO_GRACE_S,
    Gang,
    OnItem,
    WorkerFailure,
    check_room,
    gang_error,
    ignore,
    run_rank,
)
from moe_ep.launch.gangs.local_gang import (
    LocalGang,
    LocalWorkers,
    ending_fork_server,
    local_rank_envs,
    warm_fork_server,
)
from moe_ep.launch.gangs.rank_env import RankEnv, resolve_rank_env
from moe_ep.launch.gangs.rendezvous import init_process_group

if TYPE_CHECKING:
    from moe_ep.layer.elastic import ElasticConfig

_CAUSE = "moe_ep/cause"
# A signal may find a rank inside a library, where Python raises nothing. The rank ends after this time.
_STUCK_S = 1.5
# How long rank 0 waits for ranks that have given their results and do not end.
_LEAVING_S = 10.0


class TorchrunGang(Gang):
    """This node's ranks of a torchrun job.

    Args:
        num_local: ranks of this node, the same on all nodes; ignored under torchrun or srun.
        num_nodes: number of nodes, each of which makes such a gang.
        rdzv_endpoint: host:port where the agents of several nodes meet; the first one on that host listens there.
        started: this process's rank, if a launcher started it; None reads its variables. `RankEnv()` makes an agent.

    Raises:
        NoRoomError: fewer GPUs here than ranks of this node, or far fewer cores.
        ValueError: several nodes without an endpoint.
    """

    def __init__(
        self,
        num_local: int = 1,
        device: str = "cpu",
        num_nodes: int = 1,
        rdzv_endpoint: str | None = None,
        started: RankEnv | None = None,
    ) -> None:
        if num_nodes > 1 and not rdzv_endpoint:
            raise ValueError(
                f"rdzv_endpoint is missing; with num_nodes ({num_nodes}) give the host:port where the nodes meet"
            )
        started = resolve_rank_env() if started is None else started
        self._env = started if started.source in ("torchrun", "slurm") else None
        self._num_local = self._env.local_world_size if self._env else num_local
        check_room(self._num_local, device)
        self.world_size = self._env.world_size if self._env else num_local * num_nodes
        self.device = device
        self._num_nodes = num_nodes
        self._rdzv_endpoint = rdzv_endpoint
        self._has_rank_0 = self._env is None or self._env.rank == 0

    @property
    def is_driver(self) -> bool:
        """Whether rank 0 is this process or, after `run`, one of this agent's."""
        return self._has_rank_0

    def run(self, fn: Callable[..., Any], *args: Any, on_item: OnItem = ignore) -> list[Any]:
        """As `Gang.run`; the list is empty on processes that are not `is_driver` afterwards.

        Under torchrun, a rank that fails only because of a peer ends its process silently.
        """
        if self._env is not None:
            return self._run_as_rank(self._env, fn, args, on_item)
        if self._num_nodes == 1:
            gang = LocalGang(self._num_local, self.device, source="torchrun")
            return gang.run(fn, *args, on_item=on_item)
        return self._run_as_agent(fn, args, on_item)

    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """As `Gang.run_elastic` on the node that leads at the end; other nodes get empty lists."""
        if self._env is not None:
            raise ConfigError(
                f"--elastic is given under {self._env.source}, which ends all ranks when one fails; start moe-ep by "
                f"itself, with --launcher torchrun or ray"
            )
        if self._num_nodes == 1:
            gang = LocalGang(self._num_local, self.device, source="torchrun")
            return gang.run_elastic(fn, *args, config=config, on_item=on_item)
        with self._met() as (context, node, ranks):
            agent = ElasticAgent(node, config, self.device, on_item)
            try:
                return agent.run(context, ranks, fn, args)
            finally:
                self._has_rank_0 = node.leads

    def _run_as_rank(
        self, rank_env: RankEnv, fn: Callable[..., Any], args: Sequence[Any], on_item: OnItem
    ) -> list[Any]:
        if self.device == "cuda":
            rank_env = replace(rank_env, device=f"cuda:{rank_env.local_rank}")
        display = progress.ProgressDisplay()
        if rank_env.rank == 0:
            progress.set_sink(display)
            progress.set_receiver(on_item)
        stores: list[Any] = []
        with interrupts.ending_within(_STUCK_S):
            outcome = run_rank(rank_env, _gathered, (stores, fn, args), exports=False)
            display.close()
            if outcome.failure is None:
                _leave(stores[0], rank_env)
                return outcome.value or []
            failure, speaks = outcome.failure, True
            if stores:
                failure, speaks = _agree_on_failure(failure, stores[0])
        if not speaks:
            os._exit(1)
        raise gang_error(failure)

    def _run_as_agent(self, fn: Callable[..., Any], args: Sequence[Any], on_item: OnItem) -> list[Any]:
        results: list[Any] = []
        with (
            self._met() as (context, node, ranks),
            LocalWorkers(context, ranks, _gathered, ([], fn, args), on_item=on_item, on_port=node.announce) as workers,
        ):
            while not node.is_over:
                for rank, outcome in workers.outcomes(node.left_s, also=node.sockets):
                    if rank == 0:
                        results = outcome.value or []
                    node.add(rank, outcome.failure)
                node.receive()
                while node.ports:
                    workers.tell(node.ports.pop())
        node.check()
        return results

    @contextlib.contextmanager
    def _met(self) -> Iterator[tuple[ForkServerContext, Node, list[RankEnv]]]:
        """Yields the context that workers are forked from, the connected nodes, and this node's ranks."""
        context = warm_fork_server()
        with ending_fork_server():
            # What all nodes must share, by the names of their options, behind what tells them from strangers.
            shared = {"job": "moe_ep", "--nnodes": self._num_nodes, "--ep-size": self.world_size}
            meeting = Node.meet(shared, self._rdzv_endpoint or "")
        with meeting as node:
            self._has_rank_0 = node.node_rank == 0
            yield context, node, local_rank_envs(
                self._num_local, self.device, source="torchrun", first=node.node_rank * self._num_local,
                world_size=self.world_size, node_rank=node.node_rank, master_addr=node.master_addr,
            )  # fmt: skip


def _gathered(rank_env: RankEnv, stores: list[Any], fn: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
    """Runs the function; returns the values of all ranks on rank 0. Appends the attempt's store to `stores`."""
    import torch.distributed as dist

    from moe_ep.distributed.exchange import gather_texts
    from moe_ep.distributed.failure_detection import timeout_of

    stores.append(init_process_group(rank_env))
    value = fn(rank_env, *args)
    # Other ranks may still have much to do.
    limit = timeout_of(dist.distributed_c10d._get_default_group())
    mailbox.put(stores[0], mailbox.result_key(rank_env.rank), value)
    gather_texts("results", timeout_s=None if limit is None else limit.total_seconds())
    if rank_env.rank > 0:
        return None
    return [mailbox.take(stores[0], mailbox.result_key(rank)) for rank in range(rank_env.world_size)]


def _leave(store: Any, rank_env: RankEnv) -> None:
    """Has rank 0, which may serve the store, end after the last request of all others."""
    key = "moe_ep/left/{}".format
    with contextlib.suppress(RuntimeError):
        if rank_env.rank > 0:
            store.set(key(rank_env.rank), "")
        elif rank_env.world_size > 1:
            store.wait([key(rank) for rank in range(1, rank_env.world_size)], timedelta(seconds=_LEAVING_S))


def _agree_on_failure(failure: WorkerFailure, store: Any) -> tuple[WorkerFailure, bool]:
    """Returns the root cause, as far as the ranks can agree on it, and whether this rank was the first to know it.

    A rank with an echo waits a moment: the rank that failed may still be writing, and if it was killed, the agent must
    see that before it sees this one end.
    """
    deadline = time.monotonic() + (ECHO_GRACE_S if failure.echo else 0)
    # If the agent is gone, so is its store, and the first rank is unknown.
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
