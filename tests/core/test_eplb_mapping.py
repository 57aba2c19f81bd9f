"""Logical to physical ids, the load record, and balancedness."""

from __future__ import annotations

import pytest
import torch

from moe_ep.eplb import balancedness, eplb_map_to_physical_and_record


def make_maps(replica_counts: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(logical_to_physical_map, logical_replica_count, num_physical) with physical ids in shuffled order."""
    num_physical = sum(replica_counts)
    order = torch.randperm(num_physical, generator=torch.Generator().manual_seed(seed)).tolist()
    mapping = torch.full((len(replica_counts), max(replica_counts) + 1), -1)
    for expert, count in enumerate(replica_counts):
        mapping[expert, :count] = torch.tensor([order.pop() for _ in range(count)])
    return mapping, torch.tensor(replica_counts), num_physical


def map_by_hand(
    ids: torch.Tensor, mapping: torch.Tensor, counts: torch.Tensor, num_physical: int, num_unpadded: int
) -> tuple[list[list[int]], list[int]]:
    load = [0] * num_physical
    result = []
    for row, experts in enumerate(ids.tolist()):
        mapped = []
        for expert in experts:
            if expert < 0:
                mapped.append(-1)
                continue
            fraction = (row * 0x9E3779B1 + expert * 0x85EBCA6B) % 2**32
            physical = int(mapping[expert, fraction * int(counts[expert]) // 2**32])
            mapped.append(physical)
            if row < num_unpadded:
                load[physical] += 1
        result.append(mapped)
    return result, load


def test_worked_example() -> None:
    load = torch.tensor([10, 20, 30], dtype=torch.int32)
    ids = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32)
    physical = eplb_map_to_physical_and_record(ids, load, torch.tensor([[0, 2], [1, -1]]), torch.tensor([2, 1]))
    assert physical.tolist() == [[0, -1], [1, 2]]
    assert physical.dtype == torch.int32
    assert load.tolist() == [11, 21, 31]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 200])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("unpadded", ["none", "int", "tensor"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_against_a_loop(num_tokens: int, top_k: int, unpadded: str, ids_dtype: torch.dtype) -> None:
    mapping, counts, num_physical = make_maps([1, 3, 2, 5, 1, 2])
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, 6, (num_tokens, top_k), generator=generator).to(ids_dtype)
    real = num_tokens if unpadded == "none" else num_tokens * 2 // 3
    argument = {"none": None, "int": real, "tensor": torch.tensor(real)}[unpadded]
    load = torch.zeros(num_physical, dtype=torch.int32)
    physical = eplb_map_to_physical_and_record(ids, load, mapping, counts, torch.int64, argument)
    expected, expected_load = map_by_hand(ids, mapping, counts, num_physical, real)
    assert physical.dtype == torch.int64
    assert physical.tolist() == expected
    assert load.tolist() == expected_load


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_any_run_of_rows_is_spread_evenly(count: int) -> None:
    mapping, counts, num_physical = make_maps([count] * 3)
    ids = torch.tensor([[0, 1, 2]]).expand(1000, 3)
    physical = eplb_map_to_physical_and_record(ids, torch.zeros(num_physical, dtype=torch.int32), mapping, counts)
    for start, stop in ((0, 64), (17, 81), (0, 1000), (300, 999)):
        load = torch.bincount(physical[start:stop].flatten(), minlength=num_physical)
        assert int(load.max() - load.min()) <= 4
        assert load.sum() == 3 * (stop - start)


def test_one_row_does_not_send_every_expert_to_the_same_replica() -> None:
    mapping, counts, num_physical = make_maps([2] * 64)
    first = set(mapping[:, 0].tolist())
    ids = torch.arange(64)[None]
    physical = eplb_map_to_physical_and_record(ids, torch.zeros(num_physical, dtype=torch.int32), mapping, counts)
    assert 28 <= sum(p in first for p in physical.flatten().tolist()) <= 36


@pytest.mark.parametrize(
    ("ids_shape", "map_shape", "count_shape", "load_shape", "message"),
    [
        ((4,), (3, 2), (3,), (4,), r"topk_ids has shape \(4,\)"),
        ((4, 1), (2, 3, 2), (2, 3), (4,), "one layer's rows"),
        ((4, 1), (3, 2), (4,), (4,), r"logical_replica_count \(4,\)"),
        ((4, 1), (3, 2), (3,), (2, 4), r"expert_load_view has shape \(2, 4\)"),
    ],
)
def test_bad_shapes(ids_shape: tuple, map_shape: tuple, count_shape: tuple, load_shape: tuple, message: str) -> None:
    ids, mapping, counts, load = (
        torch.zeros(shape, dtype=torch.int32) for shape in (ids_shape, map_shape, count_shape, load_shape)
    )
    with pytest.raises(ValueError, match=message):
        eplb_map_to_physical_and_record(ids, load, mapping, counts)


@pytest.mark.parametrize(
    ("tokens_per_rank", "expected"),
    [
        ([[100, 0, 0, 0]] * 2, 0.25),
        ([[5, 5, 5]], 1.0),
        ([[4, 2], [0, 6]], (3 + 3) / (4 + 6)),
        ([[0, 0]], 1.0),
        ([[7]], 1.0),
    ],
)
def test_balancedness(tokens_per_rank: list, expected: float) -> None:
    assert balancedness(torch.tensor(tokens_per_rank, dtype=torch.int32)) == pytest.approx(expected, abs=1e-12)


def test_balancedness_wants_layers_and_ranks() -> None:
    with pytest.raises(ValueError, match=r"tokens_per_rank has shape \(3,\); it must be \(L, R\)"):
        balancedness(torch.ones(3))
