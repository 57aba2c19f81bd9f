"""A dispatch backend: every rank sees every token, computes its experts, and the sums are all-reduced.

    ALL2ALL_BACKENDS.register("broadcast", "broadcast_backend:BroadcastDispatcher", "the example of the docs")
    layer = FusedMoE(..., all2all_backend="broadcast")

It needs the same number of tokens on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_ep.distributed.process_groups import GroupReference
from moe_ep.modular_kernel import Dispatched, Dispatcher, FusedMoEActivationFormat


class BroadcastDispatcher(Dispatcher):
    def __init__(self, *, moe_config, quant_config=None, process_group=None):
        # A reference, because a group that is kept outlives destroy_process_group and may abort the process at exit.
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
        return True  # combine leaves complete sums

    # A step: rows out, results back.

    def dispatch(self, hidden_states, routing, quant_config):
        if routing.apply_router_weight_on_input:
            hidden_states = (hidden_states * routing.topk_weights).to(hidden_states.dtype)
        rows, weights, ids = map(self._gather, (hidden_states, routing.topk_weights, routing.topk_ids))
        # The contract: ids of received rows are global, and -1 where the expert is not on this rank.
        is_local = (ids >= 0) & (routing.expert_map[ids.clamp(min=0).long()] >= 0)
        return Dispatched(
            rows=rows,
            topk_ids=torch.where(is_local, ids, -1),
            topk_weights=weights,
            rows_are_weighted=routing.apply_router_weight_on_input,
            handle=hidden_states.size(0),  # what combine needs to know of the batch: its number of tokens
        )

    def combine(self, output, expert_output, dispatched, reduce_impl):
        # This rank's experts are summed for every token of every rank, then over ranks; our tokens are one slice.
        sums = reduce_impl.apply(
            None, expert_output, dispatched.topk_weights, dispatched.topk_ids, dispatched.rows_are_weighted
        ).float()
        dist.all_reduce(sums, group=self.group())
        num_tokens = dispatched.handle
        output.copy_(sums[self.rank * num_tokens : (self.rank + 1) * num_tokens])

    def _gather(self, tensor):
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group())
        return torch.cat(parts)
