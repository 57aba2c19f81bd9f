"""Fixed capacity, nothing for the host to wait for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.dispatch.batch import Batch, check_results, wire_dtype
from moe_ep.dispatch.messages import MessageLayout, OpenedMessages, open_messages, pack_messages
from moe_ep.dispatch.torch_distributed import TorchDistributedPrepareFinalize, check_delegated
from moe_ep.kernels.dispatch_rows import sum_rows, weighted_rows
from moe_ep.modular_kernel.contracts import Dispatched, ExpertTokensMetadata, FusedMoEActivationFormat, Pending
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce


class _Sent(NamedTuple):
    slots: torch.Tensor
    opened: OpenedMessages


class BatchedAllToAllPrepareFinalize(TorchDistributedPrepareFinalize, unchecked=True):
    """BatchedExperts format with room for max_num_tokens of every rank; for decode, and captured in CUDA graphs.

    One message of fixed size goes to every rank (`dispatch.messages`), so that a dispatch is two kernels around one
    collective, whatever the routing: pack, all-to-all, open. Opening copies a received row to each of its experts on
    this rank; an expert's rows are ordered by (source rank, token). The combine is the same backwards: the weighted
    sum of a row's experts here in slot order, one row back, and the owner adds rows in rank order, all in f32.

    Bytes on the wire follow the capacity and not T: choose max_num_tokens as the largest decode batch. Before a
    capture, run once outside: NCCL sets up its communicator then.
    """

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_cuda_graph(self) -> bool:
        return True

    def max_num_tokens_per_rank(self) -> int | None:
        return self.moe_config.max_num_tokens

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        capacity, num_ranks = self.moe_config.max_num_tokens, self.ranks.size
        device, hidden_size = batch.rows.device, batch.rows.size(1)
        rows = batch.wire_rows()
        layout = MessageLayout(
            batch.owners.numel(), capacity, batch.topk_ids.size(1), rows.size(1) * rows.element_size()
        )
        outgoing, incoming = layout.empty(num_ranks, device), layout.empty(num_ranks, device)
        slots = pack_messages(rows, batch.topk_ids, batch.topk_weights, batch.owners, layout, outgoing)
        steps = self.ranks.steps("dispatch", device)
        steps.all_to_all(incoming, outgoing)

        def arrived() -> Dispatched:
            shape = (self.moe_config.num_local_experts, num_ranks * capacity, hidden_size)
            expert_rows = torch.empty(shape, dtype=batch.rows.dtype, device=device)
            opened = open_messages(incoming, layout, batch.expert_map, expert_rows, batch.quantized)
            meta = ExpertTokensMetadata(opened.expert_num_tokens)
            return Dispatched(rows=expert_rows, expert_tokens_meta=meta, handle=_Sent(slots, opened))

        return steps.then(arrived)

    def _return(
        self,
        sent: _Sent,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        check_delegated("batched_all_to_all", reduce_impl)
        capacity, hidden_size = self.ranks.size * self.moe_config.max_num_tokens, output.size(1)
        shape = (self.moe_config.num_local_experts, capacity, hidden_size)
        check_results(expert_output, shape, output)
        weights = None if dispatched.rows_are_weighted else sent.opened.weights
        outgoing = output.new_empty((capacity, hidden_size), dtype=wire_dtype(output.dtype))
        weighted_rows(expert_output.reshape(-1, hidden_size), sent.opened.slots, weights, outgoing)
        incoming = torch.empty_like(outgoing)
        steps = self.ranks.steps("combine", output.device)
        steps.all_to_all(incoming, outgoing)
        return steps.then(lambda: sum_rows(incoming, sent.slots, output))
