"""The experts in plain torch, the reference for all other implementations.

Nothing here is optimised. Weights are dequantized to f32 one expert at a time, the arithmetic is f32 throughout, and
the result is rounded once. It runs on CPUs and GPUs, for plain and quantized weights and every activation.

Weights are plain, w1 `[El, 2N, K]` (gate rows, then up rows; `[El, N, K]` if ungated) and w2 `[El, K, N]`, or in the
canonical quantized form: uint8 codes of the same shapes, with scales and zero points `[El, out, in / group_size]` in
the quant_config, and g_idx int32 `[El, in]` if the columns of a group are scattered (act-order).

With an `input_dtype` the rows and the activation's output are rounded to it, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from moe_ep.activation import apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.kernels.expert_formats import BatchedFormat, StandardFormat, Step, check_weights
from moe_ep.kernels.quantize import round_rows, row_values
from moe_ep.layer.custom_ops import without_autocast
from moe_ep.modular_kernel.contracts import FusedMoEPermuteExpertsUnpermute
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize
from moe_ep.quantization.input_rows import INPUT_DTYPES


class _ReferenceExpertsBase(FusedMoEPermuteExpertsUnpermute):
    """Computes one expert in f32; the two formats below select its rows."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        *,
        w13_g_idx: torch.Tensor | None = None,
        w2_g_idx: torch.Tensor | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config)
        self._g_idx = (w13_g_idx, w2_g_idx)

    @classmethod
    def depends_on_batch(cls, moe_config: FusedMoEConfig, device: torch.device) -> str | None:
        return None

    def _weight(self, weights: torch.Tensor, which: int, expert: int) -> torch.Tensor:
        """f32 `[out, in]` of one local expert; `which` is 0 for w13 and 1 for w2."""
        quant = self.quant_config
        if quant.quant_type_id is None:
            if not weights.is_floating_point():
                raise ValueError(
                    f"w{which + 1} is {weights.dtype} and quant_config has no quant_type_id, that is, weights are "
                    f"plain; give floats, or say what the codes are"
                )
            return weights[expert].float()
        scales, zero_points = ((quant.w1_scale, quant.w1_zp), (quant.w2_scale, quant.w2_zp))[which]
        type_id, group_size = quant.quant_type_id, quant.group_size
        if which == 1:
            type_id = type_id if quant.w2_quant_type_id is None else quant.w2_quant_type_id
            group_size = group_size if quant.w2_group_size is None else quant.w2_group_size
        alphas = (quant.g1_alphas, quant.g2_alphas)[which]
        g_idx = self._g_idx[which]
        if scales is None or group_size is None:
            raise ValueError(
                f"quant_config has quant_type_id {quant.quant_type_id} and lacks "
                f"{'group_size' if scales is not None else f'w{which + 1}_scale'}; quantized experts need both"
            )
        return dequantize(
            CanonicalWeights(
                codes=weights[expert],
                scales=scales[expert],
                zero_points=None if zero_points is None else zero_points[expert],
                g_idx=None if g_idx is None else g_idx[expert],
                quant_type_id=type_id,
                group_size=group_size,
                global_scales=None if alphas is None else alphas[expert].float(),
            )
        )

    @classmethod
    def refuses_input_dtype(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device, **kwargs: Any
    ) -> str | None:
        return None

    def may_round_rows(self) -> bool:
        return self.quant_config.input_dtype is not None

    def takes_quantized_rows(self) -> bool:
        # Rows that stay on their rank come as they are, and must have the same bits.
        return self.may_round_rows() and not self.moe_config.batch_invariant

    def _compute(self, rows: torch.Tensor, scales: torch.Tensor | None, step: Step, expert: int) -> torch.Tensor:
        """Runs rows `[n, K]` through one expert; returns f32 `[n, K]`."""
        quant = self.quant_config
        bias1, bias2 = (None if bias is None else bias[expert].float() for bias in (quant.w1_bias, quant.w2_bias))
        return compute_rows(
            rows,
            scales,
            lambda which: self._weight((step.w1, step.w2)[which], which, expert),
            (bias1, bias2),
            lambda hidden: apply_activation(step.activation, hidden, clamp_limit=self.moe_config.swiglu_limit),
            quant.input_dtype,
        )


