"""Experts that move while the model serves: outputs, commits at one step, errors on all ranks, the deadline."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from moe_ep.eplb import transfer
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import CommitReport, LoadReport, PlanReport
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.planner import make_plan, measure_load
from moe_ep.eplb.planner_process import PlannerProcess
from moe_ep.eplb.recorder import ExpertLoadRecorder
from moe_ep.eplb.transfer import MessageTransport
from moe_ep.errors import ConfigError, EplbError
from moe_ep.layer import FusedMoE
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.eplb.models import (
    SCHEMES,
    TOP_K,
    E,
    fresh_weights,
    inputs,
    load_layer,
    make_layer,
    random_placement,
    redundancy,
)
from tests.ranks import RankPool, ranks

L = 3
# Of this machine's CPUs, on any number of ranks.
BACKENDS = [name for name in ALL2ALL_BACKENDS if not name.startswith(("no_ep", "nvshmem", "two_level"))]
CONFIG = EplbConfig(
    first_plan=4, interval=10**6, rebalance_below=1.0, refine=False, commit_margin=1, timeout_s=20, planner="thread"
)


def make_model(world_size: int, spare: int = 2, **options: Any) -> list[FusedMoE]:
    redundant = redundancy(world_size, spare)
    return [load_layer(make_layer("plain", redundant, **options), seed) for seed in range(L)]


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


@pytest.mark.parametrize("backend", BACKENDS)
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


def step_until_error(manager: EPLBManager, limit_s: float = 20) -> str:
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


def go_wrong(rank: int, world_size: int, how: str) -> str:
    layers = make_model(world_size)
    num_slots = E + layers[0].num_redundant_experts
    settings = {**vars(CONFIG), "first_plan": 10**6, "timeout_s": 1.5 if how == "absent" else 20}
    if how == "settings":
        with pytest.raises(EplbError) as error:
            EPLBManager(layers, EplbConfig(**{**settings, "interval": 20 + rank}))
        return str(error.value)
    manager = EPLBManager(layers, EplbConfig(**settings))
    seal = transfer.seal
    if how == "step" and rank == 1:
        manager.step()
    if how == "checksum" and rank == 1:

        def wrong_seal(rows: torch.Tensor, stamps: list[int]) -> None:
            seal(rows, stamps)
            rows[:, 5] += 1

        transfer.seal = wrong_seal
    if how != "absent" or rank != 1:
        manager.rearrange(random_placement(L, num_slots, seed=rank if how == "plan" else 5))
    try:
        return step_until_error(manager)
    finally:
        transfer.seal = seal


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("settings", "the ranks disagree about the model or its EPLB settings: settings is "),
        ("plan", "the ranks disagree about rearrangement 1: plan is "),
        ("step", "the ranks disagree about rearrangement 1: step is 0 on EP rank 0 and 1 on EP rank 1; "),
        ("checksum", "experts of layer 0 did not arrive on EP rank 0 with another checksum than they left with"),
        ("absent", "the ranks could not exchange rearrangement 1 within 1.5 s: EP rank 1 did not take part; experts"),
    ],
)
def test_what_goes_wrong_is_the_same_error_everywhere(how: str, message: str) -> None:
    pool = RankPool(3, timeout_s=20)
    try:
        results = pool.run(go_wrong, how)
    finally:
        pool.close()
    assert results[0].startswith(message)
    assert results == [results[0]] * 3


def die_while_moving(rank: int, world_size: int) -> None:
    layers = make_model(world_size)
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "first_plan": 10**6, "timeout_s": 2.0}))
    fetch = MessageTransport.fetch
    if rank == 1:
        MessageTransport.fetch = lambda *args: os._exit(9)  # type: ignore[method-assign]
    manager.rearrange(random_placement(L, E + layers[0].num_redundant_experts, seed=1))
    started = time.monotonic()
    text = step_until_error(manager)
    MessageTransport.fetch = fetch  # type: ignore[method-assign]
    raise EplbError(f"after {'less' if time.monotonic() - started < 8 else 'more'} than 8 s: {text}")


def test_a_rank_that_dies_while_experts_move_ends_the_others() -> None:
    pool = RankPool(3, timeout_s=20)
    with pytest.raises(AssertionError) as failure:
        pool.run(die_while_moving)
    text = str(failure.value)
    assert "rank 1: the process died" in text
    message = (
        "EplbError: after less than 8 s: the ranks could not exchange the arrival of layer 0 within 2 s: EP rank 1"
    )
    assert text.count(message) == 2


def reload(rank: int, world_size: int) -> None:
    """Layers of one model, each quantized in its own way, move; then other weights of some experts are loaded, of all
    but expert 0 in the end, and go where the experts are now, in place."""
    redundant = redundancy(world_size, 2)
    layers = [load_layer(make_layer(scheme, redundant), seed) for seed, scheme in enumerate(SCHEMES)]
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "asynchronous": False}))
    manager.rearrange(random_placement(len(layers), E + redundant, seed=3))
    for index, (scheme, layer) in enumerate(zip(SCHEMES, layers, strict=True)):
        row = manager.placement.host[index]
        old, new = (fresh_weights(scheme, redundant, seed, row) for seed in (index, 50 + index))
        in_use = layer.expert_weights()
        for loaded in (range(0), range(1, E, 2), range(1, E)):
            layer.begin_reload()
            load_layer(layer, 50 + index, loaded)
            for tensor, before, after in zip(in_use, old, new, strict=True):
                for slot, expert in enumerate(np.split(row, world_size)[rank]):
                    assert torch.equal(tensor[slot], after[slot] if expert in loaded else before[slot])
    manager.close()


def test_weights_loaded_after_a_move_go_to_the_present_owners() -> None:
    ranks(3).run(reload)


def test_a_layer_that_is_loaded_again_does_not_run_half_loaded() -> None:
    layer = load_layer(make_layer("GPTQ", ep_size=1), 0)
    x, logits = inputs(4, seed=1)
    layer.begin_reload()
    with pytest.raises(RuntimeError, match="are being loaded again; call process_weights_after_loading first"):
        layer(x, logits)
    part = torch.zeros_like(layer.get_parameter("w2_qweight")[0])
    layer.weight_loader(layer.get_parameter("w2_qweight"), part, "experts.3.w2.qweight", "w2", 3)
    with pytest.raises(RuntimeError, match="not complete: w13_qweight of local expert 3"):
        layer.process_weights_after_loading()
    changed: list[int] = []
    layer.quant_method.rebuild_derived_state = lambda layer, slots: changed.extend(slots)  # type: ignore[method-assign]
    load_layer(layer, 1, [3])
    assert changed == [3]
    assert layer(x, logits).isfinite().all()


def derived(rank: int, world_size: int) -> None:
    """A method that keeps something beside the tensors that move hears which slots changed."""
    layer = make_model(world_size)[0]
    method, weight = layer.quant_method, layer.get_parameter("w13_weight")
    sums = weight.sum(dim=(1, 2))

    def rebuild(changed: FusedMoE, slots: list[int]) -> None:
        assert changed is layer
        sums[slots] = weight[slots].sum(dim=(1, 2))

    method.rebuild_derived_state = rebuild  # type: ignore[method-assign]
    manager = EPLBManager([layer], EplbConfig(**{**vars(CONFIG), "asynchronous": False}))
    manager.rearrange(random_placement(1, E + layer.num_redundant_experts, seed=4))
    assert torch.equal(sums, weight.sum(dim=(1, 2)))
    manager.close()


def test_derived_state_is_rebuilt() -> None:
    ranks(3).run(derived)


def counted(rank: int, world_size: int) -> list[Any]:
    """What the listener hears of a load that is known."""
    layers = make_model(world_size, spare=0)
    events: list[Any] = []
    manager = EPLBManager(
        layers, EplbConfig(**{**vars(CONFIG), "first_plan": 2, "asynchronous": False}), listener=events.append
    )
    passes = manager.recorder.expert_load_pass
    passes.fill_(100)
    manager.profile_step()
    for _ in range(2):
        passes[:, 0] += 6
        passes[1:, 5] += 6
        passes[0, 1] += 6
        manager.step()
    assert manager.totals.load is events[0]
    assert manager.totals.plans_made == 1
    assert manager.staging_bytes == (manager._mover._experts[0].num_slots + 1) * manager._mover._experts[0].row_bytes
    manager.close()
    return events


def test_events_and_totals() -> None:
    (load, plan, *commits), (_, elsewhere, *_) = ranks(2).run(counted)
    assert isinstance(load, LoadReport) and isinstance(plan, PlanReport)
    assert (load.step, load.num_steps) == (2, 2)
    # Two ranks count alike: layer 0 gives 24 to rank 0, layers 1 and 2 give 12 to each rank.
    assert load.layer_balancedness == (0.5, 1.0, 1.0)
    assert load.balancedness == 36 / 48
    assert (load.max_tokens, load.mean_tokens, load.active_experts) == (16.0, 12.0, pytest.approx(4 / 3))
    assert plan.made and plan.num_layers == len(commits) == 1
    # Rank 0 plans, and the others wait for it.
    assert plan.seconds > 0 and elsewhere.seconds == 0
    assert (commits[0].step, commits[0].layer) == (2, 0)
    assert sum(event.experts_moved for event in commits) == plan.experts_moved
    assert sum(event.bytes_moved for event in commits) == plan.bytes_moved


def on_one_rank() -> EPLBManager:
    return EPLBManager(make_model(1, ep_size=1), EplbConfig(**{**vars(CONFIG), "asynchronous": False}))


def test_one_rank_has_nothing_to_exchange() -> None:
    manager = on_one_rank()
    target = random_placement(L, manager.placement.num_slots, seed=1)
    manager.rearrange(target)
    assert manager.placement.host.tolist() == target.tolist()
    assert manager.totals.experts_moved == 0
    for _ in range(5):
        manager.step()
    assert not manager.busy
    manager.close()


def test_the_recorded_steps_come_oldest_first() -> None:
    recorder = ExpertLoadRecorder(num_layers=2, num_physical_experts=3, window_size=3, device="cpu")
    assert recorder.snapshot().shape == (0, 2, 3)
    for step in range(1, 6):
        recorder.expert_load_pass.add_(step)
        recorder.end_step()
        held = range(max(1, step - 2), step + 1)
        assert recorder.snapshot()[:, 1, 2].tolist() == list(held)
    recorder.forget(1)
    assert recorder.snapshot()[:, :, 0].tolist() == [[3, 0], [4, 0], [5, 0]]
    recorder.expert_load_pass.add_(1)
    recorder.discard_pass()
    assert not recorder.expert_load_pass.any()


def test_steps_that_count_nothing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = on_one_rank()
    for _ in range(5):
        manager.step()
    manager.plan_now()
    manager.close()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "EPLB counted no tokens in 4 steps; CUDA graphs that were captured before" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 2}, r"num_nodes is 2; it must divide the EP ranks \(1\)"),
        ({"num_groups": 3}, rf"num_groups is 3; it must divide the experts of a layer \({E}\)"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_it_serves(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EPLBManager(make_model(1, ep_size=1), EplbConfig(**{**vars(CONFIG), **settings}))


def test_level_tokens_are_no_reason_not_to_level_active_experts() -> None:
    counts = torch.tensor([[[40, 0, 0, 0, 10, 10, 10, 10]]]).expand(4, 1, 8)
    load, placement = measure_load(counts, 2, step=4), np.arange(8)[None]
    assert load.balancedness == 1.0
    by_tokens, reason = make_plan(counts, load, placement, 8, 2, CONFIG)
    assert by_tokens is None and reason == "balancedness 1.000 is not below 1"
    plan, _ = make_plan(counts, load, placement, 8, 2, EplbConfig(objective="active_experts", refine=False))
    assert plan is not None
    active = (counts[0, 0].numpy()[plan[0]] > 0).reshape(2, 4).sum(axis=1)
    assert active.max() == 3


def test_when_a_plan_is_due() -> None:
    config = EplbConfig(first_plan=3, interval=5)
    assert [step for step in range(20) if config.is_due(step)] == [3, 8, 13, 18]
    assert TOP_K < E


def planned_elsewhere(rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Steps until the planning process has answered; the same plan as without it."""
    counts = torch.randint(50, (E + redundancy(world_size, 2),), generator=torch.Generator().manual_seed(1)).int()
    found = []
    for planner in ("process", "thread"):
        layers = make_model(world_size)
        config = EplbConfig(**{**vars(CONFIG), "first_plan": 2, "interval": 10**6, "planner": planner, "refine": True})
        manager = EPLBManager(layers, config)
        for _ in range(2):
            manager.recorder.expert_load_pass += counts
            manager.step()
        manager.finish()
        found.append(manager.placement.host.tolist())
        plans = manager.totals.plans_made
        manager.close()
    assert found[0] == found[1]
    return found[0], plans


def test_plans_of_the_planning_process() -> None:
    results = ranks(2).run(planned_elsewhere)
    assert results[0] == results[1]
    assert results[0][1] == 1


def test_a_planning_process_that_ends_is_an_error() -> None:
    planner = PlannerProcess()
    planner._process.kill()
    placement = np.arange(4)[None]
    with pytest.raises(RuntimeError, match="the planning process ended with exit code -9"):
        planner.make_plan(torch.ones(1, 1, 4, dtype=torch.int64), placement, 4, 2, CONFIG, 20)
    planner.close()
