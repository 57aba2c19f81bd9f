"""How evenly the load lies on the ranks, as one number."""

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
