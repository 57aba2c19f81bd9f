"""The allgather_reducescatter backend: every rank gathers the tokens of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.dispatch.batch import Batch
from moe_ep.dispatch.payload import ids_for_rank, make_send_plan, make_slot_plan
from moe_ep.dispatch.torch_distributed import CombineCall, SlotsSent, TorchDistributedPrepareFinalize
from moe_ep.kernels.dispatch_rows import sum_rows
from moe_ep.modular_kernel.contracts import Dispatched, FusedMoEActivationFormat, Pending


class _Sent(NamedTuple):
    slots: torch.Tensor
    num_rows: int


class AllGatherReduceScatterPrepareFinalize(TorchDistributedPrepareFinalize, unchecked=True):
    """Standard format; the simplest backend that works on any transport.

    Every rank gathers the rows, ids and weights of all ranks, padded to the largest T of the step, which the hosts
    agree on. Under CUDA-graph capture they are padded to the capacity, max_num_tokens, and a larger T is refused.
    Padding has ids of -1.

    The reduction is an all-to-all of partial sums and an addition in rank order in f32 at the owner, not a
    reduce_scatter. Both move the same bytes to and from every rank, but reduce_scatter adds in the rows' own dtype, in
    an order that the transport chooses by size and topology, and would read rows that a rank's experts never wrote.
    In a batch-invariant layer the combine returns one row per slot. The host waits for their number, so such a layer
    cannot be captured.
    """

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_cuda_graph(self) -> bool:
        return not self.moe_config.batch_invariant

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        num_tokens, topk = batch.topk_ids.shape
        num_ranks = self.ranks.size
        steps = self.ranks.steps("dispatch", batch.rows.device)
        padded_tokens = self._largest_num_tokens(num_tokens, batch.rows.device)
        rows = batch.wire_rows()
        if num_tokens < padded_tokens:  # the padding is uninitialized memory
            padded = rows.new_empty((padded_tokens, rows.size(1)))
            padded[:num_tokens] = rows
            rows = padded
        meta = batch.topk_ids.new_full((padded_tokens, 2 * topk), -1)
        meta[:num_tokens, :topk] = batch.topk_ids
        meta[:num_tokens, topk:] = batch.topk_weights.view(torch.int32)
        all_rows = rows.new_empty((num_ranks * padded_tokens, rows.size(1)))
        all_meta = meta.new_empty((num_ranks * padded_tokens, 2 * topk))
        if padded_tokens:
            steps.all_gather(all_rows, rows)
            steps.all_gather(all_meta, meta)
        slots = make_send_plan(batch.topk_ids, batch.owners, num_ranks, padded_tokens).slots

        def arrived() -> Dispatched:
            ids = self._ids_for_this_rank(all_meta[:, :topk], batch.owners)
            found, scales = batch.received(all_rows)
            return Dispatched(
                rows=found,
                row_scales=scales,
                topk_ids=ids,
                topk_weights=all_meta[:, topk:].contiguous().view(torch.float32),
                handle=self._slots_sent(batch, ids) if self.moe_config.batch_invariant else _Sent(slots, len(all_rows)),
            )

        return steps.then(arrived)

    def _return(self, sent: _Sent, call: CombineCall) -> Pending[None]:
        rows, output = self._reduced(call, sent.num_rows), call.output
        returned = torch.empty_like(rows)
        steps = self.ranks.steps("combine", output.device)
        if rows.size(0):
            steps.all_to_all(returned, rows)
        return steps.then(lambda: sum_rows(returned, sent.slots, output))

    def _slots_sent(self, batch: Batch, ids: torch.Tensor) -> SlotsSent:
        """The handle for combining single slots, from ids `[R * padded T, topk]`, -1 if their expert is elsewhere."""
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "allgather_reducescatter needs the number of slots on the host in a batch-invariant layer and cannot "
                "be captured in a CUDA graph; use all2all_backend='batched_all_to_all' for what is captured"
            )
        slots, returning = make_slot_plan(batch.topk_ids, batch.owners, self.ranks.size)
        arrived = (ids >= 0).view(self.ranks.size, -1).sum(dim=1)
        return SlotsSent(slots, batch.topk_weights, returning.tolist(), arrived.tolist())

    def _largest_num_tokens(self, num_tokens: int, device: torch.device) -> int:
        """The capacity of every rank's part, in rows."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            capacity = self.moe_config.max_num_tokens
            if num_tokens > capacity:
                raise ValueError(
                    f"a1 has {num_tokens} tokens under CUDA-graph capture and the capacity is {capacity} per rank; "
                    f"capture at most {capacity}, or make the backend with max_num_tokens={num_tokens}"
                )
            return capacity
        mine = torch.full((1,), num_tokens, dtype=torch.int64, device=device)
        everybody = mine.new_empty(self.ranks.size)
        steps = self.ranks.steps("dispatch", device)
        steps.all_gather(everybody, mine)
        return max(steps.on_host(everybody).get())

    def _ids_for_this_rank(self, ids: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Replaces ids of experts on other ranks by -1; a shared expert's tokens are computed on their own rank."""
        rank, num_routed = self.ranks.rank, self.moe_config.num_experts
        mine = ids_for_rank(ids, owners, rank)
        if self.moe_config.num_fused_shared_experts:
            source = torch.arange(self.ranks.size, device=ids.device).repeat_interleave(ids.size(0) // self.ranks.size)
            mine.masked_fill_((mine >= num_routed) & (source != rank)[:, None], -1)
        return mine
