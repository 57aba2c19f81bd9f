"""Ranks tell each other texts and numbers; who does not come, fails or dies is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.exchange import (
    SharedMemoryExchange,
    answers_of_ranks,
    check_agreement,
    gather_texts,
    largest_over_ranks,
    open_exchange,
)
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.errors import DispatchTimeoutError
from tests.full_disk import files_of_at_most
from tests.ranks import RankPool, ranks

# Deaths are noticed within this many seconds on a busy machine, otherwise within 3, and long before the deadline.
DEATH_S = 50.0
# A file's number that no process here reaches by itself.
HANDLE = 500


def numbers(rank: int, question: int) -> int:
    return (question * 7 + rank * 5) % 11 * (1 << 20)


def largest(rank: int, world_size: int, hosts: int) -> list[bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_RANKS_PER_HOST", str(world_size // hosts if hosts > 1 else 0))
        group = dist.new_group()
        with torch.device("meta"):  # whatever tensors are made on
            found = [largest_over_ranks(numbers(rank, question), group) for question in range(50)]
        shares = isinstance(open_exchange(group, 1), SharedMemoryExchange)
    assert shares == (hosts == 1)
    dist.destroy_process_group(group)
    return [value == max(numbers(r, q) for r in range(world_size)) for q, value in enumerate(found)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_largest_of_all_ranks(hosts: int) -> None:
    assert all(all(right) for right in ranks(4).run(largest, hosts))


def share_in_namespaces(rank: int, world_size: int, path: Path, added: int) -> tuple[bool, list[int], bool]:
    """Each rank has a file of its own at the path that rank 0 announces, as in PID namespaces of their own."""
    group, make = dist.distributed_c10d._get_default_group(), SharedMemoryExchange.shared_file

    @contextmanager
    def announced(size: int, width: int) -> Iterator[Any]:
        with make(size, width) as address:
            own = str(address).split()[0]
            with open(own, "r+b") as file:
                os.dup2(file.fileno(), HANDLE)
            yield type(address)(str(address).replace(own, f"/proc/self/fd/{HANDLE}"))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(SharedMemoryExchange, "shared_file", announced)
        else:
            with make(world_size, 1) as address:
                path.write_bytes(bytes(max(Path(str(address).split()[0]).stat().st_size + added, 0)))
            with path.open("r+b") as file:
                os.dup2(file.fileno(), HANDLE)
        before = path.read_bytes() if rank else b""
        exchange = open_exchange(group, 1)
        largest = [max(exchange.gather("numbers", [numbers(rank, question)]))[0] for question in range(3)]
    os.close(HANDLE)
    return isinstance(exchange, SharedMemoryExchange), largest, not rank or path.read_bytes() == before


@pytest.mark.parametrize("added", [0, 8, -1000], ids=["as large", "larger", "empty"])
def test_a_file_of_another_process_is_left_alone(added: int, tmp_path: Path) -> None:
    largest = [max(numbers(rank, question) for rank in range(2)) for question in range(3)]
    assert ranks(2).run(share_in_namespaces, tmp_path / "file", added) == [(False, largest, True)] * 2


def test_a_pipe_at_the_path_of_shared_memory_keeps_what_is_in_it() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"text")
    with SharedMemoryExchange.shared_file(1, 1) as address:
        other = f"/proc/self/fd/{reads} {address.split()[1]}"
        with pytest.raises(OSError, match=f"/proc/self/fd/{reads}"):
            SharedMemoryExchange(other, FailureDetector("", 0, 1), 1, 60)
    assert os.read(reads, 10) == b"text"
    os.close(reads)
    os.close(writes)


def test_one_process_asks_no_other() -> None:
    assert largest_over_ranks(3, None) == 3


def tell(rank: int, world_size: int) -> list[Any]:
    odd = [1, 3]
    told: list[Any] = [gather_texts("names", f"{rank} of {world_size}: {number}") for number in range(3)]
    if rank in odd:
        told.append(gather_texts("names", str(rank), ranks=odd))
    # More than the store takes at once, and after it less again.
    told.append([len(text) for size in (12_000_000, 5) for text in gather_texts("sizes", "é" * (size if rank else 0))])
    told.append(answers_of_ranks(("colour", rank < 2), {"rank": rank, "is": [None, rank / 2]}))
    told.append(answers_of_ranks(("colour", rank < 2), "asked once"))
    with pytest.raises(ValueError) as error:
        check_agreement("settings", {"size": 4 if rank < 2 else 5, "dtype": "bf16"})
    check_agreement("settings", {"size": 4, "dtype": torch.bfloat16})
    return [*told, str(error.value)]


def test_texts_of_all_ranks() -> None:
    results = ranks(4).run(tell)
    texts = [[f"{rank} of 4: {number}" for rank in range(4)] for number in range(3)]
    answers = tuple({"rank": rank, "is": [None, rank / 2]} for rank in range(4))
    for rank, (first, second, third, *some, sizes, once, again, error) in enumerate(results):
        assert sizes == [0, *[12_000_000] * 3, 0, 5, 5, 5]
        assert [first, second, third] == texts and some == ([["1", "3"]] if rank in (1, 3) else [])
        assert once == again == answers
        assert "size is 4 on rank 0 1, 5 on rank 2 3" in error and "dtype" not in error


def wait_in_vain(rank: int, world_size: int, how: str) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 is killed before it comes; the others have deadlines of a minute."""
    hosts = world_size // 2 if how == "gloo" else 0
    os.environ["MOE_EP_RANKS_PER_HOST"] = str(hosts)
    group = dist.distributed_c10d._get_default_group()
    exchange = None if how == "store" else open_exchange(group, 2)
    gather_texts("ready")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(DispatchTimeoutError) as error:
        if exchange is None:
            gather_texts("something")
        else:
            exchange.gather("something", [rank, 1])
    return str(error.value), time.monotonic() - start, error.value.ranks


