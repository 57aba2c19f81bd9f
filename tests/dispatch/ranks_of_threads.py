"""EP ranks as threads of one process, whose collective steps are swaps of tensors: so many settings cost little.

Backends of torch.distributed run as they are; what is not covered is torch.distributed itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch

from moe_ep.dispatch import torch_distributed
from moe_ep.dispatch.rank_group import HostCopy, RankGroup
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.modular_kernel.contracts import Pending

_TIMEOUT_S = 120.0


class Board:
    """Where each rank leaves something for all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self._left: list[Any] = [None] * size

    def swap(self, rank: int, mine: Any) -> list[Any]:
        self._left[rank] = mine
        self.barrier.wait()
        found = list(self._left)
        self.barrier.wait()
        return found


class Group(RankGroup):
    """One thread's RankGroup."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board, self.rank, self.size, self.timeout_s = board, rank, size, _TIMEOUT_S
        self._group: Any = lambda: None
        self.ep_ranks = range(size)
        self.detector = FailureDetector("", 0, 1)
        self.have_agreed = False

    def steps(self, name: str, device: torch.device) -> Any:
        return Steps(self)


class Steps:
    """Of one dispatch or combine; each is through when it returns."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
    ) -> None:
        ranks = self._ranks
        parts = input.split(input_sizes if input_sizes is not None else len(input) // ranks.size)
        arrived = [of_rank[ranks.rank] for of_rank in ranks.board.swap(ranks.rank, parts)]
        assert output_sizes is None or output_sizes == list(map(len, arrived))
        torch.cat(arrived, out=output)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        torch.cat(self._ranks.board.swap(self._ranks.rank, input), out=output)

    def wait(self) -> None:
        pass

    def then(self, finish: Callable[[], Any]) -> Pending[Any]:
        result = finish()
        return Pending(lambda: None, lambda: result)

    def on_host(self, numbers: torch.Tensor) -> HostCopy:
        return HostCopy(numbers, self._ranks, "")


def run_on_threads(size: int, check: Callable[..., Any], *args: Any) -> list[Any]:
    """check(rank, size, *args) on every rank; the first failure is raised."""
    board = Board(size)

    def run(rank: int) -> Any:
        try:
            return check(rank, size, *args)
        except BaseException:
            board.barrier.abort()
            raise

    group = patch.object(torch_distributed, "RankGroup", lambda config, _: Group(board, config.ep_rank, size))
    with group, ThreadPoolExecutor(size) as pool:
        begun = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for each in begun if (error := each.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in begun]
