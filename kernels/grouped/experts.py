"""Experts with plain weights on GPUs: rows are listed by expert, one product computes w13 of all experts and the
activation, and another one w2. Many rows an expert take torch's products where those are one kernel.

Row counts stay on the device, and shapes follow from the largest possible number of rows, so passes can be captured.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, gate_limit
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.kernels.align import batched_moe_align_block_size, moe_align_block_size, sort_slots_by_expert
from moe_ep.kernels.expert_formats import BatchedFormat, StandardFormat, Step, check_weights, wide_dtype
from moe_ep.kernels.grouped.products import (
    Activation,
    Blocks,
    multiply_into_order,
    multiply_into_places,
    rows_of_blocks,
)
from moe_ep.kernels.grouped.rows import activate_rows, move_rows
from moe_ep.kernels.mul_sum import moe_fused_mul_sum
from moe_ep.modular_kernel.contracts import FusedMoEPermuteExpertsUnpermute
from moe_ep.quantization.canonical_weights import CanonicalWeights

_DTYPES = (torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)
# From so many rows an expert on torch's grouped product is faster, all copies counted
# (docs/benchmarks/experts.md).
MANY_ROWS = 192
# Rows of a block in a batch-invariant layer, whatever comes: a tile of so many is still bound by memory where few rows
# an expert come, and computes at a good rate where many do.
_INVARIANT_ROWS = 64
# Buffers of a fixed capacity are seldom full: one row in so many is expected to be there.
_ROOM_FOR_A_ROW = 4


class _GroupedExpertsBase(FusedMoEPermuteExpertsUnpermute):
    """Both products and the activation, on rows that are listed by expert; each format lists them in its own way."""

    @classmethod
    def unusable_reason(cls) -> str | None:
        if not torch.cuda.is_available():
            return "there is no GPU; plain weights run experts='reference'"
        if torch.version.hip is not None:
            return "the kernels are for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability()
        if capability < _MIN_CAPABILITY:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}; 8.0 (A100) or newer is needed"
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
        if moe_config.in_dtype not in _DTYPES:
            return f"the activations are {moe_config.in_dtype}; they take {' or '.join(map(str, _DTYPES))}"
        if moe_config.num_local_experts == 0:
            return "this rank has no experts"
        return cls.unusable_reason()

    @classmethod
    def depends_on_batch(cls, moe_config: FusedMoEConfig, device: torch.device) -> str | None:
        return None

    def _rows_of_blocks(self, rows_per_expert: float) -> int:
        """How many rows a block has where experts have so many on average; it decides how products are computed."""
        return _INVARIANT_ROWS if self.moe_config.batch_invariant else rows_of_blocks(rows_per_expert)

    @staticmethod
    def _check(step: Step) -> None:
        """ValueError for weights of other shapes or dtypes than the rows', or rows that the products do not take."""
        check_weights(step)
        dtypes = [step.hidden_states.dtype, step.w1.dtype, step.w2.dtype]
        if dtypes[1:] != dtypes[:1] * 2 or (step.hidden_states.is_cuda and dtypes[0] not in _DTYPES):
            raise ValueError(
                f"hidden_states, w1 and w2 are {', '.join(map(str, dtypes))}; all three must be of one dtype, "
                f"{' or '.join(map(str, _DTYPES))} on a GPU; experts='reference' computes others"
            )

    def _compute(
        self,
        step: Step,
        rows: torch.Tensor,
        row_ids: torch.Tensor | None,
        places_per_row: int,
        blocks: Blocks,
        output: torch.Tensor,
    ) -> None:
        """Writes the results of rows `[*, K]` to their places in the output, `[num_places, K]`."""
        if not blocks.most:
            return
        w1, w2, quant = step.w1.contiguous(), step.w2.contiguous(), self.quant_config
        hidden = rows.new_empty(blocks.most, w2.size(2), dtype=wide_dtype(rows.dtype))
        activation = _activation(step, self.moe_config)
        multiply_into_order(rows, row_ids, places_per_row, w1, quant.w1_bias, activation, blocks, hidden)
        multiply_into_places(hidden, w2, quant.w2_bias, blocks, output)


