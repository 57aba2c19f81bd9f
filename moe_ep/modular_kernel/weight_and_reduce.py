"""Strategies for multiplying expert outputs by the router weights and summing them.

Experts return the strategy that fits the shape of their output from `finalize_weight_and_reduce_impl()`. The
prepare/finalize backend applies it, or uses its own if the experts delegate the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep.arguments import INTEGERS, check_same_device, check_tensors
from moe_ep.errors import check_at_least


class TopKWeightAndReduce(ABC):
    """Turns a fused expert output into `[T, K]`. Two strategies of one kind compare equal."""

    @abstractmethod
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Weights and sums the output of the experts.

        Args:
            output: `[T, K]`, written in place; None creates one, or returns the input if nothing is left to do.
            fused_expert_output: the experts' output, in the shape that the strategy expects.
            topk_weights: f32 `[T, topk]`.
            topk_ids: `[T, topk]`, -1 for no expert.
            apply_router_weight_on_input: the experts' input was weighted already, so weights are not applied again.

        Returns:
            `output`, or the tensor created in its place, `[T, K]`.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit together.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _accumulator(fused_expert_output: torch.Tensor, num_tokens: int) -> torch.Tensor:
    shape = (num_tokens, fused_expert_output.shape[-1])
    return torch.zeros(shape, dtype=torch.float32, device=fused_expert_output.device)


def _check_slots(fused_expert_output: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raises ValueError unless ids and weights have the same slots, and the experts' output is a float tensor."""
    check_tensors(fused_expert_output=fused_expert_output, topk_weights=topk_weights, topk_ids=topk_ids)
    if topk_ids.dim() != 2 or topk_ids.dtype not in INTEGERS:
        raise ValueError(f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}; it must be (T, topk) of integers")
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point():
        raise ValueError(
            f"topk_weights is {topk_weights.dtype} {tuple(topk_weights.shape)}; it must be f32 of topk_ids' shape "
            f"{tuple(topk_ids.shape)}"
        )
    if not fused_expert_output.is_floating_point():
        raise ValueError(f"fused_expert_output is {fused_expert_output.dtype}; it must be of a float dtype")
    device = fused_expert_output.device
    check_same_device("fused_expert_output", device, topk_weights=topk_weights, topk_ids=topk_ids)


def _deliver(total: torch.Tensor, output: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if output is None:
        return total.to(dtype)
    check_tensors(output=output)
    if output.shape != total.shape or not output.is_floating_point():
        raise ValueError(
            f"output is {output.dtype} {tuple(output.shape)}; it must be of a float dtype and have the shape of the "
            f"reduced expert output, {tuple(total.shape)}"
        )
    check_same_device("fused_expert_output", total.device, output=output)
    return output.copy_(total)


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """Delegates weighting and summing to the prepare/finalize backend, which does both while it moves the rows."""

    def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(
            "weight_and_reduce_impl is TopKWeightAndReduceDelegate, which leaves the reduction to the prepare/finalize "
            "backend; the backend must replace it by a strategy of its own before applying it"
        )


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """For experts that weight and sum themselves: their output `[T, K]` is copied if `output` is another tensor."""

    def apply(
        self, output: torch.Tensor | None, fused_expert_output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if output is fused_expert_output:
            return output
        check_tensors(fused_expert_output=fused_expert_output)
        return _deliver(fused_expert_output, output, fused_expert_output.dtype)


class _SlotSum(TopKWeightAndReduce):
    """Adds up a token's slots in f32."""

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        _check_slots(fused_expert_output, topk_weights, topk_ids)
        weights = None if apply_router_weight_on_input else topk_weights
        return _deliver(self._sum(fused_expert_output, weights, topk_ids), output, fused_expert_output.dtype)

    @abstractmethod
    def _sum(self, results: torch.Tensor, weights: torch.Tensor | None, topk_ids: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum, f32 `[T, K]`; the plain sum if weights is None. Slots with id -1 were never written
        and may hold NaN, so they are left out instead of being multiplied by zero."""


class TopKWeightAndReduceContiguous(_SlotSum):
    """For one row per slot, `[T, topk, K]` or `[T * topk, K]`: weights and sums them in slot order, in f32."""

    def _sum(self, results: torch.Tensor, weights: torch.Tensor | None, topk_ids: torch.Tensor) -> torch.Tensor:
        num_tokens, topk = topk_ids.shape
        if results.shape[:-1] not in ((num_tokens, topk), (num_tokens * topk,)):
            raise ValueError(
                f"fused_expert_output has shape {tuple(results.shape)}; with topk_ids of shape "
                f"{tuple(topk_ids.shape)} it must be ({num_tokens}, {topk}, K) or ({num_tokens * topk}, K)"
            )
        rows = results.view(num_tokens, topk, results.size(-1))
        total = _accumulator(rows, num_tokens)
        for slot in range(topk):
            row = rows[:, slot].float()
            if weights is not None:
                row = row * weights[:, slot, None]
            total += torch.where(topk_ids[:, slot, None] >= 0, row, 0.0)
        return total


@dataclass(frozen=True)
class TopKWeightAndReduceNaiveBatched(_SlotSum):
    """For `[El, T, K]`, each expert's rows in token order: sums the results of one rank's experts.

    Example: ids [[0, 2], [2, 1]], rank 0 with El = 2: output[0] = w[0,0] * y[0,0], output[1] = w[1,1] * y[1,0].
    """

    rank: int

    def __post_init__(self) -> None:
        check_at_least(0, rank=self.rank)

    def _sum(self, results: torch.Tensor, weights: torch.Tensor | None, topk_ids: torch.Tensor) -> torch.Tensor:
        if results.dim() != 3:
            raise ValueError(f"fused_expert_output has shape {tuple(results.shape)}; it must be (El, T, K)")
        num_local_experts = results.shape[0]
        total = _accumulator(results, topk_ids.shape[0])
        for local in range(num_local_experts):
            chosen = topk_ids == self.rank * num_local_experts + local
            has_expert = chosen.any(dim=1)
            row_index = (has_expert.cumsum(0) - 1).clamp_(min=0)
            rows = results[local].index_select(0, row_index).float()
            if weights is not None:
                rows = rows * torch.where(chosen, weights, 0.0).sum(dim=1, keepdim=True)
            total += torch.where(has_expert[:, None], rows, 0.0)
        return total


def undelegated(weight_and_reduce_impl: TopKWeightAndReduce) -> TopKWeightAndReduce:
    """Returns the strategy to apply in a backend without its own. Experts that delegate leave one row per slot.

    Raises:
        ValueError: weight_and_reduce_impl is not a strategy.
    """
    if not isinstance(weight_and_reduce_impl, TopKWeightAndReduce):
        raise ValueError(
            f"weight_and_reduce_impl is {weight_and_reduce_impl!r}; it must be a TopKWeightAndReduce, such as what the "
            f"experts' finalize_weight_and_reduce_impl() returns"
        )
    if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
        return TopKWeightAndReduceContiguous()
    return weight_and_reduce_impl
