"""Which weights and layers the packed experts take: every reason against one, in a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.repack import not_packed_reason
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
