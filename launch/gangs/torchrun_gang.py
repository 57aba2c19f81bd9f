"""Gangs in the manner of torchrun: this process is a rank that torchrun or srun started, or the agent of its node.

All ranks call `run`; rank 0 reports to the user. An agent starts the ranks of its node with torchrun's variables.
Agents of several nodes meet at an endpoint: the one on that machine listens there, numbers the nodes, and collects the
outcomes of all ranks. They exchange lines of JSON over connections that stay open, so that each notices at once when
another dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from moe_ep.errors import ConfigError, GangError, MoeEpError
from moe_ep.launch.gangs import elastic, interrupts, mailbox, progress, waiting
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
    run_rank,
)
from moe_ep.launch.gangs.local_gang import (
    POLL_S,
    LocalGang,
    LocalWorkers,
    ending_fork_server,
    joining_rank_env,
    local_rank_envs,
    warm_fork_server,
)
from moe_ep.launch.gangs.rank_env import RankEnv, resolve_rank_env
from moe_ep.launch.gangs.rendezvous import (
    addresses_of,
    init_process_group,
    listen_at,
    listen_store,
    open_clients_store,
)
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    from moe_ep.layer.elastic import ElasticConfig

_CAUSE = "moe_ep/cause"
# A signal may find a rank inside a library, where Python raises nothing. The rank ends after this time.
_STUCK_S = 1.5
_RETRY_S, _CONNECT_LIMIT_S = 0.2, 5.0
# The first field of every line, and the version in it.
_PROTOCOL = "moe_ep_agents"
_VERSION = 1
# Longer lines are not an agent's.
_MOST_BYTES = 1 << 20
# TCP keepalive: seconds and probes until an unreachable machine is noticed.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class TorchrunGang(Gang):
    """This node's ranks of a torchrun job.

    Args:
        num_local: ranks of this node, the same on all nodes; ignored under torchrun or srun.
        num_nodes: number of nodes, each of which makes such a gang.
        rdzv_endpoint: host:port where the agents of several nodes meet; the first one on that host listens there.
        rdzv_id: name of the job at that endpoint.
        timeout_s: how long agents and ranks wait for each other; None takes MOE_EP_DISPATCH_TIMEOUT_S.
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
        rdzv_id: str = "moe_ep",
        timeout_s: float | None = None,
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
        self._rdzv_id = rdzv_id
        self._timeout_s = timeout_s
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
            gang = LocalGang(self._num_local, self.device, self._timeout_s, source="torchrun")
            return gang.run(fn, *args, on_item=on_item)
        return self._run_as_agent(fn, args, on_item)

    def run_elastic(
        self, fn: Callable[..., Any], *args: Any, config: ElasticConfig, on_item: OnItem = ignore
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """As `Gang.run_elastic` on the node that listens at the endpoint; other nodes get empty lists."""
        if self._env is not None:
            raise ConfigError(
                f"--elastic is given under {self._env.source}, which ends all ranks when one fails; start moe-ep by "
                f"itself, or under Ray"
            )
        if self._num_nodes == 1:
            gang = LocalGang(self._num_local, self.device, self._timeout_s, source="torchrun")
            return gang.run_elastic(fn, *args, config=config, on_item=on_item)
        with self._met() as (context, node, ranks):
            if node.node_rank > 0:
                self._serve_node_0(node, context, ranks, fn, args)
                return [], []
            store = listen_store(node.master_addr, self._timeout_s)
            node.announce(store.port)
            workers = LocalWorkers(context, ranks, self._timeout_s, fn, args, store.port)
            outcomes = elastic.ElasticOutcomes(store, range(self.world_size), config, workers.kill, on_item)
            node.record = lambda rank, failure: outcomes.add(
                rank, Outcome(None if failure else mailbox.take(store, _result_key(rank)), failure)
            )

            def start_rank(rank: int) -> None:
                if node.place_new(rank, outcomes.ranks) == 0:
                    workers.start(self._joining(node, rank))

            try:
                with workers, ControlServer() as control:
                    outcomes.take_requests(control, start_rank, replaces=True)
                    while not outcomes.are_final:
                        for event in workers.events(elastic.POLL_S, also=node.sockets):
                            outcomes.add(event.rank, event.content)
                        for _ in node.receive():
                            pass
                        outcomes.look()
                    results = outcomes.results()
            except MoeEpError as error:
                node.end(error)
                raise
            node.end()
            return results, outcomes.recoveries

    def _serve_node_0(
        self, node: _Node, context: ForkServerContext, ranks: Sequence[RankEnv], fn: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:  # fmt: skip
        """An agent other than node 0's: reports the outcomes of its ranks to node 0, and ends ranks that were removed.
        All of them end with node 0's agent, which serves the store."""
        import torch.distributed as dist

        from moe_ep.distributed.membership import MembershipLog

        try:
            store = open_clients_store(node.master_addr, node.await_port(self._timeout_s), self._timeout_s)
            with LocalWorkers(context, ranks, self._timeout_s, fn, args, store.port) as workers:
                log = MembershipLog(store)
                epoch = log.first
                while not node.is_over:
                    for event in workers.events(elastic.POLL_S, also=node.sockets):
                        if event.content.failure is None:
                            mailbox.put(store, _result_key(event.rank), event.content.value)
                        node.add(event.rank, event.content.failure)
                    while (after := log.next_of(epoch)) is not None:
                        epoch = after
                        for rank in epoch.removed:
                            workers.kill(rank)
                    for _ in node.receive():
                        pass
                    while node.to_start:
                        workers.start(self._joining(node, node.to_start.pop()))
        except dist.DistError:
            node.await_end()
        node.check()

    def _joining(self, node: _Node, rank: int) -> RankEnv:
        return joining_rank_env(
            rank, self.device, source="torchrun", node_rank=node.node_rank, master_addr=node.master_addr
        )

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
            outcome = run_rank(rank_env, _gathered, (stores, fn, args), self._timeout_s, exports=False)
            display.close()
            if outcome.failure is None:
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
            LocalWorkers(context, ranks, self._timeout_s, _gathered, ([], fn, args)) as workers,
        ):
            while not node.is_over:
                for event in workers.events(min(node.left_s, POLL_S), also=node.sockets):
                    if event.kind == "item":
                        on_item(event.content)
                    elif event.kind == "port":
                        workers.tell(event.content)
                        node.announce(event.content)
                    else:
                        if event.rank == 0:
                            results = event.content.value or []
                        node.add(event.rank, event.content.failure)
                for port in node.receive():
                    workers.tell(port)
        node.check()
        return results

    @contextlib.contextmanager
    def _met(self) -> Iterator[tuple[ForkServerContext, _Node, list[RankEnv]]]:
        """Yields the context that workers are forked from, the connected nodes, and this node's ranks."""
        context = warm_fork_server()
        with ending_fork_server():
            meeting = _Node.meet(self._description(), self._rdzv_endpoint or "", self._timeout_s)
        with meeting as node:
            self._has_rank_0 = node.node_rank == 0
            yield context, node, local_rank_envs(
                self._num_local, self.device, source="torchrun", first=node.node_rank * self._num_local,
                world_size=self.world_size, node_rank=node.node_rank, master_addr=node.master_addr,
            )  # fmt: skip

    def _description(self) -> dict[str, Any]:
        """The settings that all nodes must share, by the names of their options."""
        return {"job": self._rdzv_id, "--nnodes": self._num_nodes, "--ep-size": self.world_size}


def _gathered(rank_env: RankEnv, stores: list[Any], fn: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
    """Runs the function; returns the values of all ranks on rank 0. Appends the attempt's store to `stores`."""
    import torch.distributed as dist

    from moe_ep.distributed.exchange import gather_texts
    from moe_ep.distributed.failure_detection import timeout_of

    stores.append(init_process_group(rank_env))
    value = fn(rank_env, *args)
    # Other ranks may still have much to do.
    limit = timeout_of(dist.distributed_c10d._get_default_group())
    mailbox.put(stores[0], _result_key(rank_env.rank), value)
    gather_texts("results", timeout_s=None if limit is None else limit.total_seconds())
    if rank_env.rank > 0:
        return None
    return [mailbox.take(stores[0], _result_key(rank)) for rank in range(rank_env.world_size)]


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


def _result_key(rank: int) -> str:
    return f"result/{rank}"


class _Peer:
    """A connection to another agent: lines of JSON objects."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name = connection, name
        self._received = b""
        self._lines: list[dict[str, Any]] = []
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a line; OSError if the other agent is gone."""
        line = json.dumps({_PROTOCOL: _VERSION, **message}) + "\n"
        self.connection.settimeout(_CONNECT_LIMIT_S)
        self.connection.sendall(line.encode())

    def receive(self) -> list[dict[str, Any]]:
        """Returns the lines that have arrived; EOFError at the end of the connection, ValueError for a foreign line."""
        self.connection.settimeout(0.0)
        try:
            found = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            found = None
        except OSError:
            found = b""
        if not found and (self._lines or found is None):
            lines, self._lines = self._lines, []
            return lines
        if not found:
            raise EOFError
        *complete, self._received = (self._received + found).split(b"\n")
        if len(self._received) > _MOST_BYTES:
            raise ValueError("a line without end")
        lines, self._lines = self._lines + [_message(line) for line in complete], []
        return lines

    def answer(self, wait_for: Wait, why: Callable[[], str] | None = None) -> dict[str, Any]:
        """Waits for the next line."""
        while not self._lines:
            self._lines = self.receive()
            if not self._lines:
                wait_for.look(why)
                wait(_waitable(self), timeout=min(0.2, max(wait_for.left_s, 0.0)))
        return self._lines.pop(0)

    def close(self) -> None:
        self.connection.close()


def _waitable(*found: Any) -> list[Any]:
    """The sockets, and objects with their fileno, as `wait` takes them."""
    return list(found)


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get(_PROTOCOL) != _VERSION:
        raise ValueError(repr(line[:60].decode(errors="replace")))
    return message


@dataclass
class _Node:
    """One agent's view of a job of several nodes. Node 0, which listens, has the outcomes of all ranks; the others send
    theirs and are told when the job is over.

    Attributes:
        is_over: all ranks have answered, or the job has failed with `failure` or `error`.
        record: called with the outcome of each rank; by default it adds to `outcomes`.
    """

    node_rank: int
    master_addr: str
    peers: dict[int, _Peer]
    num_local: int
    outcomes: Outcomes
    is_over: bool = False
    failure: WorkerFailure | None = None
    error: MoeEpError | None = None
    left_s: float = POLL_S

    def __post_init__(self) -> None:
        self.record: Callable[[int, WorkerFailure | None], None] = self._record
        self.to_start: list[int] = []
        # On node 0: the node of each rank that joined.
        self._joined: dict[int, int] = {}

    @classmethod
    def meet(cls, description: dict[str, Any], endpoint: str, timeout_s: float | None) -> contextlib.closing[_Node]:
        """Connects all nodes.

        Raises:
            GangError: nodes do not arrive within the timeout, or something else listens at the endpoint.
            ConfigError: nodes have different options.
        """
        host, _, port = endpoint.rpartition(":")
        host, limit_s = host.strip("[]"), waiting.limit_of(timeout_s)
        try:
            listener = listen_at(host, int(port))
        except OSError:  # the address of another machine, or another agent of this one listens there
            return contextlib.closing(cls._join(description, host, int(port), limit_s))
        with listener:
            return contextlib.closing(cls._gather(description, listener, endpoint, limit_s))

    @classmethod
    def _gather(cls, description: dict[str, Any], listener: socket.socket, endpoint: str, limit_s: float) -> _Node:
        """Node 0: accepts the other nodes in the order in which they arrive."""
        num_nodes = description["--nnodes"]
        joined: dict[int, _Peer] = {}
        arriving: list[_Peer] = []

        def missing() -> str:
            here = ", ".join([socket.gethostname(), *(peer.name for peer in joined.values())])
            return f"{num_nodes - 1 - len(joined)} of {num_nodes} nodes to come to {endpoint} (here: {here})"

        wait_for = Wait(missing, limit_s)
        listener.setblocking(False)
        try:
            while len(joined) < num_nodes - 1:
                wait_for.look()
                for ready in wait(_waitable(listener, *arriving), timeout=min(0.2, max(wait_for.left_s, 0.0))):
                    if ready is listener:
                        with contextlib.suppress(OSError):
                            connection, address = listener.accept()
                            arriving.append(_Peer(connection, str(address[0])))
                            arriving[-1].send(node=socket.gethostname())
                    elif isinstance(ready, _Peer):
                        cls._take_in(ready, description, joined, arriving)
            address = listener.getsockname()[0]
            for node_rank, peer in joined.items():
                peer.send(node_rank=node_rank, address=address)
        except BaseException as error:
            for peer in (*joined.values(), *arriving):
                with contextlib.suppress(OSError):
                    peer.send(ended=str(error) or "it was interrupted")
                peer.close()
            raise
        for peer in arriving:
            peer.close()
        num_local = description["--ep-size"] // num_nodes
        return cls(0, address, joined, num_local, Outcomes(range(description["--ep-size"])))

    @staticmethod
    def _take_in(peer: _Peer, description: dict[str, Any], joined: dict[int, _Peer], arriving: list[_Peer]) -> None:
        """Reads an arriving node's introduction, and accepts or refuses it."""
        try:
            messages = peer.receive()
            if not messages:
                return
            told = messages[0]
            peer.name = str(told.get("node"))[:256]
            wrong = next((name for name, value in description.items() if told.get(name) != value), None)
            if wrong is not None:
                refusal = (
                    f"{wrong} is {told.get(wrong)!r} on {peer.name} and {description[wrong]!r} on "
                    f"{socket.gethostname()}; all nodes run the same command"
                )
                peer.send(refused=refusal)
                if wrong != "job":
                    raise ConfigError(refusal)
                peer.close()
            else:
                joined[len(joined) + 1] = peer
        except ConfigError:
            raise
        except (EOFError, OSError, ValueError):
            peer.close()
        arriving.remove(peer)

    @classmethod
    def _join(cls, description: dict[str, Any], host: str, port: int, limit_s: float) -> _Node:
        """Another node: finds the one that listens, and waits until all have arrived."""
        where = f"{host}:{port}"
        wait_for = Wait(f"the node that listens at {where}", limit_s)
        while True:
            try:
                peer = _Peer(_connected(host, port), host)
                return cls._introduced(peer, description, where, wait_for, limit_s)
            except EOFError:
                why = f"the node that listens at {where} ended before all were there"
            except OSError as error:
                why = f"nobody answers at {where} ({error})"
            wait_for.pause(
                _RETRY_S,
                lambda why=why: (  # type: ignore[misc]
                    f"{why}, for {limit_s:g} s; check that the command runs on the node that --rdzv-endpoint names, "
                    f"and that no firewall is between"
                ),
            )

    @classmethod
    def _introduced(cls, peer: _Peer, description: dict[str, Any], where: str, wait_for: Wait, limit_s: float) -> _Node:
        try:
            with contextlib.suppress(OSError):
                peer.send(node=socket.gethostname(), **description)
            banner = peer.answer(
                wait_for,
                lambda: (
                    f"what listens at {where} has not answered as a node of this job does within {limit_s:g} s; see "
                    f"what it is, or choose another port for --rdzv-endpoint"
                ),
            )
            peer.name = str(banner["node"])[:256]
            answer = peer.answer(Wait(f"the other nodes to come to {where}", limit_s))
            if "refused" in answer:
                raise ConfigError(f"the node that listens at {where} refuses this one: {answer['refused']}")
            if "ended" in answer:
                raise GangError(f"the node that listens at {where} gave up: {answer['ended']}")
            num_local = description["--ep-size"] // description["--nnodes"]
            node_rank, address = int(answer["node_rank"]), str(answer["address"])
        except (ValueError, KeyError, TypeError) as error:
            peer.close()
            if isinstance(error, ConfigError):
                raise
            raise GangError(
                f"what listens at {where} is no node of such a job: it said {error}; choose another port for "
                f"--rdzv-endpoint"
            ) from None
        except BaseException:
            peer.close()
            raise
        first = node_rank * num_local
        return cls(node_rank, address, {0: peer}, num_local, Outcomes(range(first, first + num_local)))

    @property
    def sockets(self) -> list[_Peer]:
        return list(self.peers.values())

    def announce(self, port: int) -> None:
        """Tells all nodes the port of the store."""
        self._send_all(port=port)

    def add(self, rank: int, failure: WorkerFailure | None) -> None:
        """Records the outcome of a rank of this node."""
        if self.node_rank == 0:
            self.record(rank, failure)
        else:
            self._send_all(rank=rank, failure=None if failure is None else asdict(failure))

    def receive(self) -> Iterator[int]:
        """Handles the messages of the other agents; yields the port of the store when it is announced."""
        for node_rank, peer in list(self.peers.items()):
            try:
                for message in peer.receive():
                    if "port" in message:
                        yield int(message["port"])
                    elif "over" in message:
                        self.failure = _failure_from(message["over"])
                        self.is_over = True
                    elif "ended" in message:
                        self.error = (ConfigError if message["is_refusal"] else GangError)(str(message["ended"]))
                        self.is_over = True
                    elif "start" in message:
                        self.to_start.append(int(message["start"]))
                    elif self.node_rank == 0:
                        self.record(int(message["rank"]), _failure_from(message["failure"]))
            except (EOFError, ValueError, KeyError, TypeError):
                self._lose(node_rank, peer)
        if self.node_rank == 0 and not self.is_over:
            self._look_whether_over()

    def place_new(self, rank: int, present: Sequence[int]) -> int:
        """Node 0: asks the node with the fewest present ranks to start a new one; returns that node."""
        nodes = [self._joined.get(one, one // self.num_local) for one in present]
        place = self._joined[rank] = min((0, *self.peers), key=lambda node: (nodes.count(node), node))
        if place > 0:
            with contextlib.suppress(OSError):  # a lost node is found by its connection
                self.peers[place].send(start=rank)
        return place

    def await_port(self, timeout_s: float | None) -> int:
        """Waits for the port of the store, which node 0 announces.

        Raises:
            GangError, ConfigError: node 0 has ended, or does not announce it within the timeout.
        """
        wait_for = Wait("the node that listens to tell where the ranks meet", waiting.limit_of(timeout_s))
        while True:
            ports = list(self.receive())
            self.check()
            if ports:
                return ports[0]
            wait_for.look()
            wait(_waitable(*self.sockets), timeout=_RETRY_S)

    def await_end(self) -> None:
        """Waits for the end of the job after node 0's store has gone."""
        wait_for = Wait("the node that listens to say why it ended", _CONNECT_LIMIT_S)
        while not self.is_over:
            wait_for.pause()
            for _ in self.receive():
                pass

    def check(self) -> None:
        """Raises the error that has ended the job, if any."""
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            raise gang_error(self.failure)

    def end(self, error: MoeEpError | None = None) -> None:
        """Node 0: tells the others that the job is done or why it failed, and waits until they have left the store."""
        self.is_over = True
        if error is None:
            self._send_all(over=None)
        else:
            self._send_all(ended=str(error), is_refusal=isinstance(error, ConfigError))
        until = time.monotonic() + _CONNECT_LIMIT_S
        while self.peers and time.monotonic() < until:
            wait(_waitable(*self.sockets), timeout=_RETRY_S)
            for _ in self.receive():
                pass

    def close(self) -> None:
        """Leaves the job. If it is not over, the other nodes are told that this one gave up."""
        if not self.is_over:
            first = self.node_rank * self.num_local
            left = WorkerFailure(rank=first, node=socket.gethostname(), cause="the command on its node was ended")
            if self.node_rank == 0:
                self._send_all(over=asdict(left))
            else:
                self._send_all(rank=first, failure=asdict(left))
        for peer in self.peers.values():
            peer.close()

    def _record(self, rank: int, failure: WorkerFailure | None) -> None:
        self.outcomes.add(rank, Outcome(failure=failure))

    def _lose(self, node_rank: int, peer: _Peer) -> None:
        """Handles the end of a connection to another agent."""
        peer.close()
        del self.peers[node_rank]
        if self.is_over:
            return
        first, last = node_rank * self.num_local, (node_rank + 1) * self.num_local - 1
        failure = WorkerFailure(
            rank=first,
            node=peer.name,
            cause=f"the agent of its node (ranks {first} to {last}) ended silently: killed, or out of reach",
        )
        if self.node_rank != 0:
            self.failure, self.is_over = failure, True
            return
        joined = [rank for rank, place in self._joined.items() if place == node_rank]
        for rank in (*range(first, last + 1), *joined):
            self.record(rank, failure)

    def _look_whether_over(self) -> None:
        self.left_s = min(POLL_S, self.outcomes.left_s)
        if self.outcomes.are_final:
            self.failure, self.is_over = self.outcomes.cause, True
            self._send_all(over=None if self.failure is None else asdict(self.failure))

    def _send_all(self, **message: Any) -> None:
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.send(**message)


def _connected(host: str, port: int) -> socket.socket:
    """Connects to the first of the host's addresses that accepts."""
    error: OSError = ConnectionRefusedError(f"{host} has no address")
    for address in addresses_of(host):
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S)
        except OSError as caught:
            error = caught
    raise error


def _failure_from(told: dict[str, Any] | None) -> WorkerFailure | None:
    """Reads a failure from another agent's message."""
    if told is None:
        return None
    kinds = {"rank": int, "echo": bool, "refusal": bool, "is_final": bool}
    return WorkerFailure(**{item.name: kinds.get(item.name, str)(told[item.name]) for item in fields(WorkerFailure)})
