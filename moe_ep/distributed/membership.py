"""The present ranks of an elastic gang: a sequence of epochs in a store, and new process groups for each epoch.

    membership = Membership(store, rank)         # in a worker; no rank serves the store, so that any rank may die
    membership.follow(callback)                  # callback(membership): rebuilds what depends on the ranks
    membership.serve(work)                       # meets the others, makes the process group, runs the callbacks, then
                                                 # work(): collective steps; all of it again when the ranks change

Who decides. An epoch is a numbered set of ranks. `MembershipLog.propose` writes the next one with a compare-and-set, so
the first proposal wins and all processes see the same sequence. A launcher proposes a rank's removal as soon as its
process ends; that needs no majority. Ranks that cannot be reached are removed by `Membership.settle` after a deadline,
if the others are at least half of the epoch. Only a side that reaches the store can propose.

If the store is lost. A launcher of several hosts has a standby store on each (`announce_standby`), with a copy of the
epochs. One of them is chosen (`lead`). Members that cannot reach their store look for it and move there: each writes
again what it wrote to the lost store, in callbacks of `on_move`, and settles anew. What lost members wrote is lost. A
store that does not answer counts as lost once another one is chosen.

What a launcher does (`moe_ep.launch.gangs.elastic`): it serves the store, writes epoch 0, gives every worker a
`Membership`, proposes removals and admissions through a `MembershipLog`, and ends the processes of removed ranks.

The order of steps in `settle`. (1) A thread of every member sees the new epoch within `_POLL_S` and ends all waits for
other ranks with `RanksChangedError`, and aborts NCCL's communicators, whose kernels wait too. (2) The groups of the old
epoch are abandoned: never used again, and freed by a thread, which waits for the steps that gloo's threads are in: a
peer's death or its own freeing ends them. CUDA graphs are freed before (`before_change`), since NCCL waits for the
graphs that have its kernels. (3) The members of the new epoch meet in the store. (4) They make the default process
group anew, under a prefix of the store of its own. (5) The callbacks run in the order in which they were added; each
may make collective calls. Where another change comes meanwhile, all of it begins again with the newest epoch.

A rank keeps its number for good, and a rank that joins gets a new one. In the process group of an epoch, members are
numbered in the order of their ranks: `Membership.ep_rank` of `Membership.ep_size`.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.profiler import record_function

from moe_ep import env
from moe_ep.distributed.failure_detection import FailureDetector, end_all_waits
from moe_ep.distributed.plain_data import decode, encode
from moe_ep.distributed.store import call_in_thread, close_at_exit, connect_again, end_calls
from moe_ep.errors import DispatchTimeoutError, GangError, MinorityError, RanksChangedError, rank_list

logger = logging.getLogger(__name__)

# Intervals at which members look for a new epoch, and show that they are alive.
_POLL_S, _HEARTBEAT_S = 0.03, 0.2
# How long an error may come before the epoch that explains it.
_NEWS_S = 3.0
# The construction of a group that a removal interrupts may still complete within this time.
_GRACE_S = 0.3
# A rank that is silent for this share of the deadline counts as stopped or out of reach.
_SILENT = 0.8
# If most others have been silent for this share of that time, this rank may be the one that is out of reach.
_SUSPECT = 0.5
# A rank of a machine that is out of reach has a heartbeat of this age, unless it reaches the store.
_STALE_S = 2.0
# A call to the store is stuck after this time.
_STUCK_S = 1.0
# Limit for the launcher to report that a process ended.
_LAUNCHER_S = 0.5
_STEP_S = 0.005
# Limit for a connection to another host's store.
_CONNECT_S = 2.0
# Abandoned groups are kept so long.
_FREE_S = 5.0
_PREFIX = "moe_ep/membership"

# The default groups that members have made.
_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def is_elastic(group: dist.ProcessGroup) -> bool:
    """Whether a default group is that of one epoch of an elastic gang, whose ranks may die."""
    return group in _groups


class RemovedError(GangError):
    """This rank was removed from its gang."""


class FinishedError(GangError):
    """The gang's work ended while this rank looked for the others."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A set of ranks.

    Attributes:
        number: from 0.
        ranks: in rising order.
        removed: ranks of the previous epoch that are gone, each with the cause, which completes "rank 1 ...".
        admitted: ranks that the previous epoch did not have.
        decided_at: seconds since 1970, by the clock of the proposer.
        last_seen: last sign of life of removed ranks, if known.
    """

    number: int
    ranks: tuple[int, ...]
    removed: dict[int, str] = field(default_factory=dict)
    admitted: tuple[int, ...] = ()
    decided_at: float = 0.0
    last_seen: dict[int, float] = field(default_factory=dict)


class MembershipLog:
    """The epochs of a gang in its store. A process may have several such objects.

    Args:
        store: the gang's store, over a connection that no wait blocks.
        first: the ranks of epoch 0, given by the launcher; None if the gang has started.

    Attributes:
        first: epoch 0.
    """

    def __init__(self, store: dist.Store, first: Sequence[int] | None = None) -> None:
        if first is not None:
            ranks = tuple(sorted(first))
            self.copy(Epoch(number=0, ranks=ranks, admitted=ranks, decided_at=time.time()), store)
        self.move(store)

    def move(self, store: dist.Store) -> None:
        """Continues in another store, which has the same epochs up to some number."""
        self.store = store
        self.first = self._latest = decode(store.get(_key(0)))
        self._ever = set(self.first.ranks)

    @staticmethod
    def copy(epoch: Epoch, store: dist.Store) -> None:
        """Writes an epoch into a standby store; epochs are to be copied in order."""
        store.set(_key(epoch.number), encode(epoch).decode())

    # Standby stores of other hosts, each at (host, port).

    def expect_standbys(self, count: int) -> None:
        """Sets the number of standby stores, before there are members."""
        self.store.set(f"{_PREFIX}/standbys", str(count))

    def announce_standby(self, number: int, address: tuple[str, int]) -> None:
        """Sets the address of a standby store, numbered from 1."""
        self.store.set(f"{_PREFIX}/standby/{number}", json.dumps(address))

    def num_standbys(self) -> int:
        """The number of standby stores."""
        return int(self._find(f"{_PREFIX}/standbys") or 0)

    def standbys(self, count: int) -> list[tuple[str, int]] | None:
        """Their addresses; None until all are known."""
        found = self._find_all(f"{_PREFIX}/standby", range(1, count + 1))
        return None if found is None else [(str(host), int(port)) for host, port in map(json.loads, found)]

    def lead(self) -> None:
        """Chooses this store, a standby store, for the gang to go on."""
        self.store.set(_LEADS, "")

    def latest(self) -> Epoch:
        """The present epoch."""
        while (after := self.next_of(self._latest)) is not None:
            self._latest = after
            self._ever.update(after.ranks)
        return self._latest

    def all_ranks(self) -> set[int]:
        """The ranks of all epochs."""
        self.latest()
        return set(self._ever)

    def next_of(self, epoch: Epoch) -> Epoch | None:
        """The following epoch; None if it is not decided yet."""
        found = self._find(_key(epoch.number + 1))
        return None if found is None else decode(found)

    def propose(self, remove: Mapping[int, str] | None = None, admit: Collection[int] = ()) -> Epoch:
        """Removes and admits ranks; returns the epoch that has the change.

        Args:
            remove: ranks with their causes; ranks that are already gone are ignored.
        """
        while True:
            epoch = self.latest()
            gone = {rank: cause for rank, cause in (remove or {}).items() if rank in epoch.ranks}
            new = sorted(set(admit) - set(epoch.ranks))
            if not gone and not new:
                return epoch
            after = Epoch(
                number=epoch.number + 1,
                ranks=tuple(sorted({*epoch.ranks, *new} - gone.keys())),
                removed=gone,
                admitted=tuple(new),
                decided_at=time.time(),
                last_seen={rank: seen for rank in gone if (seen := self.last_seen(rank)) is not None},
            )
            self.store.compare_set(_key(after.number), "", encode(after).decode())

    # Leaving: a rank is asked to leave, the others prepare, and then it is removed.

    def ask_to_leave(self, rank: int) -> None:
        """Asks the launcher to remove a rank when the others are ready."""
        self.store.set(f"{_PREFIX}/asked/{rank}", "")

    def asked_to_leave(self) -> list[int]:
        """The present ranks that were asked to leave."""
        return [rank for rank in self.latest().ranks if self.store.check([f"{_PREFIX}/asked/{rank}"])]

    def withdraw(self, rank: int) -> None:
        """Cancels the request that a rank leaves."""
        self.store.delete_key(f"{_PREFIX}/asked/{rank}")

    def let_leave(self, rank: int) -> int:
        """Tells the ranks to prepare for a rank's leaving; called by the launcher for one rank at a time.

        Returns:
            The number of this attempt, from 1. A rank that was refused may be asked again.
        """
        attempt = self.store.add(f"{_PREFIX}/attempts", 1)
        self.store.set(f"{_PREFIX}/leaving", f"{rank} {attempt}")
        return attempt

    def end_leaving(self) -> None:
        """Ends the attempt, whether the rank has left or stays."""
        # A deleted key would block a rank that has just checked for it and reads it.
        self.store.set(f"{_PREFIX}/leaving", "")

    def leaving(self) -> tuple[int, int] | None:
        """The rank that the others are to prepare for, and the attempt."""
        found = self._find(f"{_PREFIX}/leaving")
        if not found:
            return None
        rank, attempt = map(int, found.split())
        return rank, attempt

    def say_ready(self, attempt: int, rank: int, problem: str = "") -> None:
        """Reports that a rank can go on without the leaving one, or why it cannot."""
        self.store.set(f"{_PREFIX}/ready/{attempt}/{rank}", problem)

    def ready_without(self, attempt: int) -> list[str] | None:
        """The ranks' problems, empty for none; None until all have reported."""
        found = self._find_all(f"{_PREFIX}/ready/{attempt}", self.latest().ranks)
        return None if found is None else [problem.decode() for problem in found]

    def last_seen(self, rank: int) -> float | None:
        """The time of a rank's last sign of life; None if there was none."""
        found = self._find(f"{_PREFIX}/alive/{rank}")
        return None if found is None else float(found)

    def report(self, epoch: Epoch, rank: int, values: Mapping[str, float]) -> None:
        """Reports that a rank serves in an epoch, and the costs of the change."""
        self.store.set(f"{_PREFIX}/serves/{epoch.number}/{rank}", json.dumps(dict(values)))

    def reports(self, epoch: Epoch) -> list[dict[str, float]] | None:
        """The reports of all ranks of an epoch; None until all have reported."""
        found = self._find_all(f"{_PREFIX}/serves/{epoch.number}", epoch.ranks)
        return None if found is None else list(map(json.loads, found))

    def finish_work(self, number: int) -> None:
        """Marks one work as done, so that its members that settle do not wait for others."""
        self.store.set(f"{_PREFIX}/{number}/finished", "")

    def is_work_finished(self, number: int) -> bool:
        return bool(self.store.check([f"{_PREFIX}/{number}/finished"]))

    def finish(self) -> None:
        """Marks all work as done, so that ranks that join do not wait for others; called by the launcher."""
        self.store.set(f"{_PREFIX}/finished", "")

    @property
    def is_finished(self) -> bool:
        return bool(self.store.check([f"{_PREFIX}/finished"]))

    def _find(self, key: str) -> bytes | None:
        return self.store.get(key) if self.store.check([key]) else None

    def _find_all(self, prefix: str, numbers: Iterable[int]) -> list[bytes] | None:
        """The values of `prefix/number`; None unless all are there."""
        keys = [f"{prefix}/{number}" for number in numbers]
        return [self.store.get(key) for key in keys] if self.store.check(keys) else None


