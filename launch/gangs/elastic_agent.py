"""The agent of a node in an elastic gang of several nodes: leads the gang, or follows and is ready to lead."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from moe_ep import env
from moe_ep.errors import GangError, MinorityError, MoeEpError
from moe_ep.launch.gangs import elastic, mailbox, progress
from moe_ep.launch.gangs.agents import RETRY_S, Node, Peer, arrivals
from moe_ep.launch.gangs.gang import OnItem, Outcome, WorkerFailure
from moe_ep.launch.gangs.local_gang import LocalWorkers, joining_rank_env
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.gangs.rendezvous import listen_at, listen_store, open_clients_store

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_ep.distributed.membership import MembershipLog
    from moe_ep.layer.elastic import ElasticConfig

# How long an agent that takes over waits for the others.
_SUCCEED_S = 3.0
# A leading agent that does not answer for this share of the deadline is out of reach. No worker makes a step meanwhile,
# and each waits for the others no longer than the deadline.
_SILENT = 0.5


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
                workers.start(self._joining(rank))

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
                workers.start(self._joining(rank))

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
        """Makes the first remaining agent the leader: this one, or another one, which is told of this node.

        Raises:
            GangError: the leading agent was lost before all agents knew each other.
        """
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
            for peer, told in arrivals(self._listener, arriving, RETRY_S):
                try:
                    other = int(told["node_rank"])
                    nodes |= {int(rank): other for rank in told["ranks"]}
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
