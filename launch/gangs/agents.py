"""Agents of several nodes, which meet at an endpoint: the one on that machine listens there and numbers the nodes.

They exchange lines of JSON over connections that stay open, so that each notices at once when another dies. One agent
leads: it has the outcomes of all ranks, and is the one that listens unless an elastic gang has lost that.
Sections: connections; a node of a job; the agent of an elastic gang.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from moe_ep import env
from moe_ep.errors import ConfigError, GangError, MinorityError, MoeEpError
from moe_ep.launch.gangs import elastic, mailbox, progress
from moe_ep.launch.gangs.gang import POLL_S, OnItem, Outcome, Outcomes, WorkerFailure, gang_error
from moe_ep.launch.gangs.local_gang import LocalWorkers, joining_rank_env
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.gangs.rendezvous import addresses_of, listen_at, listen_store, open_clients_store
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_ep.distributed.membership import MembershipLog
    from moe_ep.layer.elastic import ElasticConfig

_RETRY_S = 0.2
_CONNECT_LIMIT_S = 5.0
# Errors of a connection to a machine that may still run.
_OUT_OF_REACH = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
# The first field of every line, and the version in it.
_PROTOCOL = "moe_ep_agents"
_VERSION = 1
# Longer lines are not an agent's.
_MOST_BYTES = 1 << 20
# TCP keepalive: seconds and probes until an unreachable machine is noticed.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
# How long an agent that takes over waits for the others.
_SUCCEED_S = 3.0
# A leading agent that does not answer for this share of the deadline is out of reach. No worker makes a step meanwhile,
# and each waits for the others no longer than the deadline.
_SILENT = 0.5


# ==== Connections ====


class Peer:
    """A connection to another agent: lines of JSON objects."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name, self.is_out_of_reach = connection, name, False
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
        lines, self._lines = self._lines, []
        self.connection.settimeout(0.0)
        try:
            found = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return lines
        except OSError as error:
            self.is_out_of_reach |= isinstance(error, TimeoutError) or error.errno in _OUT_OF_REACH
            found = b""
        if not (found or lines):
            raise EOFError
        *complete, self._received = (self._received + found).split(b"\n")
        if len(self._received) > _MOST_BYTES:
            raise ValueError("a line without end")
        return lines + [_message(line) for line in complete]

    def has_left(self) -> bool:
        """Whether the connection has ended; lines that came are kept for `answer`."""
        try:
            self._lines = self.receive()
        except (EOFError, ValueError):
            return True
        return False

    def answer(self, wait_for: Wait, why: str = "") -> dict[str, Any]:
        """Waits for the next line."""
        while not self._lines:
            self._lines = self.receive()
            if not self._lines:
                wait_for.look(why)
                wait([self.connection], timeout=min(0.2, max(wait_for.left_s, 0.0)))
        return self._lines.pop(0)

    def close(self) -> None:
        self.connection.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get(_PROTOCOL) != _VERSION:
        raise ValueError(repr(line[:60].decode(errors="replace")))
    return message


