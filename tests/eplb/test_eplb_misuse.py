"""Managers used as they should not be, or interrupted: a named error or the right thing, and never wrong weights."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from moe_ep.eplb import rearrangement
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import Event, PlanReport
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.placement_state import PlacementState
from moe_ep.eplb.planner import PlannerProcess
from moe_ep.eplb.rearrangement import StepGate
from moe_ep.errors import ConfigError, EplbError
from moe_ep.layer import FusedMoE
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
from tests.ranks import RankPool

NEVER = 10**6


def check_weights(layers: list[FusedMoE], scheme: str = "plain", first_seed: int = 0) -> None:
    """Every slot holds what the layer's maps say."""
    for seed, layer in enumerate(layers, first_seed):
        row = np.array(layer.slots.logical_of_physical())
        for got, wanted in zip(
            layer.expert_weights(), fresh_weights(scheme, layer.num_redundant_experts, seed, row), strict=True
        ):
            assert torch.equal(got, wanted)


def test_layers_have_one_manager_at_a_time() -> None:
    layers = make_model(1, ep_size=1)
    settings = EplbConfig(**{**vars(CONFIG), "first_plan": NEVER})
    first = EPLBManager(layers, settings)
    with pytest.raises(ConfigError, match="is balanced by another EPLBManager"):
        EPLBManager(layers[1:], settings)
    first.rearrange(random_placement(L, first.placement.num_slots, seed=1))
    first.finish()
    first.close()
    second = EPLBManager(layers, settings)
    second.rearrange(random_placement(L, second.placement.num_slots, seed=2))
    second.finish()
    second.close()
    check_weights(layers)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_of_two_threads_that_begin_at_once_is_refused(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = on_one_rank(asynchronous=asynchronous, first_plan=NEVER)
    together, check, errors = threading.Barrier(2), PlacementState.check, []

    def check_together(*args: Any) -> None:
        check(*args)
        together.wait()

    def go(seed: int) -> None:
        try:
            manager.rearrange(random_placement(L, manager.placement.num_slots, seed))
        except EplbError as error:
            errors.append(str(error))

    # The one that comes first must be under way until the other has asked.
    carried_out = rearrangement.Rearrangement.carry_out

    def carry_out_late(*args: Any, **options: Any) -> Any:
        while not errors:
            time.sleep(0.001)
        return carried_out(*args, **options)

    monkeypatch.setattr(PlacementState, "check", check_together)
    monkeypatch.setattr(rearrangement.Rearrangement, "carry_out", carry_out_late)
    threads = [threading.Thread(target=go, args=(seed,), daemon=True) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == ["rearrange was called while experts are still moving; call finish first"]
    manager.finish()
    assert not manager.busy and manager.totals.layers_committed == L
    manager.close()


@pytest.mark.parametrize("scheme", ["plain", "GPTQ"])
def test_a_plan_that_is_due_waits_for_weights_that_are_being_loaded(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [load_layer(make_layer(scheme, 2, ep_size=1), seed) for seed in range(L)]
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "asynchronous": False, "first_plan": 1, "interval": 2}))
    target = random_placement(L, manager.placement.num_slots, seed=3)
    monkeypatch.setattr(rearrangement, "make_plan", lambda *args: (target, ""))
    for seed, layer in enumerate(layers, 50):
        layer.begin_reload()
        with monkeypatch.context() as half:
            half.setattr(layer, "process_weights_after_loading", lambda: None)
            load_layer(layer, seed, range(5))
        if seed == 50:
            with pytest.raises(RuntimeError, match="are being loaded again"):
                manager.step()
        load_layer(layer, seed, range(5, E))
    check_weights(layers, scheme, 50)
    for _ in range(2):
        manager.step()
    assert manager.placement.host.tolist() == target.tolist()
    check_weights(layers, scheme, 50)
    manager.close()


def test_plain_weights_are_not_loaded_while_experts_move() -> None:
    layers = make_model(1, ep_size=1)
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "first_plan": NEVER}))
    manager.rearrange(random_placement(L, manager.placement.num_slots, seed=1))
    with pytest.raises(RuntimeError, match="experts are still moving, and the weights of .* cannot be loaded again"):
        load_layer(layers[0], 50)
    manager.finish()
    for seed, layer in enumerate(layers, 50):
        load_layer(layer, seed)
    check_weights(layers, "plain", 50)
    manager.close()


