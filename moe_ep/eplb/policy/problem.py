"""The input of a policy: loads, slots, the shape of the machine, and the present placement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_ep.eplb.policy.maps import Array, check_placement
from moe_ep.errors import check_at_least, check_number, check_whole, one_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One planning problem for all layers; a policy is a function from it to physical_to_logical, int64 `[L, P]`.

    Attributes:
        weight: loads of the logical experts, float64 `[L, E]`.
        num_replicas: P, the slots of all ranks together.
        num_groups: groups that the experts divide into; those of a group stay on one host where hosts divide groups.
        num_ranks: R; P / R slots to a rank.
        old: the present placement, int64 `[L, P]`, or None where nothing is placed.
        tolerance: the share above the reachable maximum rank load at which an incremental plan stops.

    Raises:
        ValueError: sizes that do not fit together, loads that are negative or not finite, an old placement that lacks
            an expert.
    """

    weight: Array
    num_replicas: int
    num_groups: int
    num_nodes: int
    num_ranks: int
    old: Array | None = None
    tolerance: float = 0.0098

    def __post_init__(self) -> None:
        self._check_sizes()
        for name in ("num_replicas", "num_groups", "num_nodes", "num_ranks"):
            object.__setattr__(self, name, int(getattr(self, name)))  # a number of numpy lacks methods of int
        weight = self.weight
        if not np.isfinite(weight).all():
            raise ValueError("weight holds a NaN or an infinity; loads must be finite")
        if weight.size and weight.min() < 0:
            raise ValueError(f"weight holds {weight.min():g}; loads must not be negative")
        check_number(tolerance=self.tolerance)
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be at least 0 and below 1")
        if self.old is not None:
            shape = (weight.shape[0], self.num_replicas)
            check_placement(self.old, shape, weight.shape[1], "old_physical_to_logical")

    @property
    def by_host(self) -> bool:
        """Whether groups of experts divide over several hosts, so that a plan keeps each group on one."""
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0

    def _check_sizes(self) -> None:
        shape = self.weight.shape
        if len(shape) != 2 or shape[1] < 1:
            raise ValueError(f"weight has shape {shape}; it must be (L, E), a load for each logical expert of a layer")
        check_at_least(1, num_groups=self.num_groups, num_nodes=self.num_nodes, num_ranks=self.num_ranks)
        check_whole(num_replicas=self.num_replicas)
        slots, ranks = self.num_replicas, self.num_ranks
        if slots < shape[1]:
            raise ValueError(f"num_replicas ({slots}) is less than the {shape[1]} experts of weight; each needs a slot")
        if slots % ranks:
            enough = slots + ranks - slots % ranks
            raise ValueError(f"num_replicas ({slots}) must be a multiple of num_ranks ({ranks}); pass {enough}")
        if ranks % self.num_nodes:
            raise ValueError(f"num_ranks ({ranks}) must be a multiple of num_nodes ({self.num_nodes})")
        if shape[1] % self.num_groups:
            raise ValueError(f"num_groups ({self.num_groups}) must divide the {shape[1]} experts of weight")


# ==== Objectives ====
#
# Measures of a rank's load: tokens, active experts, or the time that both take.

OBJECTIVES = ("tokens", "active_experts", "auto")

# So many tokens of an expert take about as long as reading its weights of 4 bits: 55 to 94 on an H200, from 32 to 128
# rows an expert.
TOKENS_OF_READING = 64


def check_objective(objective: str, window: Array | None) -> None:
    """Raises ValueError for an unknown objective, or "active_experts" without a window."""
    if objective not in OBJECTIVES:
        raise ValueError(one_of("objective", objective, OBJECTIVES))
    if objective == "active_experts" and window is None:
        raise ValueError("objective='active_experts' needs window, the counts of each step")


def objective_window(objective: str, window: Array) -> Array:
    """Counts `[S, L, E]` as the objective sees them.

    "tokens": themselves. "active_experts": one where an expert had any token. "auto": what a step takes, in tokens: an
    expert's tokens, and as many again as reading its weights takes where it had any. In large batches that is tokens,
    in small ones it is active experts.
    """
    if objective == "tokens":
        return window
    active = (window > 0).astype(window.dtype)
    return active if objective == "active_experts" else window + TOKENS_OF_READING * active
