"""PhiMoE's routing: one expert after the other, each weighted among those whose logits are close to its own.

The rule is that of transformers/models/phimoe (`sparsemixer`, without its sampling in training;
https://huggingface.co/papers/2409.12136).
"""

from __future__ import annotations

import torch


def sparse_mixer(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, *, jitter_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `custom_routing_function`, once it knows `jitter_eps`, which says how close is close.

    Example: logits [2, 1.99, 0] with jitter_eps 0.01: expert 0 gets its softmax among the logits 2 and 1.99, and
    expert 1, as the other is taken and 0 is far, gets 1.

    Returns:
        Weights f32 and ids int64, both `[T, topk]`; weights stay as they are, renormalized or not.
    """
    logits = gating_output.float()
    left, weights, ids = logits, [], []
    for _ in range(topk):
        largest, chosen = left.max(dim=-1, keepdim=True)
        distance = (largest - logits) / logits.abs().clamp(min=largest)
        scores = left.masked_fill(distance > 2 * jitter_eps, float("-inf")).softmax(dim=-1)
        weights.append(scores.gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)
