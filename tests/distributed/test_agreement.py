"""Ranks tell each other numbers, through shared memory where they can."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed import agreement
from moe_ep.distributed.agreement import Board, largest_over_ranks
from moe_ep.distributed.failure_detection import Roll
from moe_ep.errors import DispatchTimeoutError
from tests.full_disk import files_of_at_most
from tests.ranks import ranks


def numbers(rank: int, question: int) -> int:
    return (question * 7 + rank * 5) % 11 * (1 << 20)


def largest(rank: int, world_size: int, hosts: int) -> list[bool]:
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_boards", {})
        patch.setenv("MOE_EP_RANKS_PER_HOST", str(world_size // hosts if hosts > 1 else 0))
        with torch.device("meta"):  # whatever tensors are made on
            found = [largest_over_ranks(numbers(rank, question), group) for question in range(50)]
        assert (agreement._boards[group] is None) == (hosts > 1)
    return [value == max(numbers(r, q) for r in range(world_size)) for q, value in enumerate(found)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_largest_of_all_ranks(hosts: int) -> None:
    assert all(all(right) for right in ranks(4).run(largest, hosts))


def test_one_process_asks_nobody() -> None:
    assert largest_over_ranks(3, None) == 3


def test_questions_are_numbered_anew_when_numbers_run_out(tmp_path: Path) -> None:
    file = tmp_path / "board"
    file.write_bytes(bytes(2 * 2 * 8))
    boards = [Board(file, Roll("board", rank, 2), 1, 60) for rank in range(2)]
    for board in boards:
        board._question = agreement._QUESTIONS - 3
    with ThreadPoolExecutor(2) as threads:
        for question in range(6):
            said = [[question], [9 - question]]
            assert list(threads.map(Board.gather, boards, said, "ab")) == [said] * 2


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    file = tmp_path / "board"
    file.write_bytes(bytes(2 * 3 * 2 * 8))
    boards = [Board(file, Roll("board", rank, 3), 2, 60) for rank in range(3)]
    said = [[1, 0], [5, 2**32 - 1], [0, 2]]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(Board.gather, boards, said, "abc")) == [said] * 3
        # Both have answered when the deadline of either is over.
        for board in boards:
            board._timeout_s = 2.0
        found = [threads.submit(boards[rank].gather, said[rank], "it") for rank in (0, 2)]
        for rank, waiting in zip((0, 2), found, strict=True):
            with pytest.raises(DispatchTimeoutError, match=rf"\(EP rank {rank}, deadline 2 s\): rank 1 did") as error:
                waiting.result()
            assert error.value.ranks == (1,)


def test_nothing_is_left_of_a_board_that_memory_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_SHARED_MEMORY", tmp_path)
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        Board.make_file(8, 1)
    assert not [*tmp_path.iterdir()]
