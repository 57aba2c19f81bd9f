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

from moe_ep.distributed.failure_detection import Roll
from moe_ep.distributed.process_groups import deadline_of, num_hosts, subgroup
from moe_ep.errors import DispatchTimeoutError

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
        DispatchTimeoutError: a rank did not answer before the deadline.
    """
    if group is None:
        return value
    if group not in _boards:
        _boards[group] = share_board(group, 1)
    board = _boards[group]
    if board is not None:
        return max(number for (number,) in board.gather([value], "the layer"))
    number = torch.tensor(value, dtype=torch.int64, device="cpu")
    roll, seconds = Roll.of(group), deadline_of(group)
    try:
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=_host_group(group), async_op=True)
        roll.wait_for(work, seconds)
    except RuntimeError as error:
        raise _not_agreed(roll, seconds, "the layer", error) from error
    return int(number)


class Board:
    """Shared memory of the ranks of one host, with two places for each rank: for even and for odd questions.

    A rank answers a question by writing `question << 32 | value` for each of its values, and waits until all have.
    No answer is overwritten before it was read: a rank that answers question q + 2 has seen all answers to q + 1, and
    every rank gave its own only after it had read those to q.

    Args:
        path: a file that `make_file` made for these sizes.
        roll: of the ranks that share it.
        width: number of values in an answer, each a whole number from 0 to 2^32 - 1.
        timeout_s: deadline of every question.
    """

    def __init__(self, path: Path, roll: Roll, width: int, timeout_s: float) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._answers = np.frombuffer(self._memory, dtype=np.int64).reshape(2, roll.size, width)
        self._roll, self._timeout_s = roll, timeout_s
        self._question = 0

    @staticmethod
    def make_file(size: int, width: int) -> Path:
        """Creates a file of zeros, through which the ranks that open it share memory."""
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        handle, name = tempfile.mkstemp(prefix="moe_ep_", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(2 * size * width * np.dtype(np.int64).itemsize))
        except OSError:
            os.unlink(name)
            raise
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
        answers[self._roll.rank] = [question << _VALUE_BITS | value for value in values]
        try:
            self._roll.comes(self._timeout_s, lambda: bool((answers >> _VALUE_BITS == question).all()))
        except RuntimeError as error:
            raise _not_agreed(self._roll, self._timeout_s, what, error) from None
        return (answers & (1 << _VALUE_BITS) - 1).tolist()


def share_board(group: dist.ProcessGroup, width: int) -> Board | None:
    """Creates a board for a group's ranks; None if they cannot share memory. All ranks must call it.

    Args:
        width: number of values in an answer.
    """
    if num_hosts(group) > 1:
        return None
    roll, deadline = Roll.of(group), deadline_of(group)
    made, board = None, None
    with suppress(OSError):  # the others learn of a failure by the empty name
        made = Board.make_file(roll.size, width) if roll.rank == 0 else None
    try:
        name = _gathered("" if made is None else str(made), group)[0]
        with suppress(OSError):  # ranks on hosts of one name may still have no files in common
            board = Board(Path(name), roll, width, deadline) if name else None
        is_shared = all(_gathered(board is not None, group))
    finally:
        if made is not None:
            made.unlink()
    return board if is_shared else None


def _not_agreed(roll: Roll, timeout_s: float, what: str, cause: RuntimeError) -> DispatchTimeoutError:
    """The error for ranks that did not all come to it."""
    story = f"the ranks did not all come to {what} and say how many tokens they have (EP rank {roll.rank}, deadline "
    story += f"{timeout_s:g} s)"
    try:
        verdict = roll.call()
    except RuntimeError as error:
        return DispatchTimeoutError(f"{story}, and the ranks' store cannot be reached ({error}): {cause}")
    return DispatchTimeoutError(f"{story}: {verdict}; end the process, or make the group anew", verdict.at_fault)


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
            made = subgroup(group, range(dist.get_world_size(group)), "moe_ep_host", backend="gloo")
        _host_groups[group] = made
    return _host_groups[group] or group
