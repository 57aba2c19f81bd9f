"""Ways of routing and what they choose, token by token in Python floats; what tests of select_experts share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way of routing: everything the oracle and select_experts both need."""

    num_experts: int = 12
    top_k: int = 3
    scoring_func: str = "softmax"
    renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    bias: bool = False
    routed_scaling_factor: float = 1.0
    zero_expert_num: int = 0

    @property
    def num_columns(self) -> int:
        return self.num_experts + self.zero_expert_num

    def make(self, num_tokens: int, seed: int = 0, hidden_size: int = 4) -> tuple[torch.Tensor, ...]:
        """(hidden_states, router_logits, bias | None). Logits lie on a coarse grid, so that many are equal."""
        generator = torch.Generator().manual_seed(seed)
        hidden_states = torch.randn(num_tokens, hidden_size, generator=generator)
        logits = torch.randint(-8, 9, (num_tokens, self.num_columns), generator=generator) / 4
        bias = torch.randint(-3, 4, (self.num_columns,), generator=generator) / 8
        return hidden_states, logits, bias if self.bias else None

    def arguments(self) -> dict:
        return {
            "top_k": self.top_k,
            "use_grouped_topk": self.num_expert_group > 1,
            "renormalize": self.renormalize,
            "topk_group": self.topk_group,
            "num_expert_group": self.num_expert_group,
            "scoring_func": self.scoring_func,
            "routed_scaling_factor": self.routed_scaling_factor,
            "zero_expert_num": self.zero_expert_num,
            "zero_expert_type": "identity" if self.zero_expert_num else None,
        }


def best(values: dict[int, float], count: int) -> list[int]:
    """Keys of the largest values, lowest key first among equals. Values a rounding apart count as equal."""
    return sorted(values, key=lambda key: (-round(values[key], 5), key))[:count]


def route_by_hand(rule: Rule, logits: list[float], bias: list[float] | None) -> tuple[list[float], list[int]]:
    """One token: (weights, ids), identity experts still among them."""
    if rule.scoring_func == "softmax":
        powers = [math.exp(value) for value in logits]
        scores = [power / sum(powers) for power in powers]
    elif rule.scoring_func == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(value))) for value in logits]
    choice = {e: score + (bias[e] if bias else 0.0) for e, score in enumerate(scores)}
    size = rule.num_columns // rule.num_expert_group
    group_scores = {}
    for group in range(rule.num_expert_group):
        members = sorted((choice[e] for e in range(group * size, (group + 1) * size)), reverse=True)
        group_scores[group] = sum(members[:2]) if bias else members[0]
    kept = best(group_scores, rule.topk_group)
    ids = best({e: value for e, value in choice.items() if e // size in kept}, rule.top_k)
    weights = [scores[e] for e in ids]
    if rule.renormalize:
        weights = [weight / sum(scores[e] for e in ids) for weight in weights]
    return [weight * rule.routed_scaling_factor for weight in weights], ids
