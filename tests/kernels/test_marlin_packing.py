"""Which weights and layers the packed experts take: every reason against one, in a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.repack import inexact_scales_reason, not_packed_reason, pack_experts
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import ScalarType, scalar_types
from tests.kernels.marlin_cases import E, K, N, configs, pair

UINT4B8 = scalar_types.uint4b8


def canonical(
    rows: int = 64,
    columns: int = 128,
    groups: int = 4,
    scalar_type: ScalarType = UINT4B8,
    group_size: int = 32,
    g_idx: torch.Tensor | None = None,
) -> CanonicalWeights:
    codes, scales = torch.zeros(E, rows, columns, dtype=torch.uint8), torch.ones(E, rows, groups)
    return CanonicalWeights(codes, scales, scalar_type.id, group_size, g_idx=g_idx)


def spread(columns: int, groups: int) -> torch.Tensor:
    return (torch.arange(columns) % groups).to(torch.int32).expand(E, -1)


@pytest.mark.parametrize(
    "weights",
    [
        canonical(),
        canonical(rows=192, columns=96, groups=3),
        canonical(groups=1, group_size=-1),
        canonical(g_idx=spread(128, 4)),
        canonical(groups=1, group_size=-1, g_idx=spread(128, 1)),
        canonical(groups=7, g_idx=spread(128, 7)),  # a part of a whole
    ],
)
def test_weights_that_are_packed(weights: CanonicalWeights) -> None:
    assert not_packed_reason(weights, 64) is None


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (canonical(scalar_type=scalar_types.uint8), "there is no packed form of uint8"),
        (canonical(rows=96), "a matrix is 96 x 128; they take multiples of 64 and 32"),
        (canonical(columns=80, groups=1, group_size=-1), "a matrix is 64 x 80; they take multiples of 64 and 32"),
        (canonical(groups=8, group_size=16), "8 groups of 128 columns; uint4b8 takes (-1, 32, 64, 128)"),
        (canonical(groups=3, group_size=48), "3 groups of 128 columns; uint4b8 takes (-1, 32, 64, 128)"),
        (
            canonical(groups=7, group_size=16, g_idx=spread(128, 7)),
            "7 groups of 128 columns; uint4b8 takes (-1, 32, 64, 128)",
        ),
        (canonical(g_idx=spread(128, 3)), "g_idx does not give each group 32 columns"),
        (
            canonical(scalar_type=scalar_types.float8_e4m3fn, groups=8, group_size=16),
            "8 groups of 128 columns; float8_e4m3fn takes (-1, 32, 64, 128)",
        ),
    ],
)
def test_weights_that_are_not_packed(weights: CanonicalWeights, reason: str) -> None:
    assert not_packed_reason(weights, 64) == reason


F16_REASON = (
    "rounding to torch.float16 (6.1e-05 to 65504) changes an expert's scales by more than 0.5 %; "
    "load the layer in torch.bfloat16"
)


def scaled(factor: float | torch.Tensor, scalar_type: ScalarType = UINT4B8) -> CanonicalWeights:
    """Scales between `factor` and twice that; it may differ between experts and rows."""
    weights = canonical(scalar_type=scalar_type)
    scales = 1 + torch.rand(weights.scales.shape, generator=torch.Generator().manual_seed(0))
    return weights._replace(scales=scales * factor)


def some(row: slice, factor: float) -> torch.Tensor:
    """One, but for some rows of the last expert."""
    factors = torch.ones(E, 64, 1)
    factors[-1, row] = factor
    return factors


ALL, UP = slice(0, 64), slice(32, 64)


@pytest.mark.parametrize(
    ("weights", "act_dtype", "gated", "fits"),
    [
        (scaled(1e-4), torch.float16, False, True),
        (scaled(5e-6), torch.float16, False, True),
        (scaled(1e-6), torch.float16, False, False),
        (scaled(1e-8), torch.float16, False, False),
        (scaled(3e4), torch.float16, False, True),
        (scaled(6e4), torch.float16, False, False),
        (scaled(1e-8), torch.bfloat16, False, True),
        (scaled(0.0), torch.float16, False, True),
        (canonical()._replace(scales=torch.full((E, 64, 4), 2.0**-20)), torch.float16, False, True),  # exact
        (canonical()._replace(scales=torch.full((E, 64, 4), 2.0**-26)), torch.float16, False, False),
        (scaled(some(ALL, 1e-8)), torch.float16, False, False),
        (scaled(some(UP, 1e-8)), torch.float16, False, True),  # beside others that are large
        (scaled(some(UP, 1e-8)), torch.float16, True, False),
        (scaled(1e-8, scalar_types.float4_e2m1f), torch.float16, False, True),  # whose scales keep their dtype
    ],
)
def test_scales_that_float16_cannot_hold(
    weights: CanonicalWeights, act_dtype: torch.dtype, gated: bool, fits: bool
) -> None:
    assert inexact_scales_reason(weights, act_dtype, gated) == (None if fits else F16_REASON)


def test_weights_with_such_scales_are_not_packed() -> None:
    tiny = scaled(1e-8)
    for w13, w2 in ((tiny, PAIR[1]), (PAIR[0], tiny)):
        with pytest.raises(ValueError, match=r"load the layer in torch\.bfloat16"):
            pack_experts(w13, w2, torch.float16, True, False)
        pack_experts(w13, w2, torch.bfloat16, True, False)


PAIR = (canonical(2 * N, K), canonical(K, N, 2))


@pytest.mark.parametrize(
    ("changes", "weights", "device", "reason"),
    [
        ({}, (), "cuda", "they take quantized weights and these are plain"),
        ({}, PAIR, "cpu", "the weights are on cpu, and the packed kernels run on a GPU"),
        (
            {"in_dtype": torch.float32},
            PAIR,
            "cuda",
            "the activations are torch.float32; they take torch.bfloat16 or torch.float16",
        ),
        ({"num_local_experts": 0}, PAIR, "cuda", "this rank has no experts"),
        (
            {},
            (PAIR[0], canonical(K, N, 1, scalar_types.float8_e4m3fn, -1)),
            "cuda",
            "w13 and w2 are of two types (uint4b8 and float8_e4m3fn) and one kernel computes both",
        ),
        ({}, (canonical(96, K), PAIR[1]), "cuda", "a matrix is 96 x 128; they take multiples of 64 and 32"),
        ({}, (PAIR[0], canonical(48, N, 2)), "cuda", "a matrix is 48 x 64; they take multiples of 32 and 32"),
        ({"activation": "silu_no_mul"}, (canonical(96, K), PAIR[1]), "cuda", None),
        ({"in_dtype": torch.float16}, (scaled(1e-8), PAIR[1]), "cuda", F16_REASON),
        ({"in_dtype": torch.float16}, (PAIR[0], scaled(1e-8)), "cuda", F16_REASON),
        ({}, PAIR, "cuda", None),
    ],
)
def test_layers_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], weights: tuple, device: str, reason: str | None
) -> None:
    monkeypatch.setattr(jit, "unusable_reason", lambda: None)
    kind = WEIGHT_TYPES[UINT4B8.id]
    config = replace(configs(*pair(kind, 32, MoEActivation.SILU), kind)[0], **changes)
    for experts in (MarlinExperts, BatchedMarlinExperts):
        assert experts.refuses(config, weights, torch.device(device)) == reason
