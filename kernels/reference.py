"""The experts in plain torch, the reference for all other implementations.

Nothing here is optimised. Weights are dequantized to f32 one expert at a time, the arithmetic is f32 throughout, and
the result is rounded once. It runs on CPUs and GPUs, for plain and quantized weights and every activation.

Weights are plain, w1 `[El, 2N, K]` (gate rows, then up rows; `[El, N, K]` if ungated) and w2 `[El, K, N]`, or in the
canonical quantized form: uint8 codes of the same shapes, with scales and zero points `[El, out, in / group_size]` in
the quant_config, and g_idx int32 `[El, in]` if the columns of a group are scattered (act-order).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ep.activation import apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.kernels.expert_formats import BatchedFormat, StandardFormat, Step, check_weights
from moe_ep.layer.custom_ops import without_autocast
from moe_ep.modular_kernel.contracts import FusedMoEPermuteExpertsUnpermute
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize


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

    def _compute(self, rows: torch.Tensor, step: Step, expert: int) -> torch.Tensor:
        """Runs rows `[n, K]` through one expert; returns f32 `[n, K]`."""
        bias1, bias2 = self.quant_config.w1_bias, self.quant_config.w2_bias
        w1, w2 = self._weight(step.w1, 0, expert), self._weight(step.w2, 1, expert)
        with without_autocast():
            hidden = F.linear(rows.float(), w1, None if bias1 is None else bias1[expert].float())
            hidden = apply_activation(step.activation, hidden, clamp_limit=self.moe_config.swiglu_limit)
            return F.linear(hidden, w2, None if bias2 is None else bias2[expert].float())


class ReferenceExperts(StandardFormat, _ReferenceExpertsBase, unchecked=True):
    """Standard format: finds the rows of each local expert, computes them, and sums them weighted in expert order."""

    def supports_cuda_graph(self) -> bool:
        return False

    def run(self, step: Step) -> None:
        check_weights(step)
        local_ids = to_local_ids(step.topk_ids, step.expert_map)
        total = torch.zeros(step.output.shape, dtype=torch.float32, device=step.output.device)
        for expert in range(step.w1.size(0)):
            chosen = local_ids == expert
            rows = chosen.any(dim=1).nonzero().flatten()
            if rows.numel():
                weight = torch.where(chosen, step.topk_weights, 0.0).sum(dim=1)[rows, None]
                total[rows] += weight * self._compute(step.hidden_states[rows], step, expert)
        step.output.copy_(total)


class BatchedReferenceExperts(BatchedFormat, _ReferenceExpertsBase, unchecked=True):
    """BatchedExperts format, rows in place or by reference; static shapes and no host synchronisation on a GPU."""

    def run(self, step: Step) -> None:
        check_weights(step)
        num_rows, row_ids = step.batch.expert_num_tokens, step.batch.expert_row_ids
        on_host = step.batch.expert_num_tokens_cpu if num_rows.is_cuda else num_rows
        for expert in range(step.w1.size(0)):
            bound = step.output.size(1) if on_host is None else int(on_host[expert])
            if row_ids is None:
                rows = step.hidden_states[expert, :bound]
            else:
                # Entries beyond the count are not row numbers.
                rows = step.hidden_states[row_ids[expert, :bound].long().clamp(0, step.hidden_states.size(0) - 1)]
            result = self._compute(rows, step, expert)
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
