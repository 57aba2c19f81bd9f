"""The batched_all_to_all backend: messages of a fixed capacity, no host synchronization."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.dispatch.batch import Batch, check_results, wire_dtype
from moe_ep.dispatch.messages import MessageLayout, OpenedMessages, open_messages, pack_messages
from moe_ep.dispatch.payload import owner_of
from moe_ep.dispatch.torch_distributed import CombineCall, TorchDistributedPrepareFinalize, check_delegated
from moe_ep.kernels.dispatch_rows import sum_rows, weighted_rows
from moe_ep.modular_kernel.contracts import Dispatched, ExpertTokensMetadata, FusedMoEActivationFormat, Pending


class _Sent(NamedTuple):
    slots: torch.Tensor
    opened: OpenedMessages
    weights: torch.Tensor


class BatchedAllToAllPrepareFinalize(TorchDistributedPrepareFinalize, unchecked=True):
    """BatchedExperts format with room for max_num_tokens of every rank; for decode, and captured in CUDA graphs.

    One message of fixed size goes to every rank (`dispatch.messages`), so that a dispatch is two kernels around one
    collective, whatever the routing: pack, all-to-all, open. Opening copies a received row to each of its experts on
    this rank; an expert's rows are ordered by (source rank, token). The combine reverses that: the weighted
    sum of a row's experts here in slot order, one row back, and the owner adds rows in rank order, all in f32.

    In a batch-invariant layer each slot's row comes back, topk times the bytes, and the owner adds them in slot order.

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
        if self.moe_config.batch_invariant:
            slots = _returned_slots(batch.topk_ids, batch.owners, capacity)
        steps = self.ranks.steps("dispatch", device)
        steps.all_to_all(incoming, outgoing)

        def arrived() -> Dispatched:
            # Rows that keep their codes are copied as they came.
            code_dtype = None if batch.keeps_codes else batch.code_dtype
            width, dtype = (hidden_size, batch.rows.dtype) if not batch.keeps_codes else (rows.size(1), rows.dtype)
            shape = (self.moe_config.num_local_experts, num_ranks * capacity, width)
            expert_rows = torch.empty(shape, dtype=dtype, device=device)
            opened = open_messages(incoming, layout, batch.expert_map, expert_rows, code_dtype)
            found, scales = batch.received(expert_rows) if batch.keeps_codes else (expert_rows, None)
            meta = ExpertTokensMetadata(opened.expert_num_tokens)
            handle = _Sent(slots, opened, batch.topk_weights)
            return Dispatched(rows=found, row_scales=scales, expert_tokens_meta=meta, handle=handle)

        return steps.then(arrived)

    def _return(self, sent: _Sent, call: CombineCall) -> Pending[None]:
        output, expert_output, dispatched, reduce_impl = call
        check_delegated("batched_all_to_all", reduce_impl)
        capacity, hidden_size = self.ranks.size * self.moe_config.max_num_tokens, output.size(1)
        shape = (self.moe_config.num_local_experts, capacity, hidden_size)
        check_results(expert_output, shape, output)
        here: torch.Tensor | None = sent.opened.weights
        there: torch.Tensor | None = None
        slots = sent.opened.slots
        if self.moe_config.batch_invariant:
            # Every slot is a row of its own, which is copied as it is.
            slots, here, there = slots.view(-1, 1), None, sent.weights
        if dispatched.rows_are_weighted:
            here = there = None
        outgoing = output.new_empty((len(slots), hidden_size), dtype=wire_dtype(output.dtype))
        weighted_rows(expert_output.reshape(-1, hidden_size), slots, here, outgoing)
        incoming = torch.empty_like(outgoing)
        steps = self.ranks.steps("combine", output.device)
        steps.all_to_all(incoming, outgoing)
        return steps.then(lambda: sum_rows(incoming, sent.slots, output, there))


def _returned_slots(topk_ids: torch.Tensor, owners: torch.Tensor, capacity: int) -> torch.Tensor:
    """Row of what comes back, `[R * capacity * topk, K]`, for each slot: int32 `[T, topk]`, -1 for none.

    Example: owners [0, 1], ids [[1, 0]], capacity 4: [[8, 1]].
    """
    num_tokens, topk = topk_ids.shape
    owner = owner_of(topk_ids, owners)
    own = torch.arange(num_tokens * topk, device=topk_ids.device).view(num_tokens, topk)
    return torch.where(owner >= 0, owner * (capacity * topk) + own, -1).to(torch.int32)
