"""Who is at fault where a collective step does not finish: ranks call a roll, over the store of the job.

Most ranks whose step fails wait for others that wait too. So a rank whose step fails calls the roll, and all others
answer, by a thread if need be: that they wait in a step as well, or that they live. Those that wait are told, and end
their steps. Ranks that do not answer are at fault. Where a deadline has passed, those that live and have not come to a
step are as well; where connections broke off before, they may have been on their way. The first rank that knows says so
for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_ep.distributed.job_store import LOOK_S, ask_store, listen_to_store, name_in_store
from moe_ep.distributed.waiting import comes_within
from moe_ep.errors import MoeEpError, rank_list

# How long ranks have to answer, and how long the store may take beside that.
_ROLL_S, _STORE_S = 3.0, 3.0
# The most that `Roll.call` takes.
CALL_S = _ROLL_S + _STORE_S
_POLL_S = 0.05
# Deadlines of transports are not to the millisecond.
_SURELY_IN_TIME = 0.9
# Why the roll was called, and what ranks answer.
_LATE, _BROKEN = "late", "broken"
_WAITS, _LIVES = "waits", "lives"

_rolls: WeakKeyDictionary[dist.ProcessGroup, Roll] = WeakKeyDictionary()


class Verdict(NamedTuple):
    """What the roll has shown.

    Attributes:
        late: a rank has waited until its deadline; otherwise connections broke off.
        silent: ranks that did not answer.
        elsewhere: ranks that live and were in no step.
    """

    late: bool
    silent: list[int]
    elsewhere: list[int]

    @property
    def at_fault(self) -> list[int]:
        return sorted(self.silent + self.elsewhere) if self.late else self.silent

    def __str__(self) -> str:
        """Completes "the step did not finish: ..."."""
        parts = [f"{rank_list(self.silent)} did not answer (dead, stuck or late)"] if self.silent else []
        if self.elsewhere and (self.late or not self.silent):
            parts.append(f"{rank_list(self.elsewhere)} did not take part (alive, but late or elsewhere)")
        if not self.late and not self.silent:
            parts.append("connections broke off")
        return (
            " and ".join(parts)
            or "every rank is alive and waits; see that all make their calls in one order, or raise the timeout"
        )


class Roll:
    """The ranks of a group, and what this one knows of its steps.

    Args:
        prefix: of the keys in the store; the same on every rank, and never used for other ranks or a second roll.
        rank, size: of this process in the group.

    Attributes:
        rank, size: as given.
        is_called: a rank has called the roll. This one need not wait any longer: the group's steps have come to an end.
    """

    def __init__(self, prefix: str, rank: int, size: int) -> None:
        self._prefix, self.rank, self.size = prefix, rank, size
        self.is_called = False
        self._waiting: list[None] = []  # one for each wait, in whatever thread
        self._late = False
        if size > 1:
            listen_to_store(self)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Roll:
        """The roll of a process group."""
        if group not in _rolls:
            prefix = f"moe_ep/roll/{name_in_store(group)}"
            _rolls[group] = cls(prefix, dist.get_rank(group), dist.get_world_size(group))
        return _rolls[group]

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Around a wait for other ranks that has this deadline and raises RuntimeError."""
        started = time.monotonic()
        self._waiting.append(None)
        try:
            yield
        except MoeEpError:  # a rank's own words, for which nobody is waited
            raise
        except RuntimeError:
            self._waiting.append(None)  # stays: it has waited in vain, and is on its way to call the roll
            self._late |= not self.is_called and time.monotonic() - started > _SURELY_IN_TIME * seconds
            raise
        finally:
            self._waiting.pop()

    def wait_for(self, work: dist.Work, seconds: float) -> None:
        """Waits for a collective step on the CPU; RuntimeError if it fails or is late, or the roll is called."""
        deadline = time.monotonic() + seconds
        with self.waiting(seconds):
            while True:
                left = deadline - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(min(left, LOOK_S), 1e-3)))
                    return
                except RuntimeError:
                    if not work.is_completed() and (self.is_called or left <= LOOK_S):
                        raise
                    if work.is_completed():
                        work.wait(timedelta(seconds=LOOK_S))  # raises what it failed with
                        return

    def comes(self, seconds: float, has_come: Callable[[], bool]) -> None:
        """Waits on the host; RuntimeError where it does not come before the deadline or the roll is called."""
        with self.waiting(seconds):
            if not comes_within(seconds, lambda: has_come() or self.is_called) or not has_come():
                raise RuntimeError("other ranks gave up" if self.is_called else "the deadline has passed")

    def call(self) -> Verdict:
        """After a wait that failed; the same on every rank.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        return ask_store(self._call, CALL_S)

    def listen(self, store: dist.Store) -> None:
        """Answers once the roll is called."""
        if not self.is_called and store.check([f"{self._prefix}/roll"]):
            store.set(f"{self._prefix}/answer/{self.rank}", _WAITS if self._waiting else _LIVES)
            self.is_called = True

    def _call(self, store: dist.Store) -> Verdict:
        roll, verdict = f"{self._prefix}/roll", f"{self._prefix}/verdict"
        store.set(f"{self._prefix}/answer/{self.rank}", _WAITS)
        if self._late:
            store.set(roll, _LATE)
        else:
            store.compare_set(roll, "", _BROKEN)
        self.is_called = True
        deadline = time.monotonic() + _ROLL_S
        found = ""
        while not found:
            if store.check([verdict]):
                found = store.get(verdict).decode()
                break
            answers = [self._answer(store, rank) for rank in range(self.size)]
            if time.monotonic() > deadline or all(answer == _WAITS for answer in answers):
                is_late = store.get(roll).decode() == _LATE
                mine = json.dumps([is_late, *([r for r, a in enumerate(answers) if a == w] for w in ("", _LIVES))])
                found = store.compare_set(verdict, "", mine).decode()
            else:
                time.sleep(_POLL_S)
        return Verdict(*json.loads(found))

    def _answer(self, store: dist.Store, rank: int) -> str:
        key = f"{self._prefix}/answer/{rank}"
        return store.get(key).decode() if store.check([key]) else ""
