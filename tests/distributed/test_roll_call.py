"""The roll of ranks whose step did not finish: who is named, and who is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from moe_ep.distributed import failure_detection as roll_call
from moe_ep.distributed.failure_detection import Roll, Verdict


def test_ranks_that_wait_are_told_and_the_others_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(roll_call, "_ROLL_S", 2.0)
    # Rank 3 is dead, rank 2 lives and does not come.
    rolls = [Roll("group", rank, 4) for rank in range(3)]

    def wait(rank: int, seconds: float) -> tuple[str, Verdict]:
        with pytest.raises(RuntimeError) as failure:
            rolls[rank].comes(seconds, lambda: False)
        return str(failure.value), rolls[rank].call()

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(wait, (0, 1), (0.2, 600.0)))
    verdict = Verdict(late=True, silent=[3], elsewhere=[2])
    assert found == [("the deadline has passed", verdict), ("other ranks gave up", verdict)]
    assert rolls[2].is_called and rolls[2].call() == verdict


@pytest.mark.parametrize(
    ("verdict", "at_fault", "text"),
    [
        (
            Verdict(True, [3], [1, 2]),
            [1, 2, 3],
            "rank 3 did not answer (dead, stuck or late) and ranks 1, 2 did not take part (alive, but late or "
            "elsewhere)",
        ),
        (
            Verdict(True, [], []),
            [],
            "every rank is alive and waits; see that all make their calls in one order, or raise the timeout",
        ),
        # Where a rank has died, those that had not come to the step may have been on their way.
        (Verdict(False, [3], [1, 2]), [3], "rank 3 did not answer (dead, stuck or late)"),
        (
            Verdict(False, [], [1]),
            [],
            "rank 1 did not take part (alive, but late or elsewhere) and connections broke off",
        ),
    ],
)
def test_the_words_of_a_verdict(verdict: Verdict, at_fault: list[int], text: str) -> None:
    assert verdict.at_fault == at_fault and str(verdict) == text
