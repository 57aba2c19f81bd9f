"""Experts that move while the model serves: outputs, commits at one step, errors on all ranks, the deadline."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from moe_ep.eplb import rearrangement, transfer
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import CommitReport
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.planner import make_plan
from moe_ep.eplb.rearrangement import StepGate
from moe_ep.eplb.transfer import MessageTransport
from moe_ep.errors import EplbError
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.eplb.models import (
    CONFIG,
    E,
    L,
    fresh_weights,
    inputs,
    load_layer,
    make_layer,
    make_model,
    on_one_rank,
    random_placement,
)
from tests.ranks import RankPool, ranks

# Of this machine's CPUs, on any number of ranks.
BACKENDS = [name for name in ALL2ALL_BACKENDS if not name.startswith(("no_ep", "nvshmem", "two_level"))]


def serve(
    rank: int, world_size: int, backend: str, asynchronous: bool, num_steps: int = 40
) -> tuple[list[list[list[int]]], list[int], dict[str, int]]:
    """Steps whose outputs are compared bit by bit; routing turns round after twenty. Returns placements by step, the
    steps of the commits and what was counted."""
    layers = make_model(world_size, all2all_backend=backend)
    alone = [load_layer(make_layer(ep_size=1, enable_eplb=False), seed) for seed in range(L)]
    commits: list[int] = []
    manager = EPLBManager(
        layers,
        EplbConfig(**{**vars(CONFIG), "asynchronous": asynchronous}),
        listener=lambda event: commits.append(event.step) if isinstance(event, CommitReport) else None,
    )
    placements = []
    for step in range(num_steps):
        # The last rank has no tokens in most steps.
        T = (step % 5) * 4 if rank < world_size - 1 or step % 4 == 0 else 0
        for index, (layer, reference) in enumerate(zip(layers, alone, strict=True)):
            x, logits = inputs(T, seed=1000 * step + 10 * index + rank)
            if step >= 20:
                logits = logits.flip(1)
            assert torch.equal(layer(x, logits), reference(x, logits))
        manager.step()
        placements.append(manager.placement.host.tolist())
        if step in (28, num_steps - 1):
            while manager.busy:
                time.sleep(0.01)
                manager.step()
                placements.append(manager.placement.host.tolist())
        if step == 28:
            manager.plan_now()
    for index, layer in enumerate(layers):
        fresh = fresh_weights("plain", layer.num_redundant_experts, index, manager.placement.host[index])
        for got, wanted in zip(layer.expert_weights(), fresh, strict=True):
            assert torch.equal(got, wanted)
    maps = manager.placement
    assert maps.physical_to_logical_map.tolist() == maps.host.tolist()
    assert torch.equal((maps.logical_to_physical_map >= 0).sum(2), maps.logical_replica_count.long())
    totals = manager.totals
    manager.close()
    counted = {"plans": totals.plans_made, "experts": totals.experts_moved, "layers": totals.layers_committed}
    return placements, commits, counted


@pytest.mark.parametrize(
    "backend", [BACKENDS[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in BACKENDS[1:])]
)
def test_outputs_are_the_same_bits_while_experts_move(backend: str) -> None:
    results = ranks(3).run(serve, backend, True)
    placements, commits, counted = results[0]
    assert all(result == results[0] for result in results)
    assert counted["plans"] == 2 and counted["layers"] == len(commits) >= L and counted["experts"] > L
    # One layer at a time, each at a step of its own.
    assert len(set(commits)) == len(commits)
    changes = [sum(before != after for before, after in zip(*pair, strict=True)) for pair in pairwise(placements)]
    assert max(changes) == 1


def test_synchronous_equals_asynchronous() -> None:
    synchronous, asynchronous = (ranks(3).run(serve, BACKENDS[0], mode, 25)[0] for mode in (False, True))
    assert synchronous[0][-1] == asynchronous[0][-1]
    assert synchronous[2] == asynchronous[2]
    assert set(synchronous[1]) == {4}


def without_lockstep(rank: int, world_size: int, seed: int) -> list[list[list[int]]]:
    """Ranks that step and receive at a pace of their own; the placement after every step."""
    pace = random.Random(10 * seed + rank)
    layers = make_model(world_size)
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "commit_margin": 1 + seed}))
    fetch = MessageTransport.fetch

    def slow_fetch(*args: Any) -> bool:
        time.sleep(pace.random() * 0.01)
        return fetch(*args)

    placements = []
    MessageTransport.fetch = slow_fetch  # type: ignore[method-assign]
    try:
        for step in range(90):
            if step in (10, 60):
                manager.finish()
                manager.rearrange(random_placement(L, E + layers[0].num_redundant_experts, seed=step))
            time.sleep(pace.random() * (0.01 if rank else 0.005))
            manager.step()
            placements.append(manager.placement.host.tolist())
        manager.finish()
        placements.append(manager.placement.host.tolist())
    finally:
        MessageTransport.fetch = fetch  # type: ignore[method-assign]
    assert not manager.busy
    manager.close()
    return placements


@pytest.mark.parametrize("seed", [0, 3])
def test_all_ranks_commit_after_the_same_step_whatever_their_pace(seed: int) -> None:
    results = ranks(4).run(without_lockstep, seed)
    assert all(result == results[0] for result in results)
    target = random_placement(L, len(results[0][0][0]), seed=60).tolist()
    assert results[0][0] != results[0][-1] == target


def step_until_error(manager: EPLBManager, limit_s: float) -> str:
    """What the manager raises in a step; and again in the next."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        time.sleep(0.002)
        try:
            manager.step()
        except EplbError as error:
            with pytest.raises(EplbError):
                manager.step()
            manager.close()
            return str(error)
    raise AssertionError("no error came")


