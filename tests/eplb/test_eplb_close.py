"""Managers that end, closed or by an error: nothing of them is left, and no rank waits for one that has given up."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from dataclasses import replace
from operator import le
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed import failure_detection
from moe_ep.distributed import store as rendezvous
from moe_ep.distributed.failure_detection import comes_within
from moe_ep.eplb import rearrangement
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.mover import LayerMover
from moe_ep.eplb.rearrangement import StepGate
from moe_ep.eplb.transfer import MessageTransport, nccl_group
from moe_ep.errors import ConfigError, EplbError
from moe_ep.launch.gangs.processes import children
from moe_ep.layer import FusedMoE
from tests.eplb.models import CONFIG, E, L, load_layer, make_layer, random_placement, redundancy
from tests.ranks import RankPool, ranks

# An exchange may take longer than a pool waits for its ranks: who waits for its deadline fails the test.
PATIENT = replace(CONFIG, first_plan=10**6, timeout_s=600)


def make_model(group: dist.ProcessGroup | None, world_size: int) -> list[FusedMoE]:
    options: dict[str, Any] = {"process_group": group} if group else {}
    return [load_layer(make_layer("plain", redundancy(world_size, 2), **options), seed) for seed in range(L)]


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def comes_down_to(before: tuple[int, int]) -> bool:
    """Whether no more threads and files are held than before; a thread that was joined is there for a moment yet."""
    return comes_within(30, lambda: all(map(le, held(), before)))


def make_and_close(rank: int, world_size: int) -> list[list[bool]]:
    """Whether the process holds what it did after the first of several managers: of all ranks, and of two."""
    pair = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    found: list[list[bool]] = []
    for group in (None, pair) if rank < 2 else (None,):
        layers, first = make_model(group, 2 if group else world_size), None
        found.append([])
        for seed in range(4):
            manager = EPLBManager(layers, CONFIG)
            manager.rearrange(random_placement(L, manager.placement.num_slots, seed))
            manager.finish()
            manager.close()
            manager.close()
            with pytest.raises(EplbError, match="the EPLB manager was closed"):
                manager.step()
            assert manager.staging_bytes == 0
            gone = weakref.ref(manager)
            del manager
            gc.collect()
            assert gone() is None
            layers[0].begin_reload()
            layers[0].process_weights_after_loading()
            first = first or held()
            found[-1].append(comes_down_to(first))
    return found


def test_managers_that_are_closed_leave_nothing() -> None:
    pool = RankPool(3)
    try:
        everybody = [True] * 4
        assert pool.run(make_and_close) == [[everybody] * 2] * 2 + [[everybody]]
    finally:
        pool.close()


def end_of_python(rank: int, world_size: int) -> tuple[str, bool]:
    """What a step says behind the end of Python, and whether no thread is left; rank 1 moves experts meanwhile."""
    before = len(os.listdir("/proc/self/task"))
    manager = EPLBManager(make_model(None, world_size), PATIENT)
    if rank == 1:
        manager.rearrange(random_placement(L, manager.placement.num_slots, seed=0))
    rendezvous.close_all()
    with pytest.raises(EplbError) as error:
        manager.step()
    return str(error.value), comes_within(30, lambda: len(os.listdir("/proc/self/task")) <= before)


def test_a_manager_that_nobody_closed_is_closed_when_python_ends() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(end_of_python) == [("the EPLB manager was closed", True)] * 2
    finally:
        pool.close()


def test_a_manager_that_cannot_be_made_leaves_nothing() -> None:
    layers, settings = make_model(None, 1), EplbConfig(**{**vars(CONFIG), "planner": "process"})
    EPLBManager(layers, settings).close()
    before = held(), children(os.getpid())
    with pytest.raises(ValueError, match="physical_to_logical"):
        EPLBManager(layers, settings, placement=torch.full((L, E + layers[0].num_redundant_experts), E))
    assert comes_down_to(before[0]) and children(os.getpid()) == before[1]


def one_rank_makes_a_mistake(rank: int, world_size: int) -> tuple[str, bool]:
    """Rank 0 gives its manager no layers, once. What that raises, and whether the next manager can be made."""
    layers, settings = make_model(None, world_size), replace(CONFIG, timeout_s=0.2)
    with mock.patch.object(failure_detection, "ANSWER_S", 0.2), pytest.raises((ConfigError, EplbError)) as error:
        EPLBManager(layers if rank else [], settings)
    dist.barrier()
    EPLBManager(layers, CONFIG).close()
    return str(error.value), all(runs(layer) for layer in layers)


def test_a_mistake_on_one_rank_does_not_keep_the_ranks_from_making_the_next_manager() -> None:
    results = ranks(2).run(one_rank_makes_a_mistake)
    assert results[0] == ("layers is empty; EPLB needs the model's MoE layers", True)
    assert "could not exchange their addresses within 0.2 s: rank 0 did not answer" in results[1][0] and results[1][1]


def close_while_moving(rank: int, world_size: int, where: tuple[type, str]) -> str:
    """The thread of rank 1 ends without a word. What a step raises once the manager was closed."""
    layers = make_model(None, world_size)
    manager = EPLBManager(layers, PATIENT)
    if rank == 1:

        def leave(*args: Any) -> None:
            raise EplbError("rank 1 left")

        setattr(*where, leave)
    manager.rearrange(random_placement(L, E + layers[0].num_redundant_experts, seed=1))
    time.sleep(0.5)
    manager.close()
    with pytest.raises(EplbError) as error:
        manager.step()
    return str(error.value)


@pytest.mark.parametrize("where", [(MessageTransport, "fetch"), (StepGate, "announce")])
def test_closing_does_not_wait_for_a_rank_that_has_given_up(where: tuple[type, str]) -> None:
    pool = RankPool(3)
    try:
        results = pool.run(close_while_moving, where)
    finally:
        pool.close()
    assert all("closed" in text or "left" in text or "did not" in text for text in results), results


def runs(layer: FusedMoE) -> bool:
    """Whether a pass may begin."""
    try:
        layer.check_loaded()
    except RuntimeError as error:
        assert "cannot run: " in str(error)
        return False
    return True


def fail_once(
    rank: int, world_size: int, where: tuple[type, str], turn: int, asynchronous: bool, slow_rank: int | None
) -> tuple[str, str]:
    """Rank 1 raises at a turn of something. What all raise then, and what the next manager makes of these layers.

    A rank hears of it before its own commit where it is slow, and else behind that.
    """
    layers = make_model(None, world_size)
    settings = replace(PATIENT, asynchronous=asynchronous)
    manager, done, turns = EPLBManager(layers, settings), getattr(*where), itertools.count(1)

    def fail_at_turn(*args: Any) -> Any:
        if next(turns) == turn:
            raise ValueError("enough")
        return done(*args)

    if rank == 1:
        setattr(*where, fail_at_turn)
    hears_after_s = 0.02 if rank == slow_rank else 60.0
    try:
        with mock.patch.object(rearrangement, "POLL_S", hears_after_s), pytest.raises(EplbError) as error:
            manager.rearrange(random_placement(L, E + layers[0].num_redundant_experts, seed=1))
            while True:
                time.sleep(0.3 if rank == slow_rank else 0.002 * (1 + rank))
                manager.step()
    finally:
        setattr(*where, done)
    manager.close()
    # Layers whose experts are elsewhere for one rank than for another do not run.
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, [(layer.slots.logical_of_physical(), runs(layer)) for layer in layers])
    for layer in zip(*found, strict=True):
        assert len({str(placement) for placement, _ in layer}) == 1 or not any(ran for _, ran in layer)
    try:
        EPLBManager(layers, settings).close()
    except EplbError as refused:
        return str(error.value), str(refused)
    assert all(runs(layer) for layer in layers)
    return str(error.value), ""


@pytest.mark.parametrize(
    ("where", "turn", "asynchronous", "slow_rank", "half_done"),
    [
        ((LayerMover, "cost"), 4, True, None, False),
        ((StepGate, "announce"), 1, True, None, False),
        ((MessageTransport, "fetch"), 2, True, None, False),
        ((MessageTransport, "fetch"), 2, True, 2, True),
        ((LayerMover, "commit"), L, True, None, True),
        # Of a synchronous move's last layer, which nobody has to wait for.
        ((LayerMover, "commit"), L, False, None, True),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all_at_once(
    where: tuple[type, str], turn: int, asynchronous: bool, slow_rank: int | None, half_done: bool
) -> None:
    results = ranks(3).run(fail_once, where, turn, asynchronous, slow_rank)
    assert results == [results[0]] * 3
    error, refused = results[0]
    assert "on EP rank 1: ValueError('enough')" in error
    assert ("settings: placement is " in refused) == half_done


def groups_taken(rank: int, world_size: int) -> list[Any]:
    """The group that a transport takes where ranks left the same one, different ones, and where one has none."""
    world, groups = dist.group.WORLD, [dist.new_group() for _ in range(2)]
    assert world is not None
    channel, found = SideChannel(world, 20), []
    with mock.patch.object(dist, "new_group", return_value="new"):
        for index in (1, rank, None if rank else 0):
            left: dict[float, dist.ProcessGroup] = {} if index is None else {20.0: groups[index]}
            taken = nccl_group(channel, world, 20.0, left)
            assert not left
            found.append(groups.index(taken) if taken in groups else taken)
    channel.close()
    return found


def test_a_group_that_was_left_is_taken_where_all_ranks_left_it() -> None:
    assert ranks(2).run(groups_taken) == [[1, "new", "new"]] * 2
