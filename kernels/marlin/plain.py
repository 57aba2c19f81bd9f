"""The packed experts in plain torch: weights are dequantized to f32 one expert at a time, and products are in f32.

The functions run this on the CPU, and the kernels are compared with it. On a GPU it is used if the caller passes an
activation function, with static shapes and without a host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin.repack import PackedWeights, unpack_marlin
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair, Weights, group_size_of
from moe_ep.layer.custom_ops import without_autocast
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize

# mean |d| / mean |ref| of results with rows of 8 bits, against those of rows that are not rounded.
TOLERANCES = {torch.int8: 0.022, torch.float8_e4m3fn: 0.05}
GROUP_COLUMNS = 128  # kGroupColumns of cuda/eight_bit_layout.cuh
_LEAST_SCALE = 2.0**-60
_LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}

ActivationFunction = Callable[[MoEActivation, torch.Tensor, torch.Tensor], None]


def dequantize_packed(weights: Weights, kind: WeightType, expert: int) -> torch.Tensor:
    """Dequantizes one expert to f32 `[rows, columns]` in natural order."""
    packed = PackedWeights(
        weights.qweight[expert : expert + 1],
        weights.scales[expert : expert + 1],
        None if weights.zeros is None else weights.zeros[expert : expert + 1],
        None if weights.g_idx is None else weights.g_idx[expert : expert + 1],
        None if weights.sort_indices is None else weights.sort_indices[expert : expert + 1],
    )
    size = group_size_of(kind, weights.num_columns, weights.scales.size(1)) or kind.group_sizes[0]
    codes, scales, zeros = unpack_marlin(packed, kind.scalar_type.id, size, gated=weights.gated)
    return dequantize(
        CanonicalWeights(
            codes=codes[0],
            scales=scales[0],
            zero_points=None if zeros is None else zeros[0],
            g_idx=_group_of_columns(weights, expert),
            quant_type_id=kind.scalar_type.id,
            group_size=size,
            global_scales=None if weights.alphas is None else weights.alphas[expert],
        )
    )


def compute_expert(
    rows: torch.Tensor, pair: WeightPair, expert: int, activation_func: ActivationFunction | None = None
) -> torch.Tensor:
    """Runs rows `[n, K]` through one expert; returns f32 `[n, K]`.

    If pair.input_dtype is int8 or e4m3, the rows and the activation's output are rounded to it (`round_rows`): rows
    with one scale each, the activation's output with one for every 128 columns, as the kernels quantize them.
    """
    kind, w13, w2, activation, dtype = pair.kind, pair.w13, pair.w2, pair.activation, pair.input_dtype
    rounds = dtype in _LARGEST_CODE
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in (w13, w2))
    with without_autocast():
        rows = round_rows(rows, dtype, rows.size(1)) if rounds else rows.float()
        gate_up = F.linear(rows, dequantize_packed(w13, kind, expert), bias1)
        if activation_func is None:
            hidden = apply_activation(activation, gate_up, clamp_limit=pair.clamp_limit)
        else:
            hidden = gate_up.new_empty(gate_up.size(0), w2.num_columns)
            activation_func(activation, hidden, gate_up)
        hidden = round_rows(hidden, dtype) if rounds else hidden
        return F.linear(hidden, dequantize_packed(w2, kind, expert), bias2)


def _group_of_columns(weights: Weights, expert: int) -> torch.Tensor:
    """int64 `[columns]`: the group of every column, in natural order."""
    if weights.g_idx is None or weights.has_regular_groups:
        packed = torch.arange(weights.num_columns, device=weights.qweight.device)
        packed //= weights.num_columns // weights.scales.size(1)
    else:
        packed = weights.g_idx[expert].long()
    if weights.sort_indices is None:
        return packed
    return torch.empty_like(packed).scatter_(0, weights.sort_indices[expert].long(), packed)


def round_rows(rows: torch.Tensor, dtype: torch.dtype, group_columns: int = GROUP_COLUMNS) -> torch.Tensor:
    """Rows `[n, K]` as they are after quantizing to int8 or e4m3: f32.

    value = code * scale, with scale = max|x| / 127 (int8) or / 448 (e4m3), at least 2^-60, of group_columns columns;
    the last group has those that remain. Codes are rounded to nearest, ties to even.

    Example: int8, row [1, -0.5, 0.25]: scale 1 / 127, codes 127, -64, 32.
    """
    rows = rows.float()
    num_rows, num_columns = rows.shape
    groups = F.pad(rows, (0, -num_columns % group_columns)).view(num_rows, -1, group_columns)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # A tensor as the divisor: torch on CUDA multiplies by the reciprocal of a number.
    scales = (largest / torch.full_like(largest, _LARGEST_CODE[dtype])).clamp(min=_LEAST_SCALE)
    codes = groups / scales
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return (codes * scales).view(num_rows, -1)[:, :num_columns]
