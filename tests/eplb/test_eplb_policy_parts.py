"""The parts of a plan by hand: maps, replica counts, packing, matching, experts passed round."""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.balance import Placement as BalancedRows
from moe_ep.eplb.policy.balance import relieve_heavy
from moe_ep.eplb.policy.maps import experts_moved, initial_placement, keep_slots, logical_maps
from moe_ep.eplb.policy.packing import greedy_counts, pack, sorted_items
from moe_ep.eplb.policy.relabel import match, renumber


def test_maps_by_hand():
    table, counts = logical_maps(np.array([[1, 0, 1]]), 2)
    assert table.tolist() == [[[1, -1], [0, 2]]]
    assert counts.tolist() == [[1, 2]]
    assert keep_slots(np.array([[3, 1, 2]]), np.array([[2, 5, 3]]), 1).tolist() == [[3, 5, 2]]
    assert renumber(np.array([[2, 0, 1]]), np.array([[0, 1, 3]]), 4, 3).tolist() == [[3, 0, 1]]
    old, new = np.array([[0, 1, 2, 3], [0, 0, 1, 2]]), np.array([[1, 0, 2, 0], [1, 2, 1, 2]])
    assert experts_moved(old, new, 2).tolist() == [1, 2]
    assert initial_placement(1, 3, 5).tolist() == [[0, 1, 2, 0, 1]]


def test_counts_and_packing():
    weight = np.array([[6, 3, 1]], dtype=np.float32)
    counts = greedy_counts(weight, 6, 4)
    assert counts.tolist() == [[3, 2, 1]]
    expert, loads = sorted_items(weight, counts)
    assert expert.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert np.allclose(loads, [[2, 2, 2, 1.5, 1.5, 1]], rtol=1e-4)
    rank = pack(loads, 3)
    assert sorted(np.bincount(rank[0], weights=loads[0]).round(3)) == [3, 3.5, 3.5]
    assert greedy_counts(np.array([[9, 1, 1]], dtype=np.float32), 6, 2).max() == 2


def test_matching_is_a_permutation():
    rng = np.random.default_rng(0)
    row, old, new = np.repeat(np.arange(5), 40), rng.integers(0, 7, 200), rng.integers(0, 7, 200)
    assert (np.sort(match(row, old, new, 5, 7), axis=1) == np.arange(7)).all()


def test_three_ranks_pass_experts_round():
    # Ranks of 11, 11, 7 and 10: exchanges of two would take four moves.
    weight = np.array([[6, 5, 6, 5, 3, 4, 1, 9]], dtype=np.float32)
    place = BalancedRows(weight, np.ones((1, 8)), np.arange(8)[None], 4)
    relieve_heavy(place, np.array([10], dtype=np.float32))
    assert sorted(place.by_row[0]) == [9, 10, 10, 10]
    assert place.by_row[0].tolist() == place.units.sum(axis=0).tolist() == weight[0, place.experts].sum(axis=0).tolist()
    assert experts_moved(np.arange(8)[None], place.slots, 4) == 3