def _arrivals(
    listener: socket.socket, arriving: list[Any], timeout_s: float, **greeting: Any
) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Waits for agents that connect; yields each with its first line, and drops what is no agent.

    Args:
        arriving: those that have sent no line yet; it is updated.
        greeting: the line that each is sent, if any.
    """
    for ready in wait([listener, *arriving], timeout=timeout_s):
        if not isinstance(ready, Peer):
            with contextlib.suppress(OSError):
                connection, address = listener.accept()
                arriving.append(Peer(connection, str(address[0])))
                if greeting:
                    arriving[-1].send(**greeting)
            continue
        try:
            lines = ready.receive()
        except (EOFError, ValueError):
            ready.close()
            arriving.remove(ready)
        else:
            if lines:
                arriving.remove(ready)
                yield ready, lines[0]


# ==== A node of a job ====


@dataclass
class Node:
    """One agent's view of a job of several nodes. The leading node has the outcomes of all ranks; the others send
    theirs and are told when the job is over.

    Attributes:
        leader: the leading node; node 0 unless it was lost.
        is_over: all ranks have answered, or the job has failed with `error`.
        outlives_leader: whether the job goes on when the leader dies; `lost_leader` is then set, instead of `error`,
            and `leader_may_live` if it merely cannot be reached.
        was_stopped: this node may have been taken for one that is out of reach, as all others of it then.
        check_reach: on a leader, called with the ranks of a node that cannot be reached; raises if they are too many.
        record: called with the outcome of each rank; by default it adds to `outcomes`.
        to_start: ranks that the leader has asked this node to start; to be removed when they are.
        ports: ports of the store that the leader has announced; to be removed when they are used.
    """

    node_rank: int
    master_addr: str
    peers: dict[int, Peer]
    num_local: int
    leader: int = 0
    is_over: bool = False
    outlives_leader: bool = False
    lost_leader: bool = False
    leader_may_live: bool = False
    was_stopped: bool = False
    error: MoeEpError | None = None
    left_s: float = POLL_S

    def __post_init__(self) -> None:
        self.outcomes = Outcomes(range(self.num_local * (1 + len(self.peers))))
        self.record: Callable[[int, WorkerFailure | None], None] = lambda rank, failure: self.outcomes.add(
            rank, Outcome(failure=failure)
        )
        self.check_reach: Callable[[Sequence[int]], None] = lambda ranks: None
        self.to_start: list[int] = []
        self.ports: list[int] = []
        # On the leader: the node of each rank that joined, and of all ranks if it has taken over.
        self.places: dict[int, int] = {}
        # This machine's address in its connection to the leader.
        self.address = self.master_addr if self.leads else str(self.peers[0].connection.getsockname()[0])

    @property
    def leads(self) -> bool:
        return self.leader == self.node_rank

    def lead(self) -> None:
        """Makes this node the leader; connections to the others are to be added to `peers`."""
        self.leader, self.master_addr, self.peers, self.lost_leader = self.node_rank, self.address, {}, False

    def follow(self, leader: int, address: str, peer: Peer) -> None:
        """Makes another node the leader."""
        self.leader, self.master_addr, self.peers, self.lost_leader = leader, address, {leader: peer}, False
        self.ports = []

    @classmethod
    def meet(cls, description: dict[str, Any], endpoint: str) -> contextlib.closing[Node]:
        """Connects all nodes; GangError if they do not arrive in time, ConfigError if their options differ."""
        host, _, port = endpoint.rpartition(":")
        host, limit_s = host.strip("[]"), env.DISPATCH_TIMEOUT_S.get()
        try:
            listener = listen_at(host, int(port))
        except OSError:  # the address of another machine, or another agent of this one listens there
            return contextlib.closing(cls._join(description, host, int(port), limit_s))
        with listener:
            return contextlib.closing(cls._gather(description, listener, endpoint, limit_s))

    @classmethod
    def _gather(cls, description: dict[str, Any], listener: socket.socket, endpoint: str, limit_s: float) -> Node:
        """Node 0: accepts the other nodes in the order in which they arrive."""
        num_nodes = description["--nnodes"]
        joined: list[Peer] = []
        arriving: list[Any] = []

        def missing() -> str:
            here = ", ".join([socket.gethostname(), *(peer.name for peer in joined)])
            return f"{num_nodes - 1 - len(joined)} of {num_nodes} nodes to come to {endpoint} (here: {here})"

        wait_for = Wait(missing, limit_s)
        listener.setblocking(False)
        try:
            while len(joined) < num_nodes - 1:
                wait_for.look()
                timeout_s = min(0.2, max(wait_for.left_s, 0.0))
                for peer, message in _arrivals(listener, arriving, timeout_s, node=socket.gethostname()):
                    peer.name = str(message.get("node"))[:256]
                    wrong = next((name for name, value in description.items() if message.get(name) != value), None)
                    if wrong is None:
                        joined.append(peer)
                        if len(joined) == num_nodes - 1:
                            break  # Others wait, in case one of these has left.
                        continue
                    refusal = (
                        f"{wrong} is {message.get(wrong)!r} on {peer.name} and {description[wrong]!r} on "
                        f"{socket.gethostname()}; all nodes run the same command"
                    )
                    with contextlib.suppress(OSError):
                        peer.send(refused=refusal)
                    peer.close()
                    if wrong != "job":
                        raise ConfigError(refusal)
                for peer in [peer for peer in joined if peer.has_left()]:  # its command may be started again
                    peer.close()
                    joined.remove(peer)
            address = listener.getsockname()[0]
            for node_rank, peer in enumerate(joined, 1):
                peer.send(node_rank=node_rank, address=address)
        except BaseException as error:
            for peer in (*joined, *arriving):
                with contextlib.suppress(OSError):
                    peer.send(ended=str(error) or "it was interrupted")
                peer.close()
            raise
        for peer in arriving:
            peer.close()
        return cls(0, address, dict(enumerate(joined, 1)), description["--ep-size"] // num_nodes)

    @classmethod
    def _join(cls, description: dict[str, Any], host: str, port: int, limit_s: float) -> Node:
        """Another node: finds the one that listens, and waits until all have arrived."""
        where = f"{host}:{port}"
        wait_for = Wait(f"the node that listens at {where}", limit_s)
        while True:
            try:
                peer = Peer(_connected(host, port), host)
                return cls._introduced(peer, description, where, wait_for, limit_s)
            except EOFError:
                why = f"the node that listens at {where} ended before all were there"
            except OSError as error:
                why = f"nobody answers at {where} ({error})"
            wait_for.pause(
                _RETRY_S,
                f"{why}, for {limit_s:g} s; check that the command runs on the node that --rdzv-endpoint names, and "
                f"that no firewall is between",
            )

    @classmethod
    def _introduced(cls, peer: Peer, description: dict[str, Any], where: str, wait_for: Wait, limit_s: float) -> Node:
        try:
            with contextlib.suppress(OSError):
                peer.send(node=socket.gethostname(), **description)
            banner = peer.answer(
                wait_for,
                f"what listens at {where} has not answered as a node of this job does within {limit_s:g} s; see what "
                f"it is, or choose another port for --rdzv-endpoint",
            )
            peer.name = str(banner["node"])[:256]
            answer = peer.answer(Wait(f"the other nodes to come to {where}", limit_s))
            if "refused" in answer:
                raise ConfigError(f"the node that listens at {where} refuses this one: {answer['refused']}")
            if "ended" in answer:
                raise GangError(f"the node that listens at {where} gave up: {answer['ended']}")
            node_rank, address = int(answer["node_rank"]), str(answer["address"])
        except BaseException as error:
            peer.close()
            if isinstance(error, (ValueError, KeyError, TypeError)) and not isinstance(error, ConfigError):
                raise GangError(
                    f"what listens at {where} is no node of such a job: it said {error}; choose another port for "
                    f"--rdzv-endpoint"
                ) from None
            raise
        return cls(node_rank, address, {0: peer}, description["--ep-size"] // description["--nnodes"])

    @property
    def sockets(self) -> list[Any]:
        return list(self.peers.values())

    def give_up_leader(self) -> None:
        """Takes the leader for out of reach; its connection ends."""
        for peer in self.sockets:
            peer.is_out_of_reach = True
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def announce(self, port: int) -> None:
        """Tells all nodes the port of the store."""
        self._send_all(port=port)

    def add(self, rank: int, failure: WorkerFailure | None) -> None:
        """Records the outcome of a rank of this node."""
        if self.leads:
            self.record(rank, failure)
        else:
            self._send_all(rank=rank, failure=None if failure is None else asdict(failure))

    def receive(self) -> None:
        """Handles the messages of the other agents."""
        for node_rank, peer in list(self.peers.items()):
            try:
                for message in peer.receive():
                    if "port" in message:
                        self.ports.append(int(message["port"]))
                    elif "over" in message:
                        if (why := message["over"]) is not None:
                            self.error = (ConfigError if message["is_refusal"] else GangError)(str(why))
                        self.is_over = True
                    elif "start" in message:
                        self.to_start.append(int(message["start"]))
                    elif self.leads:
                        self.record(int(message["rank"]), _failure_from(message["failure"]))
            except (EOFError, ValueError, KeyError, TypeError):
                self._lose(node_rank, peer)
        if self.leads and not self.is_over:
            self.left_s = min(POLL_S, self.outcomes.left_s)
            if self.outcomes.are_final:
                cause = self.outcomes.cause
                self._tell_end(None if cause is None else gang_error(cause))

    def place_new(self, rank: int, present: Sequence[int]) -> int:
        """Leader: asks the node with the fewest present ranks to start a new one; returns that node."""
        nodes = [self.places.get(one, one // self.num_local) for one in present]
        place = self.places[rank] = min((self.node_rank, *self.peers), key=lambda node: (nodes.count(node), node))
        if place != self.node_rank:
            with contextlib.suppress(OSError):  # a lost node is found by its connection
                self.peers[place].send(start=rank)
        return place

    def await_port(self) -> int:
        """Waits for the port of the store, which the leader announces; GangError or ConfigError if it ended, or does
        not in time."""
        wait_for = Wait("the node that listens to tell where the ranks meet", env.DISPATCH_TIMEOUT_S.get())
        while True:
            self.receive()
            self.check()
            if self.ports:
                return self.ports.pop(0)
            wait_for.look()
            wait(self.sockets, timeout=_RETRY_S)

    def await_end(self) -> None:
        """Waits for the end of the job, or the loss of its leader, after the leader's store has gone."""
        wait_for = Wait("the node that listens to say why it ended", _CONNECT_LIMIT_S)
        while not (self.is_over or self.lost_leader):
            wait_for.pause()
            self.receive()

    def check(self) -> None:
        """Raises the error that has ended the job, if any."""
        if self.error is not None:
            raise self.error

    def end(self, error: MoeEpError | None = None) -> None:
        """Leader: tells the others that the job is done or why it failed, and waits until they have left the store."""
        self._tell_end(error)
        until = time.monotonic() + _CONNECT_LIMIT_S
        while self.peers and time.monotonic() < until:
            wait(self.sockets, timeout=_RETRY_S)
            self.receive()

    def _tell_end(self, error: MoeEpError | None) -> None:
        self.error, self.is_over = error, True
        self._send_all(over=None if error is None else str(error), is_refusal=isinstance(error, ConfigError))

    def close(self) -> None:
        """Leaves the job. If it is not over, the other nodes are told that this one gave up."""
        if not self.is_over:
            first = self.node_rank * self.num_local
            left = WorkerFailure(rank=first, node=socket.gethostname(), cause="the command on its node was ended")
            if self.leads:
                self._tell_end(gang_error(left))
            else:
                self._send_all(rank=first, failure=asdict(left))
        for peer in self.peers.values():
            peer.close()

    def _lose(self, node_rank: int, peer: Peer) -> None:
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
        if not self.leads:
            self.leader_may_live = peer.is_out_of_reach
            if self.outlives_leader:
                self.lost_leader = True
            else:
                self.error, self.is_over = gang_error(failure), True
            return
        ranks = [*range(first, last + 1), *(rank for rank, place in self.places.items() if place == node_rank)]
        if peer.is_out_of_reach or self.was_stopped:
            self.check_reach(ranks)
        for rank in ranks:
            self.record(rank, failure)

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


