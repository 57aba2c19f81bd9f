"""Managers and models that nobody has any more: they end by themselves, and nothing of them is left."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.distributed.failure_detection import comes_within
from moe_ep.eplb.manager import EPLBManager
from moe_ep.hf.parallelized import steps_of
from moe_ep.launch.gangs.processes import children
from tests.eplb.models import CONFIG, L, random_placement
from tests.eplb.test_eplb_close import PATIENT, comes_down_to, held, make_model
from tests.ranks import RankPool


def drop(rank: int, world_size: int, moving: bool) -> list[bool]:
    """Whether managers that are dropped leave nothing, and let the next one of the same layers be made."""
    layers, first, found = make_model(None, world_size), None, []
    for seed in range(3):
        manager = EPLBManager(layers, PATIENT)
        if moving:
            manager.rearrange(random_placement(L, manager.placement.num_slots, seed))
        gone = weakref.ref(manager)
        del manager
        gc.collect()  # The thread may be at work for it.
        assert comes_within(30, lambda gone=gone: gone() is None)
        first = first or held()
        dist.barrier()
        found.append(comes_down_to(first))
    weights = [weakref.ref(layer.w13_weight) for layer in layers]
    del layers
    found.append(comes_within(30, lambda: not any(weight() is not None for weight in weights)))
    return found


@pytest.mark.parametrize("moving", [False, True])
def test_managers_that_are_dropped_leave_nothing(moving: bool) -> None:
    pool = RankPool(2)
    try:
        assert pool.run(drop, moving) == [[True] * 4] * 2
    finally:
        pool.close()


def test_a_dropped_manager_is_let_go_without_the_garbage_collector() -> None:
    layers = make_model(None, 1)
    before = threading.active_count(), children(os.getpid())
    gc.disable()
    try:
        for close, planner in ((True, "thread"), (False, "process")):
            heard: list[Any] = []
            manager = EPLBManager(layers, replace(CONFIG, planner=planner, timeout_s=100), listener=heard.append)
            manager.plan_now()
            manager.finish()
            if close:
                manager.close()
            gone = weakref.ref(manager)
            del manager
            assert heard and gone() is None
            assert comes_within(30, lambda: (threading.active_count(), children(os.getpid())) == before)
    finally:
        gc.enable()
    assert not any(layer.eplb_state.is_balanced() for layer in layers)


def moving_threads() -> list[threading.Thread]:
    """Those of managers, in the order of their start."""
    return [thread for thread in threading.enumerate() if thread.name == "moe_ep-eplb"]


class Cycle:
    """What only the garbage collector takes away."""

    def __init__(self) -> None:
        self.me = self


def test_the_moving_thread_may_be_the_one_that_collects_what_closes_it() -> None:
    manager = EPLBManager(make_model(None, 1), CONFIG)
    thread, threshold = moving_threads()[-1], gc.get_threshold()
    gc.disable()
    weakref.finalize(Cycle(), manager.close)
    gc.set_threshold(1, 1, 1)
    try:
        gc.enable()  # this thread makes nothing while it sleeps
        time.sleep(1.2)
    finally:
        gc.set_threshold(*threshold)
    thread.join(1)
    assert not thread.is_alive()


def test_a_model_of_transformers_is_let_go_with_its_balancing() -> None:
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make_model as make_transformers_model

    model = moe_ep.parallelize(make_transformers_model("Qwen3Moe"), eplb=True)
    steps = steps_of(model)
    thread, experts = weakref.ref(moving_threads()[-1]), weakref.ref(steps.layers[0])
    part = model.model
    del model, steps
    gc.collect()
    with torch.inference_mode():  # Its steps are those of the part that makes the passes.
        part(torch.ones(1, 2, dtype=torch.int64))
    assert thread().is_alive()
    del part
    gc.collect()
    assert experts() is None and comes_within(30, lambda: thread() is None)
