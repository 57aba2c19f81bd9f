"""What backends of the Standard format share on the way back."""

from __future__ import annotations

import torch

from moe_ep.dispatch.batch import wire_dtype
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP, undelegated


def reduced_rows(
    weight_and_reduce_impl: TopKWeightAndReduce,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """The sum of this rank's experts for every received row, `[num_received, K]`, contiguous, in the wire's dtype.

    Experts that reduced already (NoOP) are not copied unless the wire has another dtype (f16 layers, `wire_dtype`);
    experts that delegate left one row a slot.
    """
    reduce_impl = undelegated(weight_and_reduce_impl)
    dtype, rows = wire_dtype(fused_expert_output.dtype), None
    if dtype != fused_expert_output.dtype and not isinstance(reduce_impl, TopKWeightAndReduceNoOP):
        rows = fused_expert_output.new_empty((topk_ids.size(0), fused_expert_output.size(-1)), dtype=dtype)
    rows = reduce_impl.apply(rows, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)
    return rows.to(dtype).contiguous()