def test_a_layer_whose_commit_was_interrupted_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_model(1, ep_size=1)
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "first_plan": NEVER}))
    write = ExpertRows.write

    def write_and_fail(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(ExpertRows, "write", write_and_fail)
    manager.rearrange(random_placement(L, manager.placement.num_slots, seed=1))
    with pytest.raises(KeyboardInterrupt):
        manager.finish()
    with pytest.raises(EplbError, match=r"a commit failed on EP rank 0: KeyboardInterrupt\(\)"):
        manager.step()
    x, logits = inputs(4, seed=1)
    with pytest.raises(RuntimeError, match="cannot run: a move of its experts was interrupted"):
        layers[0](x, logits)
    assert layers[1](x, logits).isfinite().all()
    manager.close()


def test_layers_run_where_a_manager_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_model(1, ep_size=1)
    write, asked = ExpertRows.write, []

    def write_and_fail(*args: Any) -> None:
        write(*args)
        asked.append(args)
        if len(asked) == 2:
            raise MemoryError

    monkeypatch.setattr(ExpertRows, "write", write_and_fail)
    with pytest.raises(MemoryError):
        EPLBManager(layers, CONFIG)
    x, logits = inputs(4, seed=1)
    assert all(layer(x, logits).isfinite().all() for layer in layers)
    check_weights(layers)
    EPLBManager(layers, CONFIG).close()


def leave_from_listener(rank: int, world_size: int, asynchronous: bool) -> tuple[str, bool]:
    """The listener of rank 1 ends its thread. What a step raises then, and whether a plan's caller was interrupted."""
    layers = make_model(world_size)

    def leave(event: Event) -> None:
        if rank == 1 and isinstance(event, PlanReport):
            raise SystemExit(3)

    settings = {**vars(CONFIG), "first_plan": NEVER, "timeout_s": 120, "asynchronous": asynchronous}
    manager, interrupted = EPLBManager(layers, EplbConfig(**settings), listener=leave), False
    try:
        manager.rearrange(random_placement(L, manager.placement.num_slots, seed=1))
    except SystemExit:
        interrupted = True
    except EplbError:
        assert not asynchronous
    with pytest.raises(EplbError) as error:
        while True:
            time.sleep(0.002)
            manager.step()
    manager.close()
    return str(error.value), interrupted


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_listener_that_ends_its_thread_ends_all_ranks_at_once(asynchronous: bool) -> None:
    pool = RankPool(3)
    try:
        results = pool.run(leave_from_listener, asynchronous)
    finally:
        pool.close()
    message = "EPLB was interrupted on EP rank 1: SystemExit(3)"
    assert results == [(message, rank == 1 and not asynchronous) for rank in range(3)]


def interrupt_a_step(rank: int, world_size: int) -> str:
    """Rank 1 is interrupted while its step waits for the others' word on a commit, and goes on. What a step raises."""
    layers = make_model(world_size)
    settings = {**vars(CONFIG), "first_plan": NEVER, "timeout_s": 20}
    manager, wait, interrupted = EPLBManager(layers, EplbConfig(**settings)), StepGate.wait_for, False
    serving = threading.get_ident()

    def wait_or_leave(gate: StepGate, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        nonlocal interrupted
        if rank == 1 and threading.get_ident() == serving and not (interrupted or ready()):
            interrupted = True
            raise KeyboardInterrupt
        return wait(gate, ready, timeout_s)

    with mock.patch.object(StepGate, "wait_for", wait_or_leave), pytest.raises(EplbError) as error:
        manager.rearrange(random_placement(L, manager.placement.num_slots, seed=1))
        while True:
            with suppress(KeyboardInterrupt):
                manager.step()
    assert interrupted == (rank == 1)
    manager.close()
    return str(error.value)


def test_a_step_that_was_interrupted_ends_all_ranks_at_once() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(interrupt_a_step) == ["EPLB was interrupted on EP rank 1: KeyboardInterrupt()"] * 2
    finally:
        pool.close()


def test_closing_does_not_wait_for_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    manager = on_one_rank(asynchronous=True, planner="process", first_plan=NEVER, timeout_s=600)
    asked, make_plan = threading.Event(), PlannerProcess.make_plan

    def ask(planner: PlannerProcess, *args: Any) -> Any:
        planner.process.send_signal(signal.SIGSTOP)
        asked.set()
        return make_plan(planner, *args)

    with mock.patch.object(PlannerProcess, "make_plan", ask):
        manager.plan_now()
        assert asked.wait(60)
        started = time.monotonic()
        manager.close()
    assert time.monotonic() - started < 300
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
