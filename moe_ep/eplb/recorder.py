"""The load of every pass and of the latest steps, on the device."""

from __future__ import annotations

import torch


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