_LEADS = f"{_PREFIX}/leads"
Callback = Callable[["Membership"], None]


class Membership:
    """One member's view of its gang (the module's docstring).

    Args:
        store: the gang's store, which must outlive every rank; connections to it are cloned.
        rank: this process's rank, which never changes.
        device: "cpu", or the GPU of this rank, which becomes the current device.

    Attributes:
        rank: as given.
        epoch: the epoch that this member has settled in, or is settling in.
        ranks: its ranks.
        work_number: how many calls of `serve` are over, which numbers the present one; the same on all ranks that have
            settled. A rank that joins takes it over from the others.
    """

    def __init__(self, store: dist.Store, rank: int, *, device: torch.device | str = "cpu") -> None:
        self.rank, self.device = rank, torch.device(device)
        self.timeout_s = env.DISPATCH_TIMEOUT_S.get()
        self.use_device()
        self._store = store
        self.log = MembershipLog(connect_again(store))
        self.epoch = self._seen = self.log.latest()
        self.work_number = 0
        # A rank that joins does not know the number before it meets the others.
        self._knows_work = rank in self.first_ranks
        self._last_finished: int | None = None
        self._callbacks: list[Callback] = []
        self._before_change: list[Callable[[], None]] = []
        # Whether the present epoch has its groups, and how many callbacks have run in it.
        self._has_groups, self._num_called = False, 0
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._watching = MembershipLog(connect_again(store))
        # The last heartbeat of each other rank, and when this process first saw it.
        self._beats: dict[int, tuple[float, float]] = {}
        self._looked_at = time.monotonic()
        # The standby stores, once they are known; whether this member looks for the one that was chosen, and whether it
        # has moved there and not settled yet.
        self._num_standbys, self._standbys = self.log.num_standbys(), list[tuple[str, int]]()
        self._is_moving = self._has_moved = False
        self._on_move: list[Callable[[], None]] = []
        self._preparing: list[Callable[[int], None]] = []
        # The last attempt of a rank to leave that this member has prepared for.
        self._wants_to_leave, self._attempt = False, 0
        # Why this side cannot go on, once most other ranks are silent.
        self._cut_off: GangError | None = None
        self._aborted: WeakSet[dist.ProcessGroup] = WeakSet()
        # When the watching thread last began to ask the store.
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="moe_ep-membership", daemon=True)
        self._thread.start()
        if self.may_move:
            threading.Thread(target=self._guard, name="moe_ep-guard", daemon=True).start()
        close_at_exit(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.epoch.ranks

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The initial ranks of the gang."""
        return self.log.first.ranks

    @property
    def ep_rank(self) -> int:
        """This member's position among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def ep_size(self) -> int:
        return len(self.ranks)

    def check(self) -> None:
        """Raises RanksChangedError if there is an epoch that this member has not settled in.

        To be called between steps: a single member waits for no other, and would not notice one that joins.
        """
        if self._is_outdated():
            raise RanksChangedError(f"the ranks have changed since epoch {self.epoch.number}")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the present ranks; None for one rank."""
        return dist.group.WORLD if self.ep_size > 1 else None

    def use_device(self) -> None:
        """Makes this member's GPU the current device of the calling thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def follow(self, callback: Callback) -> None:
        """Adds a callback that `settle` runs on every member, in the order of adding."""
        self._callbacks.append(callback)

    def before_change(self, callback: Callable[[], None]) -> None:
        """Adds a callback that `settle` runs before it leaves the groups of an epoch, to free CUDA graphs with their
        collectives."""
        self._before_change.append(callback)

    def on_move(self, callback: Callable[[], None]) -> None:
        """Adds a callback that runs in a thread when the gang goes on in another store. It writes there again what this
        member wrote to the lost store."""
        self._on_move.append(callback)

    @property
    def may_move(self) -> bool:
        """Whether there are standby stores."""
        return self._num_standbys > 0

    def before_leaving(self, callback: Callable[[int], None]) -> None:
        """Adds a callback that runs in a thread before a rank leaves, with that rank. It returns when this member is
        ready, or raises if it cannot be."""
        self._preparing.append(callback)

    def remove_callback(self, callback: Callable[..., None]) -> None:
        """Removes a callback of `follow`, `before_change`, `on_move` or `before_leaving`, if it is still there."""
        if callback in self._callbacks[: self._num_called]:
            self._num_called -= 1
        lists: tuple[list[Any], ...] = (self._callbacks, self._before_change, self._on_move, self._preparing)
        for callbacks in lists:
            if callback in callbacks:
                callbacks.remove(callback)

    def remove(self, ranks: Mapping[int, str]) -> None:
        """Removes ranks that are known to be gone, with their causes; returns when that is decided."""
        self.log.propose(remove=ranks)

    def admit(self, ranks: Collection[int]) -> None:
        """Admits ranks whose processes have a `Membership` and call `settle`."""
        self.log.propose(admit=ranks)

    def ask_to_leave(self) -> None:
        """Requests that this rank leaves; may be called in a signal handler."""
        self._wants_to_leave = True

    def settle(self, error: BaseException | None = None) -> None:
        """Makes the process group of the newest epoch and runs the callbacks, together with all other members.

        If that was done for this epoch, only callbacks that were added since are run. A rank that was in no epoch yet
        is admitted.

        Args:
            error: the error of a failed step; it is raised again if the ranks do not change.

        Raises:
            RemovedError: this rank is not in the newest epoch.
            FinishedError: another rank has marked the work as done.
        """
        while True:
            try:
                self._settle(error)
            except dist.DistError as lost:
                if not self._await_move():
                    raise
                error = lost
            else:
                return

    def _settle(self, error: BaseException | None) -> None:
        if error is not None:
            logger.debug("rank %d left epoch %d: %s", self.rank, self.epoch.number, error)
            self._await_change(error)
        if self.rank not in self.log.all_ranks():
            admitting = self.log.propose(admit=[self.rank])
            # Epochs before that one may have come while this rank loaded.
            while self._seen.number < admitting.number:
                time.sleep(_STEP_S)
        while True:
            with self._lock:
                goes_on = error is None and self._has_groups and not self._is_outdated()
                self.epoch, self._has_moved = self._seen, False
            if not goes_on:
                self._has_groups, self._num_called = False, 0
            if self.rank not in self.ranks:
                raise RemovedError(f"rank {self.rank} was removed from the gang; end its process")
            try:
                if not goes_on:
                    self._make_groups(self.epoch)
                    self._has_groups = True
                while self._num_called < len(self._callbacks):
                    self._callbacks[self._num_called](self)
                    self._num_called += 1
            except (RemovedError, FinishedError):
                raise
            except Exception as failure:
                logger.debug("rank %d could not settle in epoch %d", self.rank, self.epoch.number, exc_info=True)
                self._await_change(failure)
                error = failure
            else:
                return

    def serve(self, work: Callable[[], None]) -> None:
        """Settles and calls `work`, and again for each change of the ranks, until the work is done.

        Calls may follow one another, the same on all ranks; a rank that joins begins with the present one, or the next.

        Args:
            work: makes collective steps, calls `check` before each, and continues where it was interrupted. When it
                returns on one rank, it is done on all.

        Raises:
            RemovedError: this rank was removed.
        """
        error: Exception | None = None
        try:
            while True:
                with nullcontext() if error is None else record_function("moe_ep_recovery"):
                    self.settle(error)
                try:
                    work()
                except Exception as caught:
                    error = caught
                else:
                    self._last_finished = self.work_number
                    self.log.finish_work(self.work_number)
                    return
        except FinishedError:
            return
        finally:
            self.work_number += 1

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        self._closed.set()

    # ---- Changes

    def _watch(self) -> None:
        beat = 0.0
        while not self._closed.wait(_POLL_S):
            self._turned = time.monotonic()
            try:
                if time.monotonic() >= beat:
                    self._watching.store.set(f"{_PREFIX}/alive/{self.rank}", repr(time.time()))
                    beat = time.monotonic() + _HEARTBEAT_S
                    self._remove_silent()
                    self._look_who_leaves()
                    if self.may_move and not self._standbys:
                        self._standbys = self._watching.standbys(self._num_standbys) or []
                newest = self._watching.latest()
            except RuntimeError as error:
                # The store ends with its launcher. Without standby stores the workers end with it too.
                logger.debug("the gang's store cannot be reached: %s", error)
                self._move()
                continue
            with self._lock:
                self._seen = newest
                if newest.number > self.epoch.number:
                    self._end_waits("the ranks have changed")

    def _move(self) -> None:
        """Moves to the standby store that is chosen within the deadline, if any."""
        self._is_moving = bool(self._standbys)
        until = time.monotonic() + self.timeout_s
        while self._is_moving and time.monotonic() < until and not self._closed.wait(_POLL_S):
            self._turned = time.monotonic()
            if (store := self._chosen_store()) is not None:
                self._go_on_in(store)
                return
        self._is_moving = False

    def _chosen_store(self) -> dist.Store | None:
        """A connection to the standby store that was chosen, if any."""
        connect = timedelta(seconds=_CONNECT_S)
        for host, port in self._standbys:
            with suppress(OSError, RuntimeError):
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
                store = dist.TCPStore(host, port, is_master=False, timeout=connect, wait_for_workers=False)
                if store.check([_LEADS]):
                    store.set_timeout(timedelta(seconds=self.timeout_s))
                    return store
        return None

    def _guard(self) -> None:
        """Ends this process's calls to a store that does not answer, once another store was chosen."""
        while not self._closed.wait(_STUCK_S):
            if self._is_moving or time.monotonic() - self._turned < _STUCK_S:
                continue
            stuck, chosen = _address(self._store), self._chosen_store()
            if chosen is not None and _address(chosen) != stuck:
                end_calls(*stuck)

    def _go_on_in(self, store: dist.Store) -> None:
        self._store = store
        self._watching.move(connect_again(store))
        self.log.move(connect_again(store))
        self._attempt = 0
        if self._last_finished is not None:
            self.log.finish_work(self._last_finished)
        for callback in tuple(self._on_move):
            callback()
        with self._lock:
            self._seen, self._has_moved, self._is_moving = self._watching.latest(), True, False
            self._end_waits("the ranks go on in another store")

    def _end_waits(self, why: str) -> None:
        try:
            end_all_waits(why)
        except Exception:  # of the GPU, say; this thread shows the others that the rank lives
            logger.warning("rank %d could not end its kernels' waits", self.rank, exc_info=True)
        group = dist.group.WORLD
        if self.device.type == "cuda" and group is not None and group not in self._aborted:
            self._aborted.add(group)
            # The call returns when the graphs with these collectives are gone, too.
            threading.Thread(target=self._abort, args=(group,), name="moe_ep-abort", daemon=True).start()

    def _abort(self, *groups: dist.ProcessGroup) -> None:
        """Ends the kernels of NCCL's communicators."""
        for group in groups:
            with suppress(RuntimeError):  # a group of gloo alone
                group._get_backend(self.device).abort()  # type: ignore[attr-defined]

    def _await_move(self) -> bool:
        """Waits while this member looks for another store; whether it has moved."""
        until = time.monotonic() + _NEWS_S
        while not self._is_outdated() and (self._is_moving or time.monotonic() < until):
            time.sleep(_STEP_S)
        return self._is_outdated()

    def _look_who_leaves(self) -> None:
        if self._wants_to_leave:
            self._wants_to_leave = False
            self._watching.ask_to_leave(self.rank)
        leaving = self._watching.leaving()
        if leaving is not None and leaving[1] != self._attempt:
            self._attempt = leaving[1]
            threading.Thread(target=self._prepare, args=leaving, name="moe_ep-prepare", daemon=True).start()

    def _prepare(self, leaving: int, attempt: int) -> None:
        problem = ""
        try:
            self.use_device()
            for callback in self._preparing if leaving != self.rank else ():
                callback(leaving)
        except Exception as error:
            logger.debug("rank %d cannot go on without rank %d", self.rank, leaving, exc_info=True)
            problem = str(error) or type(error).__name__
        self.log.say_ready(attempt, self.rank, problem)

    def _remove_silent(self) -> None:
        """Removes ranks without a sign of life for nearly the deadline, such as stopped ones.

        A rank that is alive but does not come to a step is found by the ranks that wait for it.
        """
        now, epoch = time.monotonic(), self._watching.latest()
        silent, suspects = [], 0
        limit_s = _SILENT * self.timeout_s
        if now - self._looked_at > _SUSPECT * limit_s:  # this process was stopped, and maybe the others with it
            self._beats.clear()
        self._looked_at = now
        for rank in set(epoch.ranks) - {self.rank}:
            beat = self._watching.last_seen(rank)
            if beat is None:  # it has not started
                continue
            if self._beats.get(rank, (None, 0.0))[0] != beat:
                self._beats[rank] = beat, now
            elif self._silent_s(rank) > limit_s:
                silent.append(rank)
            elif self._silent_s(rank) > _SUSPECT * limit_s:
                suspects += 1
        if not silent or self.rank not in epoch.ranks:
            return
        if 2 * (len(silent) + suspects) <= len(epoch.ranks):
            why = f"has not shown for {limit_s:g} s that it lives (stopped, or out of reach)"
            self._watching.propose(remove=dict.fromkeys(silent, why))
        elif 2 * len(silent) > len(epoch.ranks):
            self._cut_off = self._lost_majority(silent, _SUSPECT * limit_s)
            self._end_waits("most ranks are out of reach")

    def _lost_majority(self, unreachable: Collection[int], silent_s: float) -> GangError:
        """Why this rank cannot go on without these, which are out of the store's reach too if silent for so long."""
        # Those that still reach the store go on, and this rank alone is cut off.
        is_side = all(self._silent_s(rank) > silent_s for rank in unreachable)
        return (MinorityError if is_side else GangError)(
            f"rank {self.rank} cannot reach {rank_list(sorted(unreachable))}, the majority of the {self.ep_size} "
            f"ranks, which may go on without it; this side ends"
        )

    def _silent_s(self, rank: int) -> float:
        """Seconds since another rank last showed in the store that it is alive."""
        return time.monotonic() - self._beats[rank][1] if rank in self._beats else 0.0

    def _await_change(self, error: BaseException) -> None:
        """Waits for a newer epoch; raises the error if none comes."""
        began = time.monotonic()
        while not self._is_outdated():
            waited = time.monotonic() - began
            if waited > _NEWS_S or not isinstance(error, Exception):
                raise error
            asked = time.monotonic()
            self._check_finished()
            if self._cut_off is not None:
                raise self._cut_off from error
            # A launcher that sees the death knows the cause.
            if waited > _LAUNCHER_S and isinstance(error, DispatchTimeoutError) and error.ranks:
                self._remove_failed(error)
            # A store that does not answer, as while its launcher is stopped, has no news.
            began += time.monotonic() - asked
            time.sleep(_STEP_S)

    def _check_finished(self) -> None:
        """Raises FinishedError if the work of this member is done."""
        is_done = self.log.is_work_finished(self.work_number) if self._knows_work else self.log.is_finished
        if is_done:
            raise FinishedError("the work is done")

    def _is_outdated(self) -> bool:
        with self._lock:
            return self._has_moved or self._seen.number > self.epoch.number

    def _remove_failed(self, error: DispatchTimeoutError) -> None:
        """Removes the ranks that a verdict names, if the others may go on without them."""
        group = self.group
        detector = None if group is None else FailureDetector.of(group)
        dead, cut = (set(), set()) if detector is None else (set(detector.dead()), set(detector.unreachable()))
        late = f"did not answer within {self.timeout_s:g} s (stuck, or out of reach)"
        causes = {
            self.ranks[at]: "is out of reach" if at in cut else "died (its process ended)" if at in dead else late
            for at in error.ranks
            if at < self.ep_size
        }
        if self.rank in causes:
            raise error
        ended = {self.ranks[at] for at in dead - cut}
        silent_s = _STALE_S if cut else _SUSPECT * _SILENT * self.timeout_s
        unreachable = causes.keys() - ended
        # With them those that nobody has missed yet.
        lost = {*unreachable, *(rank for rank in self.ranks if self._silent_s(rank) > silent_s)} - ended
        if unreachable and 2 * len(lost) > self.ep_size - len(ended):
            raise self._lost_majority(lost, silent_s) from error
        self.log.propose(remove=causes)

    # ---- Groups

    def _make_groups(self, epoch: Epoch) -> None:
        self._abandon()
        self._meet(epoch)
        # A construction that hangs keeps its connection.
        connection = connect_again(self._store)
        store = dist.PrefixStore(f"{_PREFIX}/epoch/{epoch.number}", connection)
        making = call_in_thread("moe_ep-make-group", lambda: self._make_default(store))
        ends_at = float("inf")
        while not making.done():
            wait([making], _STEP_S)
            if self._is_outdated():
                ends_at = min(ends_at, time.monotonic() + _GRACE_S)
                if time.monotonic() > ends_at:
                    raise DispatchTimeoutError("the ranks changed while their group was made")
        making.result()  # raises what it failed with

    def _make_default(self, store: dist.Store) -> None:
        self.use_device()
        # Ranks that joined later have made fewer groups.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=self.ep_rank,
            world_size=self.ep_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        _groups.add(dist.distributed_c10d._get_default_group())

    def _abandon(self) -> None:
        """Leaves the groups of the epoch before, without waiting for what goes on in them."""
        for callback in self._before_change:
            callback()
        if not dist.is_initialized():
            return
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        if self.device.type == "cuda":
            self._abort(*groups)
        dist.destroy_process_group()
        # Nothing else keeps them: layers and exchanges have weak references.
        threading.Thread(target=_free, args=(groups,), name="moe_ep-free-groups", daemon=True).start()

    def _meet(self, epoch: Epoch) -> None:
        """Returns when all members of the epoch are settling in it; a rank that joins takes over `work_number`."""
        prefix = f"{_PREFIX}/here/{epoch.number}"
        self.log.store.set(f"{prefix}/{self.rank}", str(self.work_number))
        keys = [f"{prefix}/{rank}" for rank in epoch.ranks]
        until = time.monotonic() + self.timeout_s
        while not self.log.store.check(keys):
            self._check_finished()
            if self._is_outdated():
                raise DispatchTimeoutError("the ranks changed while they met")
            if time.monotonic() > until:
                absent = [at for at, key in enumerate(keys) if not self.log.store.check([key])]
                raise DispatchTimeoutError(
                    f"{rank_list([epoch.ranks[at] for at in absent])} did not come to epoch {epoch.number} within "
                    f"{self.timeout_s:g} s",
                    absent,
                )
            time.sleep(_STEP_S)
        number = max(int(self.log.store.get(key)) for key in keys)
        if self._knows_work and number > self.work_number:
            # The others have gone on to a later work.
            self._check_finished()
            raise GangError(f"rank {self.rank} is at work {self.work_number} and other ranks are at work {number}")
        self.work_number, self._knows_work = number, True


def _free(groups: list[Any]) -> None:
    """Frees groups when this rank is through with what changes; each waits for the steps that are under way in it."""
    time.sleep(_FREE_S)
    groups.clear()


def _key(number: int) -> str:
    return f"{_PREFIX}/epochs/{number}"


def _address(store: Any) -> tuple[str, int]:
    return store.host, store.port
