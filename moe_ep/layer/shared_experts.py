"""Shared experts, which every token uses: one plain MLP next to the routed experts."""

from __future__ import annotations

import torch
from torch import nn

from moe_ep.activation import MoEActivation, apply_activation, gate_limit


class SharedExperts(nn.Module):
    """An MLP from `[T, K]` to `[T, K]`, complete on every rank.

    Several shared experts of a checkpoint form one MLP of their total width. With `expert_gate` the output is
    multiplied by the sigmoid of one more projection, as in Qwen2-MoE (its `shared_expert_gate`).

    Parameters: `gate_proj.weight` and `up_proj.weight` `[N, K]`, `down_proj.weight` `[K, N]`, and with the gate
    `expert_gate.weight` `[1, K]`. An ungated activation reads `gate_proj` alone, and there is no `up_proj`.

    Raises:
        ValueError: an unknown activation, or a limit that it cannot have (`moe_ep.activation.gate_limit`).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: MoEActivation | str = "silu",
        *,
        clamp_limit: float | None = None,
        expert_gate: bool = False,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self._limit = MoEActivation.parse(activation), gate_limit(activation, clamp_limit)

        def projection(num_in: int, num_out: int) -> nn.Linear:
            return nn.Linear(num_in, num_out, bias=False, dtype=params_dtype).requires_grad_(False)

        self.gate_proj = projection(hidden_size, intermediate_size)
        self.up_proj = projection(hidden_size, intermediate_size) if self.activation.is_gated else None
        self.down_proj = projection(intermediate_size, hidden_size)
        self.expert_gate = projection(hidden_size, 1) if expert_gate else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_proj(hidden_states)
        if self.up_proj is not None:
            gate_up = torch.cat([gate_up, self.up_proj(hidden_states)], dim=-1)
        output = self.down_proj(apply_activation(self.activation, gate_up, clamp_limit=self._limit))
        if self.expert_gate is not None:
            output = output * torch.sigmoid(self.expert_gate(hidden_states))
        return output