@pytest.mark.parametrize("how", ["shared memory", "gloo", "store"])
def test_a_dead_rank_is_named_soon(how: str) -> None:
    pool = RankPool(4)
    with pytest.raises(AssertionError) as failure:
        pool.run(wait_in_vain, how)
    outcomes = failure.value.results  # type: ignore[attr-defined]
    for rank in (0, 2, 3):
        text, elapsed, blamed = outcomes[rank]
        assert "something" in text and "rank 1 died" in text and blamed == (1,) and elapsed < DEATH_S


def fail_instead(rank: int, world_size: int) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 fails by itself, and lives on."""
    group = dist.distributed_c10d._get_default_group()
    exchange = open_exchange(group, 1)
    gather_texts("ready")
    start = time.monotonic()
    if rank == 1:
        FailureDetector.of(group).report(KeyError("what rank 1 lacks"))
        return "", 0.0, ()
    with pytest.raises(DispatchTimeoutError) as error:
        exchange.gather("something", [rank])
    return str(error.value), time.monotonic() - start, error.value.ranks


def test_a_rank_that_fails_by_itself_is_named_with_its_reason() -> None:
    pool = RankPool(3)
    try:
        results = pool.run(fail_instead)
    finally:
        pool.close()
    for rank in (0, 2):
        text, elapsed, blamed = results[rank]
        assert "KeyError" in text and "what rank 1 lacks" in text and blamed == (1,) and elapsed < DEATH_S


def leave_early(rank: int, world_size: int) -> list[list[int]]:
    """A rank that has answered may end before the others have read it; rank 2 is late."""
    exchange = open_exchange(dist.distributed_c10d._get_default_group(), 1)
    gather_texts("ready")
    if rank == 1:
        exchange_and_die(exchange)
    time.sleep(2.5 if rank == 2 else 0.0)
    return exchange.gather("something", [rank])


def exchange_and_die(exchange: Any) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(exchange.gather, "something", [1])
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_has_answered_may_end() -> None:
    with pytest.raises(AssertionError) as failure:
        RankPool(3).run(leave_early)
    assert failure.value.results == {rank: [[0], [1], [2]] for rank in (0, 2)}  # type: ignore[attr-defined]


def boards(size: int, width: int, **options: Any) -> list[SharedMemoryExchange]:
    detectors = [FailureDetector("", rank, size) for rank in range(size)]
    with SharedMemoryExchange.shared_file(size, width) as address:
        return [SharedMemoryExchange(address, detector, width, 60, **options) for detector in detectors]


def test_questions_are_numbered_anew_when_numbers_run_out() -> None:
    exchanges = boards(2, 1, num_questions=4)
    with ThreadPoolExecutor(2) as threads:
        for question in range(11):
            said = [[question], [19 - question]]
            assert list(threads.map(SharedMemoryExchange.gather, exchanges, "ab", said)) == [said] * 2


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    exchanges = boards(3, 2)
    said = [[1, 0], [5, 2**32 - 1], [0, 2]]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(SharedMemoryExchange.gather, exchanges, "abc", said)) == [said] * 3
        # Both have answered when the deadline of either is over.
        for exchange in exchanges:
            exchange.timeout_s = 2.0
        found = [threads.submit(exchanges[rank].gather, "it", said[rank]) for rank in (0, 2)]
        for rank, waiting in zip((0, 2), found, strict=True):
            with pytest.raises(DispatchTimeoutError, match=rf"\(EP rank {rank}, deadline 2 s\): rank 1 did") as error:
                waiting.result()
            assert error.value.ranks == (1,)


def test_nothing_is_left_of_memory_that_has_no_room() -> None:
    before = os.listdir("/proc/self/fd")
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        SharedMemoryExchange.shared_file(8, 1).__enter__()
    assert len(os.listdir("/proc/self/fd")) == len(before)
