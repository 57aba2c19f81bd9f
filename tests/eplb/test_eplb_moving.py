"""Experts that move: whose they are afterwards, bit by bit, whatever they were before and however they are stored."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_ep.checkpoint import CheckpointReader, load_moe_layer, model_spec
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.moves import plan_moves
from moe_ep.eplb.packing import ExpertRows, intact, seal
from moe_ep.eplb.transfer import rearrange_expert_weights
from moe_ep.errors import EplbError
from tests.checkpoint.format_cases import CASES, write_case
from tests.checkpoint.format_cases import E as FORMAT_E
from tests.checkpoint.test_format_cases import make_layer as make_format_layer
from tests.eplb.models import (
    CONFIG,
    SCHEMES,
    E,
    fresh_weights,
    load_layer,
    make_layer,
    my_slots,
    random_placement,
    redundancy,
    set_placement,
)
from tests.ranks import ranks


@pytest.mark.parametrize(("num_ranks", "per_host"), [(1, None), (2, None), (4, 2), (8, 4), (12, 4)])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_everybody_gets_each_expert_once_and_in_order(num_ranks: int, per_host: int | None, spare: int) -> None:
    for seed in range(5):
        num_slots = num_ranks * (2 + spare)
        old, new = random_placement(2, num_slots, seed, num_experts=2 * num_ranks)
        moves = [plan_moves(old, new, num_ranks, rank, per_host) for rank in range(num_ranks)]
        before, after = np.split(old, num_ranks), np.split(new, num_ranks)
        assert len({len(part.rounds) for part in moves}) == 1
        for index in range(len(moves[0].rounds)):
            sent = [(e, source, peer) for source in range(num_ranks) for e, _, to in moves[source].rounds[index].sends
                    for peer in to]  # fmt: skip
            received = [(e, source, r) for r in range(num_ranks) for e, _, source, _ in moves[r].rounds[index].receives]
            assert sorted(sent) == sorted(received)
            for pair in {(source, peer) for _, source, peer in sent}:
                # Messages between two ranks are told apart by their order alone.
                assert [e for e, *ends in sent if tuple(ends) == pair] == [
                    e for e, *ends in received if tuple(ends) == pair
                ]
        for rank, part in enumerate(moves):
            rows = {row: e for e, slot, row in part.copies if before[rank][slot] == e}
            rows |= {
                row: e for turn in part.rounds for e, row, source, slot in turn.receives if before[source][slot] == e
            }
            assert sorted(rows) == list(range(part.num_rows))
            assert len(set(rows.values())) == part.num_rows
            assert part.num_received == len(set(after[rank]) - set(before[rank]))
            result = before[rank].copy()
            for row, slot in part.writes:
                assert result[slot] != rows[row]
                result[slot] = rows[row]
            assert result.tolist() == after[rank].tolist()
            for turn in part.rounds:
                assert part.num_rows + len(turn.sends) <= len(before[rank]) + 1
                assert all(before[rank][slot] == e for e, slot, _ in turn.sends)
            if per_host:
                for turn in part.rounds:
                    for e, _, source, _ in turn.receives:
                        near = [r for r in range(num_ranks) if r // per_host == rank // per_host and e in before[r]]
                        assert not near or source in near


def test_an_expert_wanted_everywhere_is_sent_by_all_that_hold_it() -> None:
    old = np.array([0, 1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    new = np.array([0, 1, 0, 2, 0, 4, 0, 6, 0, 8, 0, 10])
    sources = Counter(
        source
        for rank in range(6)
        for part in plan_moves(old, new, 6, rank).rounds
        for _, _, source, _ in part.receives
    )
    assert sources == {0: 2, 1: 2}


def test_a_row_says_when_it_is_not_what_was_sent() -> None:
    experts = ExpertRows([torch.arange(14, dtype=torch.int16).view(2, 7), torch.rand(2, 3, 5), torch.rand(2)])
    rows = experts.rows(torch.zeros(experts.staging_bytes, dtype=torch.uint8))
    experts.pack([0, 1], [rows[0], rows[1]])
    with torch.device("meta"):
        seal(rows[:2], [76, 77])
        assert intact(rows[:2], {0: 76, 1: 77})
    assert not intact(rows[:2], {0: 76, 1: 78})
    rows[1, 40] += 1
    assert intact(rows[:2], {0: 76})
    assert not intact(rows[:2], {0: 76, 1: 77})
    assert (experts.expert_bytes, experts.row_bytes) == (14 + 60 + 4, 16 + 64 + 16 + 16)


def move_tensors(rank: int, world_size: int, seed: int) -> None:
    """Layers of different tensors over random placements."""
    spare = int(np.random.default_rng(seed).integers(0, 2 * world_size))
    num_slots = E + redundancy(world_size, spare)
    old, new = random_placement(3, num_slots, seed), random_placement(3, num_slots, seed + 100)
    generator = torch.Generator().manual_seed(seed)
    layers = [
        [torch.rand(E, 5, 7, generator=generator), torch.randint(256, (E, 9), generator=generator).to(torch.uint8)],
        [torch.rand(E, 6, generator=generator).bfloat16(), torch.rand(E, generator=generator), torch.empty(E, 0)],
        [torch.rand(E, 4, 4, generator=generator).to(torch.float8_e4m3fn)],
    ]

    def shard(placement: np.ndarray) -> list[list[torch.Tensor]]:
        return [[t[my_slots(placement, index)] for t in tensors] for index, tensors in enumerate(layers)]

    moved, expected = shard(old), shard(new)
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in moved]
    rearrange_expert_weights(moved, torch.from_numpy(old), new)
    assert [[tensor.data_ptr() for tensor in tensors] for tensors in moved] == addresses
    for got, wanted in zip(chain(*moved), chain(*expected), strict=True):
        assert torch.equal(got.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_moved_tensors_are_those_of_the_new_placement(world_size: int) -> None:
    for seed in range(4):
        ranks(world_size).run(move_tensors, seed)


def move_layers(rank: int, world_size: int, managed: bool) -> None:
    """Whole layers of every scheme, as layers of one model, against a load into the new slots."""
    redundant = redundancy(world_size, 3)
    num_slots = E + redundant
    layers = [load_layer(make_layer(scheme, redundant), seed) for seed, scheme in enumerate(SCHEMES)]
    old = np.tile(np.arange(num_slots) % E, (len(layers), 1))
    new = random_placement(len(layers), num_slots, seed=7)
    if managed:
        manager = EPLBManager(layers, CONFIG)
        manager.rearrange(new)
        manager.finish()
        manager.close()
    else:
        rearrange_expert_weights([layer.expert_weights() for layer in layers], old, new)
    for index, scheme in enumerate(SCHEMES):
        fresh = fresh_weights(scheme, redundant, index, new[index])
        for got, wanted in zip(layers[index].expert_weights(), fresh, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(("world_size", "managed"), [(1, False), (3, True), (8, False)])
def test_layers_of_every_scheme_equal_a_fresh_load(world_size: int, managed: bool) -> None:
    ranks(world_size).run(move_layers, managed)


def move_format(rank: int, world_size: int, name: str, directory: Path) -> None:
    """A layer of a checkpoint, against one that was loaded into the new placement; then it is loaded again there."""
    reader = CheckpointReader(directory)
    redundant = -FORMAT_E % world_size + world_size
    options = {"enable_eplb": True, "num_redundant_experts": redundant}
    moved, fresh = (make_format_layer(reader, 0, **options) for _ in range(2))
    num_slots = FORMAT_E + redundant
    old = np.arange(num_slots)[None] % FORMAT_E
    new = random_placement(1, num_slots, seed=len(name), num_experts=FORMAT_E)
    set_placement(fresh, new[0], FORMAT_E)
    for layer in (moved, fresh):
        load_moe_layer(reader, model_spec(reader.config), 0, layer)
    rearrange_expert_weights([moved.expert_weights()], old, new)
    in_use = [tensor.flatten().view(torch.uint8) for tensor in moved.expert_weights()]
    wanted = [tensor.flatten().view(torch.uint8) for tensor in fresh.expert_weights()]
    assert all(map(torch.equal, in_use, wanted))
    set_placement(moved, new[0], FORMAT_E)
    for tensor in in_use:
        tensor.zero_()
    moved.begin_reload()
    load_moe_layer(reader, model_spec(reader.config), 0, moved)
    assert all(map(torch.equal, in_use, wanted))


@pytest.mark.parametrize("name", CASES)
def test_every_format_of_a_checkpoint_moves_whole_and_is_loaded_again(name: str, tmp_path: Path) -> None:
    write_case(name, tmp_path)
    ranks(3).run(move_format, name, tmp_path)


def disagree(rank: int, world_size: int) -> str:
    old = random_placement(1, E + redundancy(world_size, 0), 0)
    new = random_placement(1, old.shape[1], rank)
    weights = [[torch.zeros(old.shape[1] // world_size, 4)]]
    with pytest.raises(EplbError) as error:
        rearrange_expert_weights(weights, old, new)
    group = dist.new_group()
    if rank == 0:
        absent = pytest.raises(EplbError, match="their addresses within 0.2 s: rank 1 did not answer")
        with pytest.MonkeyPatch.context() as patch, absent:
            patch.setenv("MOE_EP_DISPATCH_TIMEOUT_S", "0.2")
            rearrange_expert_weights(weights, old, old, group)
    return str(error.value)


def test_ranks_with_different_placements_all_raise_and_one_that_is_alone_does() -> None:
    first, second = ranks(2).run(disagree)
    assert first == second
    assert first.startswith("the ranks disagree about the placements: checksum is ")


def with_other_tensors(rank: int, world_size: int) -> None:
    old, new = np.array([[0, 1]]), np.array([[1, 0]])
    of_ranks = ([(4,)], [(5,)]), ([(2, 3)], [(3, 2)]), ([(4,)], [(4,), (2,)])
    for shapes in of_ranks:
        tensors = [torch.zeros(1, *shape) for shape in shapes[rank]]
        with pytest.raises(EplbError, match="the experts' tensors"):
            rearrange_expert_weights([tensors], old, new)


def test_ranks_with_other_tensors_all_raise() -> None:
    ranks(2).run(with_other_tensors)


def outside_of_a_group(rank: int, world_size: int) -> None:
    group = dist.new_group([0])
    weights, slots = [[torch.ones(2, 3)]], np.array([[0, 1]])
    if rank:
        with pytest.raises(ValueError, match="process_group"):
            rearrange_expert_weights(weights, slots, slots[:, ::-1], group)
    else:
        rearrange_expert_weights(weights, slots, slots[:, ::-1], group)


def test_a_group_of_other_processes_is_refused() -> None:
    ranks(2).run(outside_of_a_group)


@pytest.mark.parametrize(
    ("tensors", "old", "new", "message"),
    [
        ([torch.zeros(3, 2)], [[0, 1, 2]], [[0, 1, 3]], "new_physical_to_logical holds expert 3; experts are 0 to 2"),
        ([torch.zeros(3, 2)], [[0, 1, 2]], [[0, 1, 1]], "new_physical_to_logical has no slot for expert 2 in layer 0"),
        ([torch.zeros(3, 2)], [[0, 1, 2]], [[0, 1.5, 2]], "new_physical_to_logical has dtype float64; it must hold in"),
        (
            [torch.zeros(3, 2)],
            [[0, 1, 2]],
            [[0, 1]],
            r"old_physical_to_logical is \(1, 3\) and new_phys",
        ),
        ([torch.zeros(2, 2)], [[0, 1, 2]], [[0, 1, 2]], "layer 0 has 2 local slots on each of 1 ranks; the placements"),
        ([torch.zeros(3, 2), torch.zeros(2)], [[0, 1, 2]], [[0, 1, 2]], r"have shapes \[\(3, 2\), \(2,\)\]; they must"),
        (torch.zeros(3, 2), [[0, 1, 2]], [[0, 1, 2]], "expert_weights of a layer are a tensor; they must be a list of"),
        ([torch.zeros(3, 2), None], [[0, 1, 2]], [[0, 1, 2]], "tensor 1 of a layer's expert_weights is None; it must"),
        ([torch.zeros(2, 3).t()], [[0, 1, 2]], [[0, 1, 2]], "experts move as contiguous bytes, keep it contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: list, old: list, new: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rearrange_expert_weights([tensors], np.array(old), np.array(new))


BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    ("second", "new", "error", "message"),
    [
        (None, [1, 0, 2], ValueError, "layer 1: expert_weights of a layer are None; they must be a list of tensors"),
        ([torch.zeros(3, 2, device="meta")], [1, 0, 2], ValueError, "layer 1: expert_weights are on the meta device"),
        (
            [torch.zeros(3, 2)],
            [BIG, 0, 2],
            ValueError,
            f"old_physical_to_logical holds expert {BIG}; experts are 0 to 2",
        ),
    ],
)
def test_all_layers_are_checked_before_the_first_moves(second, new, error, message) -> None:
    first = torch.arange(6.0).view(3, 2)
    with pytest.raises(error, match=message):
        rearrange_expert_weights([[first], second], np.array([new, new]), np.array([[0, 1, 2]] * 2))
    assert torch.equal(first, torch.arange(6.0).view(3, 2))


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="expert_weights is None; it must be a list"):
        rearrange_expert_weights(None, np.array([[0]]), np.array([[0]]))  # type: ignore[arg-type]


def test_a_move_that_fails_at_once_does_not_say_that_time_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ExpertRows, "write", fail)
    with pytest.raises(EplbError, match=r"moving experts failed on EP rank 0 .*: no memory"):
        rearrange_expert_weights([[torch.zeros(2, 2)]], np.array([[0, 1]]), np.array([[1, 0]]))
