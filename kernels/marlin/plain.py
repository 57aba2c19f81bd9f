"""The packed experts in plain torch: weights are dequantized to f32 one expert at a time, and products are in f32.

The functions run this on the CPU, and the kernels are compared with it. On a GPU it is used if the caller passes an
activation function, with static shapes and without a host synchronization.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin.repack import PackedWeights, unpack_experts
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import WeightPair, Weights, group_size_of
from moe_ep.kernels.reference import compute_rows
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize
from moe_ep.quantization.input_rows import INPUT_DTYPES

# mean |difference| / mean |reference| of results with 8-bit rows, compared with rows that are not rounded.
TOLERANCES = {torch.int8: 0.022, torch.float8_e4m3fn: 0.05}

ActivationFunction = Callable[[MoEActivation, torch.Tensor, torch.Tensor], None]


def canonical_weights(weights: Weights, kind: WeightType, expert: int) -> CanonicalWeights:
    """One expert's codes `[rows, columns]`, scales and zero points in natural order."""
    parts = (weights.qweight, weights.scales, weights.zeros, weights.g_idx, weights.sort_indices)
    packed = PackedWeights._make(None if part is None else part[expert : expert + 1] for part in parts)
    size = group_size_of(kind, weights.num_columns, weights.scales.size(1)) or kind.group_sizes[0]
    codes, scales, zeros = unpack_experts(packed, kind, weights.gated)
    return CanonicalWeights(
        codes=codes[0],
        scales=scales[0],
        zero_points=None if zeros is None else zeros[0],
        g_idx=_group_of_columns(weights, expert),
        quant_type_id=kind.scalar_type.id,
        group_size=size,
        global_scales=None if weights.alphas is None else weights.alphas[expert],
    )


def dequantize_packed(weights: Weights, kind: WeightType, expert: int) -> torch.Tensor:
    """Dequantizes one expert to f32 `[rows, columns]` in natural order."""
    return dequantize(canonical_weights(weights, kind, expert))


def compute_expert(
    rows: torch.Tensor,
    pair: WeightPair,
    expert: int,
    activation_func: ActivationFunction | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs rows `[n, K]` through one expert; returns f32 `[n, K]`.

    Args:
        scales: as in reference.compute_rows, which rounds rows to pair.input_dtype where that is int8 or e4m3.
    """
    both = (pair.w13, pair.w2)
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in both)

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        if activation_func is None:
            return apply_activation(pair.activation, gate_up, clamp_limit=pair.clamp_limit)
        hidden = gate_up.new_empty(gate_up.size(0), pair.w2.num_columns)
        activation_func(pair.activation, hidden, gate_up)
        return hidden

    return compute_rows(
        rows,
        scales,
        lambda which: dequantize_packed(both[which], pair.kind, expert),
        (bias1, bias2),
        activate,
        pair.input_dtype if pair.input_dtype in INPUT_DTYPES else None,
    )


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
