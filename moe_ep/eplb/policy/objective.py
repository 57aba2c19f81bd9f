"""What a rank's load is: tokens, or experts that were active at all."""

from __future__ import annotations

import numpy as np

from moe_ep.errors import one_of

Array = np.ndarray

OBJECTIVES = ("tokens", "active_experts", "auto")

# Below so many tokens an active expert and step, reading its weights takes longer than computing with them.
MEMORY_BOUND_TOKENS = 32


def choose_objective(objective: str, window: Array | None) -> str:
    """Resolves "auto": "active_experts" where the window shows small batches for each active expert, else "tokens".

    Args:
        window: counts of each step `[S, L, E]`, or None.

    Raises:
        ValueError: an unknown objective, or "active_experts" without a window.
    """
    if objective not in OBJECTIVES:
        raise ValueError(one_of("objective", objective, OBJECTIVES))
    if window is None:
        if objective == "active_experts":
            raise ValueError("objective='active_experts' needs window, the counts of each step")
        return "tokens"
    if objective != "auto":
        return objective
    active = int(np.count_nonzero(window))
    return "active_experts" if active and window.sum() / active < MEMORY_BOUND_TOKENS else "tokens"


def objective_window(objective: str, window: Array) -> Array:
    """Counts `[S, L, E]` as the objective sees them: themselves, or one where an expert had any token."""
    return (window > 0).astype(window.dtype) if objective == "active_experts" else window
