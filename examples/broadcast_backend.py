"""A dispatch backend in sixty-five lines: every rank sees every token, computes its experts, and sums are all-reduced.

    ALL2ALL_BACKENDS.register("broadcast", "broadcast_backend:BroadcastPrepareFinalize", "the example of the docs")
    layer = FusedMoE(..., all2all_backend="broadcast")

It needs the same number of tokens on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_ep.distributed.process_groups import GroupReference
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat, FusedMoEPrepareAndFinalize


class BroadcastPrepareFinalize(FusedMoEPrepareAndFinalize):
    def __init__(self, *, moe_config, quant_config=None, process_group=None):
        # A group that is kept outlives destroy_process_group, and may abort the process when Python ends.
        self.group = GroupReference(process_group or dist.group.WORLD)
        self.rank, self.size = moe_config.ep_rank, moe_config.ep_size

    # What the layer asks before it joins this backend with experts.

    def activation_format(self):
        return FusedMoEActivationFormat.Standard  # rows [num_recv_tokens, K], each with its ids and weights

    def topk_indices_dtype(self):
        return torch.int32

    def max_num_tokens_per_rank(self):
        return None  # no capacity: the layer never splits a batch for it

    def num_dispatchers(self):
        return self.size

    def output_is_reduced(self):
        return True  # finalize leaves complete sums

    # A step: rows out, rows back.

    def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config):
        if apply_router_weight_on_input:
            a1 = (a1 * topk_weights).to(a1.dtype)
        rows, weights, ids = (self._gather(tensor) for tensor in (a1, topk_weights, topk_ids))
        # The contract: ids that come back are global, and -1 where the expert is not on this rank.
        local = (ids >= 0) & (expert_map[ids.clamp(min=0).long()] >= 0)
        return rows, None, None, torch.where(local, ids, -1), weights

    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ):
        # The experts of this rank are summed for every token of every rank, then over ranks; our tokens are one slice.
        sums = weight_and_reduce_impl.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        ).float()
        dist.all_reduce(sums, group=self.group())
        num_tokens = output.size(0)
        output.copy_(sums[self.rank * num_tokens : (self.rank + 1) * num_tokens])

    def _gather(self, tensor):
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group())
        return torch.cat(parts)
