"""Messages of fixed size: the rows, ids, positions and weights that one rank sends to another in a dispatch.

    header   int32 [E]: how many tokens of the sender go to each expert here, 0 for experts elsewhere
    C rows   the row itself, then int32 [topk] ids, int32 [topk] positions, f32 [topk] weights

Row t is the sender's token t. Its ids are -1 where the expert is not the receiver's, and all are -1 where the token is
not for the receiver or does not exist; such a row's first part is neither written nor read. A position says how
many earlier tokens of the sender chose the same expert; with the headers of all senders the receiver knows an expert's
row for every token without looking at any other (`payload.make_batch_plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_ep.dispatch.payload import (
    destinations,
    expert_positions,
    ids_for_rank,
    make_batch_plan,
    send_plan_reference,
)
from moe_ep.kernels.dispatch_messages import triton_open_messages, triton_pack_messages
from moe_ep.kernels.quantize import dequantize_rows_reference
from moe_ep.registry import operator

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
        """Bytes of a row before its ids."""
        return _align(self.row_bytes, 16)

    @property
    def row_stride(self) -> int:
        return _align(self.meta_offset + 12 * self.topk)

    @property
    def message_bytes(self) -> int:
        return self.header_bytes + self.capacity * self.row_stride

    def empty(self, num_ranks: int, device: torch.device) -> torch.Tensor:
        """Room for a message to or from every rank, uint8 `[R, message_bytes]`."""
        return torch.empty((num_ranks, self.message_bytes), dtype=torch.uint8, device=device)

    def header(self, messages: torch.Tensor) -> torch.Tensor:
        """A view: int32 `[R, E]`."""
        return messages[:, : self.header_bytes].view(torch.int32)[:, : self.num_experts]

    def rows(self, messages: torch.Tensor) -> torch.Tensor:
        """A view: uint8 `[R, C, row_bytes]`."""
        return self._body(messages)[:, :, : self.row_bytes]

    def meta(self, messages: torch.Tensor) -> torch.Tensor:
        """A view: int32 `[R, C, 3, topk]` of ids, positions and the bits of the weights."""
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
        slots int32 `[T, R]`: where the combine's row for token t comes back from rank r, in `[R * C, K]`; -1 for none.
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
    expert_map: torch.Tensor | None,
    batch: torch.Tensor,
    code_dtype: torch.dtype | None,
) -> OpenedMessages:
    """Copies received rows to the experts that asked for them; one kernel on CUDA.

    Args:
        messages: uint8 `[R, message_bytes]`, one from every rank.
        expert_map: int32 `[E]`, global -> local; None for the identity.
        batch: `[El, R * C, K]`, written: an expert's rows by (source rank, token), nothing behind them.
        code_dtype: rows are int8 or e4m3 with scales and are dequantized to the batch's dtype; None for rows that are
            copied as they are.
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
    messages: torch.Tensor,
    layout: MessageLayout,
    expert_map: torch.Tensor | None,
    batch: torch.Tensor,
    code_dtype: torch.dtype | None,
) -> OpenedMessages:
    views = layout.rows(messages), layout.meta(messages), layout.header(messages)
    return OpenedMessages(*triton_open_messages(*views, expert_map, batch, code_dtype))
