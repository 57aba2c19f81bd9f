"""Sums of 8-bit floats as Hopper's tensor cores make them, bit for bit, and experts in plain torch with such sums.

A tensor core adds the products of 32 columns and the accumulator at once, with few bits. Found on an H200, where random
products of e4m3 and e5m2 of 32 to 256 columns, subnormal numbers and zeros among them, have no other bits.

Example: 1 + 31 x 2^-14 is 1, since terms are cut to multiples of 2^-13 of the power of two of the largest.
"""

from __future__ import annotations

import torch

from moe_ep.activation import apply_activation
from moe_ep.kernels.marlin.hopper import groups_per_step
from moe_ep.kernels.marlin.plain import canonical_weights
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, split_rows
from moe_ep.quantization.canonical_weights import dequantize
from moe_ep.scalar_type import scalar_types

_COLUMNS = 32  # of one product
_STEP_COLUMNS = 128  # of a pipeline stage
_FRACTION_BITS = 13  # of the largest term; the others are cut at its last bit
_LEAST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
_NO_EXPONENT = -1000  # of zero, which no alignment depends on


def tensor_core_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` of e4m3 or e5m2 `[n, K]` and `[m, K]`, summed over all columns in one accumulator: f32 `[n, m]`.

    Each product's exponent is the sum of its factors', before it is normalized. All terms are cut toward zero at the
    last bit of the largest exponent, added exactly, and the sum is cut to 14 bits.
    """
    sums = torch.zeros(a.size(0), b.size(0), device=a.device)
    for first in range(0, a.size(1), _COLUMNS):
        parts = [part[:, first : first + _COLUMNS] for part in (a, b)]
        (x, of_x), (y, of_y) = ((part.float(), _exponents(part.float(), _LEAST_EXPONENT[part.dtype])) for part in parts)
        largest = torch.maximum((of_x[:, None] + of_y[None]).amax(2), _exponents(sums))
        up = (_FRACTION_BITS - largest).clamp(max=100)  # all terms are zero where it were more
        total = torch.ldexp(sums, up).trunc() + torch.ldexp(x[:, None] * y[None], up[..., None]).trunc().sum(2)
        digits, exponent = torch.frexp(total)
        whole = (digits * 2 ** (_FRACTION_BITS + 1)).trunc()
        sums = torch.ldexp(whole, exponent - (_FRACTION_BITS + 1) - up)
    return sums


def _exponents(values: torch.Tensor, least: int = _NO_EXPONENT) -> torch.Tensor:
    exponents = (torch.frexp(values).exponent - 1).clamp(min=least)
    return torch.where(values == 0, _NO_EXPONENT, exponents)


def compute_expert(
    rows: torch.Tensor, pair: WeightPair, expert: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """plain.compute_expert with e4m3 rows, whose sums are the tensor cores': f32 `[n, K]`."""
    return _product(*compute_hidden(rows, pair, expert, scales), pair, expert, 1)


def compute_hidden(
    rows: torch.Tensor, pair: WeightPair, expert: int, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What w13 and the activation make of rows: e4m3 codes `[n, N]`, and scales `[n, ceil(N / 128)]`."""
    codes = rows
    if scales is None:
        codes, scales = _rounded(rows, whole=True)
    gate_up = _product(codes, scales, pair, expert, 0)
    return _rounded(apply_activation(pair.activation, gate_up, clamp_limit=pair.clamp_limit))


def _rounded(rows: torch.Tensor, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return split_rows(quantize_rows(rows, whole=whole), rows.size(1), torch.float8_e4m3fn, whole)


def _product(codes: torch.Tensor, scales: torch.Tensor, pair: WeightPair, expert: int, phase: int) -> torch.Tensor:
    """w13 (phase 0) of rows with one scale, or w2 of rows with one every 128 columns: f32 `[n, rows of weights]`.

    As cuda/eight_bit_sm90.cu promotes sums: those of a group of columns, or where a weight row has one scale, of a step
    (w2, and e4m3 weights) or two.
    """
    both = (pair.w13, pair.w2)
    operands, of_groups = _operands(pair, expert, phase)
    if of_groups.size(1) == 1 and all(w.scales.size(1) == 1 or pair.kind.for_eight_bit_rows for w in both):
        width = _STEP_COLUMNS if phase == 1 or operands.dtype == codes.dtype else 2 * _STEP_COLUMNS
    else:
        width = _STEP_COLUMNS // max(groups_per_step(w.num_columns, w.scales.size(1)) for w in both)
    sums = torch.zeros(codes.size(0), operands.size(0), device=codes.device)
    for first in range(0, codes.size(1), width):
        columns = slice(first, first + width)
        scale = of_groups[:, first * of_groups.size(1) // codes.size(1)]
        if phase == 1:
            scale = scale * scales[:, first // _STEP_COLUMNS, None]
        sums += tensor_core_sums(codes[:, columns], operands[:, columns]) * scale
    if phase == 0:
        sums *= scales
    return sums if both[phase].bias is None else sums + both[phase].bias[expert].float()


def _operands(pair: WeightPair, expert: int, phase: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[rows, K]` as eight_bit_widen.cuh makes them of codes, and f32 `[rows, G]`, the factors of sums."""
    weights = canonical_weights((pair.w13, pair.w2)[phase], pair.kind, expert)
    assert weights.global_scales is None
    if pair.kind.scalar_type == scalar_types.float4_e2m1f:
        # e8m0 scales become one a row, its largest: code * 2^13 where a group has that scale.
        largest = torch.exp2(weights.scales.amax(1, keepdim=True).clamp(min=1).float() - 127)
        return (dequantize(weights) / largest * 2.0**13).to(torch.float8_e5m2), largest * 2.0**-13
    scales = weights.scales.float()
    codes = dequantize(weights._replace(scales=torch.ones_like(weights.scales)))
    if not pair.kind.scalar_type.is_float:
        codes, scales = codes * 2.0**-9, scales * 2.0**9
    return codes.to(torch.float8_e4m3fn), scales
