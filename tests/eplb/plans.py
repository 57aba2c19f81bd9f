"""Plans as the tests of policies make and judge them."""

from __future__ import annotations

import numpy as np
import torch

from moe_ep.eplb import rebalance_experts
from moe_ep.eplb.policy.maps import rank_loads


def zipf(num_layers: int, num_experts: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    row = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return np.stack([rng.permutation(row / row.mean()) for _ in range(num_layers)])


def plan(weight, num_replicas, num_ranks, old=None, policy="incremental", groups=1, nodes=1, **options) -> np.ndarray:
    placement = rebalance_experts(
        weight, num_replicas, groups, nodes, num_ranks, policy, old_physical_to_logical=old, **options
    )
    return placement.physical_to_logical.numpy()


def evenness(weight: np.ndarray, slots: np.ndarray, num_ranks: int) -> float:
    loads = rank_loads(weight, slots, num_ranks)
    return float(loads.mean(axis=1).sum() / loads.max(axis=1).sum())


def copies_on_a_rank(slots: np.ndarray, num_ranks: int) -> int:
    ranks = np.sort(slots.reshape(slots.shape[0] * num_ranks, -1), axis=1)
    return int((ranks[:, 1:] == ranks[:, :-1]).sum())


def check_maps(placement, num_experts: int) -> None:
    """Every slot appears exactly once in the expert's row, and nothing else does."""
    slots, table, counts = placement
    assert slots.dtype == table.dtype == counts.dtype == torch.int64
    assert int(counts.min()) >= 1
    assert torch.equal(counts.sum(dim=1), torch.full((slots.size(0),), slots.size(1)))
    for layer in range(slots.size(0)):
        listed = table[layer][table[layer] >= 0]
        assert sorted(listed.tolist()) == list(range(slots.size(1)))
        assert torch.equal((table[layer] >= 0).sum(dim=1), counts[layer])
        for expert in range(num_experts):
            own = table[layer, expert, : counts[layer, expert]]
            assert (slots[layer, own] == expert).all()
