"""Finds the failed ranks of a group, and ends the waits for them.

Every wait of the host for another rank goes through a `FailureDetector`, which ends it with an error that names ranks:

- A process that has ended is noticed within a second or two (`moe_ep.distributed.liveness`).
- Error broadcast: a rank that cannot take part in a step leaves the reason in the rendezvous store. Its peers read it
  and end their waits, unless that rank takes part again within `_REFUSAL_GRACE_S` of a wait. A peer that has ended its
  wait leaves word of that in turn, for ranks that come to the step later.
- At a deadline, and where connections broke off, a rank asks all others through the store whether they wait in a step
  too, or live, which a thread of theirs answers. Ranks that do not answer have failed; if it was a deadline, so have
  those that live and are in no step. The others are told and end their steps. The first rank that knows says so for
  all, so that every rank raises the same verdict.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.distributed.liveness import Processes
from moe_ep.distributed.store import LOOK_S, ask_store, listen_to_store, name_in_store, rendezvous_store
from moe_ep.errors import DispatchTimeoutError, MoeEpError, RanksChangedError, rank_list

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Limits for the ranks' answers, and for the store in addition.
ANSWER_S, _STORE_S = 3.0, 3.0
# The most that `FailureDetector.verdict` takes.
VERDICT_S = ANSWER_S + _STORE_S
# The process that serves the store may have ended.
_STORE_OF_THE_DEAD_S = 1.0
_POLL_S = 0.05
# A wait goes on this long after a rank has ended: what it had sent may still arrive.
_DEATH_GRACE_S = 1.0
# A rank that refused its batch may return with another one within this time of every wait: ranks that failed in one
# step and go on do not all reach the next one at the same moment.
_REFUSAL_GRACE_S = 3.0
# Begins the reason of a rank that left a step because of another's reason, which follows.
_GAVE_UP = "gave up its step: "
# Transports may time out slightly early; from 90 % of the deadline on a wait counts as timed out.
_SURELY_IN_TIME = 0.9
# A wait yields the processor for this long, then sleeps for a fiftieth of the time it has waited, within these bounds.
_YIELD_S = 2e-3
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-2
# Why ranks are asked, and what they answer.
_LATE, _BROKEN = "late", "broken"
_WAITS, _LIVES = "waits", "lives"

_detectors: WeakKeyDictionary[dist.ProcessGroup, FailureDetector] = WeakKeyDictionary()
# Those of groups, and those that others have made for connections of their own.
_all_detectors: WeakSet[FailureDetector] = WeakSet()


def comes_within(seconds: float, has_come: Callable[[], bool]) -> bool:
    """Returns True as soon as `has_come()` does, and False if it has not after this many seconds."""
    started = time.monotonic()
    while not has_come():
        waited = time.monotonic() - started
        if waited > seconds:
            return False
        time.sleep(0 if waited < _YIELD_S else min(max(waited / 50, _SHORTEST_S), _LONGEST_S))
    return True


def timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout of the group's transports, which groups of some of its ranks should have too."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(process_group).split(",")]
    options = [getattr(process_group._get_backend(torch.device(device)), "options", None) for device in devices]
    return min((option._timeout for option in options if option is not None), default=None)


def deadline_of(process_group: dist.ProcessGroup) -> float:
    """Seconds that a step of the ranks may take: MOE_EP_DISPATCH_TIMEOUT_S, or the group's timeout if shorter."""
    of_group = timeout_of(process_group)
    return min(env.DISPATCH_TIMEOUT_S.get(), math.inf if of_group is None else of_group.total_seconds())


def end_all_waits(why: str) -> None:
    """Ends this process's waits for other ranks, now and later, in all groups that there are; no rank is asked."""
    for detector in list(_all_detectors):
        detector.end_waits(why)


class Verdict(NamedTuple):
    """The ranks that failed, as known after a failed wait.

    Attributes:
        late: a rank has waited until its deadline; otherwise connections broke off.
        silent: ranks that did not answer.
        elsewhere: ranks that live and were in no step.
        dead: ranks whose processes have ended; if there are any, the others were not asked.
    """

    late: bool
    silent: list[int]
    elsewhere: list[int]
    dead: tuple[int, ...] = ()

    @property
    def failed_ranks(self) -> list[int]:
        if self.dead:
            return list(self.dead)
        return sorted(self.silent + self.elsewhere) if self.late else self.silent

    def __str__(self) -> str:
        """Completes "the step did not finish: ..."."""
        if self.dead:
            return f"{rank_list(self.dead)} died ({'its process' if len(self.dead) == 1 else 'their processes'} ended)"
        parts = [f"{rank_list(self.silent)} did not answer (dead, stuck or late)"] if self.silent else []
        if self.elsewhere and (self.late or not self.silent):
            parts.append(f"{rank_list(self.elsewhere)} did not take part (alive, but late or elsewhere)")
        if not self.late and not self.silent:
            parts.append("connections broke off")
        return (
            " and ".join(parts)
            or "every rank is alive and waits; see that all make their calls in one order, or raise the timeout"
        )


