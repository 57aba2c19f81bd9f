"""The batched_all_to_all backend: messages of a fixed capacity, no host synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_ep.dispatch.batch import Batch, check_results, wire_dtype
from moe_ep.dispatch.payload import (
    destinations,
    expert_positions,
    ids_for_rank,
    make_batch_plan,
    owner_of,
    send_plan_reference,
)
from moe_ep.dispatch.torch_distributed import CombineCall, TorchDistributedPrepareFinalize, check_delegated
from moe_ep.kernels.dispatch_messages import triton_open_messages, triton_pack_messages
from moe_ep.kernels.dispatch_rows import sum_rows, weighted_rows
from moe_ep.kernels.quantize import dequantize_rows_reference
from moe_ep.modular_kernel.contracts import Dispatched, ExpertTokensMetadata, FusedMoEActivationFormat, Pending
from moe_ep.registry import operator

# ==== Messages ====
#
# Messages of fixed size: the rows, ids, positions and weights that one rank sends to another in a dispatch.
#
#     header   int32 [E]: how many tokens of the sender go to each expert here, 0 for experts elsewhere
#     C rows   the row itself, then int32 [topk] ids, int32 [topk] positions, f32 [topk] weights
#
# Row t is the sender's token t. An id is -1 if its expert is not on the receiver. All ids are -1 if the token does not
# go to the receiver or does not exist; the first part of this row is then neither written nor read. A position is the
# number of earlier tokens of the sender that chose the same expert. From it and the headers of all senders the receiver
# computes the token's row in the expert's batch without reading other tokens (`payload.make_batch_plan`).

# Rows and headers begin at multiples of this, so that kernels may read 16 bytes at a time from any of them.
_ALIGNMENT = 64


def _align(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class MessageLayout:
    """Offsets inside a message.

    Example: E=256, capacity 128, topk 8, bf16 rows of K=7168: header 1024 bytes, rows 14464 bytes apart (14336 of
    data, 96 of ids, positions and weights), message 1852416 bytes.
    """

    num_experts: int
    capacity: int
    topk: int
    row_bytes: int

    @property
    def header_bytes(self) -> int:
        return _align(4 * self.num_experts)

    @property
    def meta_offset(self) -> int:
        """The number of bytes of a row before its ids."""
        return _align(self.row_bytes, 16)

    @property
    def row_stride(self) -> int:
        return _align(self.meta_offset + 12 * self.topk)

    @property
    def message_bytes(self) -> int:
        return self.header_bytes + self.capacity * self.row_stride

    def empty(self, num_ranks: int, device: torch.device) -> torch.Tensor:
        """Allocates a message to or from every rank, uint8 `[R, message_bytes]`."""
        return torch.empty((num_ranks, self.message_bytes), dtype=torch.uint8, device=device)

    def header(self, messages: torch.Tensor) -> torch.Tensor:
        """Returns a view of the headers, int32 `[R, E]`."""
        return messages[:, : self.header_bytes].view(torch.int32)[:, : self.num_experts]

    def rows(self, messages: torch.Tensor) -> torch.Tensor:
        """Returns a view of the rows, uint8 `[R, C, row_bytes]`."""
        return self._body(messages)[:, :, : self.row_bytes]

    def meta(self, messages: torch.Tensor) -> torch.Tensor:
        """Returns a view of ids, positions and the bits of the weights, int32 `[R, C, 3, topk]`."""
        meta = self._body(messages)[:, :, self.meta_offset : self.meta_offset + 12 * self.topk]
        return meta.view(torch.int32).unflatten(2, (3, self.topk))

    def _body(self, messages: torch.Tensor) -> torch.Tensor:
        return messages[:, self.header_bytes :].unflatten(1, (self.capacity, self.row_stride))


@operator("messages")
def pack_messages(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    owners: torch.Tensor,
    layout: MessageLayout,
    messages: torch.Tensor,
) -> torch.Tensor:
    """Writes the message to every rank; one kernel on CUDA.

    Args:
        rows: `[T, W]` of any dtype, `layout.row_bytes` bytes each; T is at most the capacity.
        topk_ids: int32 `[T, topk]`, contiguous.
        topk_weights: f32 `[T, topk]`, contiguous.
        owners: int32 `[E]`.
        messages: uint8 `[R, message_bytes]`.

    Returns:
        slots int32 `[T, R]`: the row in `[R * C, K]` that the combine returns for token t from rank r; -1 for none.
    """
    num_ranks, num_tokens = messages.size(0), topk_ids.size(0)
    positions, counts = expert_positions(topk_ids, layout.num_experts)
    ranks = torch.arange(num_ranks, device=owners.device)
    layout.header(messages)[:] = torch.where(owners == ranks[:, None], counts, 0)
    has = destinations(topk_ids, owners, num_ranks)
    row_bytes = rows.contiguous().view(torch.uint8)
    for rank in range(num_ranks):
        ids = ids_for_rank(topk_ids, owners, rank)
        mine = ids >= 0
        meta = layout.meta(messages)[rank]
        meta[num_tokens:, 0] = -1
        meta[num_tokens:, 1:] = 0
        meta[:num_tokens, 0] = ids
        meta[:num_tokens, 1] = torch.where(mine, positions, 0)
        meta[:num_tokens, 2] = torch.where(mine, topk_weights, 0.0).view(torch.int32)
        tokens = has[:, rank].nonzero().flatten()
        layout.rows(messages)[rank, tokens] = row_bytes[tokens]
    return send_plan_reference(topk_ids, owners, num_ranks, layout.capacity).slots


@pack_messages.on_gpu
def _pack_by_kernel(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, owners: torch.Tensor, layout: MessageLayout,
    messages: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    views = layout.rows(messages), layout.meta(messages), layout.header(messages)
    return triton_pack_messages(rows, ids, weights, owners, *views)


class OpenedMessages(NamedTuple):
    """The receiver's state of a dispatch.

    Attributes:
        slots: int32 `[R * C, topk]`: row of the batch for each received row and slot, -1 for none.
        weights: f32 `[R * C, topk]`.
        expert_num_tokens: int32 `[El]`.
    """

    slots: torch.Tensor
    weights: torch.Tensor
    expert_num_tokens: torch.Tensor


@operator("messages")
def open_messages(
    messages: torch.Tensor,
    layout: MessageLayout,
    expert_map: torch.Tensor,
    batch: torch.Tensor,
    code_dtype: torch.dtype | None,
) -> OpenedMessages:
    """Copies received rows to the batches of their experts; one kernel on CUDA.

    Args:
        messages: uint8 `[R, message_bytes]`, one from every rank.
        expert_map: int32 `[E]`, global -> local.
        batch: `[El, R * C, K]`, written: each expert's rows by (source rank, token); the rest is left unwritten.
        code_dtype: int8 or e4m3 if rows are codes with scales, to be dequantized to the batch's dtype; None for rows
            that are copied as they are.
    """
    num_local_experts, max_rows, hidden_size = batch.shape
    meta = layout.meta(messages)
    slots, expert_num_tokens = make_batch_plan(
        meta[:, :, 0], meta[:, :, 1], layout.header(messages), expert_map, num_local_experts, max_rows
    )
    received = layout.rows(messages).flatten(0, 1)
    row, slot = (slots >= 0).nonzero(as_tuple=True)
    wanted = received[row]
    if code_dtype is not None:
        values = dequantize_rows_reference(wanted, batch.new_empty((len(row), hidden_size)), code_dtype)
    else:
        values = wanted.contiguous().view(batch.dtype)
    batch.view(-1, hidden_size)[slots[row, slot].long()] = values
    weights = meta[:, :, 2].flatten(0, 1).contiguous().view(torch.float32)
    return OpenedMessages(slots, weights, expert_num_tokens)


@open_messages.on_gpu
def _open_by_kernel(
    messages: torch.Tensor, layout: MessageLayout, expert_map: torch.Tensor, batch: torch.Tensor,
    code_dtype: torch.dtype | None,
) -> OpenedMessages:  # fmt: skip
    views = layout.rows(messages), layout.meta(messages), layout.header(messages)
    return OpenedMessages(*triton_open_messages(*views, expert_map, batch, code_dtype))


class _Sent(NamedTuple):
    slots: torch.Tensor
    opened: OpenedMessages
    weights: torch.Tensor


class BatchedAllToAllPrepareFinalize(TorchDistributedPrepareFinalize, unchecked=True):
    """BatchedExperts format with room for max_num_tokens of every rank; for decode, capturable in CUDA graphs.

    One message of fixed size goes to every rank (`MessageLayout`), so that a dispatch is two kernels around one
    collective, whatever the routing: pack, all-to-all, open. Opening copies a received row to each of its experts on
    this rank; an expert's rows are ordered by (source rank, token). The combine reverses that: each rank sums a row's
    experts, weighted and in slot order, and returns one row; the owner adds the rows in rank order, all in f32.

    In a batch-invariant layer the combine returns each slot's row, and the owner adds them in slot order. That takes
    topk times the bytes, because all slots of a token may be on one rank and no host knows which are.

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
            # Rows that stay codes are copied as they arrived.
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
            # Every slot is a separate row, which is copied as it is.
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
    """Returns the row of each slot in the returned results `[R * capacity * topk, K]`: int32 `[T, topk]`, -1 for none.

    Example: owners [0, 1], ids [[1, 0]], capacity 4: [[8, 1]].
    """
    num_tokens, topk = topk_ids.shape
    owner = owner_of(topk_ids, owners)
    own = torch.arange(num_tokens * topk, device=topk_ids.device).view(num_tokens, topk)
    return torch.where(owner >= 0, owner * (capacity * topk) + own, -1).to(torch.int32)
