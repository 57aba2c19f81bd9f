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
    """Runs rows `[n, K]` through one expert; returns f32 `[n, K]`."""
    kind, w13, w2, activation = pair.kind, pair.w13, pair.w2, pair.activation
    rounds = pair.input_dtype == torch.float8_e4m3fn
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in (w13, w2))
    with without_autocast():
        gate_up = F.linear(round_rows(rows) if rounds else rows.float(), dequantize_packed(w13, kind, expert), bias1)
        if activation_func is None:
            hidden = apply_activation(activation, gate_up, clamp_limit=pair.clamp_limit)
        else:
            hidden = gate_up.new_empty(gate_up.size(0), w2.num_columns)
            activation_func(activation, hidden, gate_up)
        return F.linear(round_hidden(hidden) if rounds else hidden, dequantize_packed(w2, kind, expert), bias2)


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


TOLERANCE = 0.08  # mean |d| / mean |ref| of results, beside those of rows that are not rounded
GROUP_COLUMNS = 128  # kGroupColumns of cuda/e4m3_layout.cuh
_LEAST_SCALE = 2.0**-60


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[n, K]` as its rows are in e4m3, one scale each: f32."""
    rows = rows.float()
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales = (largest / torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)).clamp(min=_LEAST_SCALE)
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def round_hidden(hidden: torch.Tensor) -> torch.Tensor:
    """The activation's output `[n, N]` as it is in e4m3, with a scale for every 128 columns of a row: f32."""
    return round_rows(hidden.reshape(-1, GROUP_COLUMNS)).view(hidden.shape)