class WaitsOnDevice(Protocol):
    """Waits of kernels for other ranks, which this process can end."""

    def end(self, why: str) -> None:
        """Ends them for good; called in any thread, and maybe again."""


class FailureDetector:
    """Watches the ranks of a group, and this process's waits for them.

    As a context manager it marks the start of a collective step (`__enter__`).

    Args:
        prefix: of the keys in the store; the same on every rank, and never used for other ranks or a second detector.
        members: the group's ranks in the default group; None if their processes are not known.

    Attributes:
        epoch: how often ranks were excluded.
        has_ended: a rank has asked who failed. The group's steps have come to an end, and no rank need wait any longer.
        logs_refusals: log what other ranks refuse, for waits on the device, which the host cannot end.
    """

    def __init__(self, prefix: str, rank: int, size: int, members: Sequence[int] | None = None) -> None:
        self._name, self.rank, self.size = prefix, rank, size
        self._members = tuple(members or ())
        self._processes = Processes.of_job() if members and size > 1 else None
        self.logs_refusals = False
        self._ended_by = ""
        self._waits_on_device: WeakSet[WaitsOnDevice] = WeakSet()
        _all_detectors.add(self)
        self._begin(epoch=0, live=range(size))
        if size > 1:
            self.dead()  # from now on, processes are looked for
            listen_to_store(self)

    def _begin(self, epoch: int, live: Sequence[int]) -> None:
        self.epoch, self.live = epoch, list(live)
        self.has_ended = self._late = False
        self._prefix = f"{self._name}/{epoch}"
        self._waiting: list[None] = []  # one for each wait, in whatever thread
        self._refusals: dict[int, tuple[str, float]] = {}
        self._dead_since: dict[int, float] = {}

    def exclude(self, ranks: Collection[int]) -> None:
        """Goes on without these ranks of the group, in a new epoch; all others call it, when none of them waits."""
        self._begin(self.epoch + 1, [rank for rank in self.live if rank not in ranks])

    def end_waits(self, why: str) -> None:
        """Ends the waits for these ranks for good, with a `RanksChangedError`."""
        self._ended_by, self.has_ended = why, True
        for waits in list(self._waits_on_device):
            waits.end(why)

    def check(self) -> None:
        """Raises RanksChangedError once the waits for these ranks were ended; what kernels left is of no meaning."""
        if self._ended_by:
            raise RanksChangedError(self._ended_by)

    def ends_also(self, waits: WaitsOnDevice) -> None:
        """Lets `end_waits` end these waits too."""
        self._waits_on_device.add(waits)
        if self._ended_by:
            waits.end(self._ended_by)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> FailureDetector:
        """The detector of a process group."""
        if group not in _detectors:
            prefix = f"moe_ep/failures/{name_in_store(group)}"
            members = dist.get_process_group_ranks(group)
            _detectors[group] = cls(prefix, dist.get_rank(group), dist.get_world_size(group), members)
        return _detectors[group]

    # Waits.

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Surrounds a wait for other ranks that has this deadline and raises RuntimeError."""
        started, waiting = time.monotonic(), self._waiting
        waiting.append(None)
        try:
            yield
        except MoeEpError:  # an error of this rank's own, which has nothing to do with others
            raise
        except RuntimeError:
            waiting.append(None)  # stays: the wait failed, and this rank is about to ask for a verdict
            self._late |= not self.has_ended and time.monotonic() - started > _SURELY_IN_TIME * seconds
            raise
        finally:
            waiting.pop()

    def wait_for(self, work: dist.Work, seconds: float) -> None:
        """Waits for a collective step on the CPU; RuntimeError if it fails or is late, or if a rank has failed."""
        started = time.monotonic()
        with self.waiting(seconds):
            while True:
                left = started + seconds - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(min(left, _POLL_S), 1e-3)))
                    return
                except RuntimeError:
                    if not work.is_completed() and (left <= _POLL_S or self.is_hopeless(started)):
                        raise
                    if work.is_completed():
                        work.wait(timedelta(seconds=LOOK_S))  # raises what it failed with
                        return

    def wait_until(
        self, seconds: float, has_come: Callable[[], bool], missing: Callable[[], Collection[int]] | None = None
    ) -> None:
        """Waits on the host; RuntimeError if it does not come before the deadline, or if a rank has failed.

        Args:
            missing: the ranks that are still waited for; None if that is not known.
        """
        started = time.monotonic()
        look = started + _POLL_S

        def is_over() -> bool:
            nonlocal look
            if has_come() or self.has_ended:
                return True
            if time.monotonic() < look:
                return False
            look = time.monotonic() + _POLL_S
            return self.is_hopeless(started, missing)

        with self.waiting(seconds):
            if not comes_within(seconds, is_over) or not has_come():
                raise RuntimeError("a rank failed" if self.is_hopeless(started, missing) else "the deadline has passed")

    def is_hopeless(self, started: float = -math.inf, missing: Callable[[], Collection[int]] | None = None) -> bool:
        """Whether a wait since `started` for the ranks that are `missing` (None: for any) should end before its
        deadline."""
        if self.has_ended:
            return True
        self._note_deaths()
        now = time.monotonic()
        dead = {rank for rank, since in self._dead_since.items() if now - since > _DEATH_GRACE_S}
        refusing = {rank for rank, (_, since) in self._refusals.items() if now - max(since, started) > _REFUSAL_GRACE_S}
        if missing is not None and (dead or refusing):
            waited_for = set(missing())
            dead, refusing = dead & waited_for, refusing & waited_for
        if dead or not refusing:
            return bool(dead)
        # The rank may have come back since the thread looked, which on a busy machine is long ago.
        with suppress(RuntimeError):
            return not refusing.isdisjoint(self.refusals())
        return False

    def _note_deaths(self) -> None:
        """From now on, the time since a death is known."""
        now = time.monotonic()
        for rank in self.dead():
            self._dead_since.setdefault(rank, now)

    # Error broadcast.

    def __enter__(self) -> None:
        """A block that starts a collective step: what is refused in it with a ValueError is told to the peers, and
        otherwise this rank takes part (again)."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.take_part()
        elif isinstance(error, ValueError):
            self._refuse(f"refused its batch: {error}")

    def report(self, error: BaseException) -> None:
        """Tells the peers that this rank has failed and will not come to the step that they wait for."""
        if not isinstance(error, DispatchTimeoutError) and self._key("refused", self.rank) not in _standing:
            self._refuse(f"failed: {type(error).__name__}: {error}")

    def give_up(self, refusals: Mapping[int, str]) -> tuple[str, list[int]]:
        """Tells the peers that this rank has left its step because of these refusals.

        Returns:
            The reasons as text, and the ranks to name: not those that gave up because of others that are among them.
        """
        least = min(reason.count(_GAVE_UP) for reason in refusals.values())
        first = {rank: reason for rank, reason in refusals.items() if reason.count(_GAVE_UP) == least}
        reasons = "; ".join(f"rank {rank} {reason}" for rank, reason in first.items())
        # A death is noticed by all, and may be of the process that serves the store.
        if not self.dead() and self._key("refused", self.rank) not in _standing:
            self._refuse(f"{_GAVE_UP}{reasons}")
        return reasons, list(first)

    def _refuse(self, reason: str) -> None:
        if self.size == 1:
            return
        key = self._key("refused", self.rank)
        _standing.add(key)
        try:
            rendezvous_store().set(key, reason)
            rendezvous_store().set(f"{self._prefix}/refusals", "")
        except RuntimeError as error:
            logger.error("rank %d could not tell the others that it failed: %s", self.rank, error)

    def take_part(self) -> None:
        """Withdraws what this rank has refused."""
        if _standing and (key := self._key("refused", self.rank)) in _standing:
            _standing.remove(key)
            with suppress(RuntimeError):
                rendezvous_store().set(key, "")

    def refusals(self) -> dict[int, str]:
        """Why other ranks do not take part at present; the reasons complete "rank 1 ...".

        Raises:
            RuntimeError: the store cannot be reached, and no process is known to have ended.
        """
        try:
            return self._ask_store(self._read_refusals, _STORE_OF_THE_DEAD_S if self.dead() else _STORE_S)
        except RuntimeError:
            if not self.dead():
                raise
            return {rank: reason for rank, (reason, _) in self._refusals.items()}

    def _read_refusals(self, store: dist.Store) -> dict[int, str]:
        if not store.check([f"{self._prefix}/refusals"]):
            return {}
        keys = {rank: self._key("refused", rank) for rank in self.live if rank != self.rank}
        found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        return {rank: reason for rank, reason in found.items() if reason}

    # The verdict.

    def dead(self) -> list[int]:
        """Ranks of the group whose processes have ended, or whose machines are out of reach."""
        if self._processes is None:
            return []
        ended = self._processes.ended(self._members)
        return [rank for rank in self.live if self._members[rank] in ended]

    def unreachable(self) -> list[int]:
        """Those of `dead` whose machines are out of reach: the processes may live."""
        if self._processes is None:
            return []
        unreachable = self._processes.unreachable()
        return [rank for rank in self.live if self._members[rank] in unreachable]

    def verdict(self) -> Verdict:
        """After a wait that failed: which ranks failed; the same on every rank.

        Raises:
            RuntimeError: the store cannot be reached, and no process is known to have ended.
        """
        if not self.dead():
            try:
                return self._ask_store(self._ask, VERDICT_S)
            except RuntimeError:
                if not self.dead():
                    raise
        self.has_ended = True
        own = Verdict(self._late, [], [], tuple(self.dead()))
        with suppress(RuntimeError):
            return self._ask_store(lambda store: self._settle(store, own), _STORE_OF_THE_DEAD_S)
        return own

    def _ask_store(self, question: Callable[[dist.Store], T], limit_s: float) -> T:
        return ask_store(question, limit_s, lambda: self._ended_by != "")

    def error(self, story: str, cause: object) -> DispatchTimeoutError:
        """The error for a wait that failed, with the failed ranks where they are known."""
        try:
            self.check()
            refusals = self.refusals()
            if refusals:
                reasons, named = self.give_up(refusals)
                return DispatchTimeoutError(f"{story}: {reasons}", named)
            verdict = self.verdict()
        except RuntimeError as error:
            if self._ended_by:
                return RanksChangedError(f"{story}: {self._ended_by}")
            return DispatchTimeoutError(f"{story}, and the ranks' store cannot be reached ({error}): {cause}")
        return DispatchTimeoutError(f"{story}: {verdict}: {cause}", verdict.failed_ranks)

    def listen(self, store: dist.Store) -> None:
        """Answers when a rank asks who failed, and reads what other ranks refuse."""
        if self.has_ended:
            return
        if self._processes is not None:
            self._note_deaths()
        if store.check([f"{self._prefix}/asked"]):
            store.set(self._key("answer", self.rank), _WAITS if self._waiting else _LIVES)
            self.has_ended = True
        found = self._read_refusals(store)
        now, known = time.monotonic(), self._refusals
        self._refusals = {
            rank: known[rank] if rank in known and known[rank][0] == reason else (reason, now)
            for rank, reason in found.items()
        }
        for rank in self._refusals.keys() - known.keys() if self.logs_refusals else ():
            logger.error("EP rank %d %s; this rank will wait for it in vain", rank, found[rank])

    def _ask(self, store: dist.Store) -> Verdict:
        asked = f"{self._prefix}/asked"
        store.set(self._key("answer", self.rank), _WAITS)
        if self._late:
            store.set(asked, _LATE)
        else:
            store.compare_set(asked, "", _BROKEN)
        self.has_ended = True
        deadline = time.monotonic() + ANSWER_S
        while not store.check([f"{self._prefix}/verdict"]):
            self.check()
            answers = {rank: self._answer(store, rank) for rank in self.live}
            dead = self.dead()
            if dead or time.monotonic() > deadline or all(answer == _WAITS for answer in answers.values()):
                is_late = store.get(asked).decode() == _LATE
                silent, elsewhere = (
                    [rank for rank, answer in answers.items() if answer == kind] for kind in ("", _LIVES)
                )
                return self._settle(store, Verdict(is_late, silent, elsewhere, tuple(dead)))
            time.sleep(_POLL_S)
        return self._settle(store, None)

    def _settle(self, store: dist.Store, own: Verdict | None) -> Verdict:
        """The first verdict of any rank."""
        key = f"{self._prefix}/verdict"
        found = store.get(key) if own is None else store.compare_set(key, "", json.dumps(own))
        if own is not None:
            store.compare_set(f"{self._prefix}/asked", "", _BROKEN)
        late, silent, elsewhere, dead = json.loads(found.decode())
        return Verdict(late, silent, elsewhere, tuple(dead))

    def _answer(self, store: dist.Store, rank: int) -> str:
        key = self._key("answer", rank)
        return store.get(key).decode() if store.check([key]) else ""

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"


# Keys of this process's present refusals. A backend of a group that takes part again withdraws the group's.
_standing: set[str] = set()
