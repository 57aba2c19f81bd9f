"""What else `rebalance_experts` is told: when a plan pays, what a load is, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_ep.eplb import rebalance_experts
from moe_ep.eplb.policy.maps import initial_placement, rank_loads
from moe_ep.eplb.policy.problem import objective_window
from moe_ep.registry import EPLB_POLICIES
from tests.eplb.plans import check_maps, plan, zipf


def test_thresholds_leave_layers_alone():
    rng = np.random.default_rng(3)
    weight = zipf(8, 64, 0.5, rng)
    slots = plan(weight, 72, 8)
    drifted = weight * rng.uniform(0.8, 1.2, weight.shape)
    free = plan(drifted, 72, 8, old=slots)
    assert (free != slots).any()
    assert np.array_equal(plan(drifted, 72, 8, old=slots, move_cost=1e9), slots)
    assert np.array_equal(plan(drifted, 72, 8, old=slots, min_gain=0.9), slots)
    assert np.array_equal(plan(drifted, 72, 8, old=slots, rebalance_below=0.5), slots)
    even = rank_loads(drifted, slots, 8)
    even = even.mean(axis=1) / even.max(axis=1)
    threshold = float(np.median(even))
    some = plan(drifted, 72, 8, old=slots, rebalance_below=threshold)
    assert np.array_equal((some != slots).any(axis=1), (even < threshold) & (free != slots).any(axis=1))


# (experts, slots, groups, hosts, ranks); hosts divide the groups or not.
SHAPES = [(10, 12, 2, 2, 4), (8, 16, 1, 1, 8), (12, 12, 4, 2, 4), (24, 30, 3, 2, 6), (16, 32, 8, 4, 8), (6, 9, 1, 1, 3)]


@pytest.mark.parametrize("policy", list(EPLB_POLICIES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planning_again_for_unchanged_loads_moves_nothing(shape, policy):
    experts, slots, groups, nodes, ranks = shape
    rng = np.random.default_rng(slots)
    options = {"policy": policy, "groups": groups, "nodes": nodes}
    for weight in (zipf(12, experts, 1.2, rng), rng.integers(0, 5, (12, experts)), rng.random((12, experts)) ** 4):
        drawn = [np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]) for _ in range(12)]
        window = rng.poisson(40 * weight, (5, 12, experts))
        for old in (None, initial_placement(12, experts, slots), np.stack([*map(rng.permutation, drawn)])):
            placed = plan(weight, slots, ranks, old=old, **options)
            assert np.array_equal(plan(weight, slots, ranks, old=placed, **options), placed)
            options_of_steps = {**options, "window": window}
            placed = plan(window.sum(axis=0), slots, ranks, old=old, **options_of_steps)
            assert np.array_equal(plan(window.sum(axis=0), slots, ranks, old=placed, **options_of_steps), placed)


def test_active_experts_spread_apart():
    # Expert 0 takes all tokens of a step or none; 2 and 3 take one in every step. By tokens 0 stands alone.
    window = np.zeros((4, 1, 4))
    window[:, 0] = [[90, 1, 1, 1], [90, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    by_tokens = plan(window.sum(axis=0), 4, 2, window=window)
    by_active = plan(window.sum(axis=0), 4, 2, window=window, objective="active_experts")
    active = rank_loads((window > 0).mean(axis=0), by_active, 2)
    assert active.max() == 1.5
    assert rank_loads((window > 0).mean(axis=0), by_tokens, 2).max() > 1.5


def test_auto_counts_the_reading_of_weights_as_tokens():
    window = np.array([[[0, 1, 200]]])
    assert objective_window("auto", window).tolist() == [[[0, 65, 264]]]
    assert objective_window("tokens", window).tolist() == window.tolist()
    # Few tokens: active experts decide. 0 and 1 are active in every step, 2 and 3 in none but the last.
    few = np.array([[[2, 2, 0, 0]]] * 3 + [[[2, 2, 6, 6]]])
    slots = plan(few.sum(axis=0), 4, 2, old=np.array([[0, 1, 2, 3]]), window=few, objective="auto")
    assert sorted(slots[0, :2] // 2) == [0, 1]
    # Many tokens: they decide.
    many = few * np.array([1, 100, 100, 1])
    by_time, by_tokens = (
        plan(many.sum(axis=0), 4, 2, window=many, objective=objective) for objective in ("auto", "tokens")
    )
    assert np.array_equal(by_time, by_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_loads_of_any_real_dtype(dtype):
    weight = torch.tensor([[600, 560, 120, 120, 20, 10, 10, 10]], dtype=dtype)
    found, wanted = (rebalance_experts(loads, 16, 1, 1, 8) for loads in (weight, weight.double()))
    assert all(torch.equal(*tensors) for tensors in zip(found, wanted, strict=True))


@pytest.mark.parametrize("policy", list(EPLB_POLICIES))
def test_sizes_may_be_numbers_of_numpy(policy):
    window = np.random.default_rng(0).integers(0, 9, (3, 2, 12))
    given = {"old_physical_to_logical": initial_placement(2, 12, 16), "window": window}
    found, wanted = (
        rebalance_experts(window.sum(axis=0), *map(kind, (16, 1, 1, 4)), policy, **given) for kind in (np.int64, int)
    )
    check_maps(found, 12)
    assert all(torch.equal(*tensors) for tensors in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint64])
@pytest.mark.parametrize("move_cost", [0.0, 1e9])
def test_an_old_placement_of_any_integer_dtype(dtype, move_cost):
    weight = zipf(3, 200, 1.2, np.random.default_rng(0))
    old = torch.from_numpy(initial_placement(3, 200, 208))
    found, wanted = (
        rebalance_experts(weight, 208, 1, 1, 8, old_physical_to_logical=given, move_cost=move_cost)
        for given in (old.to(dtype), old)
    )
    check_maps(found, 200)
    assert all(torch.equal(*tensors) for tensors in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_replicas": 10}, r"num_replicas \(10\) must be a multiple of num_ranks \(4\); pass 12"),
        ({"num_replicas": 4}, r"num_replicas \(4\) is less than the 8 experts"),
        ({"weight": np.full((2, 8), -1.0)}, r"weight holds -1; loads must not be negative"),
        ({"weight": np.full((2, 8), np.nan)}, r"weight holds a NaN"),
        ({"weight": np.ones(8)}, r"weight has shape \(8,\); it must be \(L, E\)"),
        ({"policy": "best"}, r"policy is 'best'; it must be one of incremental, deepseek"),
        ({"num_nodes": 3}, r"num_ranks \(4\) must be a multiple of num_nodes \(3\)"),
        ({"num_nodes": 0}, r"num_nodes is 0; it must be at least 1"),
        ({"num_groups": 3}, r"num_groups \(3\) must divide the 8 experts"),
        ({"old_physical_to_logical": np.zeros((2, 12), int)}, r"has no slot for expert 1 in layer 0"),
        ({"old_physical_to_logical": np.full((2, 12), 8)}, r"holds expert 8; experts are 0 to 7"),
        ({"old_physical_to_logical": np.zeros((2, 8), int)}, r"has shape \(2, 8\); it must be \(L, num_replicas\)"),
        ({"old_physical_to_logical": np.zeros((2, 12))}, r"has dtype float64; it must hold integers"),
        (
            {"old_physical_to_logical": torch.zeros(2, 12).bfloat16()},
            r"has dtype torch.bfloat16; it must hold integers",
        ),
        (
            {"old_physical_to_logical": torch.zeros(2, 12, device="meta")},
            r"old_physical_to_logical is on the meta device",
        ),
        ({"old_physical_to_logical": np.full((2, 12), 1 << 63, np.uint64)}, rf"holds expert {1 << 63}; it must hold"),
        ({"window": np.ones((2, 8))}, r"window has shape \(2, 8\); it must be \(S, L, E\)"),
        ({"window": np.full((1, 2, 8), -1)}, r"window holds a count that is negative or not finite"),
        ({"objective": "speed"}, r"objective is 'speed'; it must be one of tokens"),
        ({"objective": "active_experts"}, r"objective='active_experts' needs window"),
        ({"move_cost": -1.0}, r"move_cost is -1.0; it must be at least 0"),
        ({"tolerance": 1.5}, r"tolerance is 1.5"),
        ({"tolerance": "low"}, r"tolerance is 'low'; it must be a number"),
        (
            {"weight": torch.ones(2, 8, dtype=torch.complex64)},
            r"weight has dtype complex64; it must be an array of real",
        ),
        ({"weight": [["many"] * 8]}, r"weight has dtype <U4; it must be an array of real numbers"),
        ({"weight": [[1, 2], [3]]}, r"weight has dtype object; it must be an array of real numbers"),
        ({"weight": None}, r"weight has dtype object; it must be an array of real numbers"),
        ({"window": np.ones((1, 2, 8), complex)}, r"window has dtype complex128; it must be an array of real numbers"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"weight": np.ones((2, 8)), "num_replicas": 12, "num_groups": 1, "num_nodes": 1, "num_ranks": 4}
    with pytest.raises((ValueError, TypeError), match=message):
        rebalance_experts(**(arguments | change))