def _failure_from(message: dict[str, Any] | None) -> WorkerFailure | None:
    """Reads a failure from another agent's message."""
    if message is None:
        return None
    kinds = {"rank": int, "echo": bool, "refusal": bool, "is_final": bool}
    return WorkerFailure(**{item.name: kinds.get(item.name, str)(message[item.name]) for item in fields(WorkerFailure)})


# ==== The agent of an elastic gang ====


class ElasticAgent:
    """A node's part of an elastic gang of several nodes.

    The leading agent serves the gang's store and has the outcomes of all ranks. The others report their ranks' outcomes
    to it, end ranks that were removed, and copy the epochs into a store of their own. If the leading agent dies, the
    first of the others leads, with its store; the rest, and all workers, go on there.

    An agent whose store does not answer within the deadline, or whose connection times out, cannot be reached. Then the
    side with most ranks of the last epoch goes on, or at a tie that of the leading agent, and the other one ends.
    """

    def __init__(self, node: Node, config: ElasticConfig, device: str, on_item: OnItem) -> None:
        self._node, self._config, self._device, self._on_item = node, config, device, on_item
        self._recoveries: list[dict[str, Any]] = []
        # This node's running ranks, and the outcomes of the others, which an agent that takes over is told again.
        self._ranks: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        # Where the agents that may take over listen, by node.
        self._successors: dict[int, tuple[str, int]] = {}
        self._num_successors = 0
        self._limit_s = _SILENT * env.DISPATCH_TIMEOUT_S.get()
        # Since when this agent waits for the leading one's store, in seconds; infinity while it does not.
        self._asked_at, self._leaders_port, self._is_over = math.inf, 0, threading.Event()
        # Ranks of nodes that could not be reached, each with the time of that.
        self._unreached: dict[int, float] = {}

    def run(
        self, context: ForkServerContext, ranks: Sequence[RankEnv], fn: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """As `TorchrunGang.run_elastic`."""
        from moe_ep.distributed.membership import MembershipLog

        node = self._node
        node.outlives_leader = True
        with contextlib.ExitStack() as stack:
            self._store = listen_store(node.address)
            if node.leads:
                world_size = node.num_local * (1 + len(node.peers))
                log = MembershipLog(self._store, range(world_size))
                log.expect_standbys(len(node.peers))
                node.announce(self._store.port)
                port = self._store.port
            else:
                self._listener = stack.enter_context(listen_at(node.address, 0))
                port = node.await_port()
                client = open_clients_store(node.master_addr, port)
                log = MembershipLog(client)
                self._num_successors = log.num_standbys()
                log.announce_standby(node.node_rank, (node.address, self._store.port))
                client.set(_successor_key(node.node_rank), json.dumps(self._listener.getsockname()[:2]))
            self._ranks = {rank_env.rank for rank_env in ranks}
            self._leaders_port = port
            stack.callback(self._is_over.set)
            threading.Thread(target=self._guard, name="moe_ep-guard", daemon=True).start()
            workers = stack.enter_context(LocalWorkers(context, ranks, fn, args, port=port))
            takes_over = not node.leads
            while not node.leads:
                self._follow(workers, log)
                if node.is_over:
                    node.check()
                    return [], []
                self._succeed()
                port = self._store.port if node.leads else node.await_port()
                if not node.leads:
                    log.move(open_clients_store(node.master_addr, port))
                workers.port = self._leaders_port = port
            return self._lead(workers, takes_over=takes_over)

    def _lead(self, workers: LocalWorkers, *, takes_over: bool) -> tuple[list[Any], list[dict[str, Any]]]:
        """Leads the gang to its end."""
        node, store = self._node, self._store

        def start_rank(rank: int) -> None:
            if node.place_new(rank, outcomes.ranks) == node.node_rank:
                workers.start_joining(self._joining(rank))

        outcomes = elastic.ElasticOutcomes(
            store, None, self._config, workers.kill, start_rank, self._on_item, before=self._recoveries
        )
        node.record = lambda rank, failure: outcomes.add(
            rank, Outcome(None if failure else mailbox.take(store, mailbox.result_key(rank)), failure)
        )
        node.check_reach = lambda ranks: self._check_reach(outcomes.ranks, ranks)
        turned = time.monotonic()

        def look_at_clock() -> None:
            nonlocal turned
            before, turned = turned, time.monotonic()
            node.was_stopped |= turned - before > self._limit_s

        def poll(timeout_s: float) -> Iterator[tuple[int, Outcome]]:
            look_at_clock()
            yield from workers.outcomes(timeout_s, also=node.sockets)
            look_at_clock()
            node.receive()

        try:
            if takes_over:
                self._take_over(outcomes)
            results, recoveries = outcomes.run(poll)
        except MoeEpError as error:
            node.end(error)
            raise
        node.end()
        return results, recoveries

    def _follow(self, workers: LocalWorkers, log: MembershipLog) -> None:
        """Follows the leading agent until the gang has ended or that agent is lost."""
        import torch.distributed as dist

        node, epoch = self._node, log.first
        log.copy(epoch, self._store)
        for rank, outcome in self._outcomes.items():
            self._report(log.store, rank, outcome)
        while not node.is_over and not node.lost_leader:
            try:
                self._asked_at = math.inf
                found = dict(workers.outcomes(elastic.POLL_S, also=node.sockets))
                self._asked_at = time.monotonic()
                self._ranks -= found.keys()
                self._outcomes |= found
                for rank, outcome in found.items():
                    self._report(log.store, rank, outcome)
                while (after := log.next_of(epoch)) is not None:
                    epoch = after
                    log.copy(epoch, self._store)
                    for rank in epoch.removed:
                        workers.kill(rank)
                self._recoveries = elastic.recoveries_in(log.store)
                self._find_successors(log.store)
            except dist.DistError:
                self._asked_at = math.inf
                node.await_end()
            node.receive()
            while node.to_start:
                rank = node.to_start.pop()
                self._ranks.add(rank)
                workers.start_joining(self._joining(rank))

    def _guard(self) -> None:
        """Gives up a leading agent whose store does not answer."""
        from moe_ep.distributed.store import end_calls

        while not self._is_over.wait(elastic.POLL_S):
            if time.monotonic() - self._asked_at > self._limit_s:
                self._asked_at = math.inf
                self._node.give_up_leader()
                end_calls(self._node.master_addr, self._leaders_port)

    def _check_reach(self, present: Sequence[int], unreached: Sequence[int]) -> None:
        """Raises GangError if most ranks cannot be reached, of those that could be a deadline ago."""
        now = time.monotonic()
        self._unreached |= dict.fromkeys(set(unreached) & set(present), now)
        lost = {rank for rank, since in self._unreached.items() if now - since < env.DISPATCH_TIMEOUT_S.get()}
        ranks = lost.union(present)
        if 2 * len(lost) > len(ranks):
            raise _minority(ranks - lost, ranks)

    def _report(self, store: dist.Store, rank: int, outcome: Outcome) -> None:
        """Reports the outcome of a rank of this node to the leading agent."""
        if outcome.failure is None:
            mailbox.put(store, mailbox.result_key(rank), outcome.value)
        self._node.add(rank, outcome.failure)

    def _find_successors(self, store: dist.Store) -> None:
        if len(self._successors) < self._num_successors:
            for node in range(1, self._num_successors + 1):
                if store.check([_successor_key(node)]):
                    host, port = json.loads(store.get(_successor_key(node)))
                    self._successors[node] = str(host), int(port)

    def _succeed(self) -> None:
        """Makes the first remaining agent the leader: this one, or another one, which is told of this node."""
        node = self._node
        for other in sorted(self._successors):
            if other == node.node_rank:
                node.lead()
                return
            with contextlib.suppress(OSError):
                peer = Peer(socket.create_connection(self._successors[other], timeout=_SUCCEED_S), f"node {other}")
                peer.send(node_rank=node.node_rank, ranks=sorted(self._ranks | self._outcomes.keys()))
                node.follow(other, self._successors[other][0], peer)
                return
        raise GangError("the leading agent was lost before this one learned where the others are; start the job again")

    def _take_over(self, outcomes: elastic.ElasticOutcomes) -> None:
        """Begins to lead: gathers the other agents, and removes the ranks of those that do not come."""
        node = self._node
        nodes = dict.fromkeys(self._ranks | self._outcomes.keys(), node.node_rank) | self._gather()
        reached = nodes.keys() & set(outcomes.ranks)
        if node.leader_may_live and 2 * len(reached) <= len(outcomes.ranks):
            raise _minority(reached, outcomes.ranks)
        node.places |= nodes
        progress.say_plain(f"the agent of {socket.gethostname()} leads from here on")
        for rank in set(outcomes.ranks) - nodes.keys():
            cause = "the agent of its node ended silently: killed, or out of reach"
            outcomes.add(rank, Outcome(failure=WorkerFailure(rank=rank, node="unknown", cause=cause)))
        for rank, outcome in self._outcomes.items():
            outcomes.add(rank, outcome)
        outcomes.lead()
        node.announce(self._store.port)

    def _gather(self) -> dict[int, int]:
        """Waits for a moment for the agents that come after this one; the nodes of their ranks, by rank."""
        node, until = self._node, time.monotonic() + _SUCCEED_S
        expected = {other for other in self._successors if other > node.node_rank}
        nodes: dict[int, int] = {}
        arriving: list[Any] = []
        while expected - node.peers.keys() and time.monotonic() < until:
            for peer, message in _arrivals(self._listener, arriving, _RETRY_S):
                try:
                    other = int(message["node_rank"])
                    nodes |= {int(rank): other for rank in message["ranks"]}
                except (ValueError, KeyError, TypeError):
                    peer.close()
                else:
                    node.peers[other] = peer
        return nodes

    def _joining(self, rank: int) -> RankEnv:
        node = self._node
        return joining_rank_env(
            rank, self._device, source="torchrun", node_rank=node.node_rank, master_addr=node.master_addr
        )


def _minority(reached: Collection[int], ranks: Collection[int]) -> MinorityError:
    return MinorityError(
        f"this side has {len(reached)} of {len(ranks)} ranks and cannot reach the others, which may go on without it; "
        f"this side ends"
    )


def _successor_key(node_rank: int) -> str:
    return f"moe_ep/agent/{node_rank}"
