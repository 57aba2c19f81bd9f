"""Packed 4- and 8-bit experts for the modular kernel, one class for each activation format.

Scratch of a pass: `workspace2` holds the activation's output (N values per row), `workspace13` the partial sums of
tiles that several CTAs share, at most 35 MB. In the Standard format, or for f16 activations, workspace13 also holds one
row of K values per slot. Gate and up need no scratch, because they never leave the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.kernels import jit
from moe_ep.kernels.arrival import PeerBuild
from moe_ep.kernels.expert_formats import BatchedFormat, Shape, StandardFormat, Step, wide_dtype
from moe_ep.kernels.marlin import eight_bit, hopper
from moe_ep.kernels.marlin.checks import (
    batched_shape,
    check_batch,
    check_output,
    check_scratch,
    check_tokens,
    check_weight_pair,
)
from moe_ep.kernels.marlin.compute import (
    compute_arriving,
    compute_batch,
    compute_deferred,
    compute_peers,
    compute_slots,
    compute_tokens,
    partials_numel,
)
from moe_ep.kernels.marlin.repack import has_all_groups, inexact_scales_reason, not_packed_reason, pack_experts
from moe_ep.kernels.marlin.types import ACTIVATION_DTYPES, check_input_dtype, weight_type
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import check_row_scales
from moe_ep.modular_kernel.contracts import Compilation, ExpertWeights, FusedMoEPermuteExpertsUnpermute
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.quantization.input_rows import dtype_name
from moe_ep.scalar_type import ScalarType

_SCRATCH = ("workspace13", "workspace2")


class _MarlinExpertsBase(FusedMoEPermuteExpertsUnpermute):
    """Base of both formats: handles the scales and other tensors of the weights, and the problem size."""

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        *,
        w13_g_idx: torch.Tensor | None = None,
        w2_g_idx: torch.Tensor | None = None,
        w13_g_idx_sort_indices: torch.Tensor | None = None,
        w2_g_idx_sort_indices: torch.Tensor | None = None,
        is_k_full: bool = True,
    ) -> None:
        super().__init__(moe_config, quant_config)
        quant = self.quant_config
        if quant.quant_type_id is None or quant.w1_scale is None or quant.w2_scale is None:
            raise ValueError(
                "quant_config lacks quant_type_id, w1_scale or w2_scale; packed experts need all three, choose "
                "experts='reference' for plain weights"
            )
        if quant.w2_quant_type_id not in (None, quant.quant_type_id):
            raise ValueError(
                f"quant_config has quant_type_id {quant.quant_type_id} and w2_quant_type_id {quant.w2_quant_type_id}; "
                f"packed experts compute both matrices in one type, choose experts='reference'"
            )
        is_k_full = is_k_full and all(
            has_all_groups(size, scales.size(1), columns)
            for size, scales, columns in (
                (quant.group_size, quant.w1_scale, moe_config.hidden_dim),
                (quant.w2_group_size, quant.w2_scale, moe_config.intermediate_size_per_partition),
            )
        )
        self._kind, self._is_k_full = weight_type(quant.quant_type_id), is_k_full
        # Scales, zero points, biases, global scales, g_idx and sort indices of each GEMM.
        self._companions = (
            (quant.w1_scale, quant.w1_zp, quant.w1_bias, quant.g1_alphas, w13_g_idx, w13_g_idx_sort_indices),
            (quant.w2_scale, quant.w2_zp, quant.w2_bias, quant.g2_alphas, w2_g_idx, w2_g_idx_sort_indices),
        )
        for scales in (quant.w1_scale, quant.w2_scale):
            check_input_dtype(self._kind, scales.dtype, moe_config.in_dtype, quant.input_dtype)
        self._pair: WeightPair | None = None
        self._device = quant.w1_scale.device

    @classmethod
    def unusable_reason(cls) -> str | None:
        return jit.unusable_reason()

    @classmethod
    def refuses(
        cls, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
    ) -> str | None:
        if not weights:
            return "they take quantized weights and these are plain"
        if device.type != "cuda":
            return f"the weights are on {device}, and the packed kernels run on a GPU"
        if moe_config.in_dtype not in ACTIVATION_DTYPES:
            return f"the activations are {moe_config.in_dtype}; they take {' or '.join(map(str, ACTIVATION_DTYPES))}"
        if moe_config.num_local_experts == 0:
            return "this rank has no experts"
        types = [str(ScalarType.from_id(part.quant_type_id)) for part in weights]
        if len(set(types)) > 1:
            return f"w13 and w2 are of two types ({' and '.join(types)}) and one kernel computes both"
        gated = (MoEActivation.parse(moe_config.activation).is_gated, False)
        for part, is_gated in zip(weights, gated, strict=True):
            reason = not_packed_reason(part, 64 if is_gated else 32)
            reason = reason or inexact_scales_reason(part, moe_config.in_dtype, is_gated)
            if reason is not None:
                return reason
        return cls.unusable_reason()

    @classmethod
    def refuses_input_dtype(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device, **kwargs: Any
    ) -> str | None:
        quant, dtype = quant_config, quant_config.input_dtype
        if device.type != "cuda" or dtype is None or quant.quant_type_id is None:
            return None
        groups = (quant.w1_scale.size(1), quant.w2_scale.size(1))  # type: ignore[union-attr]
        has_act_order = any(value is not None for name, value in kwargs.items() if "g_idx" in name)
        refusal = cls.refuses_eight_bit_rows(moe_config, dtype, device, groups, has_act_order)
        capability = jit.capability(device.index or 0)
        if refusal is None and quant.faster_rows_only and not eight_bit.is_faster(capability):
            refusal = (
                f"{dtype_name(dtype)} rows were not measured to be faster on a GPU of compute capability "
                f"{capability[0]}.{capability[1]}; name the dtype to take them"
            )
        return refusal

    @classmethod
    def refuses_eight_bit_rows(
        cls,
        moe_config: FusedMoEConfig,
        dtype: torch.dtype,
        device: torch.device,
        groups: tuple[int, int],
        has_act_order: bool,
    ) -> str | None:
        """Why no kernel for this GPU can compute the layer with 8-bit rows; None if one can.

        Args:
            groups: the numbers of scale groups in w13 and w2.
        """
        if device.type != "cuda":
            return None
        if moe_config.batch_invariant:
            return "batch_invariant is set, and on a GPU the number of rows decides whether they are rounded"
        if moe_config.num_local_experts > hopper.MOST_EXPERTS:
            return f"there are {moe_config.num_local_experts} experts on a rank; 8-bit rows take {hopper.MOST_EXPERTS}"
        return eight_bit.unfit_reason(
            dtype,
            jit.capability(device.index or 0),
            MoEActivation.parse(moe_config.activation),
            (moe_config.hidden_dim, moe_config.intermediate_size_per_partition),
            groups,
            has_act_order,
        )

    @classmethod
    def depends_on_batch(cls, moe_config: FusedMoEConfig, device: torch.device) -> str | None:
        if device.type != "cuda":
            return None
        if not hopper.runs_on(device):
            return "the packed kernels of GPUs other than Hopper choose their tiles by the number of rows"
        if moe_config.in_dtype is torch.float16:
            return "experts are computed again in bf16 where one of their f16 results is out of range; use bf16"
        if moe_config.num_local_experts > hopper.MOST_EXPERTS:
            return f"there are {moe_config.num_local_experts} experts a rank, above {hopper.MOST_EXPERTS}"
        return None

    @classmethod
    def compilations(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device
    ) -> Sequence[Compilation]:
        scales, size = quant_config.w1_scale, quant_config.group_size
        if quant_config.quant_type_id is None or scales is None or size is None or cls.unusable_reason() is not None:
            return ()
        if not hopper.runs_on(device):
            return ()
        sizes = (moe_config.num_local_experts, moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        activation = MoEActivation.parse(moe_config.activation)
        kind = weight_type(quant_config.quant_type_id)
        # Among mxfp4 weights, only those packed for 8-bit rows have a tensor in place of zero points.
        if not kind.has_zero_points and quant_config.w1_zp is not None:
            kind = kind.packed_for(size, torch.float8_e4m3fn)
        numbers = (kind, moe_config.in_dtype, scales.dtype, size, activation)
        sources = hopper.kernel_sources(*numbers, sizes, moe_config.swiglu_limit, moe_config.batch_invariant)
        if moe_config.in_dtype is torch.float16:  # results out of range are computed again by the bf16 kernels
            return [*sources, *cls.compilations(replace(moe_config, in_dtype=torch.bfloat16), quant_config, device)]
        return sources

    @classmethod
    def pack_weights(
        cls,
        w13: CanonicalWeights,
        w2: CanonicalWeights,
        moe_config: FusedMoEConfig,
        input_dtype: torch.dtype | None = None,
    ) -> tuple[ExpertWeights, ExpertWeights]:
        gated = MoEActivation.parse(moe_config.activation).is_gated
        if input_dtype is not None:
            groups = (w13.scales.size(2), w2.scales.size(2))
            has_act_order = w13.g_idx is not None or w2.g_idx is not None
            if cls.refuses_eight_bit_rows(moe_config, input_dtype, w13.codes.device, groups, has_act_order) is not None:
                input_dtype = None
        return pack_experts(w13, w2, moe_config.in_dtype, gated, moe_config.has_bias, input_dtype)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Returns (E, M, N, K, topk); N is the intermediate size, 16 times the second dimension of packed w2."""
        M = a1.size(1) if a1.dim() == 3 else a1.size(0)
        return w1.size(0), M, w2.size(1) * 16, a1.size(-1), topk_ids.size(-1)

    def _weights(
        self, w1: torch.Tensor, w2: torch.Tensor, activation: MoEActivation | str, act_dtype: torch.dtype
    ) -> WeightPair:
        """Returns the weights with their scales and other tensors, checked only if they changed since the last pass."""
        pair = self._pair
        if (
            pair is None
            or pair.w13.qweight is not w1
            or pair.w2.qweight is not w2
            or pair.activation != activation
            or pair.act_dtype != act_dtype
        ):
            act = MoEActivation.parse(activation)
            first, second = self._companions
            parts = ((w1, *first), (w2, *second))
            limit = self.moe_config.swiglu_limit
            pair = self._pair = check_weight_pair(
                self._kind, act, act_dtype, self._is_k_full, *parts, limit, self.quant_config.input_dtype
            )
            pair.batch_invariant = self.moe_config.batch_invariant
        return pair

    def takes_quantized_rows(self) -> bool:
        return self.may_round_rows() and not self.moe_config.batch_invariant

    def _rows(self, step: Step) -> tuple[torch.Tensor, torch.dtype]:
        """Returns the rows and the activations' dtype; raises ValueError for quantized rows that are not supported."""
        rows, scales = step.hidden_states, step.row_scales
        if scales is None:
            return rows, rows.dtype
        if not self.takes_quantized_rows() or rows.dtype != self.quant_config.input_dtype:
            raise ValueError(
                f"a1q_scale comes with rows of {rows.dtype}; these experts take rows of their input_dtype "
                f"({self.quant_config.input_dtype}), on a GPU not in batches: dequantize them before"
            )
        check_row_scales(rows, scales)
        return rows, self.moe_config.in_dtype

    def _output_dtype(self, step: Step, act_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype that the output must have; f32 is accepted if the modular kernel may ask for it."""
        wide = wide_dtype(act_dtype)
        return wide if self.supports_f32_output() and step.output.dtype == wide else act_dtype

    def _partials(self, max_rows: int) -> int:
        """Returns the scratch size for shared tiles, in elements of the activations' dtype."""
        return 2 * partials_numel(max_rows, self._device) if self._device.type == "cuda" else 0


class BatchedMarlinExperts(BatchedFormat, _MarlinExpertsBase, unchecked=True):
    """BatchedExperts format, rows in place or by reference; no host synchronization, CUDA-graph capturable.

    Args:
        moe_config: shapes, and the activations' dtype, bf16 or f16.
        quant_config: quant_type_id, and the scales and other tensors as repack.pack_marlin returns them; group sizes
            follow from the shapes of the scales.
        max_num_tokens, num_dispatchers: see BatchedFormat.
        w13_g_idx, w2_g_idx, w13_g_idx_sort_indices, w2_g_idx_sort_indices, is_k_full: act-order, as the arguments of
            functional.batched_fused_marlin_moe.

    Raises:
        ValueError: number type or scales are missing, or the two matrices have different types.
    """

    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
        w13_g_idx: torch.Tensor | None = None,
        w2_g_idx: torch.Tensor | None = None,
        w13_g_idx_sort_indices: torch.Tensor | None = None,
        w2_g_idx_sort_indices: torch.Tensor | None = None,
        is_k_full: bool = True,
    ) -> None:
        super().__init__(
            moe_config,
            quant_config,
            max_num_tokens,
            num_dispatchers,
            w13_g_idx=w13_g_idx,
            w2_g_idx=w2_g_idx,
            w13_g_idx_sort_indices=w13_g_idx_sort_indices,
            w2_g_idx_sort_indices=w2_g_idx_sort_indices,
            is_k_full=is_k_full,
        )

    def may_round_rows(self) -> bool:
        return self.quant_config.input_dtype is not None and self._device.type != "cuda"

    def scratch_shapes(self, num_experts: int, max_rows: int, N: int) -> tuple[Shape, Shape]:
        numel = self._partials(max_rows)
        if self._device.type == "cuda" and self.moe_config.in_dtype is torch.float16:
            # Results, before those out of range are computed again.
            numel = -(-numel // 128) * 128 + num_experts * max_rows * self.moe_config.hidden_dim
        return (numel,), (num_experts * max_rows, N)

    def combines_batches(self, build: PeerBuild) -> bool:
        if not self._may_combine:
            return False
        is_loaded = self._pair is not None and hopper.has_peers_kernel(self._pair, build)
        return is_loaded or not torch.cuda.is_current_stream_capturing()

    @functools.cached_property
    def _may_combine(self) -> bool:
        config = self.moe_config
        groups = [scales.size(1) for scales, *_ in self._companions]  # type: ignore[union-attr]
        columns = (config.hidden_dim, config.intermediate_size_per_partition)
        return (
            hopper.runs_on(self._device)
            and config.in_dtype is torch.bfloat16
            and not config.batch_invariant
            and config.num_local_experts <= hopper.MOST_EXPERTS
            and not any(tensor is not None for companions in self._companions for tensor in companions[4:])
            and hopper.have_one_spacing(columns, (groups[0], groups[1]))
        )

    def run(self, step: Step) -> None:
        if step.peers is not None:
            pair = self._weights(step.w1, step.w2, step.activation, self.moe_config.in_dtype)
            compute_peers(pair, step)
            return
        counts, row_ids = step.batch.expert_num_tokens, step.batch.expert_row_ids
        rows, act_dtype = self._rows(step)
        pair = self._weights(step.w1, step.w2, step.activation, act_dtype)
        check_batch(pair, rows, counts, row_ids)
        shape = batched_shape(pair, rows, row_ids)
        check_output(step.output, shape, rows, self._output_dtype(step, act_dtype))
        check_scratch(pair, rows, shape[0] * shape[1], shape[1], _SCRATCH, *step.scratch)
        # The tokens of all ranks choose top-k of all experts. A backend's buffers may have room for fewer tokens.
        most_rows = max(step.output.size(1), self._max_rows) * step.topk_ids.size(-1)
        expected_m = most_rows / self.moe_config.global_num_experts
        given = (pair, step.output, rows, counts, row_ids, step.scratch, expected_m, most_rows)
        compute_batch(*given, stays_in_range=True, row_scales=step.row_scales)


class MarlinExperts(StandardFormat, _MarlinExpertsBase, unchecked=True):
    """Standard format: gathers the rows of each local expert, computes them, and sums them weighted in slot order. In a
    batch-invariant layer it leaves the sum to the token's rank, and with a combine that sums slots to that combine.

    Arguments and errors are those of BatchedMarlinExperts without max_num_tokens and num_dispatchers. Rows are rounded
    to `quant_config.input_dtype` where functional.fused_marlin_moe rounds them.
    """

    def may_round_rows(self) -> bool:
        dtype = self.quant_config.input_dtype
        if dtype is None or self._device.type != "cuda":
            return dtype is not None
        return eight_bit.has_kernel(dtype, jit.capability(self._device.index or 0))

    def most_deferred_tokens(self) -> int:
        config = self.moe_config
        slots = config.experts_per_token + config.num_fused_shared_experts
        return hopper.most_routed_tokens(slots) if hopper.runs_on(self._device) else 0

    def refuses_overlap(self) -> str | None:
        config, quant = self.moe_config, self.quant_config
        if not hopper.runs_on(self._device):
            return f"the weights are on {self._device}, and the kernel that waits for rows is for Hopper"
        if config.num_local_experts > hopper.MOST_EXPERTS:
            return f"there are {config.num_local_experts} experts on a rank; the kernel takes {hopper.MOST_EXPERTS}"
        reasons = (
            (config.in_dtype is not torch.bfloat16, f"rows are {config.in_dtype} and must be torch.bfloat16"),
            (
                quant.input_dtype is not None,
                f"rows are rounded to {quant.input_dtype} and must stay as they are; leave input_dtype out",
            ),
            (any(part[5] is not None for part in self._companions), "act-order reorders all rows before"),
            (config.batch_invariant, "a batch-invariant layer has a kernel of its own"),
        )
        return next((reason for holds, reason in reasons if holds), None)

    def scratch_shapes(self, num_slots: int, N: int, K: int) -> tuple[Shape, Shape]:
        slots = -(-num_slots * K // 128) * 128 if not self._sums_are_left else 0
        more = self._partials(num_slots)
        if self.may_round_rows() and self._device.type == "cuda":
            more = max(
                more, eight_bit.scratch_layout(self.moe_config.num_local_experts, num_slots, K, N).num_bytes // 2
            )
        return (slots + more,), (num_slots, N)

    def run(self, step: Step) -> None:
        (rows, act_dtype), weights, ids = self._rows(step), step.topk_weights, step.topk_ids
        pair = self._weights(step.w1, step.w2, step.activation, act_dtype)
        check_tokens(pair, rows, weights, ids, step.expert_map)
        shape = (*ids.shape, rows.size(1)) if self._leaves_slots() else rows.shape
        check_output(step.output, shape, rows, self._output_dtype(step, act_dtype))
        check_scratch(pair, rows, ids.numel(), ids.numel() if self._sums_are_left else None, _SCRATCH, *step.scratch)
        if step.deferred is not None:
            fits = step.output.dtype == act_dtype and step.row_scales is None and not self._leaves_slots()
            if fits and compute_deferred(pair, step):
                return
            step.deferred.settle()
        if step.arrival is not None:
            compute_arriving(pair, step)
        elif self.moe_config.batch_invariant:
            compute_slots(pair, step)
        else:
            given = (pair, step.output, rows, weights, ids, step.expert_map, step.scratch)
            compute_tokens(*given, row_scales=step.row_scales)