class GroupedExperts(StandardFormat, _GroupedExpertsBase, unchecked=True):
    """Standard format: computes each slot of the local experts, and sums the slots of a token weighted in order.

    In a batch-invariant layer it leaves the slots to the token's rank, and beside a combine that sums slots to that.
    """

    def run(self, step: Step) -> None:
        self._check(step)
        ids, num_experts, K = step.topk_ids, step.w1.size(0), step.hidden_states.size(1)
        num_ids = num_experts if step.expert_map is None else step.expert_map.numel()
        rows_per_expert = ids.numel() / num_ids
        leaves_slots, many = self._leaves_slots(), rows_per_expert >= MANY_ROWS and not self.moe_config.batch_invariant
        if leaves_slots:
            results = step.output.view(ids.numel(), K)
        else:
            results = step.hidden_states.new_empty(ids.numel(), K, dtype=wide_dtype(step.hidden_states.dtype))
        if many and can_multiply(step.hidden_states, step.w2):
            compute_slots(step, self.quant_config, _activation(step, self.moe_config), results)
        else:
            size = self._rows_of_blocks(rows_per_expert)
            places, experts, used = moe_align_block_size(
                ids, size, num_ids, step.expert_map, pad_sorted_ids=True, ignore_invalid_experts=True
            )
            blocks = _blocks(places, experts, used, size, ids.numel(), ids.numel(), num_experts)
            self._compute(step, step.hidden_states, None, ids.size(1), blocks, results)
        if not leaves_slots:
            moe_fused_mul_sum(results.view(*ids.shape, K), step.topk_weights, step.output, ids, step.expert_map)


class BatchedGroupedExperts(BatchedFormat, _GroupedExpertsBase, unchecked=True):
    """BatchedExperts format, rows in place or by reference."""

    def run(self, step: Step) -> None:
        self._check(step)
        counts, row_ids = step.batch.expert_num_tokens, step.batch.expert_row_ids
        num_experts, max_rows, K = step.output.shape
        # No expert has more than all tokens that can come, and no token has more than topk experts.
        top_k = step.topk_ids.size(-1)
        most_rows = max(max_rows, self._max_rows) * top_k
        size = self._rows_of_blocks(most_rows / self.moe_config.global_num_experts / _ROOM_FOR_A_ROW)
        places, experts, used = batched_moe_align_block_size(max_rows, size, counts)
        most = max_rows * min(top_k, num_experts)
        blocks = _blocks(places, experts, used, size, num_experts * max_rows, most, num_experts)
        rows = step.hidden_states.reshape(-1, K)
        ids = None if row_ids is None else row_ids.view(-1)
        self._compute(step, rows, ids, 1, blocks, step.output.view(-1, K))


def _activation(step: Step, config: FusedMoEConfig) -> Activation:
    name = MoEActivation.parse(step.activation)
    return Activation(name, gate_limit(name, config.swiglu_limit))


def _blocks(
    places: torch.Tensor,
    experts: torch.Tensor,
    used: torch.Tensor,
    size: int,
    num_places: int,
    most_rows: int,
    num_experts: int,
) -> Blocks:
    """Every expert pads its rows to whole blocks."""
    most = min(places.numel(), -(-(most_rows + num_experts * (size - 1)) // size) * size)
    return Blocks(places, experts, used, size, num_places, most)


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


def compute_slots(step: Step, quant: FusedMoEQuantConfig, activation: Activation, results: torch.Tensor) -> None:
    """Writes the results `[T * topk, K]` of the slots that local experts compute, unweighted, and no others."""
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
    activate_rows(activation.name, gate_up, hidden, ends[-1:], activation.limit)
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
