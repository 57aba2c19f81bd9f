"""Experts of many rows: every number type, tails, tiles of both sizes, tiles that blocks share, and experts of few rows
beside them."""

from __future__ import annotations

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin import tuning
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.types import WeightType
from tests.gpu.marlin_cases import FORMATS_AGREE
from tests.gpu.test_marlin_gpu import KINDS, UINT4B8, arguments, check_batched, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

# Beside an expert of so many rows tiles have up to 128 tokens or more, in small problems without one up to 64.
tile_sizes = pytest.mark.parametrize("more", [[], [5000]], ids=["small-tiles", "large-tiles"])


@tile_sizes
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_every_type_and_group_size(kind: WeightType, group: int, dtype: torch.dtype, more: list[int]) -> None:
    check_batched(kind, group, [33, 0, 64, 130, 300, *more], (384, 256), dtype=dtype)


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize("by_reference", [False, True], ids=["batched", "by-reference"])
def test_many_experts_of_many_rows(kind: WeightType, group: int, by_reference: bool) -> None:
    """Tiles have up to 176 tokens here where codes have 4 bits and no zero points, the last of experts fewer."""
    check_batched(kind, group, [1000] * 9 + [100, 300], (1024, 512), by_reference=by_reference)


@pytest.mark.parametrize("activation", list(MoEActivation))
@pytest.mark.parametrize("by_reference", [False, True], ids=["batched", "by-reference"])
def test_every_activation_with_biases(activation: MoEActivation, by_reference: bool) -> None:
    check_batched(UINT4B8, 128, [65, 200], (256, 384), activation=activation, bias=True, by_reference=by_reference)


@tile_sizes
@pytest.mark.parametrize("rows", [33, 48, 63, 64, 65, 80, 81, 96, 112, 127, 128, 129, 192, 193, 2049])
def test_tails(rows: int, more: list[int]) -> None:
    check_batched(UINT4B8, 128, [rows, rows, rows, *more], (384, 256))


@pytest.mark.parametrize(("kind", "group"), [k for k in KINDS if k[0].bits == 4 and k[1] in (16, 32)], ids=str)
@pytest.mark.parametrize("by_reference", [False, True], ids=["batched", "by-reference"])
@pytest.mark.parametrize(
    ("counts", "shape"),
    [([64] * 16, (512, 1536)), ([64, 33, 48, 57] * 7, (1056, 1664)), ([50] * 36, (1056, 2144))],
    ids=["one-wave", "halves", "three-waves"],
)
def test_tall_tiles(
    kind: WeightType, group: int, counts: list[int], shape: tuple[int, int], by_reference: bool
) -> None:
    """Of 384 and of 512 weight rows on 132 SMs, the last of them cut and incomplete."""
    check_batched(kind, group, counts, shape, by_reference=by_reference)


@pytest.mark.parametrize("shape", [(4096, 128), (128, 4096), (7168, 2048), (32, 32), (96, 160), (2880, 2880)], ids=str)
def test_one_expert_is_spread_over_all_blocks(shape: tuple[int, int]) -> None:
    check_batched(UINT4B8, 32, [150], shape)


@pytest.mark.parametrize("counts", [[1, 33, 32, 0, 500, 31, 128, 8] * 5, [8, 0, 30, 8, 1, 25]], ids=["many", "few"])
def test_few_and_many_rows_side_by_side(counts: list[int]) -> None:
    check_batched(UINT4B8, 128, counts, (512, 256))  # one kernel computes all: beginning with the other costs more
    with tuning.forced(16):
        check_batched(UINT4B8, 128, counts, (512, 256))


@pytest.mark.parametrize("rows", [40, 100])
def test_one_expert_of_many_rows_beside_many_of_few(rows: int) -> None:
    """The blocks for many rows come one by one here, as those for few end, and the first claim most of the pieces."""
    with tuning.forced(24):
        check_batched(UINT4B8, 128, [8] * 63 + [rows], (2048, 1024))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    K, N = 1024, 512
    first = make(UINT4B8, 128, 2, 2 * N, K, True, torch.bfloat16, False)
    second = make(UINT4B8, 128, 2, K, N, False, torch.bfloat16, False)
    more = arguments(first, second, UINT4B8, MoEActivation.SILU)
    rows = torch.randn(2, 300, K, device="cuda").bfloat16()
    counts = [torch.tensor([count, 40], dtype=torch.int32, device="cuda") for count in (300, 128)]
    results = [batched_fused_marlin_moe(rows, count, **more) for count in counts]
    first_rows, second_rows = (result[:, :40].float() for result in results)  # whose sums are added in another order
    assert (first_rows - second_rows).abs().mean() < FORMATS_AGREE * second_rows.abs().mean()
