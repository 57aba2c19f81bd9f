"""How the hosts of a group's ranks exchange small numbers before a step, while their GPUs keep working.

Ranks of one host use shared memory, which takes microseconds where a gloo collective takes hundreds of them; ranks on
several hosts use such a collective.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from moe_ep.errors import DispatchTimeoutError, rank_list
from moe_ep.process_groups import deadline_of, num_hosts, timeout_of
from moe_ep.waiting import comes_within

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
_VALUE_BITS = 32
_QUESTIONS = 1 << 31

# By group. A board is None if the ranks cannot share memory, a host group if the group accepts host tensors itself.
_boards: WeakKeyDictionary[dist.ProcessGroup, Board | None] = WeakKeyDictionary()
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = WeakKeyDictionary()


def largest_over_ranks(value: int, group: dist.ProcessGroup | None) -> int:
    """The largest `value` of the group's ranks, at least 0; `value` itself without a group. All ranks must call it.

    Raises:
        DispatchTimeoutError: a rank of this host did not answer before the deadline.
    """
    if group is None:
        return value
    if group not in _boards:
        _boards[group] = share_board(group, 1)
    board = _boards[group]
    if board is not None:
        return max(number for (number,) in board.gather([value], "the layer"))
    number = torch.tensor(value, dtype=torch.int64, device="cpu")
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=_host_group(group))
    return int(number)


class Board:
    """Shared memory of the ranks of one host, with two places for each rank: for even and for odd questions.

    A rank answers a question by writing `question << 32 | value` for each of its values, and waits until all have.
    No answer is overwritten before it was read: a rank that answers question q + 2 has seen all answers to q + 1, and
    every rank gave its own only after it had read those to q.

    Args:
        path: a file that `make_file` made for these sizes.
        rank: this process's rank among the `size` ranks that share it.
        width: number of values in an answer, each a whole number from 0 to 2^32 - 1.
        timeout_s: deadline of every question.
    """

    def __init__(self, path: Path, rank: int, size: int, width: int, timeout_s: float) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._answers = np.frombuffer(self._memory, dtype=np.int64).reshape(2, size, width)
        self._rank, self._timeout_s = rank, timeout_s
        self._question = 0

    @staticmethod
    def make_file(size: int, width: int) -> Path:
        """Creates a file of zeros, through which the ranks that open it share memory."""
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        handle, name = tempfile.mkstemp(prefix="moe_ep_", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(2 * size * width * np.dtype(np.int64).itemsize))
        return Path(name)

    def gather(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Exchanges the answers to the next question; returns the values of every rank, by rank.

        Every rank must call it equally often.

        Args:
            what: for the message, completes "to come to".

        Raises:
            DispatchTimeoutError: a rank did not answer before the deadline.
        """
        question = self._question = (self._question + 1) % _QUESTIONS
        answers = self._answers[question % 2]
        answers[self._rank] = [question << _VALUE_BITS | value for value in values]
        if not comes_within(self._timeout_s, lambda: bool((answers >> _VALUE_BITS == question).all())):
            absent = np.flatnonzero((answers >> _VALUE_BITS != question).any(axis=1)).tolist()
            raise DispatchTimeoutError(
                f"EP rank {self._rank} waited {self._timeout_s:g} s for {rank_list(absent)} to come to {what} and say "
                f"how many tokens it has: dead, stuck or late; end the process, or make the group anew",
                absent,
            )
        return (answers & (1 << _VALUE_BITS) - 1).tolist()


def share_board(group: dist.ProcessGroup, width: int) -> Board | None:
    """Creates a board for a group's ranks; None if they cannot share memory. All ranks must call it.

    Args:
        width: number of values in an answer.
    """
    if num_hosts(group) > 1:
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    deadline = deadline_of(group)
    made, board = None, None
    with suppress(OSError):  # the others learn of a failure by the empty name
        made = Board.make_file(size, width) if rank == 0 else None
    try:
        name = _gathered("" if made is None else str(made), group)[0]
        with suppress(OSError):  # ranks on hosts of one name may still have no files in common
            board = Board(Path(name), rank, size, width, deadline) if name else None
        is_shared = all(_gathered(board is not None, group))
    finally:
        if made is not None:
            made.unlink()
    return board if is_shared else None


def _gathered(mine: T, group: dist.ProcessGroup) -> list[T]:
    """The objects of all ranks, by rank."""
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that accepts tensors in host memory; on first use all ranks must call it."""
    if group not in _host_groups:
        made = None
        if not any(pair.startswith("cpu:") for pair in dist.get_backend_config(group).split(",")):
            members = dist.get_process_group_ranks(group)
            is_part = len(members) < dist.get_world_size()
            made = dist.new_group(
                members,
                timeout=timeout_of(group),
                backend="gloo",
                use_local_synchronization=is_part,
                group_desc="moe_ep_host",
            )
        _host_groups[group] = made
    return _host_groups[group] or group
