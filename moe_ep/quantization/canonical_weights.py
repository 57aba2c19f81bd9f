"""The one form that every quantized checkpoint is unpacked to, before any kernel's layout is made from it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.arguments import check_tensors
from moe_ep.errors import check_whole, one_of
from moe_ep.scalar_type import ScalarType, scalar_types

# The magnitudes of e2m1 codes 0 to 7; code 8 + i is the negative of code i (OCP Microscaling Formats, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_WITH_ZERO_POINTS = {scalar_types.uint4b8: scalar_types.uint4, scalar_types.uint8b128: scalar_types.uint8}


class CanonicalWeights(NamedTuple):
    """Weights `[..., N, K]` as one code a byte, in the checkpoint's row and column order.

    Attributes:
        codes: uint8 `[..., N, K]`, the stored codes (for uint4b8 the value is code - 8, for float types the bits).
        scales: float `[..., N, G]`; uint8 ones are the bits of e8m0 numbers, powers of two.
        quant_type_id: `ScalarType.id` of the codes.
        group_size: columns of a group; -1 for all of them.
        zero_points: uint8 `[..., N, G]`, or None where the type has a fixed bias.
        g_idx: int32 `[..., K]`, the group of every column; None where column k is in group k // group_size.
        global_scales: f32 `[...]`, a factor of all rows, or `[..., H]`, one for each of H equal parts of the rows;
            None where there is none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    quant_type_id: int
    group_size: int
    zero_points: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    global_scales: torch.Tensor | None = None


