"""Which tiles the kernel of older GPUs takes, and that their stages fit the smallest of these GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.kernels.marlin import ampere
from moe_ep.kernels.marlin.params import Rows
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType

SHARED_BYTES = 99 * 1024  # that a block may have on sm_86 and sm_89


@pytest.mark.parametrize(
    ("expected_m", "max_rows", "tokens"),
    [
        (None, 8, 16),
        (None, 17, 32),
        (None, 1024, 32),
        (0.5, 1024, 16),
        (16, 1024, 16),
        (16.5, 1024, 32),
        (33, 1024, 64),
        (700, 1024, 64),
        (700, 30, 32),
    ],
)
def test_tiles_hold_the_rows_that_are_expected(expected_m: float | None, max_rows: int, tokens: int) -> None:
    assert ampere.tile_of(Rows(torch.zeros(4), max_rows, expected_m=expected_m)).tokens == tokens


@pytest.mark.parametrize("tile", ampere.TILES, ids=lambda tile: str(tile.tokens))
@pytest.mark.parametrize("kind", WEIGHT_TYPES.values(), ids=lambda kind: str(kind.scalar_type))
def test_stages_fit_every_gpu(kind: WeightType, tile: ampere.Tile) -> None:
    for group in (-1, 16, 32, 64, 128) if kind.bits == 4 else (-1, 32, 64, 128):
        columns, scale = 7168, torch.uint8 if group == 16 else torch.bfloat16
        num_groups = 1 if group == -1 else columns // group
        weights: Any = SimpleNamespace(
            has_regular_groups=True, num_columns=columns, scales=torch.empty(1, num_groups, 1, dtype=scale)
        )
        num_bytes = ampere.shared_bytes(tile, kind, weights, num_experts=768)
        assert num_bytes <= SHARED_BYTES
        # Sums of all teams are exchanged where the stages were.
        assert tile.split_k_groups == 1 or num_bytes - 8 * 769 >= tile.split_k_groups * 128 * tile.tokens * 4
