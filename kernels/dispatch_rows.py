"""Rows before and after they travel: packing for the wire, weighting before the way back, summing on their own rank.

Each function has a Triton form for CUDA tensors and a plain one, which is the reference and is used without Triton;
both give the same bits. Slots are row numbers, -1 for none.
"""

from __future__ import annotations

import torch

from moe_ep.kernels.forms import Plain, form_for


def pack_rows(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    send_rows: torch.Tensor,
    send_meta: torch.Tensor,
) -> None:
    """Copies each token to its row for every destination rank, with that rank's ids and weights.

    Example: owners [0, 1], ids [[0, 1]], slots [[0, 1]]: send_rows = [row, row], ids in send_meta [[0, -1], [-1, 1]].

    Args:
        rows: `[T, W]`, any dtype.
        topk_ids: int32 `[T, topk]`, contiguous.
        topk_weights: f32 `[T, topk]`, contiguous.
        owners: int32 `[E]`.
        slots: int32 `[T, R]`.
        send_rows: `[M, W]` of rows' dtype; only rows that a slot names are written.
        send_meta: int32 `[M, 2 * topk]`: ids, -1 where the expert is another rank's, then the bits of the weights,
            0 there.
    """
    pack = _form_for(pack_rows_reference, "triton_dispatch_rows.triton_pack_rows", rows)
    pack(rows, topk_ids, topk_weights, owners, slots, send_rows, send_meta)


def pack_rows_reference(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    owners: torch.Tensor,
    slots: torch.Tensor,
    send_rows: torch.Tensor,
    send_meta: torch.Tensor,
) -> None:
    """pack_rows in plain torch, on any device."""
    token, rank = (slots >= 0).nonzero(as_tuple=True)
    target = slots[token, rank].long()
    send_rows[target] = rows[token]
    ids, topk = topk_ids[token], topk_ids.size(1)
    exists = (ids >= 0) & (ids < owners.numel())
    is_theirs = exists & (owners[ids.long().clamp(0, owners.numel() - 1)] == rank[:, None])
    send_meta[target, :topk] = torch.where(is_theirs, ids, -1)
    send_meta[target, topk:] = torch.where(is_theirs, topk_weights[token], 0.0).view(torch.int32)


def weighted_rows(
    expert_output: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, send_rows: torch.Tensor
) -> None:
    """send_rows[i] = sum over slots j, in order and in f32, of weights[i, j] * expert_output[slots[i, j]].

    A row without any slot reads nothing, and its result is undefined.

    Args:
        expert_output: `[X, K]`.
        slots: int32 `[M, topk]`.
        weights: f32 `[M, topk]`; None for a plain sum.
        send_rows: `[M, K]`, rounded once from f32.
    """
    form = _form_for(weighted_rows_reference, "triton_dispatch_rows.triton_weighted_rows", expert_output, send_rows)
    form(expert_output, slots, weights, send_rows)


def weighted_rows_reference(
    expert_output: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, send_rows: torch.Tensor
) -> None:
    """weighted_rows in plain torch, on any device."""
    total = torch.zeros(send_rows.shape, dtype=torch.float32, device=send_rows.device)
    for slot in range(slots.size(1)):
        total += _taken(expert_output, slots[:, slot], None if weights is None else weights[:, slot])
    send_rows.copy_(total)


def sum_rows(received: torch.Tensor, slots: torch.Tensor, output: torch.Tensor) -> None:
    """output[t] = sum over ranks r, in order and in f32, of received[slots[t, r]]; zeros for a token without any.

    Args:
        received: `[M, K]`; rows that no slot names may contain anything.
        slots: int32 `[T, R]`.
        output: `[T, K]`, rounded once from f32.
    """
    form = _form_for(sum_rows_reference, "triton_dispatch_rows.triton_sum_rows", output, received)
    form(received, slots, output)


def sum_rows_reference(received: torch.Tensor, slots: torch.Tensor, output: torch.Tensor) -> None:
    """sum_rows in plain torch, on any device."""
    total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
    for rank in range(slots.size(1)):
        total += _taken(received, slots[:, rank], None)
    output.copy_(total)


def _form_for(plain: Plain, triton_form: str, *rows: torch.Tensor) -> Plain:
    """As form_for; the Triton forms need rows whose columns lie side by side."""
    return form_for(plain, triton_form, *rows) if all(tensor.stride(1) == 1 for tensor in rows) else plain


def _taken(source: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """source[slots] in f32, weighted; 0 for slots of -1."""
    if not source.size(0):
        return torch.zeros((), dtype=torch.float32, device=source.device)
    rows = source[slots.long().clamp(min=0)].float()
    if weights is not None:
        rows = rows * weights[:, None]
    return torch.where(slots[:, None] >= 0, rows, 0.0)
