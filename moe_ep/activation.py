"""The activations between the two expert GEMMs, in plain torch.

Gated activations read `[..., 2N]`, gate columns first, then up columns, and write `[..., N]`; ungated ones read and
write `[..., N]`. They are computed in f32 and rounded once to the output's dtype.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
import torch.nn.functional as F

from moe_ep.errors import one_of

SWIGLUOAI_ALPHA = 1.702
# Soft limits of gate and up in situ, as in Kimi-K3 (its activation_situ_beta and activation_situ_linear_beta).
SITU_BETA = 4.0
SITU_LINEAR_BETA = 25.0
# The clamp limit of gate and up unless another is given, as in vLLM.
_OWN_LIMIT = 7.0


class MoEActivation(StrEnum):
    """The name of an activation; a plain string of the same value is accepted everywhere too."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUSTEP = "swiglustep"
    SITU = "situ"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @classmethod
    def parse(cls, value: MoEActivation | str) -> MoEActivation:
        """The activation of that name; ValueError, listing the known names, if there is none."""
        try:
            return cls(value)
        except ValueError:
            raise ValueError(one_of("activation", str(value), [member.value for member in cls])) from None

    @property
    def is_gated(self) -> bool:
        """Whether w13 has gate and up rows (2N in all) rather than N rows."""
        return not self.value.endswith("_no_mul")


def gate_limit(activation: MoEActivation | str, clamp_limit: float | None = None) -> float | None:
    """The clamp limit of a gated activation: gate is clamped from above, up on both sides; None for no clamp.

    The gate is clamped before the activation; swiglustep clamps it after the silu.

    Args:
        clamp_limit: as DeepSeek-V4's `swiglu_limit`; None for the activation's own, which swigluoai and swiglustep
            have.

    Raises:
        ValueError: an unknown activation, a limit for one that is not gated or for situ, whose limits are soft, or one
            that is no positive number.
    """
    activation = MoEActivation.parse(activation)
    if clamp_limit is None:
        return _OWN_LIMIT if activation in (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP) else None
    is_number = isinstance(clamp_limit, int | float) and not isinstance(clamp_limit, bool)
    if not is_number or not math.isfinite(clamp_limit) or clamp_limit <= 0:
        raise ValueError(f"clamp_limit (swiglu_limit) is {clamp_limit!r}; it must be a positive number, or None")
    if not activation.is_gated:
        raise ValueError(
            f"clamp_limit (swiglu_limit) is {clamp_limit} and {activation} has no gate; leave it out, or choose an "
            f"activation that has one"
        )
    if activation is MoEActivation.SITU:
        raise ValueError(
            f"clamp_limit (swiglu_limit) is {clamp_limit} and situ has soft limits of its own, {SITU_BETA} and "
            f"{SITU_LINEAR_BETA}; leave it out"
        )
    return float(clamp_limit)


def apply_activation(
    activation: MoEActivation | str,
    input: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    clamp_limit: float | None = None,
) -> torch.Tensor:
    """Applies an activation along the last dimension.

    Args:
        input: `[..., 2N]` for a gated activation (gate, then up), `[..., N]` otherwise.
        output: `[..., N]`, written in place; None creates one of the input's dtype.
        clamp_limit: the clamp limit of gate and up (`gate_limit`); None for the activation's own.

    Raises:
        ValueError: an unknown name, an input that is no float tensor, an odd width for a gated activation, a limit that
            cannot be, or an output of another shape.
    """
    activation, limit = MoEActivation.parse(activation), gate_limit(activation, clamp_limit)
    if not isinstance(input, torch.Tensor) or not input.dim() or not input.is_floating_point():
        held = f"{input.dtype} {tuple(input.shape)}" if isinstance(input, torch.Tensor) else f"a {type(input).__name__}"
        raise ValueError(f"input is {held}; it must be a tensor of a float dtype with at least one dimension")
    if activation.is_gated:
        if input.shape[-1] % 2:
            raise ValueError(
                f"input has {input.shape[-1]} columns; {activation} is gated and needs an even number, gate then up"
            )
        gate, up = input.float().chunk(2, dim=-1)
        result = _gated(activation, gate, up, limit)
    else:
        result = _ungated(activation, input.float())
    if output is None:
        return result.to(input.dtype)
    if output.shape != result.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)}; {activation} of this input gives {tuple(result.shape)}"
        )
    output.copy_(result)
    return output


def _gated(activation: MoEActivation, gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    if limit is not None:
        up = up.clamp(min=-limit, max=limit)
    if activation is MoEActivation.SWIGLUSTEP:
        return F.silu(gate).clamp(max=limit) * up
    if activation is MoEActivation.SITU:
        soft_gate, soft_up = (
            SITU_BETA * torch.tanh(gate / SITU_BETA),
            SITU_LINEAR_BETA * torch.tanh(up / SITU_LINEAR_BETA),
        )
        return soft_gate * torch.sigmoid(gate) * soft_up
    if limit is not None:
        gate = gate.clamp(max=limit)
    if activation is MoEActivation.SILU:
        return F.silu(gate) * up
    if activation is MoEActivation.GELU:
        return F.gelu(gate) * up
    if activation is MoEActivation.GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    return (up + 1) * gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate)


def _ungated(activation: MoEActivation, x: torch.Tensor) -> torch.Tensor:
    if activation is MoEActivation.SILU_NO_MUL:
        return F.silu(x)
    if activation is MoEActivation.GELU_NO_MUL:
        return F.gelu(x)
    return F.relu(x).square()
