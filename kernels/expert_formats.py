"""Base classes with the answers that all experts of one activation format share."""

from __future__ import annotations

from typing import Any

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.contracts import ExpertTokensMetadata, FusedMoEActivationFormat, FusedMoEPermuteExpertsUnpermute
from moe_ep.topk_weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)


class StandardFormat(FusedMoEPermuteExpertsUnpermute):
    """Experts that find the rows of each expert themselves, and weight and sum the results."""

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_chunking(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()


class BatchedFormat(FusedMoEPermuteExpertsUnpermute):
    """Experts that are given the rows of each expert, in place or by reference, and leave weighting to the backend.

    Args:
        max_num_tokens, num_dispatchers: rows by reference come from num_dispatchers ranks with at most max_num_tokens
            tokens each; None takes them from moe_config.
        more: arguments of the class that computes the experts.
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
        self._max_rows = per_dispatcher * (moe_config.ep_size if num_dispatchers is None else num_dispatchers)

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_chunking(self) -> bool:
        return False

    def supports_row_ids(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def max_rows(self, M: int, expert_tokens_meta: ExpertTokensMetadata | None) -> int:
        """The rows that each expert's output has room for, if the input has M."""
        by_reference = expert_tokens_meta is not None and expert_tokens_meta.expert_row_ids is not None
        return self._max_rows if by_reference else M

    @staticmethod
    def given(expert_tokens_meta: ExpertTokensMetadata | None) -> ExpertTokensMetadata:
        """Returns the metadata, or raises ValueError if it is None."""
        if expert_tokens_meta is None:
            raise ValueError(
                "expert_tokens_meta is None; batched experts need the number of rows of each expert, as the "
                "prepare step returns it"
            )
        return expert_tokens_meta
