"""The backend where nothing travels: one rank, or ranks that all hold the same tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_ep.arguments import check_expert_map, check_same_device
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import check_arguments, check_made_for
from moe_ep.errors import check_at_least
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat, FusedMoEPrepareAndFinalize, PrepareResult
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce, undelegated


class NoEPPrepareFinalize(FusedMoEPrepareAndFinalize):
    """Passes this rank's rows to its own experts, and returns their sum.

    Standard format, any number of tokens. Rows are not quantized, since they do not travel. With an expert_map, ids of
    experts on other ranks become -1, and the output is this rank's partial sum.
    """

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._moe_config = moe_config

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def finalize_only_copies(self) -> bool:
        return True

    def supports_cuda_graph(self) -> bool:
        return True

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return False

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> PrepareResult:
        check_at_least(1, num_experts=num_experts)
        check_arguments(a1, topk_weights, topk_ids, apply_router_weight_on_input, num_experts)
        check_made_for(self._moe_config, a1, topk_ids)
        if apply_router_weight_on_input:
            a1 = (a1 * topk_weights).to(a1.dtype)
        if expert_map is not None:
            check_expert_map(expert_map)
            check_same_device("a1", a1.device, expert_map=expert_map)
            if expert_map.shape != (num_experts,):
                raise ValueError(
                    f"expert_map has shape {tuple(expert_map.shape)}; it must have one entry for each of "
                    f"num_experts ({num_experts})"
                )
            # An id of -1 looks up the last expert, and stays -1 whether that is local or not.
            topk_ids = torch.where(expert_map[topk_ids.long()] >= 0, topk_ids, -1)
        return a1, None, None, topk_ids, topk_weights

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        reduce_impl = undelegated(weight_and_reduce_impl)
        reduce_impl.apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)
