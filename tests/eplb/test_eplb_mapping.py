"""Logical to physical ids, the load record, and balancedness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.eplb import balancedness, eplb_map_to_physical_and_record
from moe_ep.eplb.mapping import rows_per_tile
from moe_ep.eplb.recorder import ExpertLoadRecorder
from tests.kernels.eplb_cases import make_maps


def pass_by_hand(shares: list[int], levels: list[int], one: int, other: int) -> None:
    """Token after token from the fuller of two levels to the other; where they differ by one, to the first."""
    while shares[other] and levels[one] < levels[other]:
        shares[other], levels[other] = shares[other] - 1, levels[other] - 1
        shares[one], levels[one] = shares[one] + 1, levels[one] + 1
    while shares[one] and levels[other] + 1 < levels[one]:
        shares[one], levels[one] = shares[one] - 1, levels[one] - 1
        shares[other], levels[other] = shares[other] + 1, levels[other] + 1


def map_tile_by_hand(
    rows: list[list[int]],
    mapping: torch.Tensor,
    counts: torch.Tensor,
    num_physical: int,
    num_counted: int,
    tile: int,
    ep_rank: int,
    slots_per_rank: int,
) -> tuple[list[list[int]], list[int]]:
    """The rule, expert by expert and token by token."""
    slots: dict[int, list[int]] = {}
    tokens = {e: sum(row.count(e) for row in rows[:num_counted]) for e in range(len(mapping))}
    for e in tokens:
        count = int(counts[e])
        start = ep_rank + tile + (e * 0x85EBCA6B % 2**32 * count >> 32)
        slots[e] = [int(mapping[e, (start + i) % count]) for i in range(min(count, 4))]
        own = [i for i, slot in enumerate(slots[e]) if slot // slots_per_rank == ep_rank]
        if own:
            slots[e][0], slots[e][own[0]] = slots[e][own[0]], slots[e][0]
    shares = {e: [len(range(i, tokens[e], len(slots[e]))) for i in range(len(slots[e]))] for e in tokens}
    pairs = {1: [(0, 0)] * 4, 2: [(0, 1)] * 4, 3: [(0, 1), (1, 2), (0, 2), (0, 1)], 4: [(0, 1), (2, 3), (0, 2), (1, 3)]}
    for turn in range(12):
        levels = [0] * num_physical
        for e in tokens:
            for slot, share in zip(slots[e], shares[e], strict=True):
                levels[slot // slots_per_rank] += share
        for e in tokens:
            one, other = pairs[len(slots[e])][turn // 3]
            places = [slot // slots_per_rank for slot in slots[e]]
            if (e + turn) % 3 == 0 and places[one] != places[other]:
                pass_by_hand(shares[e], [levels[place] for place in places], one, other)
    load = [0] * num_physical
    left = {e: [s for s, share in zip(slots[e], shares[e], strict=True) for _ in range(share)] for e in tokens}
    result = []
    for index, row in enumerate(rows):
        result.append([-1 if e < 0 else left[e].pop(0) if index < num_counted else slots[e][0] for e in row])
        for slot in result[-1] if index < num_counted else []:
            if slot >= 0:
                load[slot] += 1
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
@pytest.mark.parametrize("ep_size", [None, 1, 5])
def test_against_a_loop(num_tokens: int, top_k: int, unpadded: str, ep_size: int | None) -> None:
    mapping, counts, num_physical = make_maps([1, 3, 2, 10, 1, 2, 1])
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, 7, (num_tokens, top_k), generator=generator)
    real = num_tokens if unpadded == "none" else num_tokens * 2 // 3
    argument = {"none": None, "int": real, "tensor": torch.tensor(real)}[unpadded]
    load = torch.zeros(num_physical, dtype=torch.int32)
    rank = 0 if ep_size is None else ep_size - 1
    physical = eplb_map_to_physical_and_record(
        ids, load, mapping, counts, torch.int32, argument, ep_rank=rank, ep_size=ep_size
    )
    width = 1 if ep_size is None else num_physical // ep_size
    expected, expected_load = map_tile_by_hand(ids.tolist(), mapping, counts, num_physical, real, 0, rank, width)
    assert physical.dtype == torch.int32
    assert physical.tolist() == expected
    assert load.tolist() == expected_load


def test_tiles_are_independent() -> None:
    mapping, counts, num_physical = make_maps([1, 3, 2, 6])
    rows = rows_per_tile(3)
    ids = torch.randint(-1, 4, (2 * rows + 5, 3), generator=torch.Generator().manual_seed(0))
    load = torch.zeros(num_physical, dtype=torch.int32)
    physical = eplb_map_to_physical_and_record(ids, load, mapping, counts, ep_rank=1, ep_size=3)
    total = torch.zeros(num_physical, dtype=torch.int64)
    for tile in range(3):
        part = ids[tile * rows : (tile + 1) * rows].tolist()
        expected, expected_load = map_tile_by_hand(part, mapping, counts, num_physical, len(part), tile, 1, 4)
        assert physical[tile * rows : (tile + 1) * rows].tolist() == expected
        total += torch.tensor(expected_load)
    assert torch.equal(load.long(), total)


@settings(max_examples=60)
@given(data=st.data())
def test_every_token_is_counted_once_at_a_replica_of_its_expert(data: st.DataObject) -> None:
    ep_size = data.draw(st.sampled_from([1, 2, 4]))
    replicas = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    replicas[-1] += -sum(replicas) % ep_size
    mapping, counts, num_physical = make_maps(replicas, data.draw(st.integers(0, 99)))
    seed, shape = data.draw(st.integers(0, 99)), (data.draw(st.integers(0, 40)), data.draw(st.integers(1, 4)))
    ids = torch.randint(-1, len(replicas), shape, generator=torch.Generator().manual_seed(seed))
    load = torch.zeros(num_physical, dtype=torch.int32)
    rank = data.draw(st.integers(0, ep_size - 1))
    physical = eplb_map_to_physical_and_record(ids, load, mapping, counts, ep_rank=rank, ep_size=ep_size)
    owner = torch.full((num_physical,), -1)
    for expert, count in enumerate(replicas):
        owner[mapping[expert, :count]] = expert
    assert torch.equal(torch.where(ids >= 0, owner[physical.clamp(min=0)], -1), ids)
    assert torch.equal(torch.bincount(physical[physical >= 0], minlength=num_physical), load.long())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_batch_is_spread_evenly_over_replicas(count: int) -> None:
    mapping, counts, num_physical = make_maps([count] * 3)
    ids = torch.tensor([[0, 1, 2]]).expand(300, 3)
    load = torch.zeros(num_physical, dtype=torch.int32)
    eplb_map_to_physical_and_record(ids, load, mapping, counts)
    assert int(load.max() - load.min()) <= 1
    assert load.sum() == 900


def test_ranks_with_one_token_use_all_replicas() -> None:
    mapping, counts, num_physical = make_maps([4] + [1] * 28)
    used = torch.zeros(num_physical, dtype=torch.int32)
    for rank in range(32):
        eplb_map_to_physical_and_record(torch.tensor([[0]]), used, mapping, counts, ep_rank=rank, ep_size=32)
    assert used[mapping[0, :4]].min() >= 7 and used[mapping[0, :4]].max() <= 9


def test_tokens_stay_where_nothing_is_lost_by_it() -> None:
    mapping = torch.tensor([[0, 3], [1, -1], [2, -1]])
    for rank in (0, 1):
        load = torch.zeros(4, dtype=torch.int32)
        physical = eplb_map_to_physical_and_record(
            torch.tensor([[0]]), load, mapping, torch.tensor([2, 1, 1]), ep_rank=rank, ep_size=2
        )
        assert physical.tolist() == [[3 * rank]]


def test_replicas_make_up_for_experts_without() -> None:
    # Rank 0 holds expert 1, which has ten tokens; expert 0 is on both ranks and has eight.
    ids = torch.tensor([[1]] * 10 + [[0]] * 8)
    load = torch.zeros(4, dtype=torch.int32)
    mapping = torch.tensor([[0, 2], [1, -1], [3, -1]])
    eplb_map_to_physical_and_record(ids, load, mapping, torch.tensor([2, 1, 1]), ep_rank=0, ep_size=2)
    assert load.tolist() == [0, 10, 8, 0]


@pytest.mark.parametrize(
    ("ids_shape", "map_shape", "count_shape", "load_shape", "message"),
    [
        ((4,), (3, 2), (3,), (4,), r"topk_ids has shape \(4,\)"),
        ((4, 1), (2, 3, 2), (2, 3), (4,), "one layer's rows"),
        ((4, 1), (3, 2), (4,), (4,), r"logical_replica_count \(4,\)"),
        ((4, 1), (3, 2), (3,), (2, 4), r"expert_load_view has shape \(2, 4\)"),
        ((4, 1), (3, 2), (3,), (5,), r"ep_rank is 0 and ep_size 2 with 5 physical experts"),
    ],
)
def test_bad_shapes(ids_shape: tuple, map_shape: tuple, count_shape: tuple, load_shape: tuple, message: str) -> None:
    ids, mapping, counts, load = (
        torch.full(shape, value, dtype=torch.int32)
        for shape, value in ((ids_shape, 0), (map_shape, 0), (count_shape, 1), (load_shape, 0))
    )
    with pytest.raises(ValueError, match=message):
        eplb_map_to_physical_and_record(ids, load, mapping, counts, ep_size=2)


@pytest.mark.parametrize(
    ("argument", "changed", "message"),
    [
        (0, {"dtype": torch.float32}, "topk_ids is torch.float32; it must be uint8"),
        (1, {"dtype": torch.int64}, "expert_load_view is torch.int64; it must be torch.int32"),
        (1, {"device": "meta"}, "expert_load_view is on meta and topk_ids on cpu; move one"),
        (2, {"dtype": torch.float32}, "logical_to_physical_map is torch.float32; it must be uint8"),
        (3, {"device": "meta"}, "logical_replica_count is on meta and topk_ids on cpu; move one"),
    ],
)
def test_tensors_that_the_kernel_would_read_wrongly(argument: int, changed: dict, message: str) -> None:
    arguments = [torch.zeros(shape, dtype=torch.int32) for shape in ((2, 1), (3,), (3, 1), (3,))]
    arguments[argument] = arguments[argument].to(**changed)
    with pytest.raises(ValueError, match=message):
        eplb_map_to_physical_and_record(*arguments)
    arguments[argument] = None  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=f"{message.partition(' ')[0]} is None; it must be a tensor"):
        eplb_map_to_physical_and_record(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_unpadded_tokens": 1.5}, "num_unpadded_tokens is 1.5; it must be a whole number"),
        ({"num_unpadded_tokens": -1}, "num_unpadded_tokens is -1; it must be at least 0"),
        ({"num_unpadded_tokens": torch.tensor([1, 2])}, r"num_unpadded_tokens has shape \(2,\); it must be one number"),
        ({"num_unpadded_tokens": torch.tensor(1.0)}, "num_unpadded_tokens is torch.float32; it must be uint8"),
        ({"num_unpadded_tokens": torch.tensor(1, device="meta")}, "num_unpadded_tokens is on meta and topk_ids on cpu"),
        ({"indices_type": torch.int8}, "indices_type is 'torch.int8'; it must be one of torch.int32, torch.int64"),
        ({"topk_ids": torch.zeros(2, 1, dtype=torch.int8)}, "200 experts have ids up to 199, which torch.int8 cannot"),
        ({"topk_ids": torch.tensor([[-1], [3]])}, "topk_ids holds expert 3; the maps are of experts 0 to 2"),
        ({"ep_rank": -1}, "ep_rank is -1; it must be at least 0"),
        (
            {"logical_replica_count": torch.tensor([1, 0, 1])},
            "logical_replica_count goes from 0 to 1; every expert must",
        ),
        (
            {"logical_replica_count": torch.tensor([1, 2, 1])},
            "goes from 1 to 2; every expert must have .* at most the 1",
        ),
        (
            {"logical_to_physical_map": torch.tensor([[0], [-1], [2]])},
            "logical_to_physical_map names .* from -1 to 2; the",
        ),
        (
            {"logical_to_physical_map": torch.tensor([[0], [1], [200]])},
            r"to 200; they must be .* expert_load_view \(200",
        ),
        ({"ep_size": 2.0}, "ep_size is 2.0; it must be a whole number"),
    ],
)
def test_values_that_would_be_mapped_wrongly(changes: dict, message: str) -> None:
    arguments = {
        "topk_ids": torch.zeros(2, 1, dtype=torch.int32),
        "expert_load_view": torch.zeros(200, dtype=torch.int32),
        "logical_to_physical_map": torch.arange(3, dtype=torch.int32)[:, None],
        "logical_replica_count": torch.ones(3, dtype=torch.int32),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        eplb_map_to_physical_and_record(**(arguments | changes))
    assert not arguments["expert_load_view"].any()


def test_recorder_keeps_the_latest_steps() -> None:
    recorder = ExpertLoadRecorder(num_layers=2, num_physical_experts=3, window_size=2, device="cpu")
    assert recorder.snapshot().shape == (0, 2, 3)
    for step in range(1, 4):
        recorder.expert_load_pass += step
        recorder.end_step()
        assert recorder.expert_load_pass.sum() == 0
        assert recorder.snapshot()[:, 0, 0].tolist() == list(range(max(1, step - 1), step + 1))
    recorder.expert_load_pass += 9
    recorder.discard_pass()
    recorder.forget(1)
    assert recorder.snapshot().tolist() == [[[2] * 3, [0] * 3], [[3] * 3, [0] * 3]]
    recorder.end_step()
    assert recorder.snapshot()[:, 0, 0].tolist() == [3, 0]


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
    with pytest.raises(ValueError, match=r"tokens_per_rank has shape \(3,\)"):
        balancedness(torch.ones(3))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="tokens_per_rank holds a count that is negative or not finite"):
            balancedness(torch.tensor([[wrong, 3.0]]))
    with pytest.raises(ValueError, match="tokens_per_rank is torch.complex64"):
        balancedness(torch.ones(2, 2, dtype=torch.complex64))


def test_maps_on_the_host_beside_another_default_device() -> None:
    ids, load = torch.tensor([[0, 1], [1, 2]]), torch.zeros(3, dtype=torch.int32)
    turned, once = torch.tensor([[1], [2], [0]]), torch.ones(3, dtype=torch.int32)
    with torch.device("meta"):
        physical = eplb_map_to_physical_and_record(ids, load, turned, once)
    assert physical.tolist() == [[1, 2], [2, 0]] and load.tolist() == [1, 1, 2]