def dequantize(weights: CanonicalWeights) -> torch.Tensor:
    """The values, f32 `[..., N, K]`: `scale * (code - zero point)`, rounded once, times the global scale."""
    scalar_type = ScalarType.from_id(weights.quant_type_id)
    if scalar_type.is_float:
        values = _float_values(weights.codes, scalar_type)
    elif weights.zero_points is not None:
        values = weights.codes.float() - per_column(weights.zero_points, weights).float()
    else:
        values = weights.codes.float() - scalar_type.bias
    scales = weights.scales.view(torch.float8_e8m0fnu) if weights.scales.dtype == torch.uint8 else weights.scales
    values = values * per_column(scales.float(), weights)
    if (factors := weights.global_scales) is None:
        return values
    if factors.dim() < values.dim() - 1:
        factors = factors.unsqueeze(-1)
    per_row = factors.repeat_interleave(values.shape[-2] // factors.shape[-1], dim=-1)
    return values * per_row.unsqueeze(-1)


def per_column(groups: torch.Tensor, weights: CanonicalWeights) -> torch.Tensor:
    """Spreads `[..., N, G]` over the columns: `[..., N, K]`."""
    num_columns = weights.codes.shape[-1]
    if weights.g_idx is not None:
        index = weights.g_idx.long().unsqueeze(-2).expand(weights.codes.shape)
        return groups.gather(-1, index)
    group_size = num_columns if weights.group_size == -1 else weights.group_size
    return groups.repeat_interleave(group_size, dim=-1)[..., :num_columns]


def concatenate_rows(first: CanonicalWeights, second: CanonicalWeights) -> CanonicalWeights:
    """Gate rows, then up rows, of weights of one format; their columns have the same groups."""
    if first.zero_points is not None or second.zero_points is not None:
        first, second = with_zero_points(first), with_zero_points(second)

    zero_points = None
    if first.zero_points is not None and second.zero_points is not None:
        zero_points = torch.cat((first.zero_points, second.zero_points), dim=-2)
    global_scales = None
    if first.global_scales is not None and second.global_scales is not None:
        global_scales = torch.stack((first.global_scales, second.global_scales), dim=-1)
    return first._replace(
        codes=torch.cat((first.codes, second.codes), dim=-2),
        scales=torch.cat((first.scales, second.scales), dim=-2),
        zero_points=zero_points,
        global_scales=global_scales,
    )


def agree_on_type(w13: CanonicalWeights, w2: CanonicalWeights) -> tuple[CanonicalWeights, CanonicalWeights]:
    """The same values in one number type, where integers can have one; floats of two kinds stay as they are.

    Zero points in one mean zero points in both, and codes of 4 bits beside codes of 8 become codes of 8.
    """
    types = [ScalarType.from_id(part.quant_type_id) for part in (w13, w2)]
    if any(scalar_type.is_float for scalar_type in types):
        return w13, w2
    if w13.zero_points is not None or w2.zero_points is not None:
        w13, w2 = with_zero_points(w13), with_zero_points(w2)
    if types[0].size_bits != types[1].size_bits:
        w13, w2 = _in_eight_bits(w13), _in_eight_bits(w2)
    return w13, w2


def with_zero_points(weights: CanonicalWeights) -> CanonicalWeights:
    """The same values with the type's bias written out as zero points: uint4b8 becomes uint4, uint8b128 uint8."""
    if weights.zero_points is not None:
        return weights
    biased = ScalarType.from_id(weights.quant_type_id)
    zero_points = torch.full_like(weights.scales, biased.bias, dtype=torch.uint8)
    return weights._replace(zero_points=zero_points, quant_type_id=_WITH_ZERO_POINTS[biased].id)


def with_g_idx(weights: CanonicalWeights, first_column: int = 0) -> CanonicalWeights:
    """The same weights with the group of every column written out.

    Args:
        first_column: where the weights' columns start in the whole matrix, whose groups the scales are.
    """
    if weights.g_idx is not None:
        return weights
    num_columns = weights.codes.shape[-1]
    group_size = first_column + num_columns if weights.group_size == -1 else weights.group_size
    columns = torch.arange(first_column, first_column + num_columns, dtype=torch.int32, device=weights.codes.device)
    groups = columns // group_size
    return weights._replace(g_idx=groups.expand(*weights.codes.shape[:-2], -1).contiguous())


def _in_eight_bits(weights: CanonicalWeights) -> CanonicalWeights:
    """uint4b8 as uint8b128 and uint4 as uint8."""
    scalar_type = ScalarType.from_id(weights.quant_type_id)
    if scalar_type.size_bits == 8:
        return weights
    if weights.zero_points is not None:
        return weights._replace(quant_type_id=scalar_types.uint8.id)
    wide = scalar_types.uint8b128
    return weights._replace(codes=weights.codes + (wide.bias - scalar_type.bias), quant_type_id=wide.id)


def _float_values(codes: torch.Tensor, scalar_type: ScalarType) -> torch.Tensor:
    if scalar_type == scalar_types.float8_e4m3fn:
        return codes.view(torch.float8_e4m3fn).float()
    if scalar_type == scalar_types.float4_e2m1f:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=codes.device)
        return table[codes.long()]
    raise ValueError(f"quant_type_id stands for {scalar_type}; it must be an integer, e4m3 or e2m1 type")


# ==== Quantizing plain weights: round to nearest, symmetric, no calibration ====

_TYPES = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
_PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
        ValueError: a weight of another dtype, other bits, or a group_size that does not divide K.
        TypeError: a group_size that is no whole number.
    """
    if bits not in list(_TYPES):  # it may be of any type
        raise ValueError(one_of("bits", bits, [str(known) for known in _TYPES]))
    check_tensors(weight=weight)
    if weight.dtype not in _PLAIN_DTYPES:
        raise ValueError(f"weight is {weight.dtype}; it must be f32, f16 or bf16, as its scales will be")
    check_whole(group_size=group_size)
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
    return CanonicalWeights(codes, scales, _TYPES[bits].id, group_size)


def quantize_fp8(weight: torch.Tensor) -> CanonicalWeights:
    """e4m3 codes of a plain weight `[..., N, K]` and a f32 scale a row, its largest magnitude over 448."""
    largest = weight.abs().amax(dim=-1, keepdim=True).float()
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    codes = (weight.float() / torch.where(scales == 0, torch.inf, scales)).to(torch.float8_e4m3fn)
    return CanonicalWeights(codes.view(torch.uint8), scales, scalar_types.float8_e4m3fn.id, -1)
