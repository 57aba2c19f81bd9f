"""The launcher's side of an elastic gang: its members, how it ends, and an account of each loss.

The launcher serves the store, so that any rank may die. It removes a rank as soon as its process ends
(`moe_ep.distributed.membership` says who else may), ends the processes of ranks that others have removed, and reports
changes on stderr. The gang ends when every remaining rank has answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from moe_ep.errors import GangError, rank_list
from moe_ep.launch.gangs import mailbox, progress
from moe_ep.launch.gangs.control import ControlServer, Request
from moe_ep.launch.gangs.gang import OnItem, Outcome, WorkerFailure, first_cause, gang_error

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_ep.distributed.membership import Epoch
    from moe_ep.layer.elastic import ElasticConfig

# How often a launcher reads the store.
POLL_S = 0.05
# Limit for the other ranks to prepare for a rank's leaving.
_PREPARE_S = 60.0
_LEFT = "was told to leave"
_RECOVERIES = "moe_ep/gang/recoveries"
# Lost ranks are replaced at most this many times for each initial rank: if all replacements die, the cause is not the
# machine.
_REPLACEMENTS_PER_RANK = 3


def recoveries_in(store: dist.Store) -> list[dict[str, Any]]:
    """The account of losses so far, which the launcher keeps in its store."""
    return json.loads(store.get(_RECOVERIES)) if store.check([_RECOVERIES]) else []


def say_started(rank: int, pid: int, host: str) -> None:
    """Reports the process of a rank that starts or joins, on stderr."""
    progress.say_plain(f"rank {rank}: pid {pid} on {host}")


class ElasticOutcomes:
    """The members of a gang and their outcomes.

    Args:
        store: the gang's store, which this process serves.
        ranks: the initial ranks; None if this launcher takes over from a lost one.
        end_process: ends the process of a rank, if there is one.
        start_rank: starts a worker with a new rank.
        on_item: gets the items of all ranks, including lost ones.
        replaces: whether a new rank is started for each lost one.
        before: the recoveries of the lost launcher.

    Attributes:
        recoveries: an account of each loss, in order; seconds count from the rank's last sign of life.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Iterable[int] | None,
        config: ElasticConfig,
        end_process: Callable[[int], None],
        start_rank: Callable[[int], None],
        on_item: OnItem,
        *,
        replaces: bool = True,
        before: Iterable[dict[str, Any]] = (),
    ) -> None:
        from moe_ep.distributed.membership import MembershipLog

        self._store, self._log = store, MembershipLog(store, None if ranks is None else list(ranks))
        self._config, self._on_item = config, on_item
        self._end_process, self._start_rank = end_process, start_rank
        self._items = mailbox.ItemReader(store)
        self._epoch = self._log.latest()
        # The last epochs in which the ranks began their first step, and held all experts.
        self._served = self._covered = self._epoch.number - 1
        self._values: dict[int, Any] = {}
        self._failures: list[WorkerFailure] = []
        self.recoveries: list[dict[str, Any]] = list(before)
        # Losses after which the others do not serve yet, and those after which they do but do not hold all experts
        # yet, each with the time of the last sign of life.
        self._unserved: list[tuple[dict[str, Any], float]] = [
            (loss, time.time() - loss["detected_s"]) for loss in self.recoveries if "serving_s" not in loss
        ]
        self._uncovered: list[tuple[dict[str, Any], float]] = []
        self._replacements = _REPLACEMENTS_PER_RANK * len(self._log.first.ranks) if replaces else 0
        self._next_rank = 0
        # Requests by the rank that joins (None if it replaces a lost one) or leaves, and the leaving rank that the
        # others prepare for, with the number of the attempt and a time limit.
        self._joining: dict[int, Request | None] = {}
        self._leave_requests: dict[int, list[Request]] = {}
        self._leaving: tuple[int, int, float] | None = None

    def run(self, poll: Callable[[float], Iterable[tuple[int, Outcome]]]) -> tuple[list[Any], list[dict[str, Any]]]:
        """Takes outcomes, and requests to join and leave, until every remaining rank has answered.

        Args:
            poll: waits for at most this many seconds, and returns the outcomes that have arrived, by rank.

        Returns:
            The values of the remaining ranks, in rank order, and the recoveries.
        """
        with ControlServer() as control:
            progress.say_plain(f"control: {control.address}")
            while not set(self._log.latest().ranks) <= self._values.keys():
                for rank, outcome in poll(POLL_S):
                    self.add(rank, outcome)
                self._look()
                for request in control.requests():
                    self._handle(request)
            self._look()
        for loss, seen in self._unserved:
            loss["serving_s"] = max(time.time() - seen, 0.0)
        for loss, _ in self._unserved + self._uncovered:  # the work ended before
            loss |= {"covered_s": None, "experts_read": 0, "bytes_read": 0}
        return [self._values[rank] for rank in self._epoch.ranks], self.recoveries

    def add(self, rank: int, outcome: Outcome) -> None:
        """Records a rank's outcome, and removes the rank if it failed; raises the gang's error if that is final."""
        if outcome.failure is not None and rank in self._joining:
            if (request := self._joining.pop(rank)) is None:
                self._start_replacement()
            else:
                request.answer(error=f"rank {rank} could not join: {outcome.failure.cause}")
        if rank in self._values or rank not in self._log.latest().ranks:
            return
        if outcome.failure is None:
            self._values[rank] = outcome.value
            self._log.finish()
            return
        self._failures.append(outcome.failure)
        if outcome.failure.refusal or outcome.failure.is_final:
            raise gang_error(outcome.failure)
        self._log.propose(remove={rank: outcome.failure.cause})

    def _look(self) -> None:
        """Reads changes from the store, reports them, and passes items on; GangError if too few ranks remain."""
        for item in self._items.read(sorted(self._log.all_ranks())):
            self._on_item(item)
        while (epoch := self._log.next_of(self._epoch)) is not None:
            self._epoch = epoch
            self._note(epoch)
            self._share()
        self._let_leave()
        if self._covered < self._epoch.number and (reports := self._log.reports(self._epoch)) is not None:
            if self._served < self._epoch.number:
                self._served = self._epoch.number
                self._serves(reports)
            if all(report["covered_at"] for report in reports):
                self._covered = self._epoch.number
                self._covers(reports)
                self._share()

    def lead(self) -> None:
        """Makes the members go on in this launcher's store, in place of a lost one."""
        self._share()
        self._log.lead()

    def _share(self) -> None:
        """Writes what a launcher that takes over needs to know."""
        self._store.set(_RECOVERIES, json.dumps(self.recoveries))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The present ranks."""
        return self._epoch.ranks

    def _handle(self, request: Request) -> None:
        """Begins what a request asks for."""
        if request.kind == "leave":
            if request.rank not in self._epoch.ranks:
                request.answer(error=f"the gang has no rank {request.rank}; it has {rank_list(self._epoch.ranks)}")
                return
            self._leave_requests.setdefault(request.rank, []).append(request)
            self._log.ask_to_leave(request.rank)
        elif not self._join(request):
            request.answer(
                error=f"the gang has {len(self._epoch.ranks)} ranks and --max-ranks is {self._most}; start it with more"
            )

    @property
    def _most(self) -> int:
        return self._config.max_ranks or len(self._log.first.ranks)

    def _join(self, request: Request | None) -> bool:
        """Starts a new rank, unless the gang has its maximum."""
        if len(self._epoch.ranks) + len(self._joining) >= self._most:
            return False
        rank = self._next_rank = max(self._next_rank, *self._log.all_ranks()) + 1
        self._joining[rank] = request
        self._start_rank(rank)
        return True

    def _start_replacement(self) -> None:
        """Starts a rank in place of one that was lost, or of a replacement that could not join."""
        if self._replacements and self._join(None):
            self._replacements -= 1

    def _let_leave(self) -> None:
        """Removes leaving ranks one at a time, each when the others have read its experts."""
        if self._leaving is None:
            for rank in self._log.asked_to_leave()[:1]:
                left = len(self._epoch.ranks) - 1
                if left < self._config.min_ranks:
                    self._keep(
                        rank, f"{progress.workers(left)} would be left and --min-ranks is {self._config.min_ranks}"
                    )
                else:
                    self._leaving = rank, self._log.let_leave(rank), time.monotonic() + _PREPARE_S
            return
        rank, attempt, until = self._leaving
        is_present = rank in self._epoch.ranks
        problems = self._log.ready_without(attempt) if is_present else []
        if problems is None and time.monotonic() < until:
            return
        self._leaving = None
        self._log.end_leaving()
        if not is_present:
            return
        if problem := next(filter(None, problems or ()), ""):
            self._keep(rank, problem)
        else:
            self._log.propose(remove={rank: _LEFT})

    def _keep(self, rank: int, why: str) -> None:
        """Refuses a rank's request to leave."""
        self._log.withdraw(rank)
        progress.say(f"rank {rank} does not leave: {why}")
        for request in self._leave_requests.pop(rank, ()):
            request.answer(error=f"rank {rank} does not leave: {why}")

    def _note(self, epoch: Epoch) -> None:
        size = progress.workers(len(epoch.ranks))
        for rank in epoch.admitted:
            if (request := self._joining.pop(rank, None)) is not None:
                request.answer(f"rank {rank} joined: {size}")
        for rank, cause in epoch.removed.items():
            self._end_process(rank)
            for leaving in self._leave_requests.pop(rank, ()):
                leaving.answer(f"rank {rank} left: {size}")
            seen = epoch.last_seen.get(rank, epoch.decided_at)
            loss = {"rank": rank, "cause": cause, "detected_s": max(epoch.decided_at - seen, 0.0)}
            self.recoveries.append(loss)
            self._unserved.append((loss, seen))
        if len(epoch.ranks) < self._config.min_ranks:
            lost = "; ".join(f"rank {loss['rank']}: {loss['cause']}" for loss in self.recoveries)
            if not self._failures or self._config.min_ranks > 1:
                raise GangError(f"{size} left, fewer than --min-ranks ({self._config.min_ranks}): {lost}")
            raise gang_error(first_cause(self._failures))
        for cause in epoch.removed.values():
            if cause != _LEFT:
                self._start_replacement()

    def _serves(self, reports: list[dict[str, float]]) -> None:
        """Completes the account of the losses after which the ranks serve again."""
        progress.say_plain(f"serving: {len(self._epoch.ranks)} ranks")
        serving_at = max(report["serving_at"] for report in reports)
        for loss, seen in self._unserved:
            loss["serving_s"] = max(serving_at - seen, 0.0)
            progress.say(
                f"rank {loss['rank']} is out ({loss['cause']}); {progress.workers(len(self._epoch.ranks))} served "
                f"again after {loss['serving_s']:.2f} s"
            )
        self._uncovered += self._unserved
        self._unserved.clear()

    def _covers(self, reports: list[dict[str, float]]) -> None:
        """Completes the account of the losses after which the ranks hold all experts again."""
        experts, size = (int(sum(report[key] for report in reports)) for key in ("experts_read", "bytes_read"))
        covered_at = max(report["covered_at"] for report in reports)
        for loss, seen in self._uncovered:
            loss["covered_s"] = max(covered_at - seen, 0.0)
            loss["experts_read"], loss["bytes_read"] = experts, size
            if experts:
                progress.say(
                    f"all experts were held again after {loss['covered_s']:.2f} s: {experts} were read "
                    f"({size / 2**20:.1f} MiB)"
                )
            experts = size = 0  # the first of several losses counts them for all
        self._uncovered.clear()
