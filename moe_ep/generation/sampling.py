"""Chooses the next token of each sequence: the likeliest one, or a random one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ep.errors import check_number, check_whole

# Smaller numbers may flush to 0 in f32.
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for drawing tokens from softmax(logits / temperature), restricted to the likeliest ones.

    Attributes:
        temperature: 0 takes the likeliest token always.
        top_k: only this many of the likeliest tokens may be drawn; 0 for all.
        top_p: of these, the smallest set of likeliest tokens whose probabilities sum to at least this.
        seed: with a sequence's number, it determines which tokens are drawn for it; with a batch-invariant model, with
            its prompt, and how many of the same prompts come before it.

    Raises:
        ValueError: a number outside its range.
        TypeError: a value that is no number, or a count that is not whole.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(temperature=self.temperature, top_p=self.top_p)
        check_whole(top_k=self.top_k, seed=self.seed)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; it must be a number of at least 0, 0 for the likeliest"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0, 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1, 1 for all tokens")


def sequence_random(sampling: Sampling, name: int | str) -> random.Random:
    """The random numbers of one sequence, by the seed and by its number or what else is its own: independent of other
    sequences and of the number of ranks."""
    return random.Random(f"{sampling.seed} {name}")


def next_tokens(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """The next token `[B]` of each row of logits `[B, vocabulary]`; no host synchronisation.

    Args:
        draws: a number of [0, 1) for each row; not looked at with temperature 0.

    Example: probabilities .5, .3, .2 of the tokens 7, 1, 4, top_p .6: a draw below .625 gives 7, any other 1.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scores, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores, tokens = scores[:, : sampling.top_k], tokens[:, : sampling.top_k]
    # Relative to the likeliest, whose score stays 0 if a low temperature makes the others overflow f32.
    scores = (scores - scores[:, :1]) / max(sampling.temperature, _LEAST)
    sums = scores.softmax(dim=-1).cumsum(dim=-1)
    # A token may be drawn if the probabilities before it sum to less than top_p; the first one always may.
    before = torch.nn.functional.pad(sums, (1, 0))[:, :-1]
    allowed = before < max(sampling.top_p, _LEAST)
    total = torch.where(allowed, sums, 0).amax(dim=-1, keepdim=True)
    targets = torch.tensor(draws, dtype=torch.float32).to(logits.device, non_blocking=True)[:, None] * total
    # A draw that rounds to 1 takes the last token that adds to the sum, not the least likely one of the vocabulary.
    last = (allowed & (sums < total)).sum(dim=-1, keepdim=True)
    place = (allowed & (sums <= targets)).sum(dim=-1, keepdim=True).clamp(max=last)
    return tokens.gather(-1, place).squeeze(-1)
