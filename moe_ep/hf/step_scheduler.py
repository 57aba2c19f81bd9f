"""Whose step is next, where ranks have divided several models between them.

A rank may make a pass of one model while another makes one of a second model, or none: models that draft for others do
so. All models of a process group stand in one line. Before a step each rank says which model it has a pass of; the
ranks make that model's step together, and who wants another one's serves in it and asks again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_ep.distributed.exchange import open_exchange
from moe_ep.errors import ConfigError, DispatchTimeoutError

if TYPE_CHECKING:
    from moe_ep.hf.steps import StepCoordinator

# Numbers that a rank tells the others before a step.
_WIDTH = 3

# Kept as long as their groups: ranks let go of models at different times, and must find the same line.
_lines: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()


class Line:
    """The divided models of one process group; making it is a collective step of the ranks.

    Args:
        process_group: None for this process alone.

    Attributes:
        turn: held by the thread that makes a step. Ranks make their collective calls in one order, and no rank knows
            which thread of another has a pass to make: so those of a rank wait for each other.
        rank, size: of this process in the group.
        peers: by which the ranks exchange numbers; None for this process alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.turn = threading.RLock()
        self.peers = None if process_group is None else open_exchange(process_group, _WIDTH)
        self.rank, self.size = (0, 1) if self.peers is None else (self.peers.rank, self.peers.size)
        # Blocks of requests that threads of this rank have open, and whether a thread serves for all behind the last.
        self._blocks, self._is_served, self._counting = 0, False, threading.Lock()
        # Whether a block has ended that counts on another one's end.
        self._is_owed = False
        # Not kept: a model that is dropped gives its memory back at once.
        self._models: list[weakref.ref[StepCoordinator]] = []
        self._last = 0

    @staticmethod
    def of(process_group: dist.ProcessGroup | None) -> Line:
        """The group's line; one of its own for a model of this process alone."""
        if process_group is None:
            return Line(None)
        line = _lines.get(process_group)
        if line is None:
            line = _lines[process_group] = Line(process_group)
        return line

    @contextmanager
    def requests(self) -> Iterator[None]:
        """A block in which a thread of this rank makes passes when it likes."""
        with self._counting:
            self._blocks += 1
        ended = False
        try:
            yield
            ended = True
        finally:
            with self._counting:
                self._blocks -= 1
                self._is_owed |= ended and self._blocks > 0

    def is_owed(self) -> bool:
        """Whether blocks that have ended count on this thread to serve, and no other one is left."""
        with self._counting:
            return self._is_owed and not self._blocks

    @contextmanager
    def serving(self) -> Iterator[bool]:
        """A block for the next step, with whether this thread is to serve in it for the rank: no thread has requests,
        and no other one serves."""
        with self._counting:
            mine = not self._blocks and not self._is_served
            self._is_served |= mine
            self._is_owed &= not mine
        try:
            yield mine
        finally:
            with self._counting:
                self._is_served &= not mine

    def join(self, model: StepCoordinator) -> int:
        """The model's number, from 1: ranks divide their models in one order."""
        self._models.append(weakref.ref(model))
        return len(self._models)

    def next_of(self, wanted: Iterable[int]) -> int:
        """The number of the model whose step the ranks make now, of those that they want; 0 where they want none.

        Models take turns: the one behind that of the last step comes first.
        """
        numbers = set(wanted) - {0}
        if not numbers:
            return 0
        self._last = min(numbers, key=lambda number: (number <= self._last, number))
        return self._last

    def model(self, number: int) -> StepCoordinator:
        """The model of that number; ConfigError where this rank does not have it."""
        model = self._models[number - 1]() if number <= len(self._models) else None
        if model is None:
            raise ConfigError(
                f"another rank makes a pass of the model that was divided as number {number} of their process group, "
                f"which this rank has dropped or never divided; all ranks divide the same models in one order, and "
                f"keep them until all are through"
            )
        return model

    def exchange(self, first: int, second: int, third: int) -> list[list[int]]:
        """Three numbers of every rank from 0 to 2^32 - 1, by rank: what the ranks plan their next step by.

        Raises:
            DispatchTimeoutError: a rank did not come to the step before the deadline.
        """
        mine = [first, second, third]
        if self.peers is None:
            return [mine]
        try:
            return self.peers.gather("what they bring to the next step", mine)
        except DispatchTimeoutError as error:
            raise DispatchTimeoutError(
                f"{error}; a rank that has no pass to make serves the others: call moe_ep.serve, or make passes in a "
                f"moe_ep.serving block",
                error.ranks,
            ) from None
