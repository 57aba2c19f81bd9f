"""Exchanges that even out every step of a window, so that experts which peak together do not share a rank.

A step waits for its busiest rank, and which rank that is changes from step to step. A plan on mean loads evens out
ranks over the window and leaves each step uneven. This search minimises the sum over steps and ranks of the squared
rank load: that punishes high maxima, generalises to later steps better than the maxima themselves (there are few of
them to learn from), and gives the exact gain of an exchange from products of the experts' load vectors alone. With u
an expert's loads over the steps divided by its replicas, v the rank's loads over the steps, exchanging p on rank i for
q on rank j changes the sum by

    -2 (v_i - v_j) . (u_p - u_q) + 2 |u_p - u_q|**2.

Ranks meet in pairs, every pair once a tournament; each pair of a round makes its best exchange if it helps. In the end
copies of experts are placed so that batches can be levelled (`moe_ep.eplb.policy.join`).

The window is a sample, and the best of a thousand exchanges wins by chance what the next window takes back. The gain is
a sum of products over S steps, and its standard error is about |v_i - v_j| |u_p - u_q| / sqrt(S). An exchange must win
that for each expert that it takes from where it is now: plans from nothing are free to use every hint, and a plan that
is there gives way to better knowledge only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_ep.eplb.policy.exchanges import Layers
from moe_ep.eplb.policy.join import Joints
from moe_ep.eplb.policy.maps import Array, keep_slots
from moe_ep.eplb.policy.problem import Problem

# Layers worked on together: their products of load vectors should stay in cache.
_LAYERS = 16
# Times that every two ranks meet, at most.
_TOURNAMENTS = 3
# What an exchange must win, as a share of a mean rank's sum of squares.
_LEAST_GAIN = 3e-5


def refine_plan(problem: Problem, slots: Array, window: Array, doubt: float = 1.0) -> Array:
    """Improves a plan `[L, P]` against the counts of each step, exchange by exchange.

    The result depends on its arguments alone, so ranks that plan for themselves agree.

    Args:
        problem: what was planned; exchanges stay within a host where it is by hosts.
        slots: the plan, int64 `[L, P]`; its replica counts are kept.
        window: counts of each step, float32 `[S, L, E]`.
        doubt: standard errors that an exchange must win for each expert that it moves from where it is now.

    Returns:
        The better plan, int64 `[L, P]`; experts that stay on a rank of the present placement keep their slots.
    """
    num_ranks = problem.num_ranks
    refined = slots.copy()
    for at in range(0, slots.shape[0], _LAYERS):
        part = slice(at, at + _LAYERS)
        old = None if problem.old is None else problem.old[part]
        _refine_layers(problem, refined[part], old, window[:, part], doubt)
    return keep_slots(slots if problem.old is None else problem.old, refined, num_ranks)


def _refine_layers(problem: Problem, slots: Array, old: Array | None, window: Array, doubt: float) -> None:
    """Exchanges slots `[L, P]` in place; old is where the experts are now."""
    layers = Layers(slots, window, problem.num_ranks, old, doubt)
    least = _LEAST_GAIN * window.shape[0]
    per_host = problem.num_ranks // problem.num_nodes if problem.by_host else problem.num_ranks
    for _ in range(_TOURNAMENTS):
        active = layers.active
        for first, second in meetings(problem.num_ranks):
            together = first // per_host == second // per_host
            if together.any():
                layers.meet(active, first[together], second[together], least)
        layers.active = np.flatnonzero(layers.exchanged)
        layers.exchanged[:] = False
        if layers.active.size == 0:
            break
    if layers.replicated:
        Joints(layers, per_host).improve(least)


def meetings(num_ranks: int) -> Iterator[tuple[Array, Array]]:
    """Rounds of disjoint pairs in which every two ranks meet once: the circle method of round-robin tournaments."""
    circle = np.arange(num_ranks + num_ranks % 2)
    half = circle.size // 2
    for _ in range(circle.size - 1):
        first, second = circle[:half], circle[: half - 1 : -1]
        both = (first < num_ranks) & (second < num_ranks)
        yield first[both], second[both]
        circle[1:] = np.roll(circle[1:], 1)
