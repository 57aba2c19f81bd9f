"""What a manager counts and tells, when it plans, and where."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import Any

import numpy as np
import pytest
import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import LoadReport, PlanReport
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.planner import PlannerProcess, make_plan, measure_load
from moe_ep.eplb.recorder import ExpertLoadRecorder
from tests.eplb.models import CONFIG, E, make_model, on_one_rank, random_placement, redundancy
from tests.ranks import ranks


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
    for name in ("experts_moved", "bytes_moved", "transfer_s", "commit_s"):
        assert getattr(manager.totals, name) == sum(getattr(event, name) for event in events[2:]) > 0
    assert manager.staging_bytes == ExpertRows(layers[0].expert_weights()).staging_bytes
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


def test_a_listener_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: object) -> None:
        raise OSError("nobody listens")

    manager = EPLBManager(make_model(1, ep_size=1), CONFIG, listener=fail)
    manager.rearrange(random_placement(3, manager.placement.num_slots, seed=1))
    manager.finish()
    manager.close()
    assert manager.totals.layers_committed == 3
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["nobody listens"] * 4


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


def test_what_a_layer_counted_before_its_experts_moved_is_forgotten() -> None:
    manager = on_one_rank()
    manager.recorder.expert_load_pass += 5
    manager.step()
    target = manager.placement.host.copy()
    target[1] = np.roll(target[1], 1)
    manager.rearrange(target)
    # By slots that hold other experts now, they would be load of those.
    assert manager.recorder.snapshot().amax(dim=(0, 2)).tolist() == [5, 0, 5]
    manager.close()


def test_steps_that_count_nothing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = on_one_rank()
    for _ in range(5):
        manager.step()
    manager.plan_now()
    manager.close()
    # A model that has served and has nothing to do now is no reason to doubt its graphs.
    served = on_one_rank(window_size=1)
    served.recorder.expert_load_pass += 1
    for _ in range(2):
        served.step()
        served.plan_now()
    served.close()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "EPLB counted no tokens in 4 steps; CUDA graphs that were captured before" in record.getMessage()


def test_level_tokens_are_no_reason_not_to_level_active_experts() -> None:
    counts = torch.tensor([[[40, 0, 0, 0, 10, 10, 10, 10]]]).expand(4, 1, 8)
    placement = np.arange(8)[None]
    assert measure_load(counts, 2, step=4).balancedness == 1.0
    by_tokens, reason = make_plan(counts, placement, 8, 2, CONFIG)
    assert by_tokens is None and reason == "balancedness 1.000 is not below 1"
    plan, _ = make_plan(counts, placement, 8, 2, EplbConfig(objective="active_experts", refine=False))
    assert plan is not None
    active = (counts[0, 0].numpy()[plan[0]] > 0).reshape(2, 4).sum(axis=1)
    assert active.max() == 3


def test_when_a_plan_is_due() -> None:
    config = EplbConfig(first_plan=8, interval=5)
    assert [step for step in range(20) if config.is_due(step)] == [8, 13, 18]


def planned_elsewhere(rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Steps until the planning process has answered; the same plan as without it."""
    counts = torch.randint(50, (E + redundancy(world_size, 2),), generator=torch.Generator().manual_seed(1)).int()
    found = []
    for planner in ("process", "thread"):
        layers = make_model(world_size)
        # The process takes seconds to be there, and many where others keep the cores busy.
        settings = {"first_plan": 2, "interval": 10**6, "planner": planner, "refine": True, "timeout_s": 120}
        config = EplbConfig(**{**vars(CONFIG), **settings})
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


def with_numbers_of_numpy(rank: int, world_size: int) -> int:
    """Plans made, of ranks of which one has numbers of numpy and the other of Python."""
    (count, share) = (np.int64, np.float32) if rank == 0 else (int, float)
    layers = make_model(world_size, num_experts=count(E))
    settings = {"first_plan": count(1), "min_gain": share(0), "planner": "process", "timeout_s": 120}
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), **settings}))
    manager.recorder.expert_load_pass += torch.arange(manager.placement.num_slots, dtype=torch.int32)
    manager.step()
    manager.finish()
    manager.close()
    return manager.totals.plans_made


def test_settings_may_be_numbers_of_numpy() -> None:
    assert ranks(2).run(with_numbers_of_numpy) == [1, 1]


def test_a_planning_process_that_ends_is_an_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        # As a server has them: pipes with numbers that select cannot take, where this user may have so many.
        for _ in range(min(1100, limits[1] - 100)):
            stack.enter_context(open(os.devnull))
        planner = PlannerProcess(20)
        planner.process.kill()
        placement = np.arange(4)[None]
        with pytest.raises(RuntimeError, match="the planning process ended with exit code -9"):
            planner.make_plan(torch.ones(1, 1, 4, dtype=torch.int64), placement, 4, 2, CONFIG)
        planner.close()


@pytest.mark.parametrize("num_steps", [1, 2000])
def test_a_planning_process_that_hangs_is_an_error_at_the_deadline(num_steps: int) -> None:
    """With requests that its pipe has room for, and with larger ones."""
    planner = PlannerProcess(0.1)
    planner.process.send_signal(signal.SIGSTOP)
    window = torch.ones(num_steps, 1, 64, dtype=torch.int64)
    with pytest.raises(TimeoutError, match="the planning process did not answer within 0.1 s"):
        planner.make_plan(window, np.arange(64)[None], 64, 2, CONFIG)
    planner.close()
