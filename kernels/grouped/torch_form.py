"""Plain experts with many rows each, by torch's grouped product: rows are copied into the experts' order, one product
computes w13 of all experts, another one w2, and results are copied back."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ep.config import FusedMoEQuantConfig
from moe_ep.kernels.align import sort_slots_by_expert
from moe_ep.kernels.expert_formats import Step
from moe_ep.kernels.grouped.rows import activate_rows, move_rows

# Major compute capabilities on which torch's grouped product is one kernel. On others it loops over the experts and
# waits for their row counts.
_ONE_KERNEL = (9, 10)
# It needs rows that begin at multiples of 16 bytes.
_ROW_BYTES = 16


def can_multiply(rows: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether one kernel of torch multiplies rows `[T, K]` with the weights, of which w2 is `[El, K, N]`."""
    sizes = (rows.size(1), w2.size(2))
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device)[0] in _ONE_KERNEL
        and not any(size * rows.element_size() % _ROW_BYTES for size in sizes)
    )


def compute_slots(step: Step, quant: FusedMoEQuantConfig, limit: float | None, results: torch.Tensor) -> None:
    """Writes the results `[T * topk, K]` of the slots that local experts compute, unweighted, and no others.

    Args:
        limit: the config's swiglu_limit.
    """
    ids = step.topk_ids
    slots, counts = sort_slots_by_expert(ids, step.w1.size(0), step.expert_map)
    ends = counts.cumsum(0, dtype=torch.int32)
    experts = None
    if quant.w1_bias is not None:
        positions = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
        experts = torch.searchsorted(ends, positions, right=True).clamp(max=ends.numel() - 1)
    rows = torch.empty_like(results)
    move_rows(step.hidden_states, slots // ids.size(1), rows, None, ends[-1:])
    gate_up = _product(rows, step.w1, ends, quant.w1_bias, experts)
    hidden = rows.new_empty(rows.size(0), step.w2.size(2))
    activate_rows(step.activation, gate_up, hidden, ends[-1:], limit)
    move_rows(_product(hidden, step.w2, ends, quant.w2_bias, experts), None, results, slots, ends[-1:])


def _product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor | None,
) -> torch.Tensor:
    """Multiplies rows `[S, in]`, of which those of expert e end before ends[e], by their experts' weights
    `[El, out, in]`, and adds biases `[El, out]` if any."""
    product = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return product if bias is None else product.add_(bias[experts])
