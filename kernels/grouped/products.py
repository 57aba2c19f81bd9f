"""The two products of plain experts: rows that are sorted by expert times the weights of each.

Rows stand in blocks of one expert each, as `moe_align_block_size` lists them. The number of blocks is on the device,
and nothing behind the last one is read or written. Each function has a Triton form for CUDA tensors and a plain one,
which is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.forms import form_for


class Blocks(NamedTuple):
    """Which row is where. `positions` number the entries of the list, `places` are its values.

    Attributes:
        places: int32 `[S]`; those from num_places on stand for no row.
        experts: int32 `[S / size]`, the local expert of each block.
        used: int32 `[1]`, how many entries count; a multiple of size.
        size: the rows of a block.
        num_places: how many places there are.
        most: positions that count at most, known on the host; others are left out.
    """

    places: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    size: int
    num_places: int
    most: int


class Activation(NamedTuple):
    """An activation, and where gate and up end before it (`gate_limit`)."""

    name: MoEActivation
    limit: float | None


def multiply_into_order(
    rows: torch.Tensor,
    row_ids: torch.Tensor | None,
    places_per_row: int,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    blocks: Blocks,
    output: torch.Tensor,
) -> None:
    """output[j] = activation(weights[e] @ rows[r] + bias[e]) for position j of expert e, in f32 and rounded once.

    Args:
        rows: `[*, K]`, each row contiguous. Place p is row r = row_ids[p], or p // places_per_row without row_ids.
        row_ids: int32 `[num_places]`, or None.
        weights: `[El, 2N, K]` for a gated activation (gate, then up), `[El, N, K]` otherwise; contiguous.
        bias: `[El, 2N]` or `[El, N]`, or None.
        output: `[most or more, N]`. Rows of positions without a place are not written.
    """
    form = form_for(multiply_into_order_reference, "grouped.triton_products.triton_multiply_into_order", rows, weights)
    form(rows, row_ids, places_per_row, weights, bias, activation, blocks, output)


def multiply_into_order_reference(
    rows: torch.Tensor,
    row_ids: torch.Tensor | None,
    places_per_row: int,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    blocks: Blocks,
    output: torch.Tensor,
) -> None:
    """multiply_into_order in plain torch; waits for the count."""
    for positions, places, expert in _of_experts(blocks):
        sources = places // places_per_row if row_ids is None else row_ids[places]
        product = _product(rows[sources.long()], weights, bias, expert)
        output[positions] = apply_activation(activation.name, product, clamp_limit=activation.limit).to(output.dtype)


def multiply_into_places(
    rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, output: torch.Tensor
) -> None:
    """output[p] = weights[e] @ rows[j] + bias[e] for position j of expert e and place p, in f32 and rounded once.

    Args:
        rows: `[most or more, N]`, as multiply_into_order writes them; f32 beside f16 weights keeps their range.
        weights: `[El, K, N]`, contiguous.
        bias: `[El, K]`, or None.
        output: `[num_places, K]`; places that are not listed are not written.
    """
    form = form_for(
        multiply_into_places_reference, "grouped.triton_products.triton_multiply_into_places", rows, weights
    )
    form(rows, weights, bias, blocks, output)


def multiply_into_places_reference(
    rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, output: torch.Tensor
) -> None:
    """multiply_into_places in plain torch; waits for the count."""
    for positions, places, expert in _of_experts(blocks):
        output[places] = _product(rows[positions], weights, bias, expert).to(output.dtype)


def _of_experts(blocks: Blocks) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """(positions, places, expert) of each block, those without a place left out."""
    used = min(int(blocks.used), blocks.most)
    found = []
    for block, expert in enumerate(blocks.experts[: used // blocks.size].tolist()):
        positions = torch.arange(block * blocks.size, (block + 1) * blocks.size, device=blocks.places.device)
        positions = positions[blocks.places[positions] < blocks.num_places]
        found.append((positions, blocks.places[positions].long(), expert))
    return found


def _product(rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return F.linear(rows.float(), weights[expert].float(), None if bias is None else bias[expert].float())
