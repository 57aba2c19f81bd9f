"""Epochs of a gang's ranks, as its processes agree on them through a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.membership import Membership, MembershipLog
from moe_ep.errors import RanksChangedError
from moe_ep.launch.gangs.rendezvous import destroy_process_group


@pytest.fixture
def store() -> Iterator[dist.Store]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_removed_and_admitted(store: dist.Store) -> None:
    launcher, member = MembershipLog(store, [2, 0, 1]), MembershipLog(store)
    assert member.latest().ranks == (0, 1, 2)
    launcher.propose(remove={1: "died"})
    epoch = member.latest()
    assert (epoch.number, epoch.ranks, epoch.removed) == (1, (0, 2), {1: "died"})
    # A second proposal of the same changes nothing.
    assert member.propose(remove={1: "did not answer"}).number == 1
    member.propose(admit=[3])
    assert (launcher.latest().ranks, launcher.latest().admitted) == ((0, 2, 3), (3,))
    assert launcher.all_ranks() == {0, 1, 2, 3}


def test_all_see_one_sequence_whoever_proposes(store: dist.Store) -> None:
    MembershipLog(store, range(9))
    logs = [MembershipLog(store.clone()) for _ in range(4)]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(lambda at: [logs[at].propose(remove={rank: f"by {at}"}) for rank in range(at, 8, 2)], range(4))
        )
    histories = []
    for log in logs:
        epochs = [log.first]
        while (after := log.next_of(epochs[-1])) is not None:
            epochs.append(after)
        histories.append(epochs)
    assert all(history == histories[0] for history in histories)
    assert [epoch.number for epoch in histories[0]] == list(range(9))
    assert histories[0][-1].ranks == (8,)


def test_a_rank_joins_while_another_change_comes(store: dist.Store) -> None:
    log = MembershipLog(store, [0])
    joining = Membership(store, 1)
    log.propose(remove={0: "died"})
    while True:  # until it has heard of that
        try:
            joining.check()
        except RanksChangedError:
            break
        time.sleep(0.01)
    try:
        joining.settle()
        assert (joining.ranks, joining.epoch.number) == ((1,), 2)
    finally:
        joining.close()
        destroy_process_group()


def test_work_goes_on_after_a_change_and_ends_with_an_error_of_its_own(store: dist.Store) -> None:
    log, epochs, had_groups = MembershipLog(store, [0]), [], []
    membership = Membership(store, 0)
    membership.before_change(lambda: had_groups.append(dist.is_initialized()))

    def work() -> None:
        epochs.append(membership.epoch.number)
        if len(epochs) == 2:
            raise ValueError("of the work")
        membership.admit([1])
        membership.remove({1: "died"})
        while True:
            membership.check()
            time.sleep(0.01)

    try:
        with torch.profiler.profile() as profile, pytest.raises(ValueError, match="of the work"):
            membership.serve(work)
        assert epochs == [0, 2] and had_groups == [False, True]
        assert log.latest().removed == {1: "died"}
        assert "moe_ep_recovery" in {event.key for event in profile.key_averages()}
    finally:
        membership.close()
        destroy_process_group()


class SlowStore:
    """A store that does not answer for a while when it is asked once whether the work is done."""

    def __init__(self, store: Any, silent_s: float, then: Callable[[], object]) -> None:
        self._store, self._silent_s, self._then = store, silent_s, then
        self.is_slow = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if self.is_slow and keys[0].endswith("finished"):
            self.is_slow = False
            time.sleep(self._silent_s)
            threading.Timer(0.2, self._then).start()
        return bool(self._store.check(keys))


def test_a_change_is_waited_for_while_the_store_does_not_answer(store: dist.Store) -> None:
    """As of a launcher that is stopped and goes on."""
    log, epochs = MembershipLog(store, [0, 1]), []
    log.propose(remove={1: "died"})
    membership = Membership(store, 0)
    slow = SlowStore(membership.log.store, 3.3, lambda: log.propose(admit=[2]) and log.propose(remove={2: "died"}))

    def work() -> None:
        epochs.append(membership.epoch.number)
        if len(epochs) == 1:
            membership.log.move(slow)  # type: ignore[arg-type]
            slow.is_slow = True
            raise ValueError("the step failed with a peer")

    try:
        membership.serve(work)
        assert epochs == [1, 3]
    finally:
        membership.close()
        destroy_process_group()


def test_what_ranks_report_is_there_when_all_have(store: dist.Store) -> None:
    log = MembershipLog(store, [0, 1])
    epoch = log.latest()
    log.report(epoch, 0, {"experts_read": 2})
    assert log.reports(epoch) is None
    log.report(epoch, 1, {"experts_read": 3})
    assert log.reports(epoch) == [{"experts_read": 2}, {"experts_read": 3}]
