"""The index logic of dispatch and combine: which rows go to which rank, and back, in plain torch.

A token goes at most once to every rank, however many of its experts are there. The plan is one tensor,
`slots [T, R]`: token t is row slots[t, r] of all rows that this rank sends, -1 if rank r has none of its experts. The
combine returns each row to the same position, so the same tensor describes both directions.

Plans have two forms. Exact: rows are ordered by (rank, token), without gaps. Fixed: rank r's part begins at row
r * capacity and token t is row t of it; nothing needs to be counted, and no rank waits for another's counts.

The functions that have a Triton form call it for CUDA tensors; the code here is the reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_ep.kernels.dispatch_messages import triton_send_plan
from moe_ep.registry import choose_form

# Destination ranks of a token are bits of one int64 in the Triton form.
_MAX_RANKS_IN_A_WORD = 62


class SendPlan(NamedTuple):
    """Where this rank's tokens go.

    Attributes:
        slots: int32 `[T, R]`: the row of token t for rank r, -1 for none.
        counts: int32 `[R]`: tokens for each rank.
    """

    slots: torch.Tensor
    counts: torch.Tensor


def make_send_plan(
    topk_ids: torch.Tensor, owners: torch.Tensor, num_ranks: int, capacity: int | None = None
) -> SendPlan:
    """Plans which token goes to which rank, and as which row.

    Example: owners [0, 0, 1, 1], ids [[0, 1], [2, 0], [-1, 3]], two ranks: exact slots [[0, -1], [1, 2], [-1, 3]] with
    counts [2, 2]; with capacity 4 slots [[0, -1], [1, 5], [-1, 6]].

    Args:
        topk_ids: int32 `[T, topk]`, -1 for none.
        owners: int32 `[E]`, the rank that each id is sent to.
        capacity: rows that the part of each rank has room for; None for the exact form.
    """
    form: Callable[..., tuple[torch.Tensor, torch.Tensor]] = send_plan_reference
    if num_ranks <= _MAX_RANKS_IN_A_WORD:
        form = choose_form(form, triton_send_plan, topk_ids)
    return SendPlan(*form(topk_ids, owners, num_ranks, capacity))


def send_plan_reference(
    topk_ids: torch.Tensor, owners: torch.Tensor, num_ranks: int, capacity: int | None = None
) -> SendPlan:
    """The plain form of make_send_plan, on any device."""
    has = destinations(topk_ids, owners, num_ranks)
    counts = has.sum(dim=0)
    ranks = torch.arange(num_ranks, device=topk_ids.device)
    if capacity is None:
        rows = has.cumsum(dim=0) - 1 + (counts.cumsum(dim=0) - counts)
    else:
        rows = torch.arange(topk_ids.size(0), device=topk_ids.device)[:, None] + ranks * capacity
    return SendPlan(torch.where(has, rows, -1).to(torch.int32), counts.to(torch.int32))


def make_slot_plan(topk_ids: torch.Tensor, owners: torch.Tensor, num_ranks: int) -> SendPlan:
    """Plans the return of single slots' results, each in its own row, ordered by (rank, token, slot).

    The token's rank then adds them up in slot order, wherever the experts are.

    Example: owners [0, 0, 1, 1], ids [[2, 0], [-1, 1]], two ranks: slots [[2, 0], [-1, 1]], counts [2, 1].

    Returns:
        slots int32 `[T, topk]`, -1 for none, and counts int32 `[R]`: slots for each rank.
    """
    rows, counts = make_send_plan(topk_ids.reshape(-1, 1), owners, num_ranks)
    return SendPlan(rows.amax(dim=1).view(topk_ids.shape), counts)


def owner_of(topk_ids: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """The rank of each slot, int32 of the shape of topk_ids; -1 for "no expert" and for ids that do not exist."""
    exists = (topk_ids >= 0) & (topk_ids < owners.numel())
    return torch.where(exists, owners[topk_ids.long().clamp(0, owners.numel() - 1)], -1)


def destinations(topk_ids: torch.Tensor, owners: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Whether token t has an expert on rank r, bool `[T, R]`."""
    ranks = torch.arange(num_ranks, device=topk_ids.device)
    return (owner_of(topk_ids, owners)[:, :, None] == ranks).any(dim=1)


def ids_for_rank(topk_ids: torch.Tensor, owners: torch.Tensor, rank: int) -> torch.Tensor:
    """topk_ids with -1 for every expert that `rank` does not own."""
    return torch.where(owner_of(topk_ids, owners) == rank, topk_ids, -1)


class ExpertPositions(NamedTuple):
    """The order of this rank's tokens within each expert.

    Attributes:
        positions: int32 `[T, topk]`: how many earlier tokens chose the same expert; 0 where there is none.
        counts: int32 `[E]`: tokens that chose each expert. A token that names an expert twice counts once.
    """

    positions: torch.Tensor
    counts: torch.Tensor


def expert_positions(topk_ids: torch.Tensor, num_experts: int) -> ExpertPositions:
    """Returns the position of each token within each of its experts, in token order.

    Example: ids [[0, 2], [2, -1], [0, 2]], E=3: positions [[0, 0], [1, 0], [1, 2]], counts [2, 0, 3].
    """
    exists = (topk_ids >= 0) & (topk_ids < num_experts)
    column = torch.where(exists, topk_ids, num_experts).long()
    chosen = torch.zeros((topk_ids.size(0), num_experts + 1), dtype=torch.int32, device=topk_ids.device)
    chosen.scatter_(1, column, 1)
    earlier = chosen.cumsum(dim=0) - chosen
    positions = torch.where(exists, earlier.gather(1, column), 0)
    return ExpertPositions(positions.to(torch.int32), chosen[:, :num_experts].sum(dim=0).to(torch.int32))


class BatchPlan(NamedTuple):
    """The positions of received rows in the experts' batch `[El, max_rows, K]`, viewed as `[El * max_rows, K]`.

    Attributes:
        slots: int32 `[num_received, topk]`: batch row of each received row and slot, -1 for none.
        expert_num_tokens: int32 `[El]`.
    """

    slots: torch.Tensor
    expert_num_tokens: torch.Tensor


def make_batch_plan(
    ids: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    expert_map: torch.Tensor,
    num_local_experts: int,
    max_rows: int,
) -> BatchPlan:
    """Orders the rows of each expert by (source rank, token), from what each source sent about its own tokens.

    Example: two sources, one expert, counts [[2], [1]]: the second source's row at position 0 is batch row 2.

    Args:
        ids: int32 `[R, C, topk]`, global, -1 where the expert is not on this rank.
        positions: int32 `[R, C, topk]`, within the source.
        counts: int32 `[R, E]`, tokens of each source for each global expert.
        expert_map: int32 `[E]`, global -> local.
    """
    before = counts.cumsum(dim=0) - counts
    column = ids.long()  # An id of -1 looks up the last expert, and is masked below.
    source = torch.arange(len(counts), device=ids.device)[:, None, None].expand_as(column)
    local_of = expert_map.long()
    local = torch.where(ids >= 0, local_of[column], -1)
    rows = local * max_rows + before[source, column] + positions
    slots = torch.where(local >= 0, rows, -1).to(torch.int32)
    # Experts on other ranks are counted in an extra column after the local ones.
    totals = torch.zeros(num_local_experts + 1, dtype=torch.int32, device=ids.device)
    totals.index_add_(0, torch.where(local_of >= 0, local_of, num_local_experts), counts.sum(dim=0, dtype=torch.int32))
    return BatchPlan(slots.view(-1, ids.size(2)), totals[:num_local_experts])
