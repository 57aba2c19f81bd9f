"""Quantizes plain weights: round to nearest, symmetric, no calibration."""

from __future__ import annotations

import torch

from moe_ep.errors import one_of
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

_TYPES = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}


def quantize_int(weight: torch.Tensor, bits: int, group_size: int) -> CanonicalWeights:
    """Codes and scales of a plain weight, the scale of a group being its largest magnitude over `2**(bits - 1) - 0.5`.

    With half a step to spare on the positive side, no value is further than half a step from its code.

    Args:
        weight: f32, f16 or bf16 `[..., N, K]`.
        bits: 4 (uint4b8) or 8 (uint8b128).
        group_size: input columns that share a scale; a divisor of K, or -1 for all of them.

    Returns:
        codes uint8 `[..., N, K]`, scales `[..., N, K / group_size]` of the weight's dtype, no zero points.

    Raises:
        ValueError: other bits, or a group_size that does not divide K.
    """
    if bits not in list(_TYPES):  # it may be of any type
        raise ValueError(one_of("bits", bits, [str(known) for known in _TYPES]))
    num_columns = weight.shape[-1]
    columns = num_columns if group_size == -1 else group_size
    if columns < 1 or num_columns % columns:
        raise ValueError(f"group_size is {group_size}; it must be -1 or divide the {num_columns} input columns")
    bias = _TYPES[bits].bias
    groups = weight.float().unflatten(-1, (-1, columns))
    scales = (groups.abs().amax(dim=-1) / (bias - 0.5)).to(weight.dtype)
    # A group of zeros, or of values too small for the dtype's scale, becomes zeros whatever it is divided by.
    steps = scales.float().unsqueeze(-1)
    rounded = torch.round(groups / torch.where(steps == 0, torch.inf, steps))
    codes = (rounded + bias).clamp_(0, 2 * bias - 1).to(torch.uint8).flatten(-2)
    return CanonicalWeights(codes, scales, None, None, _TYPES[bits].id, group_size)


def quantize_fp8(weight: torch.Tensor) -> CanonicalWeights:
    """e4m3 codes of a plain weight `[..., N, K]` and a f32 scale a row, its largest magnitude over 448."""
    largest = weight.abs().amax(dim=-1, keepdim=True).float()
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    codes = (weight.float() / torch.where(scales == 0, torch.inf, scales)).to(torch.float8_e4m3fn)
    return CanonicalWeights(codes.view(torch.uint8), scales, None, None, scalar_types.float8_e4m3fn.id, -1)
