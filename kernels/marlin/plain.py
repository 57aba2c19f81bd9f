"""The same experts in plain torch: weights dequantized to f32 one expert at a time, matrix products in f32.

This is what the functions run on the CPU, and what the kernels are compared with. On a GPU it serves a caller's own
activation function, with static shapes and without a host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin.pair import WeightPair
from moe_ep.kernels.marlin.repack import PackedWeights, unpack_marlin
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights, group_size_of
from moe_ep.scalar_type import scalar_types

# The sixteen numbers of e2m1 (OCP Microscaling Formats, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

ActivationFunction = Callable[[MoEActivation, torch.Tensor, torch.Tensor], None]


def dequantize_packed(weights: Weights, kind: WeightType, expert: int) -> torch.Tensor:
    """f32 `[rows, columns]` of one expert in natural order: (code - zero point) * scale * global scale."""
    packed = PackedWeights(
        weights.qweight[expert : expert + 1],
        weights.scales[expert : expert + 1],
        None if weights.zeros is None else weights.zeros[expert : expert + 1],
        None,
        None if weights.sort_indices is None else weights.sort_indices[expert : expert + 1],
    )
    num_groups = weights.scales.size(1)
    size = group_size_of(kind, weights.num_columns, num_groups) or kind.group_sizes[0]
    codes, scales, zeros = unpack_marlin(packed, kind.scalar_type.id, size, gated=weights.gated)
    columns = _group_of_columns(weights, expert, num_groups)
    values = _values(codes[0], kind) if zeros is None else codes[0].float() - zeros[0].float()[:, columns]
    values = values * _scale_values(scales[0])[:, columns]
    if weights.alphas is not None:
        alphas = weights.alphas[expert].reshape(-1)
        values = values * alphas.repeat_interleave(weights.num_rows // alphas.numel())[:, None]
    return values


def compute_expert(
    rows: torch.Tensor, pair: WeightPair, expert: int, activation_func: ActivationFunction | None = None
) -> torch.Tensor:
    """rows `[n, K]` through one expert, f32 `[n, K]`."""
    kind, w13, w2, activation = pair.kind, pair.w13, pair.w2, pair.activation
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in (w13, w2))
    gate_up = F.linear(rows.float(), dequantize_packed(w13, kind, expert), bias1)
    if activation_func is None:
        hidden = apply_activation(activation, gate_up)
    else:
        hidden = gate_up.new_empty(gate_up.size(0), w2.num_columns)
        activation_func(activation, hidden, gate_up)
    return F.linear(hidden, dequantize_packed(w2, kind, expert), bias2)


def _group_of_columns(weights: Weights, expert: int, num_groups: int) -> torch.Tensor:
    """int64 `[columns]`: the group of every column, in natural order."""
    if weights.g_idx is None or weights.has_regular_groups:
        packed = torch.arange(weights.num_columns, device=weights.qweight.device)
        packed //= weights.num_columns // num_groups
    else:
        packed = weights.g_idx[expert].long()
    if weights.sort_indices is None:
        return packed
    return torch.empty_like(packed).scatter_(0, weights.sort_indices[expert].long(), packed)


def _values(codes: torch.Tensor, kind: WeightType) -> torch.Tensor:
    if kind.scalar_type == scalar_types.float8_e4m3fn:
        return codes.view(torch.float8_e4m3fn).float()
    if kind.scalar_type == scalar_types.float4_e2m1f:
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
        return table[codes.long()]
    return codes.float() - kind.scalar_type.bias


def _scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as f32; bytes are exponents of two with a bias of 127 (e8m0)."""
    if scales.dtype == torch.float8_e4m3fn or scales.dtype.itemsize > 1:
        return scales.float()
    return torch.exp2(scales.view(torch.uint8).float() - 127.0)