def compute_rows(
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    weight: Callable[[int], torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activate: Callable[[torch.Tensor], torch.Tensor],
    input_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Runs rows `[n, K]` through one expert in f32; returns f32 `[n, K]`.

    With an input_dtype, int8 or e4m3, rows and the activation's output are rounded to it (`round_rows`): rows with one
    scale each, the activation's output with one for every 128 columns, as the kernels quantize them.

    Args:
        scales: f32 `[n, 1]` or `[n, ceil(K / 128)]` of rows that came in int8 or e4m3, which are computed as they came.
            Of rows in other dtypes they say nothing.
        weight: returns f32 `[out, in]` of w13 (0) and w2 (1).
        activate: the activation, of `[n, 2N]`, or `[n, N]` if it is ungated.
    """
    with without_autocast():
        if scales is not None and rows.dtype in INPUT_DTYPES:
            rows = row_values(rows, scales)
        else:
            rows = rows.float() if input_dtype is None else round_rows(rows, input_dtype, rows.size(1))
        hidden = activate(F.linear(rows, weight(0), biases[0]))
        hidden = hidden if input_dtype is None else round_rows(hidden, input_dtype)
        return F.linear(hidden, weight(1), biases[1])


class ReferenceExperts(StandardFormat, _ReferenceExpertsBase, unchecked=True):
    """Standard format: finds the rows of each local expert, computes them, and sums them weighted in expert order, or
    leaves slots, as in a batch-invariant layer."""

    def supports_cuda_graph(self) -> bool:
        return False

    def run(self, step: Step) -> None:
        check_weights(step)
        local_ids, scales = to_local_ids(step.topk_ids, step.expert_map), step.row_scales
        if self._leaves_slots():
            for expert in range(step.w1.size(0)):
                tokens, slots = (local_ids == expert).nonzero(as_tuple=True)
                if tokens.numel():
                    found = step.hidden_states[tokens], None if scales is None else scales[tokens]
                    step.output[tokens, slots] = self._compute(*found, step, expert).to(step.output.dtype)
            return
        total = torch.zeros(step.output.shape, dtype=torch.float32, device=step.output.device)
        for expert in range(step.w1.size(0)):
            chosen = local_ids == expert
            rows = chosen.any(dim=1).nonzero().flatten()
            if rows.numel():
                weight = torch.where(chosen, step.topk_weights, 0.0).sum(dim=1)[rows, None]
                found = step.hidden_states[rows], None if scales is None else scales[rows]
                total[rows] += weight * self._compute(*found, step, expert)
        step.output.copy_(total)


class BatchedReferenceExperts(BatchedFormat, _ReferenceExpertsBase, unchecked=True):
    """BatchedExperts format, rows in place or by reference; static shapes and no host synchronisation on a GPU."""

    def run(self, step: Step) -> None:
        check_weights(step)
        num_rows, row_ids = step.batch.expert_num_tokens, step.batch.expert_row_ids
        on_host = step.batch.expert_num_tokens_cpu if num_rows.is_cuda else num_rows
        for expert in range(step.w1.size(0)):
            bound = step.output.size(1) if on_host is None else int(on_host[expert])
            where: Any = (expert, slice(bound))
            if row_ids is not None:
                # Entries beyond the count are not row numbers.
                where = row_ids[expert, :bound].long().clamp(0, step.hidden_states.size(0) - 1)
            scales = None if step.row_scales is None else step.row_scales[where]
            result = self._compute(step.hidden_states[where], scales, step, expert)
            belongs = torch.arange(bound, device=num_rows.device) < num_rows[expert]
            target = step.output[expert, :bound]
            target.copy_(torch.where(belongs[:, None], result, target.float()))


def to_local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Converts global ids to local indices, int64 `[T, topk]`; -1, ids beyond the map, and every expert that is not
    local become -1."""
    ids = topk_ids.long()
    if expert_map is None:
        return ids
    exists = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(exists, expert_map.long()[torch.where(exists, ids, 0)], -1)
