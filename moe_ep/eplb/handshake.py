"""CPU-side consensus between ranks during an expert migration, over gloo connections separate from the model's.

Each exchange has a deadline. What goes wrong on one rank becomes the same `EplbError` on all: the first rank that fails
leaves its message in the store of the rendezvous, where the others find it. A rank whose exchange fails closes its
connections first, so that messages which wait for it fail too.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.distributed.exchange import GlooExchange, gather_texts
from moe_ep.distributed.failure_detection import VERDICT_S, FailureDetector
from moe_ep.distributed.store import name_in_store, rendezvous_store
from moe_ep.errors import DispatchTimeoutError, EplbError

logger = logging.getLogger(__name__)

_OTHERS_ERROR_S = 2.0
_LOOK_S = 0.5
T = TypeVar("T")

# Numbers for the channels of a group: they name keys in the store, which must not be used twice (`_next_prefix`).
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class SideChannel:
    """Exchanges of the ranks of one group; without a group, of this process with itself.

    Making it is a collective step. It and every exchange raise EplbError where a rank does not take part in time.

    Args:
        process_group: the EP ranks.
        timeout_s: deadline of every exchange.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self._error: EplbError | None = None
        self._next_look = time.monotonic() + _LOOK_S
        self._connections: GlooExchange | None = None
        if process_group is not None:
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            self._prefix = _next_prefix(process_group)
            members = dist.get_process_group_ranks(process_group)
            self._detector = FailureDetector(self._prefix, self.rank, self.size, members)
            try:
                # First, since the connections are made in C++, where the death of a rank is not noticed.
                with self._detector.waiting(timeout_s):
                    self._wait_for_all(process_group)
                self._connections = GlooExchange(f"{self._prefix}/gloo", self._detector, timeout_s)
            except RuntimeError as error:
                raise self.too_late("their addresses", error) from None

    def _wait_for_all(self, process_group: dist.ProcessGroup) -> None:
        try:
            gather_texts(self._prefix, "", process_group, timeout_s=self.timeout_s)
        except DispatchTimeoutError as error:  # the detector looks at RuntimeErrors
            raise RuntimeError(str(error)) from None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The connections, which others may use between exchanges; None for one process, and when closed."""
        return None if self._connections is None else self._connections.group

    @property
    def verdict_s(self) -> float:
        """Seconds after which an exchange has ended on this rank or left its error."""
        return self.timeout_s + VERDICT_S

    def gather(self, what: str, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, by rank; int64, as many on each.

        Args:
            what: for the message, completes "the ranks could not exchange ...".
        """
        if self.size == 1:  # without a tensor, which torch.export would trace
            return [list(values)]
        return self._run(what, lambda connections: connections.table(values))

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a CPU tensor over ranks in place."""
        if self.size > 1:
            self._run(what, lambda connections: connections.start(lambda group: group.allreduce([tensor])))
        return tensor

    def broadcast(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """Writes rank 0's CPU tensor into that of every rank."""
        if self.size > 1:
            self._run(what, lambda connections: connections.start(lambda group: group.broadcast(tensor, root=0)))
        return tensor

    def agree(self, what: str, **values: int) -> None:
        """Raises the same EplbError on every rank unless they all give the same values.

        Args:
            what: for the message, completes "the ranks disagree about ...".
        """
        table = self.gather(what, list(values.values()))
        for index, name in enumerate(values):
            column = [row[index] for row in table]
            if len(set(column)) > 1:
                odd = next(rank for rank, value in enumerate(column) if value != column[0])
                raise self.failed(
                    f"the ranks disagree about {what}: {name} is {_shown(column[0])} on EP rank 0 and "
                    f"{_shown(column[odd])} on EP rank {odd}; give every rank the same, after the same step"
                )

    def failed(self, text: str) -> EplbError:
        """The error to raise on this rank: of the first sentence that any rank left."""
        if self._error is None:
            if self.size > 1 and dist.is_initialized():
                try:
                    text = rendezvous_store().compare_set(f"{self._prefix}/error", "", text).decode() or text
                except RuntimeError as error:
                    logger.error("the other ranks cannot be told that EPLB failed: %s", error)
            self._error = EplbError(text)
        return self._error

    def failed_elsewhere(self, text: str) -> EplbError:
        """The error to raise where other ranks know more: theirs, or this text if they leave none soon."""
        deadline = time.monotonic() + _OTHERS_ERROR_S
        while self.heard() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failed(text)

    def heard(self) -> EplbError | None:
        """The error that a rank of the group left, if any did."""
        if self._error is None and self.size > 1 and dist.is_initialized():
            key = f"{self._prefix}/error"
            try:
                store = rendezvous_store()
                if store.check([key]):
                    self._error = EplbError(store.get(key).decode())
            except RuntimeError as error:
                self._error = EplbError(f"the store of the ranks cannot be reached any more: {error}")
        return self._error

    def too_late(self, what: str, cause: object) -> EplbError:
        """The error for an exchange that did not end: what a rank left, or which ranks are at fault."""
        heard = self.heard()
        if heard is not None:
            return heard
        self.close()
        logger.info("EPLB: exchange of %s failed: %s", what, cause)
        text = f"the ranks could not exchange {what}"
        try:
            verdict = self._detector.verdict()
        except RuntimeError:
            return self.failed(f"{text}; experts stay")
        return self.failed(f"{text}{f' within {self.timeout_s:g} s' if verdict.late else ''}: {verdict}; experts stay")

    def is_hopeless(self) -> bool:
        """Whether a wait for other ranks should end before its deadline, since one of them has failed.

        May be polled: the store is asked twice a second.
        """
        if self.size == 1:
            return False
        if self._error is None and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self.heard()
        return self._error is not None or self._detector.is_hopeless()

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for other ranks outside of exchanges, until the same deadline."""
        return self._detector.waiting(self.timeout_s) if self.size > 1 else nullcontext()

    def close(self) -> None:
        """Ends the connections; exchanges of ranks that have not closed their ends fail at once."""
        if self._connections is not None:
            self._connections.close()

    def _run(self, what: str, exchange: Callable[[GlooExchange], T]) -> T:
        connections = self._connections
        if connections is None or connections.group is None:
            raise self.failed(f"{what} was to be exchanged by a closed channel")
        try:
            return exchange(connections)
        except RuntimeError as error:
            raise self.too_late(what, error) from None


def _next_prefix(process_group: dist.ProcessGroup) -> str:
    """Of the keys of the group's next channel, the same on every rank.

    Numbers under which other ranks have failed are left out: they met without this one, whose own mistake came first.
    """
    numbers = _numbers.setdefault(process_group, itertools.count())
    prefixes = (f"moe_ep/eplb/{name_in_store(process_group)}/{number}" for number in numbers)
    return next(prefix for prefix in prefixes if not rendezvous_store().check([f"{prefix}/error"]))


def _shown(value: int) -> str:
    """Checksums in hexadecimal, small numbers as they are."""
    return str(value) if abs(value) < 10**9 else f"{value & (2**64 - 1):016x}"