# Of an exchange that a rank stays away from: long enough for the others to come to it together on a busy machine.
DEADLINE_S = 4.0
# Of all others, which nobody waits for: the error comes before.
PATIENT_S = 120.0


def go_wrong(rank: int, world_size: int, how: str) -> str:
    layers = make_model(world_size)
    num_slots = E + layers[0].num_redundant_experts
    settings = {
        **vars(CONFIG),
        "first_plan": 10**6,
        "timeout_s": DEADLINE_S if how in ("absent", "commit") else PATIENT_S,
    }
    if how == "settings":
        with pytest.raises(EplbError) as error:
            EPLBManager(layers, EplbConfig(**{**settings, "interval": 20 + rank}))
        return str(error.value)
    manager = EPLBManager(layers, EplbConfig(**settings))
    seal, commit = transfer.seal, rearrangement.Rearrangement.commit
    if how == "step" and rank == 1:
        manager.step()
    if how == "checksum" and rank == 1:

        def wrong_seal(rows: torch.Tensor, stamps: list[int]) -> None:
            seal(rows, stamps)
            rows[:, 5] += 1

        transfer.seal = wrong_seal
    if how == "planner":
        rearrangement.make_plan = lambda *args: 1 // 0  # type: ignore[assignment]
    if how == "commit" and rank == 1:
        rearrangement.Rearrangement.commit = lambda *args: 1 // 0  # type: ignore[method-assign]
    if how == "planner":
        manager.plan_now()
    elif how != "absent" or rank != 1:
        manager.rearrange(random_placement(L, num_slots, seed=rank if how == "plan" else 5))
    try:
        return step_until_error(manager, PATIENT_S / 2)
    finally:
        transfer.seal, rearrangement.make_plan = seal, make_plan
        rearrangement.Rearrangement.commit = commit  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("settings", "the ranks disagree about the model or its EPLB settings: settings is "),
        ("plan", "the ranks disagree about rearrangement 1: plan is "),
        ("step", "the ranks disagree about rearrangement 1: step is 0 on EP rank 0 and 1 on EP rank 1; "),
        ("checksum", "experts of layer 0 did not arrive on EP rank 0: they came with another checksum than"),
        ("commit", "a commit failed on EP rank 1: ZeroDivisionError("),
        ("planner", "no plan could be made on EP rank 0: ZeroDivisionError("),
        ("absent", "the ranks could not exchange rearrangement 1 within 4 s: rank 1 did not take part (alive"),
    ],
)
def test_what_goes_wrong_is_the_same_error_everywhere(how: str, message: str) -> None:
    pool = RankPool(3)
    try:
        results = pool.run(go_wrong, how)
    finally:
        pool.close()
    assert results[0].startswith(message)
    assert results == [results[0]] * 3


def die_while_moving(rank: int, world_size: int, where: tuple[type, str]) -> None:
    layers = make_model(world_size)
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "first_plan": 10**6, "timeout_s": DEADLINE_S}))
    if rank == 1:
        setattr(*where, lambda *args: os._exit(9))
    manager.rearrange(random_placement(L, E + layers[0].num_redundant_experts, seed=1))
    started = time.monotonic()
    text = step_until_error(manager, PATIENT_S / 2)
    raise EplbError(f"after {'less' if time.monotonic() - started < 30 else 'more'} than 30 s: {text}")


@pytest.mark.parametrize(
    ("where", "exchange"),
    [((MessageTransport, "fetch"), "the arrival of layer 0"), ((StepGate, "announce"), "the commit of layer 0")],
)
def test_a_rank_that_dies_while_experts_move_ends_the_others(where: tuple[type, str], exchange: str) -> None:
    # Of four, one has no exchange with the rank that dies, and is not to be blamed.
    pool = RankPool(4)
    with pytest.raises(AssertionError) as failure:
        pool.run(die_while_moving, where)
    text = str(failure.value)
    assert "rank 1: the process died" in text
    # Each of the three others says so, whether it sees the death itself or is told of it.
    assert text.count(f"EplbError: after less than 30 s: the ranks could not exchange {exchange}: rank 1 ") == 3


def test_one_rank_has_nothing_to_exchange() -> None:
    manager = on_one_rank()
    target = random_placement(L, manager.placement.num_slots, seed=1)
    # What is for the CPU is made there, whatever torch's default device.
    with torch.device("meta"):
        manager.rearrange(target)
        manager.plan_now()
    assert manager.placement.host.tolist() == target.tolist()
    assert manager.totals.experts_moved == 0
    for _ in range(5):
        manager.step()
    assert not manager.busy
    manager.close()
