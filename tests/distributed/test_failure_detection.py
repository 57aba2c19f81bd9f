"""Ranks whose step did not finish: which of them failed, who is told, and how a group goes on without some."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from moe_ep.distributed.failure_detection import FailureDetector, Verdict


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def wait(detector: FailureDetector, seconds: float) -> tuple[str, Verdict]:
    with pytest.raises(RuntimeError) as failure:
        detector.wait_until(seconds, lambda: False)
    return str(failure.value), detector.verdict()


def test_ranks_that_wait_are_told_and_the_others_named(store: dist.Store) -> None:
    # Rank 3 is dead, rank 2 lives and does not come.
    detectors = [FailureDetector("group", rank, 4) for rank in range(3)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(wait, detectors[:2], (0.2, 600.0)))
    verdict = Verdict(late=True, silent=[3], elsewhere=[2])
    assert found == [("the deadline has passed", verdict), ("a rank failed", verdict)]
    assert detectors[2].has_ended and detectors[2].verdict() == verdict


def test_a_group_goes_on_without_excluded_ranks(store: dist.Store) -> None:
    detectors = [FailureDetector("group", rank, 3) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert [verdict.failed_ranks for _, verdict in threads.map(wait, detectors, (0.2, 600.0))] == [[2]] * 2
    for detector in detectors:
        detector.exclude([2])
        assert (detector.epoch, detector.live, detector.has_ended) == (1, [0, 1], False)
        detector.wait_until(1.0, lambda: True)
    # In the new epoch the next failure is a new one.
    assert wait(detectors[0], 0.2)[1] == Verdict(late=True, silent=[], elsewhere=[1])


def test_a_rank_that_failed_before_may_come_to_the_next_step_a_little_later(store: dist.Store) -> None:
    detectors = [FailureDetector("another", rank, 2) for rank in range(2)]
    for detector in detectors:
        detector.report(KeyError("expert"))
    # Rank 0 knows it for longer than it would wait.
    while not detectors[0].is_hopeless():
        time.sleep(0.1)
    # In the next step, rank 1 is half a second late.
    comes = time.monotonic() + 0.5
    detectors[0].wait_until(60, lambda: time.monotonic() > comes)


def test_a_rank_that_gave_up_is_named_once_the_one_that_refused_is_back(store: dist.Store) -> None:
    detectors = [FailureDetector("refused", rank, 4) for rank in range(4)]
    detectors[1].report(ValueError("too long"))
    for rank in (0, 2):  # rank 2 knows of rank 0, too
        error = detectors[rank].error("the step did not finish", "")
        assert error.ranks == (1,) and "too long" in str(error)
    detectors[1].take_part()
    for rank in (1, 3):  # rank 3 knows of rank 1, too
        error = detectors[rank].error("the step did not finish", "")
        assert error.ranks == (0, 2) and "too long" in str(error)
    for detector in detectors:
        detector.take_part()
    assert detectors[3].refusals() == {}


@pytest.mark.parametrize(
    ("verdict", "failed", "words"),
    [
        (Verdict(True, [3], [1, 2]), [1, 2, 3], ["rank 3 did not answer", "ranks 1, 2 did not take part"]),
        (Verdict(True, [], []), [], ["every rank is alive"]),
        # Where a rank has died, those that had not come to the step may have been about to.
        (Verdict(False, [3], [1, 2]), [3], ["rank 3 did not answer"]),
        (Verdict(False, [], [1]), [], ["rank 1 did not take part", "connections broke off"]),
        (Verdict(False, [], [], (0, 2)), [0, 2], ["ranks 0, 2 died"]),
    ],
)
def test_the_words_of_a_verdict(verdict: Verdict, failed: list[int], words: list[str]) -> None:
    assert verdict.failed_ranks == failed and all(word in str(verdict) for word in words)
