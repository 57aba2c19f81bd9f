"""The backend without communication: one rank, or ranks that all hold the same tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.arguments import check_expert_map, check_same_device
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import check_arguments, check_made_for
from moe_ep.errors import check_at_least
from moe_ep.kernels.mul_sum import mul_sum
from moe_ep.kernels.quantize import dequantize_rows, quantize_rows
from moe_ep.modular_kernel.contracts import Dispatched, Dispatcher, FusedMoEActivationFormat, Routing
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce, undelegated


class NoEPPrepareFinalize(Dispatcher, unchecked=True):
    """Passes this rank's rows to its own experts, and returns their sum.

    Standard format, any number of tokens. Rows are not quantized, because they are not sent, unless the layer is
    batch-invariant: it then gives the same bits as over several ranks. With an expert_map, ids of experts on other
    ranks become -1, and the output is this rank's partial sum.
    """

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._moe_config = moe_config
        # A batch-invariant layer gives the same bits as over several ranks.
        self._rounds_to: torch.dtype | None = None
        if moe_config.batch_invariant and quant_config is not None:
            self._rounds_to = quant_config.dispatch_dtype

    @classmethod
    def depends_on_batch(cls) -> str | None:
        return None

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def finalize_only_copies(self) -> bool:
        return True

    def supports_cuda_graph(self) -> bool:
        return True

    def most_deferred_tokens(self) -> int:
        return sys.maxsize

    def accepts_f32_output(self) -> bool:
        return self._moe_config.batch_invariant

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return False

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        rows, weights, ids = hidden_states, routing.topk_weights, routing.topk_ids
        num_experts, expert_map, is_weighted = (
            routing.num_experts, routing.expert_map, routing.apply_router_weight_on_input
        )  # fmt: skip
        check_at_least(1, num_experts=num_experts)
        check_arguments(rows, weights, ids, is_weighted, num_experts)
        check_made_for(self._moe_config, rows, ids)
        deferred = routing.deferred
        if deferred is not None and (is_weighted or expert_map is not None):
            deferred.settle()
            deferred = None
        if is_weighted:
            rows = (rows * weights).to(rows.dtype)
        if self._rounds_to is not None:
            codes = quantize_rows(rows.contiguous(), self._rounds_to)
            rows = dequantize_rows(codes, rows.size(1), rows.dtype, self._rounds_to)
        if expert_map is not None:
            check_expert_map(expert_map)
            check_same_device("a1", rows.device, expert_map=expert_map)
            if expert_map.shape != (num_experts,):
                raise ValueError(
                    f"expert_map has shape {tuple(expert_map.shape)}; it must have one entry for each of "
                    f"num_experts ({num_experts})"
                )
            # An id of -1 looks up the last expert, and stays -1 whether that is local or not.
            ids = torch.where(expert_map[ids.long()] >= 0, ids, -1)
        return Dispatched(
            rows=rows, topk_ids=ids, topk_weights=weights, rows_are_weighted=is_weighted, deferred=deferred
        )

    def combine(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> None:
        ids: Any = dispatched.topk_ids
        weights: Any = dispatched.topk_weights
        if self._moe_config.batch_invariant and expert_output.dim() == 3 and not dispatched.rows_are_weighted:
            mul_sum(expert_output, weights, output, ids, None)  # the same bits in one kernel
            return
        undelegated(reduce_impl).apply(output, expert_output, weights, ids, dispatched.rows_are_weighted)
