"""The activations in Triton, for kernels that have gate and up in f32."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ep.activation import SITU_BETA, SITU_LINEAR_BETA, SWIGLUOAI_ALPHA

_ALPHA = tl.constexpr(SWIGLUOAI_ALPHA)
_BETA = tl.constexpr(SITU_BETA)
_LINEAR_BETA = tl.constexpr(SITU_LINEAR_BETA)
# Of NaN and a limit, NaN, as torch has it.
_KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _soft(x, LIMIT: tl.constexpr):
    """LIMIT * tanh(x / LIMIT). Example: x 100, LIMIT 4: 4."""
    ratio = x * (1.0 / LIMIT)
    square = ratio * ratio
    # Near zero the difference has lost its bits, and the first terms of the series have them all.
    near = ratio * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return LIMIT * tl.where(square < 0.01, near, 2.0 * tl.sigmoid(2.0 * ratio) - 1.0)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr):
    """ACTIVATION of gate, times up if GATED; both end at LIMIT before, if there is one, or as swiglustep behind it.

    Example: silu, gate 2, up 3: 2 * sigmoid(2) * 3.
    """
    if LIMIT is not None and ACTIVATION != "swiglustep":
        gate = tl.minimum(gate, LIMIT, propagate_nan=_KEEP_NAN)
    if ACTIVATION == "swigluoai":
        result = gate * tl.sigmoid(gate * _ALPHA)
    elif ACTIVATION == "swiglustep":
        result = tl.minimum(gate * tl.sigmoid(gate), LIMIT, propagate_nan=_KEEP_NAN)
    elif ACTIVATION == "situ":
        result = _soft(gate, _BETA) * tl.sigmoid(gate)
        up = _soft(up, _LINEAR_BETA)
    elif ACTIVATION == "silu" or ACTIVATION == "silu_no_mul":
        result = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_no_mul":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(x) = 2 sigmoid(2x) - 1
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        positive = tl.maximum(gate, 0.0, propagate_nan=_KEEP_NAN)
        result = positive * positive
    if GATED:
        if LIMIT is not None:
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=_KEEP_NAN)
        result *= up + 1.0 if ACTIVATION == "swigluoai" else up
    return result
