"""The one form that every quantized checkpoint is unpacked to, before any kernel's layout is made from it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.scalar_type import ScalarType


class CanonicalWeights(NamedTuple):
    """Weights `[..., N, K]` as one code a byte, in the checkpoint's row and column order.

    Attributes:
        codes: uint8 `[..., N, K]`, the stored codes (for uint4b8 the value is code - 8).
        scales: float `[..., N, G]`.
        zero_points: uint8 `[..., N, G]`, or None where the type has a fixed bias.
        g_idx: int32 `[..., K]`, the group of every column; None where column k is in group k // group_size.
        quant_type_id: `ScalarType.id` of the codes.
        group_size: columns of a group; -1 for all of them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    g_idx: torch.Tensor | None
    quant_type_id: int
    group_size: int


def dequantize(weights: CanonicalWeights) -> torch.Tensor:
    """The values, f32 `[..., N, K]`: `scale * (code - zero point)`, rounded once.

    Raises:
        ValueError: a quant_type_id that is not an integer type.
    """
    scalar_type = ScalarType.from_id(weights.quant_type_id)
    if scalar_type.is_float:
        raise ValueError(f"quant_type_id is {weights.quant_type_id} ({scalar_type}); it must be an integer type")
    zero_points: torch.Tensor | int = scalar_type.bias
    if weights.zero_points is not None:
        zero_points = per_column(weights.zero_points, weights).float()
    return (weights.codes.float() - zero_points) * per_column(weights.scales, weights).float()


def per_column(groups: torch.Tensor, weights: CanonicalWeights) -> torch.Tensor:
    """Spreads `[..., N, G]` over the columns: `[..., N, K]`."""
    num_columns = weights.codes.shape[-1]
    if weights.g_idx is not None:
        index = weights.g_idx.long().unsqueeze(-2).expand(weights.codes.shape)
        return groups.gather(-1, index)
    group_size = num_columns if weights.group_size == -1 else weights.group_size
    return groups.repeat_interleave(group_size, dim=-1)[..., :num_columns]
