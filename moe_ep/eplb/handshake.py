"""How ranks agree while experts move: small exchanges on the CPU, beside everything that the model does.

They run on a gloo group of their own, each with a deadline. What goes wrong on one rank becomes the same `EplbError` on
all: the first that fails leaves its sentence in the store of the job, the others raise that sentence too, and a rank
that waits for nothing finds it there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_ep.errors import EplbError, rank_list
from moe_ep.job_store import job_store, roll_call

logger = logging.getLogger(__name__)

_OTHERS_WORD_S = 2.0
# What a failed exchange takes behind its deadline: the roll is called, and the error left in the store.
_VERDICT_S = 3.0


class SideChannel:
    """Exchanges of the ranks of one group; without a group, of this process with itself.

    Args:
        process_group: the EP ranks. Making the channel is a collective step of them.
        timeout_s: deadline of every exchange.

    Attributes:
        rank, size: of this process in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank, self.size = 0, 1
        self._error: EplbError | None = None
        self._group: dist.ProcessGroup | None = None
        if process_group is not None:
            self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
            self._group = new_group(process_group, "gloo", timeout_s)
            self._prefix = f"moe_ep/eplb/{self._group.group_name}"

    @property
    def verdict_s(self) -> float:
        """Seconds after which an exchange has ended on this rank or left its error."""
        return self.timeout_s + _VERDICT_S

    def gather(self, what: str, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, by rank; int64, as many on each.

        Args:
            what: for the message, completes "the ranks could not exchange ...".

        Raises:
            EplbError: a rank did not take part before the deadline.
        """
        mine = torch.tensor(list(values), dtype=torch.int64)
        if self._group is None:
            return [mine.tolist()]
        table = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(what, lambda: dist.all_gather(table, mine, group=self._group, async_op=True))
        return [row.tolist() for row in table]

    def sum(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor, summed over ranks in place; raises as `gather` does."""
        if self._group is not None:
            self._wait(what, lambda: dist.all_reduce(tensor, group=self._group, async_op=True))
        return tensor

    def broadcast(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of rank 0, in place; raises as `gather` does."""
        if self._group is not None:
            self._wait(what, lambda: dist.broadcast(tensor, group=self._group, group_src=0, async_op=True))
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
                    f"{_shown(column[odd])} on EP rank {odd}; give every rank the same and call step on all of them"
                )

    def failed(self, text: str) -> EplbError:
        """The error to raise on this rank: of the first sentence that any rank left."""
        if self._error is None:
            if self._group is not None:
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
        if self._error is None and self._group is not None and dist.is_initialized():
            key = f"{self._prefix}/error"
            try:
                if job_store().check([key]):
                    self._error = EplbError(job_store().get(key).decode())
            except RuntimeError as error:
                self._error = EplbError(f"the store of the ranks cannot be reached any more: {error}")
        return self._error

    def too_late(self, what: str, cause: object) -> EplbError:
        """The error for an exchange that did not end in time, with the ranks that did not take part."""
        absent = self._roll_call()
        who = ""
        if absent:
            who = f": EP {rank_list(absent)} did not take part"
        logger.info("EPLB: exchange of %s failed: %s", what, cause)
        return self.failed(f"the ranks could not exchange {what} within {self.timeout_s:g} s{who}; experts stay")

    def _wait(self, what: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self.too_late(what, error) from None

    def _roll_call(self) -> list[int]:
        """The ranks that do not fail too within a short while."""
        if self._group is None:
            return []
        try:
            return roll_call(self._prefix, self.rank, self.size)
        except RuntimeError:
            return []


def new_group(process_group: dist.ProcessGroup, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Another group of the same ranks, in rising order of their global ranks; a collective step of them."""
    members = dist.get_process_group_ranks(process_group)
    return dist.new_group(
        members,
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=len(members) < dist.get_world_size(),
        group_desc="moe_ep_eplb",
    )


def _shown(value: int) -> str:
    """Checksums in short, small numbers as they are."""
    return str(value) if abs(value) < 10**9 else f"{value & (2**64 - 1):016x}"
