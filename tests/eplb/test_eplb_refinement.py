"""Plans against the counts of each step: experts that peak together, chance, where copies lie, recorded routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_ep.eplb.policy.maps import experts_moved, initial_placement, rank_loads, replica_counts
from moe_ep.eplb.policy.problem import Problem
from moe_ep.eplb.policy.refine import meetings, refine_plan
from moe_ep.eplb.simulate import Scene, measure
from moe_ep.eplb.trace import from_choices, read_arrays
from tests.eplb.plans import plan

ROUTING = Path(__file__).resolve().parents[3] / "shared" / "data" / "routing_128e.npz"


def test_refinement_separates_experts_that_peak_together():
    # Equal sums; 0 and 1 peak in the same steps, so do 2 and 3. Mean loads cannot tell these placements apart.
    window = np.array([[[9, 9, 1, 1]], [[1, 1, 9, 9]]] * 10)
    start = np.array([[0, 1, 2, 3]])
    slots = plan(window.sum(axis=0), 4, 2, old=start, window=window)
    assert sorted(map(sorted, slots.reshape(2, 2).tolist())) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert np.array_equal(plan(window.sum(axis=0), 4, 2, old=start, window=window, refine=False), start)


def test_chance_moves_few_experts_from_where_they_are():
    # Loads that vary much and independently: another window says nothing that the first did not.
    rng = np.random.default_rng(0)
    first, second = rng.poisson(rng.gamma(4, 25, (2, 64, 2, 64)))
    present = plan(first.sum(axis=0), 72, 8, window=first)
    problem = Problem(
        weight=second.sum(axis=0).astype(np.float64),
        num_replicas=72, num_groups=1, num_nodes=1, num_ranks=8, old=present,
    )  # fmt: skip
    window = second.astype(np.float32)
    doubtful, credulous = (refine_plan(problem, present, window, doubt) for doubt in (1.0, 0.0))
    moved, by_chance = (experts_moved(present, slots, 8).sum() for slots in (doubtful, credulous))
    assert moved * 4 < by_chance


def test_copies_join_as_many_ranks_as_they_can():
    # Experts 0 and 1 have two copies each, both on the same two ranks; the load is level as it is.
    start = np.array([[0, 1, 0, 1, 2, 3, 4, 5]])
    window = np.random.default_rng(0).poisson(100 * np.array([[2, 2, 1, 1, 1, 1]]), (300, 1, 6))
    assert np.array_equal(plan(window.sum(axis=0), 8, 4, old=start, window=window, refine=False), start)
    slots = plan(window.sum(axis=0), 8, 4, old=start, window=window).reshape(4, 2)
    assert (slots < 2).sum(axis=1).tolist() == [1, 1, 1, 1]
    assert replica_counts(slots.reshape(1, 8), 6).tolist() == [[2, 2, 1, 1, 1, 1]]


def busiest(window: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of each step's busiest rank, summed over the steps, `[L]`."""
    return sum(rank_loads(step.astype(float), slots, num_ranks).max(axis=1) for step in window)


@pytest.mark.parametrize(("redundant", "nodes"), [(0, 1), (8, 1), (8, 2)])
def test_a_first_plan_is_as_good_as_one_from_nothing(redundant, nodes):
    # Most exchanges win less than their standard error, and from nothing they are all made.
    rng = np.random.default_rng(3)
    window = rng.poisson(rng.gamma(2, 20, (1, 4, 32)) * rng.gamma(4, 0.25, (24, 4, 32)))
    load, num_slots, options = window.sum(axis=0), 32 + redundant, {"window": window, "groups": 4, "nodes": nodes}
    initial = initial_placement(4, 32, num_slots)
    nothing, first = (plan(load, num_slots, 8, old=old, **options) for old in (None, initial))
    assert np.allclose(busiest(window, nothing, 8), busiest(window, first, 8), rtol=5e-3)
    assert experts_moved(initial, first, 8).sum() < experts_moved(initial, nothing, 8).sum()
    # Of layers that were placed before, nothing moves; the others are planned as if they were alone.
    later = np.concatenate([first[:2], initial[2:]])
    again = plan(load, num_slots, 8, old=later, **options)
    alone = plan(load[2:], num_slots, 8, old=initial[2:], **(options | {"window": window[:, 2:]}))
    assert np.array_equal(again[2:], alone)
    assert np.array_equal(again[:2], first[:2])


