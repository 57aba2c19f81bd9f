"""Offsets past 2^31: rows, results, sorted slots and weights that lie behind two thousand million others.

Only what is computed is ever written, so the buffers cost address space and no time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types
from tests.gpu.marlin_cases import RELATIVE_ERROR, UINT4B8, arguments, pair, reference

FREE_BYTES = 40 << 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < FREE_BYTES, reason="needs 40 GB of GPU memory"
    ),
]
BIG = 1 << 31


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """Memory goes back at once: other processes may test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got.float() - expected).abs().mean() < RELATIVE_ERROR * expected.abs().mean())


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("count", [9, 17408], ids=["few rows", "many rows"])
def test_rows_and_results_of_the_last_expert(count: int) -> None:
    (K, N), num_experts, capacity = (4096, 128), 32, 17408
    first, second = pair(UINT4B8, 128, num_experts, (K, N))
    rows, last = empty(num_experts, capacity, K), num_experts - 1
    assert last * capacity * K > BIG
    rows[last, :count] = torch.randn(count, K, device="cuda").bfloat16()
    numbers = torch.zeros(num_experts, dtype=torch.int32, device="cuda")
    numbers[last] = count
    output = batched_fused_marlin_moe(rows, numbers, output=empty(*rows.shape), **arguments(first, second, UINT4B8))
    assert is_close(output[last, :count], reference(rows[last, :count], first, second, UINT4B8, last))


@pytest.mark.parametrize("count", [9, 100], ids=["few rows", "many rows"])
def test_rows_by_reference_far_behind(count: int) -> None:
    K, N, num_rows = 4096, 128, 600_000
    first, second = pair(UINT4B8, 128, 1, (K, N))
    rows = empty(num_rows, K)
    ids = torch.arange(num_rows - count, num_rows, dtype=torch.int32, device="cuda")
    assert int(ids[0]) * K > BIG
    rows[ids.long()] = torch.randn(count, K, device="cuda").bfloat16()
    numbers = torch.tensor([count], dtype=torch.int32, device="cuda")
    more = arguments(first, second, UINT4B8)
    output = batched_fused_marlin_moe(rows, numbers, expert_row_ids=ids.view(1, -1), **more)
    assert is_close(output[0], reference(rows[ids.long()], first, second, UINT4B8, 0))


def test_slots_of_the_last_tokens() -> None:
    (K, N), num_tokens, topk = (8192, 128), 40_000, 8
    first, second = pair(UINT4B8, 128, 2, (K, N))
    assert (num_tokens - 50) * topk * K > BIG
    rows = empty(num_tokens, K).zero_()
    rows[-50:] = torch.randn(50, K, device="cuda").bfloat16()
    ids = torch.full((num_tokens, topk), -1, dtype=torch.int64, device="cuda")
    ids[-50:, 5], ids[-9:, 7] = 1, 0
    weights = torch.rand(num_tokens, topk, device="cuda")
    output = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **arguments(first, second, UINT4B8))
    expected = weights[-50:, 5:6] * reference(rows[-50:], first, second, UINT4B8, 1)
    expected[-9:] += weights[-9:, 7:8] * reference(rows[-9:], first, second, UINT4B8, 0)
    assert is_close(output[-50:], expected)
    assert not output[:-50].any()


@pytest.mark.parametrize("count", [9, 100], ids=["few rows", "many rows"])
def test_weights_of_the_last_expert(count: int) -> None:
    kind, (K, N), num_experts = WEIGHT_TYPES[scalar_types.uint8b128.id], (4096, 2048), 160
    one = pair(kind, 128, 1, (K, N))

    def behind_others(weights: Weights) -> Weights:
        more = {}
        for name in ("qweight", "scales"):
            tensor = getattr(weights, name)
            more[name] = empty(num_experts, *tensor.shape[1:], dtype=tensor.dtype)
            more[name][-1] = tensor[0]
        return weights._replace(**more)

    first, second = (behind_others(weights) for weights in one)
    assert (num_experts - 1) * first.qweight[0].numel() * 4 > BIG
    rows = torch.randn(num_experts, count, K, device="cuda").bfloat16()
    numbers = torch.zeros(num_experts, dtype=torch.int32, device="cuda")
    numbers[-1] = count
    output = batched_fused_marlin_moe(rows, numbers, **arguments(first, second, kind))
    assert is_close(output[-1], reference(rows[-1], *one, kind, 0))
