"""Prompts that one pass reads together: packed into one row, or padded to a row each.

A CUDA graph holds one number of rows, so packed prompts may be filled up to one of a few (`Buckets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from moe_ep.generation.slot_cache import SequenceTable

_LEAST_ROWS = 16


class Buckets:
    """Numbers of rows that passes over packed prompts are filled up to: powers of two, and 1.5 times them between.

    Each of `num_slots + 1` sequences of a pass has a row at least, since attention takes no empty ones; the last one is
    of padding alone.

    Example: 2 slots, at most 100 rows: 16, 24, 32, 48, 64, 96, 100. Prompts of 20 and 10 tokens take 30 rows and one of
    padding, hence 32; a prompt of 99 tokens takes 101, which no bucket has.

    Args:
        num_slots: prompts of a pass, at most.
        most_rows: of the largest bucket.
        more_than: rows that the smallest one has more than.

    Attributes:
        sizes: rows of each bucket, the smallest first; none where most_rows is too few.
    """

    def __init__(self, num_slots: int, most_rows: int, more_than: int = 0) -> None:
        self.num_sequences = num_slots + 1
        powers = (_LEAST_ROWS << power for power in range(max(most_rows, 0).bit_length()))
        sizes = [size for power in powers for size in (power, power * 3 // 2) if size < most_rows]
        self.sizes = [size for size in (*sizes, most_rows) if size > max(num_slots, more_than)]

    def rows_of(self, lengths: Sequence[int]) -> int | None:
        """Rows of the bucket for prompts of these lengths; None where they do not fit into any."""
        needed = sum(lengths) + self.num_sequences - len(lengths)
        return next((size for size in self.sizes if size >= needed), None)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that one pass reads together.

    Attributes:
        numbers: int64 `[3 * B * L + num_sequences]` on the model's device: `tokens`, `positions`, `slots`, `lengths`.
        shape: (B, L).
        is_packed: the sequences lie one behind the other in one row; otherwise each has a row of its own.
        is_padded: some rows are padding.
        num_prompts: sequences that have logits: the first ones.
    """

    numbers: torch.Tensor
    shape: tuple[int, int]
    is_packed: bool
    is_padded: bool
    num_prompts: int

    def _part(self, number: int) -> torch.Tensor:
        size = self.shape[0] * self.shape[1]
        return self.numbers[number * size : (number + 1) * size].view(self.shape)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 `[B, L]`."""
        return self._part(0)

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[B, L]`, of each token in its prompt; negative for padding."""
        return self._part(1)

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[B, L]`, where each token's keys and values go."""
        return self._part(2)

    @property
    def lengths(self) -> torch.Tensor:
        """int64 `[num_sequences]`, those of padding included."""
        return self.numbers[3 * self.shape[0] * self.shape[1] :]

    @property
    def rows(self) -> torch.Tensor | None:
        """bool `[B * L]`, those that go to experts; None for all."""
        return (self.positions >= 0).flatten() if self.is_padded else None

    def mask(self) -> torch.Tensor | None:
        """The attention mask, for every kind of layer; None for a model's own causal one."""
        if self.is_packed:
            return SequenceTable.of_prompts(self.lengths).at(self.lengths - 1)
        return (self.positions >= 0).long() if self.is_padded else None

    def last(self) -> Any:
        """As transformers' `logits_to_keep`, the prompts' last tokens."""
        return (self.lengths.cumsum(0) - 1)[: self.num_prompts] if self.is_packed else 1

    def last_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`[num_prompts, vocabulary]` from those that a model returns; some models ignore `logits_to_keep`."""
        if logits.size(1) == self.shape[1]:
            logits = logits[:, self.last() if self.is_packed else slice(-1, None)]
        return logits.flatten(0, 1)


def packed_prompts(
    prompts: Sequence[torch.Tensor],
    device: torch.device,
    slots: Sequence[int] | None = None,
    num_rows: int | None = None,
    num_sequences: int | None = None,
) -> PromptBatch:
    """Concatenates prompts `[length]` into one row, for attention that takes a `SequenceTable`.

    Args:
        slots: of each prompt; None where keys and values are not kept.
        num_rows, num_sequences: of a bucket that is to be filled up; None for those that the prompts have.
    """
    lengths = [prompt.numel() for prompt in prompts]
    total = sum(lengths)
    rows, sequences = num_rows or total, num_sequences or len(lengths)
    # All indices go to the device in one copy.
    numbers = torch.zeros(3 * rows + sequences, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    tokens, positions, into = numbers[: 3 * rows].view(3, rows)
    tokens[:total] = torch.cat(list(prompts))
    # Padding is written to the end of a slot in use, where it is overwritten before any query attends to it.
    positions[total:] = -1
    into[total:] = slots[0] if slots else 0
    start = 0
    for number, length in enumerate(lengths):
        # One arange for each prompt: repeat_interleave would wake all threads of the host for a few numbers.
        torch.arange(length, out=positions[start : start + length])
        into[start : start + length] = slots[number] if slots else 0
        start += length
    of_padding = [1] * (sequences - len(lengths))
    if of_padding:
        of_padding[-1] += rows - total - len(of_padding)
    numbers[3 * rows :] = torch.tensor(lengths + of_padding, device="cpu")
    return PromptBatch(
        numbers=numbers.to(device, non_blocking=True),
        shape=(1, rows),
        is_packed=True,
        is_padded=rows > total,
        num_prompts=sequences - 1 if of_padding else sequences,
    )


def padded_prompts(prompts: Sequence[torch.Tensor], device: torch.device, slots: Sequence[int]) -> PromptBatch:
    """Gives each prompt a row of its own, padded on the left, so that states of linear attention begin with a prompt's
    first token and end with its last."""
    lengths = torch.tensor([prompt.numel() for prompt in prompts], device="cpu")
    longest = int(lengths.max())
    # The position of each column's token in its sequence, negative for padding.
    positions = torch.arange(longest, device="cpu") - (longest - lengths)[:, None]
    tokens = torch.stack([pad(prompt.cpu(), (longest - prompt.numel(), 0)) for prompt in prompts])
    into = torch.tensor(slots, device="cpu")[:, None].expand(-1, longest)
    numbers = torch.cat([part.flatten() for part in (tokens, positions, into, lengths)])
    return PromptBatch(
        numbers=numbers.to(device),
        shape=(len(prompts), longest),
        is_packed=False,
        is_padded=int(lengths.min()) < longest,
        num_prompts=len(prompts),
    )
