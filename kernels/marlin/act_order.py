"""Columns out of order (act-order) in the canonical form: what can be put right before packing.

w2 multiplies the activation's output, whose order is free: w13's rows may come in any, gate and up alike. Put into the
order that sorts w2's columns by group, they leave w2 a matrix without act-order. w13's own columns belong to tokens
that other experts read too, so their order is looked after while it runs.
"""

from __future__ import annotations

import torch

from moe_ep.checkpoint.formats.canonical import CanonicalWeights


def in_order_of_w2(w13: CanonicalWeights, w2: CanonicalWeights) -> tuple[CanonicalWeights, CanonicalWeights]:
    """The same experts with w2's columns sorted by group, expert by expert, and w13's rows in the order of them.

    w13's rows are those of one matrix, or of several (gate, up) with as many rows each. Biases of w13 would have to
    follow; there must be none.
    """
    if w2.g_idx is None:
        return w13, w2
    g_idx, order = torch.sort(w2.g_idx, dim=1, stable=True)
    size = order.size(1)
    rows = torch.cat([order + first for first in range(0, w13.codes.size(1), size)], dim=1)
    w13 = w13._replace(
        codes=_take(w13.codes, rows, 1),
        scales=_take(w13.scales, rows, 1),
        zero_points=None if w13.zero_points is None else _take(w13.zero_points, rows, 1),
    )
    return w13, w2._replace(codes=_take(w2.codes, order, 2), g_idx=g_idx)


def has_all_groups(group_size: int | None, num_groups: int, num_columns: int) -> bool:
    """Whether the groups are those of these columns, and not of a whole of which they are a part."""
    return num_groups == 1 or group_size is None or num_groups * group_size == num_columns


def irregular_reason(weights: CanonicalWeights) -> str | None:
    """Why sorting the columns by group does not leave as many in each, where it should; None where it does."""
    if weights.g_idx is None or not has_all_groups(weights.group_size, weights.scales.size(2), weights.codes.size(2)):
        return None
    num_columns = weights.codes.size(2)
    size = num_columns // weights.scales.size(2)
    in_order = torch.arange(num_columns, device=weights.g_idx.device) // size
    if (torch.sort(weights.g_idx, dim=1).values == in_order).all():
        return None
    return f"g_idx does not give each group {size} columns"


def _take(values: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """`[E, out, in]` with the rows (dim 1) or columns (2) in another order for each expert; for one-byte floats too."""
    plain = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    return plain.gather(dim, index.unsqueeze(3 - dim).expand(values.shape)).view(values.dtype)
