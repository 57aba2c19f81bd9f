"""The top-k of a router in plain torch: scores -> choice -> grouped mask -> top-k -> weights.

It runs on any device, without optimisation, and is the reference for the fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_F32 = torch.finfo(torch.float32)


# Scores f32 `[T, E]` from logits, by name.
SCORING_FUNCS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),  # DeepSeek-V4
}


def topk_reference(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = False,
    num_expert_group: int = 1,
    topk_group: int = 1,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k in plain torch, on any device; `moe_ep.kernels.routing.fused_topk` returns the same ids.

    Example: sigmoid, logits [2, -1, .5, 0, 1, 1.2, -2, 3], bias [0, 0, 0, 0, .3, .3, 0, -.9], top 2 in the best 2 of 4
    groups. The two best choices of each group sum to 1.15, 1.12, 2.10 and 0.17, so groups 2 and 0 are kept; the best
    experts in them are 5 (1.07) and 4 (1.03). Weights .7685, .7311; renormalized .5125, .4875.

    Args: as in `select_experts`, not checked.

    Returns:
        (weights f32 `[T, top_k]`, ids int32 `[T, top_k]`).
    """
    logits = router_logits.float()
    scores = SCORING_FUNCS[scoring_func](logits)
    choice = choice_values(logits, scores, e_score_correction_bias)
    if topk_group < num_expert_group:
        choice = _keep_best_groups(choice, num_expert_group, topk_group, sum_of_two=e_score_correction_bias is not None)
    ids = _topk_lowest_id(choice, top_k)
    return weights_of(scores, ids, renormalize, routed_scaling_factor), ids.to(torch.int32)


def weights_of(
    scores: torch.Tensor, ids: torch.Tensor, renormalize: bool, routed_scaling_factor: float
) -> torch.Tensor:
    """The weights f32 `[T, top_k]` of chosen experts by their scores f32 `[T, E]`; 0 for ids of -1."""
    weights = scores.gather(1, ids.long().clamp(min=0)).masked_fill(ids < 0, 0.0)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_F32.tiny)
    return weights * routed_scaling_factor


def choice_values(logits: torch.Tensor, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The values by which experts are chosen, finite f32 `[T, E]`: without a bias the logits, with which all scores
    grow, and which do not depend on how a device rounds its exponential."""
    choice = logits if bias is None else scores + bias.float()
    # -inf is reserved for groups that were dropped; adding 0 turns -0 into 0, which some sorts tell apart.
    return torch.nan_to_num(choice, nan=_F32.min, neginf=_F32.min, posinf=_F32.max) + 0.0


def _keep_best_groups(choice: torch.Tensor, num_expert_group: int, topk_group: int, sum_of_two: bool) -> torch.Tensor:
    """The choice, f32 `[T, E]`, with -inf in all but the best `topk_group` groups."""
    num_tokens, num_columns = choice.shape
    grouped = choice.view(num_tokens, num_expert_group, num_columns // num_expert_group)
    counted = min(2 if sum_of_two else 1, grouped.size(-1))
    group_scores = grouped.topk(counted, dim=-1).values.sum(dim=-1).clamp(_F32.min, _F32.max)
    best = _topk_lowest_id(group_scores, topk_group)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).view(num_tokens, num_columns)


def _topk_lowest_id(values: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest values of each row, int64 `[T, k]`; of equal values, which torch.topk leaves open, the
    first comes first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]


def sparse_mixer(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, *, jitter_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PhiMoE's routing: experts are chosen one after another, each weighted against those with logits close to its own.

    The rule is that of transformers/models/phimoe (`sparsemixer`, without the sampling that it does in training;
    https://huggingface.co/papers/2409.12136). It is a `custom_routing_function` once
    `jitter_eps` is bound, which defines how close logits must be.

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
