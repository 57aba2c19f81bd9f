"""Converts canonical weights to packed ones: which weights have a packed form, and what becomes of act-order.

w2 multiplies the activation's output, whose order is free, since w13's rows can be in any order as long as gate and up
have the same. If they are put into the order that sorts w2's columns by group, w2 no longer needs act-order. w13's
own columns multiply tokens that other experts read too, so their order is handled at run time.
"""

from __future__ import annotations

import torch

from moe_ep.kernels.marlin.repack import pack_marlin
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.kernels.marlin.weights import group_size_of
from moe_ep.modular_kernel.contracts import ExpertWeights
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import ScalarType, scalar_types


def not_packed_reason(weights: CanonicalWeights, row_multiple: int) -> str | None:
    """Why these weights have no packed form; None if they have one."""
    kind = WEIGHT_TYPES.get(weights.quant_type_id)
    _, num_rows, num_columns = weights.codes.shape
    if kind is None:
        return f"there is no packed form of {ScalarType.from_id(weights.quant_type_id)}"
    if num_rows % row_multiple or num_columns % 32:
        return f"a matrix is {num_rows} x {num_columns}; they take multiples of {row_multiple} and 32"
    num_groups = weights.scales.size(2)
    whole = weights.g_idx is None or has_all_groups(weights.group_size, num_groups, num_columns)
    size = group_size_of(kind, num_columns, num_groups) if whole else weights.group_size
    if size not in kind.group_sizes:
        return f"{num_groups} groups of {num_columns} columns; {kind.scalar_type} takes {kind.group_sizes}"
    return _irregular_reason(weights)


def pack_experts(
    w13: CanonicalWeights, w2: CanonicalWeights, act_dtype: torch.dtype, gated: bool, has_bias: bool
) -> tuple[ExpertWeights, ExpertWeights]:
    """Packs both matrices, keeping only the part of act-order that has to be handled at run time."""
    if has_bias:
        return _packed(w13, act_dtype, gated), _packed(w2, act_dtype, False)
    w13, w2 = in_order_of_w2(w13, w2)
    return _packed(w13, act_dtype, gated), _packed(w2, act_dtype, False)._replace(g_idx_sort_indices=None)


def in_order_of_w2(w13: CanonicalWeights, w2: CanonicalWeights) -> tuple[CanonicalWeights, CanonicalWeights]:
    """The same experts with w2's columns sorted by group, separately for each expert, and w13's rows in that order.

    w13 is one matrix, or several (gate, up) with the same number of rows. It must not have biases, which would have to
    be reordered too.
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
    """Whether the groups are those of these columns alone, rather than of a larger matrix of which they are a part."""
    return num_groups == 1 or group_size is None or num_groups * group_size == num_columns


def _packed(weights: CanonicalWeights, act_dtype: torch.dtype, gated: bool) -> ExpertWeights:
    # Scales of 4-bit floats have types of their own; all others have the activations'.
    is_fp4 = weights.quant_type_id == scalar_types.float4_e2m1f.id
    packed = pack_marlin(
        weights.codes,
        weights.scales if is_fp4 else weights.scales.to(act_dtype),
        weights.quant_type_id,
        weights.group_size,
        weights.zero_points,
        gated,
        weights.g_idx,
    )
    if has_all_groups(weights.group_size, packed.scales.size(1), weights.codes.size(2)):
        packed = packed._replace(g_idx=None)  # the groups are in order, so it is redundant
    return ExpertWeights(*packed, global_scales=weights.global_scales)


def _irregular_reason(weights: CanonicalWeights) -> str | None:
    """Why sorting the columns by group does not give groups of equal size, if it should; None if it does."""
    if weights.g_idx is None or not has_all_groups(weights.group_size, weights.scales.size(2), weights.codes.size(2)):
        return None
    num_columns = weights.codes.size(2)
    size = num_columns // weights.scales.size(2)
    in_order = torch.arange(num_columns, device=weights.g_idx.device) // size
    if (torch.sort(weights.g_idx, dim=1).values == in_order).all():
        return None
    return f"g_idx does not give each group {size} columns"


def _take(values: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorders the rows (dim 1) or columns (dim 2) of `[E, out, in]` for each expert; works for one-byte floats too."""
    plain = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    return plain.gather(dim, index.unsqueeze(3 - dim).expand(values.shape)).view(values.dtype)
