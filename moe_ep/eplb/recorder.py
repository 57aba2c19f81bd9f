"""The load of every pass and of the latest steps, on the device."""

from __future__ import annotations

import torch

from moe_ep.arguments import check_tensors


def balancedness(tokens_per_rank: torch.Tensor) -> float:
    """Mean over maximum load: the share of the time that the ranks would be busy if time grew with tokens.

    Sum over layers of the mean tokens per rank, divided by the sum over layers of the maximum per rank. 1.0 is perfect
    (and what no tokens at all give), 1 / R is one rank doing everything. Example: [[100, 0, 0, 0]] x 2 layers: 0.25.

    Args:
        tokens_per_rank: counts `[L, R]`, any real dtype.

    Raises:
        ValueError: another number of dimensions, no ranks, or counts that are complex, negative or not finite.
    """
    check_tensors(tokens_per_rank=tokens_per_rank)
    if tokens_per_rank.dim() != 2 or tokens_per_rank.size(1) < 1:
        raise ValueError(
            f"tokens_per_rank has shape {tuple(tokens_per_rank.shape)}; it must be (L, R) with at least one rank"
        )
    if tokens_per_rank.is_complex():
        raise ValueError(f"tokens_per_rank is {tokens_per_rank.dtype}; it must be of a real dtype")
    loads = tokens_per_rank.double()
    if not bool(((loads >= 0) & loads.isfinite()).all()):
        raise ValueError("tokens_per_rank holds a count that is negative or not finite; counts must be at least 0")
    busiest = float(loads.amax(dim=1).sum())
    return float(loads.mean(dim=1).sum()) / busiest if busiest else 1.0


class ExpertLoadRecorder:
    """Counts of tokens by physical expert: of the pass under way, and of the latest steps in a ring.

    Attributes:
        expert_load_pass: int32 `[L, P]`, added to by the layers.
        expert_load_window: int32 `[W, L, P]`.
    """

    def __init__(
        self, *, num_layers: int, num_physical_experts: int, window_size: int, device: torch.device | str
    ) -> None:
        shape = (num_layers, num_physical_experts)
        self.expert_load_pass = torch.zeros(shape, dtype=torch.int32, device=device)
        self.expert_load_window = torch.zeros((window_size, *shape), dtype=torch.int32, device=device)
        self._num_steps = 0

    def end_step(self) -> None:
        """The pass becomes the latest step of the ring; no host synchronisation."""
        self.expert_load_window[self._num_steps % len(self.expert_load_window)].copy_(self.expert_load_pass)
        self.expert_load_pass.zero_()
        self._num_steps += 1

    def discard_pass(self) -> None:
        """Forgets the pass under way."""
        self.expert_load_pass.zero_()

    def forget(self, layer: int) -> None:
        """Empties a layer's part of the ring: its slots hold other experts now."""
        self.expert_load_window[:, layer].zero_()

    def warm_up(self) -> None:
        """Runs once what will run beside a serving model, so that its kernels are loaded; nothing is recorded yet."""
        self.forget(0)
        self.expert_load_window.roll(1, dims=0)

    def snapshot(self) -> torch.Tensor:
        """A copy of the recorded steps int32 `[S, L, P]`, oldest first."""
        size = len(self.expert_load_window)
        if self._num_steps <= size:
            return self.expert_load_window[: self._num_steps].clone()
        return self.expert_load_window.roll(-(self._num_steps % size), dims=0)
