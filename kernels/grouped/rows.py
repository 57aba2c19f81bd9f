"""The steps of grouped products that move rows: into the experts' order, through the activation, and back.

Lists have room for all possible rows; the actual number is on the device, and nothing beyond it is read or written.
Each function has a Triton form for CUDA tensors and a plain one, which is the reference.
"""

from __future__ import annotations

import torch

from moe_ep.activation import MoEActivation, apply_activation, gate_limit
from moe_ep.kernels.forms import form_for


def move_rows(
    source: torch.Tensor,
    sources: torch.Tensor | None,
    target: torch.Tensor,
    targets: torch.Tensor | None,
    count: torch.Tensor,
) -> None:
    """target[targets[j]] = source[sources[j]] for j below count.

    Example: source [a, b], sources [1, 1, 0], count [2]: target [b, b, unchanged].

    Args:
        source, target: `[*, K]` of one dtype, each row contiguous.
        sources, targets: int32 `[S]`, row numbers; None means 0, 1, 2, ...
        count: int32 `[1]`, at most S.
    """
    form_for(move_rows_reference, "grouped.triton_rows.triton_move_rows", source, target)(
        source, sources, target, targets, count
    )


def move_rows_reference(
    source: torch.Tensor,
    sources: torch.Tensor | None,
    target: torch.Tensor,
    targets: torch.Tensor | None,
    count: torch.Tensor,
) -> None:
    """move_rows in plain torch; waits for the count."""
    used = int(count)
    origins = slice(used) if sources is None else sources[:used].long()
    places = slice(used) if targets is None else targets[:used].long()
    target[places] = source[origins]


def activate_rows(
    activation: MoEActivation | str,
    input: torch.Tensor,
    output: torch.Tensor,
    count: torch.Tensor,
    clamp_limit: float | None = None,
) -> None:
    """Applies the activation to the first `count` rows, in f32 and rounded once.

    Args:
        input: `[S, 2N]` for a gated activation (gate, then up), `[S, N]` otherwise; contiguous.
        output: `[S, N]`, contiguous; rows from count on are not written.
        count: int32 `[1]`, at most S.
        clamp_limit: as in `apply_activation`.
    """
    form_for(activate_rows_reference, "grouped.triton_rows.triton_activate_rows", input)(
        MoEActivation.parse(activation), input, output, count, gate_limit(activation, clamp_limit)
    )


def activate_rows_reference(
    activation: MoEActivation, input: torch.Tensor, output: torch.Tensor, count: torch.Tensor, limit: float | None
) -> None:
    """activate_rows in plain torch; waits for the count."""
    used = int(count)
    apply_activation(activation, input[:used], output[:used], clamp_limit=limit)
