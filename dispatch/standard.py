"""What backends of the Standard format share on the way back."""

from __future__ import annotations

import torch

from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce, undelegated


def reduced_rows(
    weight_and_reduce_impl: TopKWeightAndReduce,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """The sum of this rank's experts for every received row, `[num_received, K]`, contiguous.

    Experts that reduced already (NoOP) are not copied; experts that delegate left one row a slot.
    """
    reduce_impl = undelegated(weight_and_reduce_impl)
    rows = reduce_impl.apply(None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)
    return rows.contiguous()
