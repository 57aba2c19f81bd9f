"""Prompts that one pass reads together: one behind the other, or padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from moe_ep.generation.slot_attention import SequenceTable


@dataclass(frozen=True)
class PromptBatch:
    """What a model is given.

    Attributes:
        tokens: int64 `[B, L]`.
        positions: int64 `[B, L]`, of each token in its prompt; negative for padding.
        prompts: int64 `[B, L]`, the number of the prompt that each token is of.
        lengths: int64 `[num_prompts]`.
        mask: the attention mask, for every kind of layer; None for a model's own causal one.
        rows: bool `[B * L]`, those that go to experts; None for all.
        last: as transformers' `logits_to_keep`, the prompts' last tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    rows: torch.Tensor | None
    last: Any

    def last_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`[num_prompts, vocabulary]` from those that a model returns; some heed no `logits_to_keep`."""
        if logits.size(1) == self.tokens.size(1):
            logits = logits[:, self.last if isinstance(self.last, torch.Tensor) else slice(-self.last, None)]
        return logits.flatten(0, 1)


def packed_prompts(prompts: Sequence[torch.Tensor], device: torch.device) -> PromptBatch:
    """One behind the other in one row, for attention that takes a `SequenceTable`."""
    # Piece by piece: repeat_interleave would wake all threads of the host for a few numbers.
    pieces = [torch.arange(prompt.numel(), device="cpu") for prompt in prompts]
    numbers = torch.cat([torch.full_like(piece, number) for number, piece in enumerate(pieces)])
    lengths = _lengths(prompts).to(device)
    return PromptBatch(
        tokens=torch.cat(list(prompts))[None].to(device),
        positions=torch.cat(pieces)[None].to(device),
        prompts=numbers[None].to(device),
        lengths=lengths,
        mask=SequenceTable.of_prompts(lengths).at(lengths - 1),
        rows=None,
        last=lengths.cumsum(0) - 1,
    )


def padded_prompts(prompts: Sequence[torch.Tensor], device: torch.device) -> PromptBatch:
    """Each in a row of its own, padded on the left, so that states of linear attention begin with a prompt's first
    token and end with its last."""
    lengths = _lengths(prompts)
    longest = int(lengths.max())
    # The position of each column's token in its sequence, negative for padding.
    positions = (torch.arange(longest, device="cpu") - (longest - lengths)[:, None]).to(device)
    seen = positions >= 0
    is_padded = int(lengths.min()) < longest
    return PromptBatch(
        tokens=torch.stack([pad(prompt, (longest - prompt.numel(), 0)) for prompt in prompts]).to(device),
        positions=positions,
        prompts=torch.arange(len(prompts), device=device)[:, None].expand(-1, longest),
        lengths=lengths.to(device),
        mask=seen.long() if is_padded else None,
        rows=seen.flatten() if is_padded else None,
        last=1,
    )


def _lengths(prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([prompt.numel() for prompt in prompts], device="cpu")
