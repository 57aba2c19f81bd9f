"""How ranks agree while experts move: small exchanges on the CPU, beside everything that the model does.

They run over gloo connections of their own, each with a deadline. What goes wrong on one rank becomes the same
`EplbError` on all: the first that fails leaves its sentence in the store of the job, the others raise that sentence
too, and a rank that waits for nothing finds it there.

The failed ranks are found by `moe_ep.distributed.failure_detection`. A rank whose exchange fails ends its connections
first, so that messages which wait for it fail too.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.distributed.failure_detection import CALL_S, Roll
from moe_ep.distributed.job_store import job_store, name_in_store
from moe_ep.errors import EplbError

logger = logging.getLogger(__name__)

_OTHERS_WORD_S = 2.0
# Numbers for the channels of a group: they name keys in the store, which must not be met twice (`_next_prefix`).
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class SideChannel:
    """Exchanges of the ranks of one group; without a group, of this process with itself.

    Args:
        process_group: the EP ranks. Making the channel is a collective step of them.
        timeout_s: deadline of every exchange.

    Attributes:
        rank, size: of this process in the group.
        group: the connections; None for one process, and when closed. Others may use it between exchanges.

    Raises:
        EplbError: a rank did not take part in making it before the deadline.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self._error: EplbError | None = None
        # Not on torch.distributed's list: a group of some ranks that is there cannot be ended and made again.
        self.group: dist.ProcessGroup | None = None
        if process_group is not None:
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            self._prefix = _next_prefix(process_group)
            self._roll = Roll(self._prefix, self.rank, self.size)
            deadline = timedelta(seconds=timeout_s)
            try:
                store = dist.PrefixStore(f"{self._prefix}/gloo", job_store())
                with self.waiting():
                    # It has a group's methods.
                    self.group = dist.ProcessGroupGloo(  # type: ignore[assignment]
                        store, self.rank, self.size, deadline
                    )
            except RuntimeError as error:
                raise self.too_late("their addresses", error) from None

    @property
    def verdict_s(self) -> float:
        """Seconds after which an exchange has ended on this rank or left its error."""
        return self.timeout_s + CALL_S

    def gather(self, what: str, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, by rank; int64, as many on each.

        Args:
            what: for the message, completes "the ranks could not exchange ...".
            values: at least one.

        Raises:
            EplbError: a rank did not take part before the deadline.
        """
        if self.size == 1:  # without a tensor, which torch.export would trace
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        table = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(what, lambda group: group.allgather([table], [mine]))
        return [row.tolist() for row in table]

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor, summed over ranks in place; raises as `gather` does."""
        self._wait(what, lambda group: group.allreduce([tensor]))
        return tensor

    def broadcast(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of rank 0, in place; raises as `gather` does."""
        self._wait(what, lambda group: group.broadcast(tensor, root=0))
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
                    text = job_store().compare_set(f"{self._prefix}/error", "", text).decode() or text
                except RuntimeError as error:
                    logger.error("the other ranks cannot be told that EPLB failed: %s", error)
            self._error = EplbError(text)
        return self._error

    def failed_elsewhere(self, text: str) -> EplbError:
        """The error to raise where other ranks know more: theirs, or this text if they leave none soon."""
        deadline = time.monotonic() + _OTHERS_WORD_S
        while self.heard() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.failed(text)

    def heard(self) -> EplbError | None:
        """The error that a rank of the group left, if any did."""
        if self._error is None and self.size > 1 and dist.is_initialized():
            key = f"{self._prefix}/error"
            try:
                store = job_store()
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
            verdict = self._roll.call()
        except RuntimeError:
            return self.failed(f"{text}; experts stay")
        return self.failed(f"{text}{f' within {self.timeout_s:g} s' if verdict.late else ''}: {verdict}; experts stay")

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait for other ranks outside of exchanges, until the same deadline."""
        return self._roll.waiting(self.timeout_s) if self.size > 1 else nullcontext()

    def close(self) -> None:
        """Ends the connections; exchanges of ranks that have not closed their ends fail at once."""
        self.group = None

    def _wait(self, what: str, start: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        if self.size == 1:
            return
        if self.group is None:
            raise self.failed(f"{what} was to be exchanged by a closed channel")
        try:
            self._roll.wait_for(start(self.group), self.timeout_s)
        except RuntimeError as error:
            raise self.too_late(what, error) from None


def _next_prefix(process_group: dist.ProcessGroup) -> str:
    """Of the keys of the group's next channel, the same on every rank.

    Numbers under which other ranks have failed are left out: they met without this one, whose own mistake came first.
    """
    numbers = _numbers.setdefault(process_group, itertools.count())
    prefixes = (f"moe_ep/eplb/{name_in_store(process_group)}/{number}" for number in numbers)
    return next(prefix for prefix in prefixes if not job_store().check([f"{prefix}/error"]))


def _shown(value: int) -> str:
    """Checksums in short, small numbers as they are."""
    return str(value) if abs(value) < 10**9 else f"{value & (2**64 - 1):016x}"
