"""A MoE layer in plain loops, and the made-up checkpoint that it and the layers under test are loaded from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from moe_ep.layer import FusedMoE


@dataclass
class Weights:
    """Experts as a checkpoint has them: lists by expert of `[N, K]`, `[N, K]`, `[K, N]` and biases; f32.

    Attributes:
        limit: where gate and up end, up on both sides.
    """

    gate: list[torch.Tensor]
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    biases: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    limit: float = float("inf")

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name in the checkpoint."""
        named = {}
        for expert in range(len(self.gate)):
            for projection in ("gate", "up", "down"):
                stem = f"mlp.experts.{expert}.{projection}_proj"
                named[f"{stem}.weight"] = getattr(self, projection)[expert]
                if self.biases:
                    named[f"{stem}.bias"] = self.biases[projection][expert]
        return named


def make_weights(num_experts: int, K: int, N: int, *, has_bias: bool = False, seed: int = 0) -> Weights:
    """Experts whose outputs have about the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 for _ in range(num_experts)]

    weights = Weights(draw(N, K), draw(N, K), draw(K, N))
    if has_bias:
        weights.biases = {"gate": draw(N), "up": draw(N), "down": draw(K)}
    return weights


def make_inputs(T: int, K: int, num_columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_states `[T, K]` and router_logits `[T, num_columns]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, K, generator=generator), torch.randn(T, num_columns, generator=generator)


def run_expert(weights: Weights, expert: int, row: torch.Tensor) -> torch.Tensor:
    """One expert on one row `[K]`."""
    gate, up = weights.gate[expert] @ row, weights.up[expert] @ row
    if weights.biases:
        gate, up = gate + weights.biases["gate"][expert], up + weights.biases["up"][expert]
    gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
    output = weights.down[expert] @ (F.silu(gate) * up)
    return output + weights.biases["down"][expert] if weights.biases else output


def run_moe(
    weights: Weights,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    num_routed: int | None = None,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """The layer's output f32 `[T, K]`, one token and one expert at a time.

    Args:
        num_routed: routed experts; ids behind them are identity experts, and weights behind them shared experts. None
            means all.
    """
    num_routed = len(weights.gate) if num_routed is None else num_routed
    output = torch.zeros_like(hidden_states)
    for t, row in enumerate(hidden_states):
        scores = torch.softmax(router_logits[t], dim=0)
        chosen = sorted(range(len(scores)), key=lambda expert: (-float(scores[expert]), expert))[:top_k]
        total = sum(float(scores[expert]) for expert in chosen) if renormalize else 1.0
        for expert in chosen:
            weight = float(scores[expert]) / total
            if expert >= num_routed:
                output[t] += weight * row
            elif weight_on_input:
                output[t] += run_expert(weights, expert, weight * row)
            else:
                output[t] += weight * run_expert(weights, expert, row)
        for shared in range(num_routed, len(weights.gate)):
            output[t] += run_expert(weights, shared, row)
    return output


def load(layer: FusedMoE, weights: Weights, process: bool = True) -> FusedMoE:
    """Loads a layer through its weight_loader; weights behind its routed experts are fused shared ones."""
    tensors = weights.tensors()
    rows = FusedMoE.make_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", layer.num_experts, layer.num_redundant_experts
    )
    first_shared = layer.num_experts + layer.num_redundant_experts
    for index in range(layer.num_fused_shared_experts):
        for param_name, weight_name, _, shard_id in rows[:3]:
            weight_name = weight_name.replace(".0.", f".{layer.num_experts + index}.")
            rows.append((param_name, weight_name, first_shared + index, shard_id))
    params = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        for param_name, weight_name, expert_id, shard_id in rows:
            if weight_name in name:
                param = params[name.replace(weight_name, param_name).removeprefix("mlp.experts.")]
                layer.weight_loader(param, tensor, name, shard_id, expert_id)
    if process:
        layer.process_weights_after_loading()
    return layer
