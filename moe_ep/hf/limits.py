"""Where gate and up end as a checkpoint's config says and transformers' model does not heed.

Ling 3 was trained with such limits in its last layers (`expert_swiglu_limit_list`); without them some tokens are wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import MoEModelSpec
from moe_ep.hf.experts import LIMITS, ExpertsShape


def as_trained(model: Any, shape: ExpertsShape, spec: MoEModelSpec) -> ExpertsShape:
    """The shape of a layer's routed experts with the limit of its checkpoint; its shared experts get theirs."""
    routed, shared = spec.gate(shape.layer_index), spec.shared_gate(shape.layer_index)
    if shared is not None and shared.activation is MoEActivation.SWIGLUSTEP:
        _limit(model.get_submodule(f"{shape.name.rpartition('.')[0]}.shared_experts"), shared.swiglu_limit)
    return replace(shape, **routed._asdict()) if routed.activation is MoEActivation.SWIGLUSTEP else shape


class _LimitedSilu(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x).clamp(max=self._limit)


def _limit(mlp: Any, limit: float | None) -> None:
    """Ends silu of the gate, and up, at the limit, unless the MLP has one itself."""
    if limit is None or any(getattr(mlp, name, None) is not None for name in LIMITS):
        return
    mlp.act_fn = _LimitedSilu(limit)
    mlp.up_proj.register_forward_hook(partial(_clamp, limit))


def _clamp(limit: float, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.clamp(min=-limit, max=limit)
