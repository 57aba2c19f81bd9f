"""Packed experts of a few rows with the values they stand for, made by hand; what tests of them on the CPU share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.kernels.marlin.repack import PackedWeights, pack_marlin
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.scalar_type import scalar_types

E, K, N, ROWS = 3, 128, 64, 6
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
RELATIVE_ERROR = 0.01  # mean |d| / mean |ref|, the tolerance of all quantized experts


class Made(NamedTuple):
    """Packed weights, the values they stand for, and the global scales."""

    packed: PackedWeights
    values: torch.Tensor
    alphas: torch.Tensor | None


def make(
    kind: WeightType,
    group: int,
    out: int,
    columns: int,
    gated: bool,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False,
) -> Made:
    """Random weights of one kind with values of order 0.1."""
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else columns // group
    codes = torch.randint(0, 1 << kind.bits, (E, out, columns), dtype=torch.uint8, generator=rng)
    steps = torch.rand(E, out, groups, generator=rng) * 0.03 + 0.003
    alphas = zeros = g_idx = None
    if kind.scalar_type == scalar_types.float8_e4m3fn:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        values, scales = codes.view(torch.float8_e4m3fn).float(), (steps * 0.1).to(dtype)
    elif kind.scalar_type == scalar_types.float4_e2m1f:
        values = E2M1[codes.long()]
        if group == 16:
            scales, alphas = (steps * 64).to(torch.float8_e4m3fn), torch.rand(E, generator=rng) * 0.05 + 0.01
        else:
            scales = torch.randint(119, 124, steps.shape, dtype=torch.uint8, generator=rng)
    else:
        values, scales = codes.float() - kind.scalar_type.bias, (steps * (0.1 if kind.bits == 8 else 1)).to(dtype)
        if kind.has_zero_points:
            zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=rng)
    column_group = (torch.arange(columns) // (columns // groups)).expand(E, columns)
    if act_order:
        g_idx = torch.stack([c[torch.randperm(columns, generator=rng)] for c in column_group]).to(torch.int32)
        column_group = g_idx.long()
    spread = column_group[:, None, :].expand(codes.shape)
    if zeros is not None:
        values = values - zeros.float().gather(2, spread)
    factor = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    values = values * factor.gather(2, spread)
    if alphas is not None:
        values = values * alphas[:, None, None]
    rows_dtype = torch.float8_e4m3fn if kind.for_eight_bit_rows else None
    packed = pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, gated, g_idx, rows_dtype)
    return Made(packed, values, alphas)


def arguments(first: Made, second: Made, kind: WeightType, activation: MoEActivation) -> dict[str, Any]:
    """What both functions take beside the rows."""
    return {
        "w1": first.packed.qweight,
        "w2": second.packed.qweight,
        "bias1": None,
        "bias2": None,
        "w1_scale": first.packed.scales,
        "w2_scale": second.packed.scales,
        "quant_type_id": kind.scalar_type.id,
        "w1_zeros": first.packed.zeros,
        "w2_zeros": second.packed.zeros,
        "global_scale1": first.alphas,
        "global_scale2": second.alphas,
        "g_idx1": first.packed.g_idx,
        "g_idx2": second.packed.g_idx,
        "sort_indices1": first.packed.sort_indices,
        "sort_indices2": second.packed.sort_indices,
        "activation": activation,
    }


def reference(
    rows: torch.Tensor,
    first: Made,
    second: Made,
    expert: int,
    activation: MoEActivation,
    clamp_limit: float | None = None,
) -> torch.Tensor:
    hidden = apply_activation(activation, F.linear(rows.float(), first.values[expert]), clamp_limit=clamp_limit)
    return F.linear(hidden, second.values[expert])


def pair(kind: WeightType, group: int, activation: MoEActivation, **more: Any) -> tuple[Made, Made]:
    gated = activation.is_gated
    return (
        make(kind, group, 2 * N if gated else N, K, gated, 1, **more),
        make(kind, min(group, N), K, N, False, 2, **more),
    )


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got.float() - expected).abs().mean() < RELATIVE_ERROR * expected.abs().mean())


def moe_config(**settings: Any) -> FusedMoEConfig:
    """Of the sizes above with two experts a token, on one rank with room for ROWS tokens; settings replace them."""
    sizes: dict[str, Any] = {
        "num_experts": E,
        "experts_per_token": 2,
        "hidden_dim": K,
        "intermediate_size_per_partition": N,
        "num_local_experts": E,
        "moe_parallel_config": FusedMoEParallelConfig(),
        "in_dtype": torch.bfloat16,
        "max_num_tokens": ROWS,
    }
    return FusedMoEConfig(**sizes | settings)


def configs(first: Made, second: Made, kind: WeightType) -> tuple[FusedMoEConfig, FusedMoEQuantConfig]:
    """Of experts with these weights."""
    quant = FusedMoEQuantConfig(
        quant_type_id=kind.scalar_type.id,
        group_size=32,
        w1_scale=first.packed.scales,
        w2_scale=second.packed.scales,
    )
    return moe_config(), quant
