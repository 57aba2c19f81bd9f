"""The packed weights of both GEMMs of the local experts, checked once and used for many passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights

T = TypeVar("T")


class WeightPair:
    """w13 and w2 that fit each other, with values that are derived from them and cached.

    Experts keep a pair from pass to pass: the contents of its tensors may change, but their storage must not move.

    Attributes:
        kind: number type of both.
        act_dtype: dtype of the activations that they were checked for.
        clamp_limit: as in gate_limit.
        input_dtype: float8_e4m3fn if rows may be rounded to it, otherwise act_dtype.
        device: the device of all their tensors.
    """

    def __init__(
        self,
        kind: WeightType,
        activation: MoEActivation,
        act_dtype: torch.dtype,
        w13: Weights,
        w2: Weights,
        clamp_limit: float | None = None,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.kind, self.activation, self.act_dtype = kind, activation, act_dtype
        self.clamp_limit = clamp_limit
        self.input_dtype = input_dtype or act_dtype
        self.w13, self.w2 = w13, w2
        self.num_experts = w13.qweight.size(0)
        self.device = w13.qweight.device
        self._known: dict[Callable[[WeightPair], Any], Any] = {}

    def once(self, of: Callable[[WeightPair], T]) -> T:
        """`of(self)`, computed by the first call and cached."""
        if of not in self._known:
            self._known[of] = of(self)
        return self._known[of]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, so cached values are not copied."""
        return self.__dict__ | {"_known": {}}