@pytest.mark.parametrize("redundant", [0, 8])
def test_a_first_plan_moves_nothing_where_ranks_are_level(redundant):
    window = np.full((16, 3, 32), 6)
    window[:, 1], window[:, 2, ::2] = 0, 60
    initial = initial_placement(3, 32, 32 + redundant)
    # Without replicas, every rank has two heavy experts and two light ones. With them, the first ranks have none.
    gained = [redundant > 0, False, redundant > 0]
    moved = experts_moved(initial, plan(window.sum(axis=0), 32 + redundant, 8, old=initial, window=window), 8)
    assert (moved > 0).tolist() == gained


@pytest.mark.parametrize("old", [None, initial_placement(3, 16, 24)])
def test_refined_plans_keep_groups_on_their_hosts(old):
    rng = np.random.default_rng(1)
    window = rng.poisson(rng.pareto(1.5, (1, 3, 16)) * 20 + 5, (40, 3, 16))
    slots = plan(window.sum(axis=0), 24, 8, old, groups=4, nodes=2, window=window)
    groups = slots.reshape(3, 2, 12) // 4
    assert all(len(set(host.tolist())) == 2 for layer in groups for host in layer)
    assert all(len(set(rank)) == 3 for rank in slots.reshape(-1, 3).tolist())


def test_level_ranks_are_no_reason_to_leave_groups_on_several_hosts():
    # Two groups of two experts, and a copy of each: level, and both groups are on both hosts.
    window = np.full((4, 2, 4), 5)
    initial = initial_placement(2, 4, 8)
    slots = plan(window.sum(axis=0), 8, 4, old=initial, groups=2, nodes=2, window=window)
    assert all(len(set(host)) == 1 for host in (slots.reshape(-1, 4) // 2).tolist())
    # Nothing moves where groups are on their hosts.
    together = initial_placement(2, 4, 4)
    assert np.array_equal(plan(window.sum(axis=0), 4, 4, old=together, groups=2, nodes=2, window=window), together)


@pytest.mark.skipif(not ROUTING.exists(), reason="needs a recorded routing trace beside the checkout")
@pytest.mark.parametrize(
    ("num_ranks", "redundant", "rule", "bar"),
    [
        (8, 0, "hash-rank", 0.85),
        (16, 0, "hash-rank", 0.73),
        (8, 8, "hash-rank", 0.865),
        (16, 16, "hash-rank", 0.78),
        (8, 8, "levelled", 0.935),
        (16, 16, "levelled", 0.87),
        (8, 8, "known-counts", 0.95),
        (16, 16, "known-counts", 0.88),
    ],
)
def test_recorded_routing_second_half(num_ranks, redundant, rule, bar):
    scene = Scene(ep_size=num_ranks, num_redundant=redundant)
    reached = []
    for choices in read_arrays(ROUTING).values():
        trace = from_choices(choices, 1024, num_ranks, num_experts=128, model="recorded")
        window = trace.counts()[: scene.split(trace)]
        slots = plan(window.sum(axis=0), 128 + redundant, num_ranks, window=window)
        reached.append(measure(trace, scene, slots, rule).balancedness)
    assert np.mean(reached) >= bar


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_every_two_ranks_meet_once(num_ranks):
    met = [tuple(sorted(pair)) for a, b in meetings(num_ranks) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    assert len(met) == len(set(met)) == num_ranks * (num_ranks - 1) // 2
