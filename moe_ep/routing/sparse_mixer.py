"""PhiMoE's routing: experts are chosen one after another, each weighted against those with logits close to its own.

The rule is that of transformers/models/phimoe (`sparsemixer`, without the sampling that it does in training;
https://huggingface.co/papers/2409.12136).
"""

from __future__ import annotations

import torch


def sparse_mixer(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, *, jitter_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `custom_routing_function` once `jitter_eps` is bound, which defines how close logits must be.

    Example: logits [2, 1.99, 0] with jitter_eps 0.01: expert 0 gets its softmax among the logits 2 and 1.99. Expert 1
    then gets 1, since expert 0 is taken and the logit 0 is far away.

    Returns:
        Weights f32 and ids int64, both `[T, topk]`; `renormalize` is ignored.
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
