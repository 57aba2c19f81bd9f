"""Bases of experts by activation format: the answers to the contract that all of a format share."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_same_device
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.errors import check_at_least
from moe_ep.modular_kernel.contracts import Experts, ExpertTokensMetadata, FusedMoEActivationFormat
from moe_ep.modular_kernel.contracts import ExpertsCall as Step
from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

Shape = tuple[int, ...]


def wide_dtype(act_dtype: torch.dtype) -> torch.dtype:
    """The dtype of results that are not the layer's own: f32 beside f16, whose range ends at 65504, else act_dtype.

    An expert's own output may exceed that range although the weighted sum does not, and gate times up may too.
    """
    return torch.float32 if act_dtype is torch.float16 else act_dtype


def check_weights(step: Step) -> None:
    """ValueError for weights that are not w1 `[El, 2N, K]` (`[El, N, K]` if ungated) and w2 `[El, K, N]` beside the
    rows."""
    w1, w2, K = step.w1, step.w2, step.hidden_states.size(-1)
    rows = 1 + MoEActivation.parse(step.activation).is_gated
    if w1.dim() != 3 or w1.size(2) != K or w2.shape != (w1.size(0), K, w1.size(1) // rows) or w1.size(1) % rows:
        raise ValueError(
            f"w1 has shape {tuple(w1.shape)} and w2 {tuple(w2.shape)}; with K={K} and the activation "
            f"{step.activation} they must be (experts, {'2N' if rows == 2 else 'N'}, K) and (experts, K, N)"
        )
    check_same_device("hidden_states", step.hidden_states.device, w1=w1, w2=w2)


class _Format(Experts):
    """What experts of both formats support."""

    def supports_expert_map(self) -> bool:
        return True

    def supports_f32_output(self) -> bool:
        return True


class StandardFormat(_Format):
    """Experts that find the rows of each expert themselves, and weight and sum the results unless they leave slots."""

    _sums_are_left = False

    def leave_slots(self) -> None:
        self._sums_are_left = True

    def _leaves_slots(self) -> bool:
        return self._sums_are_left or self.moe_config.batch_invariant

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_chunking(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceContiguous() if self._leaves_slots() else TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation | str,
    ) -> tuple[Shape, Shape, Shape]:
        return *self.scratch_shapes(M * topk, N, K), (M, topk, K) if self._leaves_slots() else (M, K)

    def scratch_shapes(self, num_slots: int, N: int, K: int) -> tuple[Shape, Shape]:
        """Shapes of workspace13 and workspace2; none by default."""
        return (0,), (0,)


class BatchedFormat(_Format):
    """Experts that are given the rows of each expert, in place or by reference, and leave weighting to the backend.

    Args:
        max_num_tokens, num_dispatchers: rows by reference come from num_dispatchers ranks with at most max_num_tokens
            tokens each; None takes them from moe_config.
        more: arguments of the class that computes the experts.

    Raises:
        ValueError: a number below 1.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(moe_config, quant_config, **more)
        per_dispatcher = moe_config.max_num_tokens if max_num_tokens is None else max_num_tokens
        dispatchers = moe_config.ep_size if num_dispatchers is None else num_dispatchers
        check_at_least(1, max_num_tokens=per_dispatcher, num_dispatchers=dispatchers)
        self._max_rows = per_dispatcher * dispatchers

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_chunking(self) -> bool:
        return False

    def supports_row_ids(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation | str,
    ) -> tuple[Shape, Shape, Shape]:
        by_reference = expert_tokens_meta is not None and expert_tokens_meta.expert_row_ids is not None
        max_rows = self._max_rows if by_reference else M
        return *self.scratch_shapes(local_num_experts, max_rows, N), (local_num_experts, max_rows, K)

    def scratch_shapes(self, num_experts: int, max_rows: int, N: int) -> tuple[Shape, Shape]:
        """Shapes of workspace13 and workspace2; none by default."""
        return (0,), (0,)
