"""Experts of another width than the model, as Nemotron 3 Super and Kimi-K3 have them: a matrix before all experts, and
one behind their sum, so that narrower rows travel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm

from moe_ep.checkpoint import LatentWeights


class LatentProjections(nn.Module):
    """What is before and behind experts that read and write `[T, L]` in a model of `[T, K]`; whole on every rank.

    Args:
        weights: down `[L, K]`, up `[K, L]`, and the weight `[L]` of an RMS norm of the experts' sum, or None.
        eps: of that norm.
    """

    def __init__(self, weights: LatentWeights, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        (L, K), self._eps = weights.down.shape, eps
        self.down = nn.Linear(K, L, bias=False, dtype=dtype).requires_grad_(False)
        self.up = nn.Linear(L, K, bias=False, dtype=dtype).requires_grad_(False)
        self.down.weight.copy_(weights.down)
        self.up.weight.copy_(weights.up)
        self.norm_weight = None
        if weights.norm is not None:
            self.norm_weight = nn.Parameter(torch.empty(L, dtype=dtype), requires_grad=False)
            self.norm_weight.copy_(weights.norm)

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """From `[T, K]` to the experts' `[T, L]`."""
        return self.down(hidden_states)

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """From the experts' sum `[T, L]` to `[T, K]`."""
        if self.norm_weight is not None:
            output = rms_norm(output.float(), output.shape[-1:], self.norm_weight.float(), self._eps).to(output.dtype)
        return self.up(output)
