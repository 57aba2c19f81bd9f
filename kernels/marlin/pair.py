"""The packed weights of both GEMMs of the local experts, checked once for all the passes that they serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights

T = TypeVar("T")


class WeightPair:
    """w13 and w2 that fit together, and what else follows from them alone.

    Experts keep one from pass to pass: the tensors' contents may change, their storage must stay where it is.

    Attributes:
        kind: number type of both.
        act_dtype: of the activations that they were checked for.
        device: where all their tensors are.
    """

    def __init__(
        self, kind: WeightType, activation: MoEActivation, act_dtype: torch.dtype, w13: Weights, w2: Weights
    ) -> None:
        self.kind, self.activation, self.act_dtype = kind, activation, act_dtype
        self.w13, self.w2 = w13, w2
        self.num_experts = w13.qweight.size(0)
        self.device = w13.qweight.device
        self._known: dict[Callable[[WeightPair], Any], Any] = {}

    def once(self, of: Callable[[WeightPair], T]) -> T:
        """`of(self)`, computed by the first call that asks for it."""
        if of not in self._known:
            self._known[of] = of(self)
        return self._known[of]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, so what is known of these is not copied."""
        return self.__dict__ | {"_known": {}}
