"""Columns out of order on the GPU: gathered, in order already, and parts of a whole whose groups are looked up."""

from __future__ import annotations

import pytest
import torch

from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types
from tests.gpu.marlin_cases import UINT4B8, arguments, check_batched, check_tokens, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
K, N, E = 512, 384, 4
COUNTS = [3, 0, 40, 150]
INTEGERS = [
    (WEIGHT_TYPES[name.id], group)
    for name, group in ((scalar_types.uint4, 32), (scalar_types.uint4b8, 128), (scalar_types.uint8b128, 64))
]
FLOATS = [WEIGHT_TYPES[name.id] for name in (scalar_types.float8_e4m3fn, scalar_types.float4_e2m1f)]


def scattered(columns: int, group: int, num_groups: int | None = None) -> torch.Tensor:
    """g_idx of random columns, or of a random part of `num_groups` groups."""
    whole = columns if num_groups is None else num_groups * group
    return torch.stack([torch.randperm(whole, device="cuda")[:columns] // group for _ in range(E)]).to(torch.int32)


def made(
    kind: WeightType, group: int, dtype: torch.dtype, w2_is_in_order: bool = False, part_of: int | None = None
) -> tuple[Weights, Weights]:
    """w13 and w2 with scattered columns; w2's are a part of so many groups."""
    first = make(kind, group, E, 2 * N, K, True, dtype, True, scattered(K, group))
    second = make(kind, group, E, K, N, False, dtype, True, scattered(N, group, part_of), part_of)
    if part_of is not None:
        first = first._replace(has_regular_groups=False)  # is_k_full is said of both
    return first, second._replace(sort_indices=None) if w2_is_in_order else second


@pytest.mark.parametrize("w2_is_in_order", [False, True], ids=["both gathered", "w2 in order"])
@pytest.mark.parametrize("by_reference", [False, True], ids=["batched", "by reference"])
@pytest.mark.parametrize(("kind", "group"), INTEGERS, ids=lambda v: str(getattr(v, "scalar_type", v)))
def test_batched(kind: WeightType, group: int, by_reference: bool, w2_is_in_order: bool) -> None:
    weights = made(kind, group, torch.bfloat16, w2_is_in_order)
    check_batched(kind, group, COUNTS, (K, N), by_reference=by_reference, weights=weights)


@pytest.mark.parametrize("w2_is_in_order", [False, True], ids=["both gathered", "w2 in order"])
def test_tokens_with_their_experts(w2_is_in_order: bool) -> None:
    check_tokens(UINT4B8, *made(UINT4B8, 128, torch.float16, w2_is_in_order), 90, 3, 6, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("kind", "group"),
    [*INTEGERS, *((kind, group) for kind in FLOATS for group in kind.group_sizes if group > 0)],
    ids=lambda v: str(getattr(v, "scalar_type", v)),
)
def test_parts_of_a_whole(kind: WeightType, group: int, dtype: torch.dtype) -> None:
    weights = made(kind, group, dtype, part_of=2 * N // group)
    check_batched(kind, group, COUNTS, (K, N), dtype=dtype, weights=weights)


def test_rows_may_be_written_over() -> None:
    more = arguments(*made(UINT4B8, 128, torch.bfloat16, w2_is_in_order=True), UINT4B8)
    rows = torch.randn(E, 150, K, device="cuda").bfloat16()
    numbers = torch.tensor(COUNTS, dtype=torch.int32, device="cuda")
    expected = batched_fused_marlin_moe(rows, numbers, output=rows.clone(), **more)
    assert torch.equal(batched_fused_marlin_moe(rows.clone(), numbers, inplace=True, **more), expected)
