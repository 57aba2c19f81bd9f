"""Experts with plain weights on torch's grouped matrix product: rows are sorted by expert, one product computes w13 of
all experts, and another one w2.

Row counts stay on the device, and shapes follow from the largest possible number of rows, so passes can be captured.
On GPUs of sm_90 and sm_100 torch computes grouped products of bf16 in one kernel. On others it loops over the experts
and waits for their row counts, so layers use the reference there.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation
from moe_ep.canonical_weights import CanonicalWeights
from moe_ep.config import FusedMoEConfig
from moe_ep.contracts import FusedMoEPermuteExpertsUnpermute
from moe_ep.kernels.align import batched_moe_align_block_size, sort_slots_by_expert
from moe_ep.kernels.expert_formats import BatchedFormat, StandardFormat, Step, check_weights
from moe_ep.kernels.grouped_rows import activate_rows, move_rows
from moe_ep.kernels.mul_sum import moe_fused_mul_sum

# Major compute capabilities on which torch's grouped product is one kernel.
_ONE_KERNEL = (9, 10)
# It needs rows that begin at multiples of 16 bytes.
_ROW_BYTES = 16


class _GroupedExpertsBase(FusedMoEPermuteExpertsUnpermute):
    """Both products and the activation, on rows sorted by expert; each format sorts them in its own way."""

    @classmethod
    def unusable_reason(cls) -> str | None:
        if not torch.cuda.is_available():
            return "there is no GPU; plain weights run experts='reference'"
        if torch.version.hip is not None or torch.cuda.get_device_capability()[0] not in _ONE_KERNEL:
            return "torch computes grouped products in one kernel on NVIDIA GPUs of sm_90 and sm_100 alone"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; run: pip install 'moe_ep[cuda]'"
        return None

    @classmethod
    def refuses(
        cls, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
    ) -> str | None:
        if weights:
            return "they take plain weights and these are quantized"
        if device.type != "cuda":
            return f"the weights are on {device}, and the grouped products run on a GPU"
        if moe_config.in_dtype != torch.bfloat16:
            return f"the activations are {moe_config.in_dtype}; torch's grouped product takes torch.bfloat16"
        if moe_config.num_local_experts == 0:
            return "this rank has no experts"
        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size * moe_config.in_dtype.itemsize % _ROW_BYTES for size in sizes):
            return f"rows of {sizes[0]} and {sizes[1]} columns do not begin at multiples of {_ROW_BYTES} bytes"
        return cls.unusable_reason()

    def _compute(
        self,
        rows: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        activation: MoEActivation | str,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """Computes rows `[S, K]` that are sorted by expert; those of expert e end before ends[e] (int32 `[El]`)."""
        experts = None
        if self.quant_config.w1_bias is not None:
            positions = torch.arange(rows.size(0), dtype=torch.int32, device=rows.device)
            experts = torch.searchsorted(ends, positions, right=True).clamp(max=ends.numel() - 1)
        gate_up = self._product(rows, w1, ends, self.quant_config.w1_bias, experts)
        hidden = rows.new_empty(rows.size(0), w2.size(2))
        activate_rows(activation, gate_up, hidden, ends[-1:], self.moe_config.swiglu_limit)
        return self._product(hidden, w2, ends, self.quant_config.w2_bias, experts)

    @staticmethod
    def _product(
        rows: torch.Tensor,
        weights: torch.Tensor,
        ends: torch.Tensor,
        bias: torch.Tensor | None,
        experts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiplies rows `[S, in]` by their experts' weights `[El, out, in]`, and adds biases `[El, out]` if any."""
        product = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        return product if bias is None else product.add_(bias[experts])


class GroupedExperts(StandardFormat, _GroupedExpertsBase):
    """Standard format: gathers the rows of each local expert, computes them, and sums them weighted in slot order."""

    def run(self, step: Step) -> None:
        check_weights(step)
        ids, K = step.topk_ids, step.hidden_states.size(1)
        slots, counts = sort_slots_by_expert(ids, step.w1.size(0), step.expert_map)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = step.hidden_states.new_empty(ids.numel(), K)
        move_rows(step.hidden_states, slots // ids.size(1), rows, None, ends[-1:])
        results = self._compute(rows, step.w1, step.w2, step.activation, ends)
        move_rows(results, None, rows, slots, ends[-1:])
        moe_fused_mul_sum(rows.view(*ids.shape, K), step.topk_weights, step.output, ids, step.expert_map)


class BatchedGroupedExperts(BatchedFormat, _GroupedExpertsBase):
    """BatchedExperts format, rows in place or by reference."""

    def run(self, step: Step) -> None:
        check_weights(step)
        counts, row_ids = step.batch.expert_num_tokens, step.batch.expert_row_ids
        max_rows, K = step.output.size(1), step.output.size(2)
        places, _, _ = batched_moe_align_block_size(max_rows, 1, counts)
        # No expert has more than all tokens that can come, and no token has more than topk experts.
        places = places[: max_rows * min(step.topk_ids.size(-1), counts.numel())]
        sources = places if row_ids is None else row_ids.view(-1)[places.clamp(max=row_ids.numel() - 1)]
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = step.hidden_states.new_empty(places.numel(), K)
        move_rows(step.hidden_states.reshape(-1, K), sources, rows, None, ends[-1:])
        results = self._compute(rows, step.w1, step.w2, step.activation, ends)
        move_rows(results, None, step.output.view(-1, K), places, ends[-1:])
