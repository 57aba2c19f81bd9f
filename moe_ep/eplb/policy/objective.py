"""Measures of a rank's load: tokens, active experts, or the time that both take."""

from __future__ import annotations

from moe_ep.eplb.policy.maps import Array
from moe_ep.errors import one_of

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
