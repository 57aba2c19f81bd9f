"""The all_to_all backend: exact sizes; a token is sent once to each rank that holds one of its experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.dispatch.batch import Batch
from moe_ep.dispatch.payload import make_send_plan, make_slot_plan
from moe_ep.dispatch.torch_distributed import CombineCall, SlotsSent, TorchDistributedPrepareFinalize
from moe_ep.kernels.dispatch_rows import pack_rows, sum_rows
from moe_ep.modular_kernel.contracts import Dispatched, FusedMoEActivationFormat, Pending


class _Sent(NamedTuple):
    slots: torch.Tensor
    sent: list[int]
    received: list[int]


class AllToAllPrepareFinalize(TorchDistributedPrepareFinalize, unchecked=True):
    """Standard format, any number of tokens; for prefill, and across hosts.

    The ranks exchange row counts, the only host synchronization (in prepare_async too), while the rows are packed. One
    collective then writes the rows to where the experts read them, ordered by (source rank, token); another sends the
    ids and weights, 8 * topk bytes per row. The combine returns one row for each received one, the weighted sum of the
    rank's experts, and the owner adds them in rank order in f32. The send buffer has room for min(R, topk) rows per
    token. In a batch-invariant layer the combine returns one row per slot.
    """

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        device = batch.rows.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "all_to_all needs the ranks' sizes on the host and cannot be captured in a CUDA graph; use "
                "all2all_backend='batched_all_to_all' for what is captured"
            )
        num_tokens, topk = batch.topk_ids.shape
        slots, sent_counts = make_send_plan(batch.topk_ids, batch.owners, self.ranks.size)
        slot_plan = None
        if self.moe_config.batch_invariant:
            slot_plan = make_slot_plan(batch.topk_ids, batch.owners, self.ranks.size)
            sent_counts = torch.stack([sent_counts, slot_plan.counts], dim=1)
        counts = torch.stack([sent_counts, sent_counts]).view(2, self.ranks.size, -1)
        steps = self.ranks.steps("dispatch", device)
        steps.all_to_all(counts[1], counts[0])
        counts_on_host = steps.on_host(counts)

        rows = batch.wire_rows()
        num_sent = num_tokens * min(self.ranks.size, topk)
        send_rows = rows.new_empty((num_sent, rows.size(1)))
        send_meta = batch.topk_ids.new_empty((num_sent, 2 * topk))
        pack_rows(rows, batch.topk_ids, batch.topk_weights, batch.owners, slots, send_rows, send_meta)

        # For each rank: its number of rows, and in a batch-invariant layer its number of slots.
        (sent, *returning), (received, *slots_here) = (
            list(map(list, zip(*of_ranks, strict=True))) for of_ranks in counts_on_host.get()
        )
        received_rows = rows.new_empty((sum(received), rows.size(1)))
        received_meta = send_meta.new_empty((sum(received), 2 * topk))
        steps.all_to_all(received_rows, send_rows[: sum(sent)], received, sent)
        steps.all_to_all(received_meta, send_meta[: sum(sent)], received, sent)

        handle: _Sent | SlotsSent = _Sent(slots, sent, received)
        if slot_plan is not None:
            handle = SlotsSent(slot_plan.slots, batch.topk_weights, returning[0], slots_here[0])

        def arrived() -> Dispatched:
            found, scales = batch.received(received_rows)
            return Dispatched(
                rows=found,
                row_scales=scales,
                topk_ids=received_meta[:, :topk].contiguous(),
                topk_weights=received_meta[:, topk:].contiguous().view(torch.float32),
                handle=handle,
            )

        return steps.then(arrived)

    def _return(self, sent: _Sent, call: CombineCall) -> Pending[None]:
        rows, output = self._reduced(call, sum(sent.received)), call.output
        returned = rows.new_empty((sum(sent.sent), rows.size(1)))
        steps = self.ranks.steps("combine", output.device)
        steps.all_to_all(returned, rows, sent.sent, sent.received)
        return steps.then(lambda: sum_rows(returned, sent.slots, output))
