"""Which prompts the ranks read in a step: the same plan on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# A step in which any rank reads holds up the decoding of all, so they wait until this part of all slots can be filled.
FREE_SHARE = 1 / 4


@dataclass(frozen=True)
class Request:
    """A prompt.

    Attributes:
        index: its number among all prompts.
        token_ids: integer `[length]`.
        stop_ids: tokens that end its continuation, beside those that end all.
    """

    index: int
    token_ids: torch.Tensor
    stop_ids: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.token_ids.numel()


class PromptQueue:
    """The prompts that no rank has read yet, in their order.

    Every rank has a queue of the same prompts and takes from it with the same arguments, so all know who reads what.

    Args:
        max_tokens: rows of one rank's pass at most, padding included; a longer prompt is read alone.
        num_rows: of a pass that reads prompts of these lengths.
    """

    def __init__(
        self, requests: Sequence[Request], num_slots: int, max_tokens: int, num_rows: Callable[[Sequence[int]], int]
    ) -> None:
        self._waiting = deque(requests)
        self._num_slots, self._max_tokens, self._num_rows = num_slots, max_tokens, num_rows

    def take(self, free: Sequence[int]) -> list[list[Request]]:
        """What each rank reads in the next step, given its free slots; nothing, while few slots are free.

        A prompt goes to the rank with the most free slots among those whose pass has room for it.

        Example: with 4 slots each, free [1, 3] and prompts of 5, 2, 9 and 4 tokens, max_tokens 10: [[], [5, 2]], and
            rank 0 reads the prompt of 9.
        """
        num_free = sum(free)
        enough = max(1, int(FREE_SHARE * self._num_slots * len(free)))
        reads: list[list[Request]] = [[] for _ in free]
        if num_free < min(enough, len(self._waiting)):
            return reads
        while self._waiting:
            room = [rank for rank, count in enumerate(free) if count > len(reads[rank]) and self._fits(reads[rank])]
            if not room:
                break
            best = max(room, key=lambda rank: free[rank] - len(reads[rank]))
            reads[best].append(self._waiting.popleft())
        return reads

    def _fits(self, prompts: list[Request]) -> bool:
        lengths = [prompt.length for prompt in (*prompts, self._waiting[0])]
        return not prompts or self._num_rows(lengths) <= self._max_tokens
