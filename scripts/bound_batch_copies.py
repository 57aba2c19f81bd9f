"""How many copies a plan for one batch needs at least, beside those that `plan_batch` makes, on recorded routing.

    python scripts/bound_batch_copies.py FILE.npz --ep-size 8 --step-tokens 1024

Each copy joins two ranks: one that has the expert, and one that computes some of its rows. Ranks that are joined,
directly or through others, form a group; a group of k ranks takes at least k - 1 copies, and its rows, which cannot
leave it, need a mean of at most the maximum. So R ranks that divide into at most G such groups need R - G copies or
more. Placements have no replicas, which would join ranks for nothing.

Example: loads 6, 2, 5, 5, 2 and a maximum of 4: groups (6, 2) and (5, 5, 2), so 3 copies at least.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from moe_ep.eplb import plan_batch, rebalance_experts
from moe_ep.eplb.policy.maps import initial_placement


def least_copies(loads: np.ndarray, maximum: int) -> int:
    """R - G, exactly; takes about 2 s for 16 ranks.

    Args:
        loads: rows of each rank as placed, `[R]`.
    """
    full = (1 << loads.size) - 1
    above = np.zeros(full + 1, dtype=np.int64)  # of each set of ranks, in all
    for rank, load in enumerate(loads):
        above[1 << rank : 2 << rank] = above[: 1 << rank] + int(load) - maximum
    groups = np.full(full + 1, -full)
    groups[0] = 0
    for ranks in range(1, full + 1):
        lowest = ranks & -ranks
        others = np.zeros(1, dtype=np.int64)  # all subsets of the other ranks
        left = ranks ^ lowest
        while left:
            bit = left & -left
            others = np.concatenate([others, others | bit])
            left ^= bit
        fits = others[above[others | lowest] <= 0] | lowest
        if fits.size:
            groups[ranks] = 1 + groups[ranks ^ fits].max()
    return loads.size - int(groups[full])


def measure(ids: np.ndarray, ep_size: int, step_tokens: int, every: int) -> dict[str, list[int]]:
    """Copies made and needed of each batch: from the linear placement, from EPLB's, and from EPLB's for the maximum
    that the linear one reaches.

    Args:
        ids: `[L, T, top_k]`; plans are made from the first 40 % of the steps.
        every: of the others, every so manieth is measured.
    """
    num_experts, steps = int(ids.max()) + 1, ids.shape[1] // step_tokens
    seen = max(int(0.4 * steps), 1)
    parts = ids[:, : steps * step_tokens].reshape(len(ids), steps, -1)
    counts = np.stack([[np.bincount(part, minlength=num_experts) for part in of_layer] for of_layer in parts], axis=1)
    linear = initial_placement(len(ids), num_experts, num_experts)
    window = counts[:seen]
    planned = rebalance_experts(
        window.sum(axis=0), num_experts, 1, 1, ep_size, old_physical_to_logical=linear, window=window
    ).physical_to_logical.numpy()
    found: dict[str, list[int]] = {"linear": [], "least": [], "EPLB": [], "EPLB least": [], "EPLB least, as linear": []}
    for step, layer in list(np.ndindex(steps - seen, len(ids)))[::every]:
        rows = counts[seen + step, layer]
        of_ranks = np.zeros((ep_size, num_experts), dtype=np.int64)
        of_ranks[0] = rows
        maximum = []
        for name, least, slots in (("linear", "least", linear[layer]), ("EPLB", "EPLB least", planned[layer])):
            plan = plan_batch(torch.from_numpy(of_ranks), torch.from_numpy(slots), ep_size)
            maximum.append(int(plan.loads.max()))
            loads = rows[slots].reshape(ep_size, -1).sum(axis=1)
            found[name].append(len(plan.copies))
            found[least].append(least_copies(loads, maximum[-1]))
        found["EPLB least, as linear"].append(least_copies(loads, maximum[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="arrays [layer, token, top_k], one for each domain")
    parser.add_argument("--ep-size", type=int, default=8, help="at most 16")
    parser.add_argument("--step-tokens", type=int, default=1024)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    found: dict[str, list[int]] = {}
    with np.load(options.file) as domains:
        for ids in domains.values():
            for name, values in measure(ids, options.ep_size, options.step_tokens, options.every).items():
                found.setdefault(name, []).extend(values)
    print(
        json.dumps({"batches": len(found["linear"]), **{key: round(float(np.mean(n)), 2) for key, n in found.items()}})
    )


if __name__ == "__main__":
    main()
