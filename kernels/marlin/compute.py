"""Computes the experts from arguments that were checked: in plain torch on the CPU, with kernels on a GPU.

Hopper has its own kernels (hopper.py). Other GPUs from sm_80 on, and Hopper for cases that its own kernels do not
support, run those of ampere.py. Where rows may be rounded, both have those of eight_bit.py. All read the same packed
layout.

The kernels write 16-bit numbers, and beside f16 gate times up or an expert's own result may exceed 65504. So behind
every f16 launch comes another one in bf16, for the experts (batched rows) or tokens whose results are not finite. Its
row counts are zero where all are, and then it ends at once; it costs f16 layers some launches and bf16 layers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from moe_ep.errors import BackendUnavailableError, ConfigError
from moe_ep.kernels.align import sort_slots_by_expert
from moe_ep.kernels.dispatch_rows import row_blocks
from moe_ep.kernels.expert_formats import Step, wide_dtype
from moe_ep.kernels.marlin import ampere, eight_bit, hopper
from moe_ep.kernels.marlin.params import Rows, experts_params
from moe_ep.kernels.marlin.plain import ActivationFunction, compute_expert
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.mul_sum import mul_sum
from moe_ep.kernels.quantize import dequantize_codes
from moe_ep.kernels.reference import to_local_ids
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, tl
from moe_ep.registry import operator

_OLDEST = (8, 0)
_ALIGNMENT = 16  # bytes that kernels read at once


def partials_numel(max_rows: int, device: torch.device) -> int:
    """The f32 numbers of scratch that a launch needs in addition to the activation's output."""
    return (hopper if hopper.runs_on(device) else ampere).partials_numel(max_rows, device)


def takes_eight_bit(pair: WeightPair, rows: Rows) -> bool:
    """Whether the experts multiply rows of 8 bits, for which `partials` has eight_bit.scratch_bytes."""
    return rows.is_sorted and rows.expected_m is not None and eight_bit.pays(pair, rows.expected_m)


def run_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: WeightPair,
    rows: Rows,
    hidden: torch.Tensor,
    partials: torch.Tensor,
    ampere_only: bool = False,
    row_scales: torch.Tensor | None = None,
) -> None:
    """Computes every expert's rows. The caller has checked all arguments, and all are on one GPU.

    Args:
        output: `[E, max_rows, K]`, or `[num_ids, K]` if rows are sorted.
        hidden_states: rows of K numbers; may be `output`.
        hidden: scratch for the activation's output, N numbers per row.
        partials: f32 scratch of partials_numel numbers.
        ampere_only: do not use Hopper's own kernels, so that tests can run those of other GPUs on it.
        row_scales: of rows that were sent in 8 bits, where `takes_eight_bit`.

    Raises:
        BackendUnavailableError: the GPU is older than sm_80.
        ValueError: a tensor that does not begin at a multiple of 16 bytes.
    """
    pair.once(_check_starts)
    _check_start("intermediate_cache13", partials)
    _check_start("intermediate_cache2", hidden)
    if row_scales is None:
        _check_start("hidden_states", hidden_states)
    _check_start("output", output)
    if pair.batch_invariant and not pair.once(_hopper_serves):
        raise BackendUnavailableError(
            "batch_invariant is set and Hopper's kernels cannot compute these experts (act-order in w2, or scales with "
            "two spacings); choose experts='reference', or leave it out"
        )
    if takes_eight_bit(pair, rows):
        eight_bit.run(output, hidden_states, pair, rows, partials, row_scales, ampere_only)
        return
    if ampere_only or not pair.once(_hopper_serves):
        ampere.launch(output, hidden_states, pair, rows, hidden, partials)
        return
    hidden_states, rows = ampere.in_packed_order(output, hidden_states, pair.w13, rows)
    hopper.launch(experts_params(hidden_states, hidden, output, pair, rows), pair, partials, rows)


def _check_starts(pair: WeightPair) -> None:
    for which, weights in enumerate((pair.w13, pair.w2), start=1):
        for name, tensor in (("", weights.qweight), ("_scale", weights.scales), ("_zeros", weights.zeros)):
            if tensor is not None:
                _check_start(f"w{which}{name}", tensor)


def _check_start(name: str, tensor: torch.Tensor) -> None:
    if tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{name} does not begin at a multiple of {_ALIGNMENT} bytes; pass a copy of it")


def _hopper_serves(pair: WeightPair) -> bool:
    """Whether Hopper's own kernels can compute this: groups in order and with one spacing, w2's columns in the order of
    w13's rows, and not too many experts. BackendUnavailableError on GPUs for which there are no kernels."""
    capability, w13, w2 = torch.cuda.get_device_capability(pair.device), pair.w13, pair.w2
    if capability < _OLDEST:
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(pair.device)} has compute capability {capability[0]}.{capability[1]}; packed "
            f"experts need 8.0 (A100) or newer, choose experts='reference' on this GPU"
        )
    if not hopper.runs_on(pair.device) or w2.sort_indices is not None or pair.num_experts > hopper.MOST_EXPERTS:
        return False
    return w13.has_regular_groups and w2.has_regular_groups and hopper.have_one_spacing(pair.columns, pair.groups)


SumFunction = Callable[[torch.Tensor, torch.Tensor], None]
Scratch = tuple[torch.Tensor | None, torch.Tensor | None]  # intermediate_cache13 and intermediate_cache2


def compute_batch(
    pair: WeightPair,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    expert_row_ids: torch.Tensor | None,
    scratch: Scratch,
    expected_m: float | None = None,
    most_rows: int | None = None,
    stays_in_range: bool = False,
    row_scales: torch.Tensor | None = None,
) -> None:
    """`batched_fused_marlin_moe` into `output` `[El, max_tokens, K]`; for expected_m and most_rows see Rows.

    Args:
        stays_in_range: beside f16, `output` may be f32, does not share memory with hidden_states, and experts are
            computed again in bf16 where their results are not finite.
        row_scales: of rows that came quantized, on the CPU (reference.compute_rows).
    """
    num_experts, max_rows = output.size(0), output.size(1)
    if max_rows == 0 or num_experts == 0:
        return
    if hidden_states.is_cuda:
        rows = Rows(expert_num_tokens, max_rows, expert_row_ids, expected_m=expected_m, most_rows=most_rows)
        hidden = _part_of(scratch[1], num_experts * max_rows * pair.w2.num_columns, hidden_states)
        partials = _partials(scratch[0], max_rows, hidden_states)
        if not stays_in_range or hidden_states.dtype is not torch.float16:
            run_experts(output, hidden_states, pair, rows, hidden, partials)
            return
        used = -(-2 * partials.numel() // 128) * 128
        results = _part_of(scratch[0], output.numel(), hidden_states, used).view(output.shape)
        run_experts(results, hidden_states, pair, rows, hidden, partials)
        _finish_in_range(pair, output, hidden_states, rows, results, hidden, partials)
        return
    for expert in range(num_experts):
        count = min(int(expert_num_tokens[expert]), max_rows)
        where: Any = (expert, slice(count)) if expert_row_ids is None else expert_row_ids[expert, :count].long()
        scales = None if row_scales is None else row_scales[where]
        output[expert, :count] = compute_expert(hidden_states[where], pair, expert, scales=scales)


def compute_tokens(
    pair: WeightPair,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    scratch: Scratch,
    activation_func: ActivationFunction | None = None,
    moe_sum: SumFunction | None = None,
    row_scales: torch.Tensor | None = None,
) -> None:
    """`fused_marlin_moe` into `output` `[T, K]`, with weights on the output.

    Args:
        output: `[T, topk, K]` gets the slots of local experts alone, neither weighted nor summed; not in f16.
        row_scales: of rows that came quantized (reference.compute_rows). On a GPU they are converted back where experts
            do not multiply rows of 8 bits, or rows have several scales.
    """
    num_tokens, topk = topk_ids.shape
    if num_tokens == 0:
        return
    leaves_slots, shape = output.dim() == 3, (num_tokens, topk, pair.w13.num_columns)
    if activation_func is not None or not hidden_states.is_cuda:
        slots = output if leaves_slots else hidden_states.new_empty(shape, dtype=wide_dtype(pair.act_dtype))
        _plain_slots(slots, hidden_states, to_local_ids(topk_ids, expert_map), pair, activation_func, row_scales)
        if not leaves_slots:
            _sum_slots(slots, topk_weights, output, topk_ids, expert_map, moe_sum, pair.act_dtype)
        return

    rows = sort_by_expert(topk_ids, pair.num_experts, expert_map)
    rounds = takes_eight_bit(pair, rows)
    if not rounds:
        eight_bit.prepare(pair, row_scales is not None)
    if row_scales is not None:
        hidden_states, row_scales = eight_bit.in_sent_form(hidden_states, row_scales)
        if not rounds or row_scales.size(1) > 1:
            hidden_states, row_scales = dequantize_codes(hidden_states, row_scales, pair.act_dtype), None
    like = hidden_states if row_scales is None else hidden_states.new_empty(0, dtype=pair.act_dtype)
    slots_numel = 0 if leaves_slots else math.prod(shape)
    slots = output if leaves_slots else _part_of(scratch[0], slots_numel, like).view(shape)
    hidden = _part_of(scratch[1], num_tokens * topk * pair.w2.num_columns, like)
    numbers = None if not rounds else -(-eight_bit.scratch_bytes(pair, rows.max_rows) // 4)
    partials = _partials(scratch[0], num_tokens * topk, like, slots_numel, numbers)
    run_experts(slots, hidden_states, pair, rows, hidden, partials, row_scales=row_scales)
    if leaves_slots:
        return
    # Tokens whose results exceed f16's range are computed again in bf16, from rows of which `output` may be the memory.
    again = None
    if pair.act_dtype is torch.float16 and moe_sum is None:
        again = hidden_states.to(torch.bfloat16) if row_scales is None else hidden_states
    _sum_slots(slots, topk_weights, output, topk_ids, expert_map, moe_sum, pair.act_dtype)
    if again is None:
        return
    is_bad = ~output.isfinite().all(dim=1, keepdim=True)
    ids = torch.where(is_bad, topk_ids, -1)
    twin, rows = pair.once(_Bf16Twin), sort_by_expert(ids, pair.num_experts, expert_map)
    twin.refresh(rows.num_tokens)
    slots, hidden = slots.view(torch.bfloat16), hidden.view(torch.bfloat16)
    run_experts(slots, again, twin.pair, rows, hidden, partials, row_scales=row_scales)
    results = mul_sum(slots, topk_weights, torch.empty_like(output), ids, expert_map)
    output.copy_(torch.where(is_bad, results, output))


def _sum_slots(
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    moe_sum: SumFunction | None,
    dtype: torch.dtype,
) -> None:
    """Sums a token's weighted slots `[T, topk, K]` of local experts into `output`; a caller's moe_sum gets them in
    `dtype`."""
    if moe_sum is None:
        mul_sum(slots, topk_weights, output, topk_ids, expert_map)
    else:
        is_local = to_local_ids(topk_ids, expert_map)[..., None] >= 0
        moe_sum(torch.where(is_local, slots.float() * topk_weights[..., None], 0.0).to(dtype), output)


def compute_slots(pair: WeightPair, step: Step) -> None:
    """Writes the slots that local experts compute to `step.output` `[T, topk, K]`, unweighted, and no others."""
    rows, topk_ids = step.hidden_states, step.topk_ids
    num_tokens, topk = topk_ids.shape
    if not rows.is_cuda:
        _plain_slots(step.output, rows, to_local_ids(topk_ids, step.expert_map), pair, None)
        return
    # One launch has room for so many.
    at_once = max(1, hopper.most_invariant_rows(pair.num_experts) // topk)
    for start in range(0, num_tokens, at_once):
        part = slice(start, min(start + at_once, num_tokens))
        slots = sort_by_expert(topk_ids[part], pair.num_experts, step.expert_map)
        hidden = _part_of(step.scratch[1], slots.max_rows * pair.w2.num_columns, rows)
        partials = _partials(step.scratch[0], slots.max_rows, rows)
        run_experts(step.output[part], rows[part], pair, slots, hidden, partials)


def compute_arriving(pair: WeightPair, step: Step) -> None:
    """`compute_slots` of rows that are still to be sent: each work unit waits for those that it reads, on the device.

    Raises:
        ConfigError: weights that only other kernels can compute.
    """
    if not _reads_rows_in_place(pair):
        raise ConfigError(
            "overlap is True and these experts need kernels that want all rows at once (act-order, or scales with two "
            "spacings); choose overlap=False"
        )
    pair.once(_check_starts)
    rows = sort_by_expert(step.topk_ids, pair.num_experts, step.expert_map)
    hidden = _part_of(step.scratch[1], rows.max_rows * pair.w2.num_columns, step.hidden_states)
    partials = _partials(step.scratch[0], rows.max_rows, step.hidden_states)
    params = experts_params(step.hidden_states, hidden, step.output, pair, rows)
    hopper.launch_arriving(params, pair, partials, rows, step.arrival)


def compute_deferred(pair: WeightPair, step: Step) -> bool:
    """`compute_tokens` of tokens whose experts are still to be chosen, in one kernel; False, with nothing done, where
    the choice must be made before (`deferred.settle`)."""
    deferred = step.deferred
    num_slots = deferred.num_tokens * deferred.top_k
    if not _reads_rows_in_place(pair) or pair.act_dtype is not torch.bfloat16:
        return False
    if pair.batch_invariant or deferred.num_experts != pair.num_experts:
        return False
    if eight_bit.pays(pair, expected_rows(num_slots, deferred.num_tokens, pair.num_experts, pair.num_experts)):
        return False
    pair.once(_check_starts)
    hidden = _part_of(step.scratch[1], num_slots * pair.w2.num_columns, step.hidden_states)
    rows, output = step.hidden_states, step.output
    for name, tensor in (("intermediate_cache2", hidden), ("hidden_states", rows), ("output", output)):
        _check_start(name, tensor)
    return hopper.launch_routed(experts_params(rows, hidden, output, pair, None), pair, deferred)


def compute_peers(pair: WeightPair, step: Step) -> None:
    """Computes a batch that lies in its senders' packets, and combines it: `step.output` is this rank's `[T, K]`.

    Raises:
        ConfigError: weights that only other kernels can compute.
    """
    peers, output = step.peers, step.output
    if not _reads_rows_in_place(pair):
        raise ConfigError(
            "experts combine a batch themselves and need kernels that cannot (act-order, or two spacings)"
        )
    pair.once(_check_starts)
    hidden = _part_of(step.scratch[1], peers.num_rows * peers.build.topk * pair.w2.num_columns, output)
    _check_start("intermediate_cache2", hidden)
    peers.params.output = output.data_ptr()
    hopper.launch_peers(experts_params(output, hidden, output, pair, None), pair, peers)


def _reads_rows_in_place(pair: WeightPair) -> bool:
    """Whether Hopper's kernels compute these weights, and from rows whose columns stay in their order."""
    return pair.once(_hopper_serves) and pair.w13.sort_indices is None


class _Bf16Twin:
    """The weights for bf16 rows: the same codes, and what has the activations' dtype in bf16."""

    def __init__(self, pair: WeightPair) -> None:
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        w13, w2 = (
            weights._replace(
                scales=self._twin(weights.scales),
                zeros=None if weights.zeros is None else self._twin(weights.zeros),
                bias=None if weights.bias is None else self._twin(weights.bias),
            )
            for weights in (pair.w13, pair.w2)
        )
        rounded = pair.input_dtype if pair.input_dtype != pair.act_dtype else None
        self.pair = WeightPair(pair.kind, pair.activation, torch.bfloat16, w13, w2, pair.clamp_limit, rounded)

    def refresh(self, num_tokens: torch.Tensor) -> None:
        """Copies what belongs to the experts that have rows: what it is copied from may have changed.

        Another kernel must come between this and the experts', which may read scales while the last one ends.
        """
        for source, twin in self._copied:
            convert_rows(source, (num_tokens > 0).to(torch.int32) * source.size(1), twin, None)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float16:
            return tensor
        twin = torch.empty_like(tensor, dtype=torch.bfloat16)
        size = (tensor.size(0), -1, tensor.size(-1))
        self._copied.append((tensor.view(size), twin.view(size)))
        return twin


def _finish_in_range(
    pair: WeightPair,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    rows: Rows,
    results: torch.Tensor,
    hidden: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Writes f16 results of batched rows to `output`, and computes the experts again in bf16 that are not finite.

    Args:
        output: `[El, max_tokens, K]`, f16 or f32.
        results: f16, of the same shape; it is then scratch. So are hidden and partials, as in run_experts.
    """
    bf16, num_tokens = torch.bfloat16, rows.num_tokens
    flags = torch.zeros_like(num_tokens)
    convert_rows(results, num_tokens, output, flags)
    counts = num_tokens * flags
    twin = pair.once(_Bf16Twin)
    twin.refresh(counts)
    again = torch.empty_like(hidden_states, dtype=bf16)
    if rows.row_ids is None:
        convert_rows(hidden_states, counts, again, None)
    else:
        again.copy_(hidden_states)
    results, hidden = results.view(bf16), hidden.view(bf16)
    run_experts(results, again, twin.pair, rows._replace(num_tokens=counts), hidden, partials)
    convert_rows(results, counts, output, None)


@operator("source")
def convert_rows(
    source: torch.Tensor, counts: torch.Tensor, target: torch.Tensor | None, flags: torch.Tensor | None
) -> None:
    """target[e, i] = source[e, i] for i below counts[e], rounded; flags[e] becomes 1 if one of them is inf or NaN.

    Example: counts [1, 0], source [[[1, inf], [?, ?]], ...]: target[0, 0] is [1, inf] and flags [1, unchanged].

    Args:
        source: `[E, max_rows, K]`, contiguous.
        counts: int32 `[E]`.
        target: `[E, max_rows, K]` of another float dtype, contiguous; None to look at the rows alone.
        flags: int32 `[E]`, or None.
    """
    counted = torch.arange(source.size(1), device=source.device) < counts[:, None]
    if target is not None:
        target.copy_(torch.where(counted[..., None], source.to(target.dtype), target))
    if flags is not None:
        is_bad = ~source.isfinite().all(dim=2) & counted
        flags.copy_(torch.where(is_bad.any(dim=1), 1, flags))


@TritonKernel
def _convert_rows_kernel(
    source_ptr, counts_ptr, target_ptr, flags_ptr,
    max_rows, num_columns,
    HAS_TARGET: tl.constexpr, HAS_FLAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, b) converts columns b * BLOCK ... of row r % max_rows of expert r // max_rows, if the row counts.

    Before: source `[E, max_rows, K]`, counts int32 `[E]`. After: target of the same shape, flags int32 `[E]`.

    Example: max_rows 2, counts [1, 0]: program (0, 0) converts row 0 of expert 0, and all others end at once.
    """
    row = tl.program_id(0)
    expert = row // max_rows
    if row % max_rows < tl.load(counts_ptr + expert):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < num_columns
        place = row.to(tl.int64) * num_columns + column
        values = tl.load(source_ptr + place, mask=in_row, other=0.0).to(tl.float32)
        if HAS_TARGET:
            tl.store(target_ptr + place, values.to(target_ptr.dtype.element_ty), mask=in_row)
        if HAS_FLAGS:
            is_bad = (values.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
            if tl.max(is_bad.to(tl.int32)) > 0:
                tl.store(flags_ptr + expert, 1)


@convert_rows.on_gpu
def triton_convert_rows(source, counts, target, flags):
    num_experts, max_rows, num_columns = source.shape
    block, num_warps = row_blocks(num_experts * max_rows, num_columns, source.element_size())
    _convert_rows_kernel[(num_experts * max_rows, cdiv(num_columns, block))](
        source, counts, target, flags,
        max_rows, num_columns,
        HAS_TARGET=target is not None, HAS_FLAGS=flags is not None, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None) -> Rows:
    """The slots of `[T, topk]` of the local experts, expert by expert and in slot order; no host synchronisation.

    Example: ids [[1, -1], [0, 1]], 2 experts: counts [1, 2], slots 2, 0, 3, and undefined after that.
    """
    slots, counts = sort_slots_by_expert(topk_ids, num_experts, expert_map)
    num_ids = num_experts if expert_map is None else expert_map.numel()
    num_slots = topk_ids.numel()
    expected_m = expected_rows(num_slots, topk_ids.size(0), num_ids, num_experts)
    return Rows(counts, num_slots, slots, topk_ids.size(1), True, expected_m, most_rows=num_slots)


def expected_rows(num_slots: int, num_tokens: int, num_ids: int, num_experts: int) -> float:
    """Mean rows of an expert: at least one expert of every token is local, since it was sent here for one."""
    return max(num_slots / max(num_ids, 1), num_tokens / max(num_experts, 1))


def _plain_slots(
    slots: torch.Tensor,
    rows: torch.Tensor,
    local_ids: torch.Tensor,
    pair: WeightPair,
    activation_func: ActivationFunction | None,
    row_scales: torch.Tensor | None = None,
) -> None:
    """Runs every slot's row through its expert; on a GPU every expert computes all rows, so that shapes are static."""
    for expert in range(pair.num_experts):
        chosen = local_ids == expert
        if not rows.is_cuda:
            tokens, places = chosen.nonzero(as_tuple=True)
            if tokens.numel():
                scales = None if row_scales is None else row_scales[tokens]
                result = compute_expert(rows[tokens], pair, expert, activation_func, scales)
                slots[tokens, places] = result.to(slots.dtype)
            continue
        result = compute_expert(rows, pair, expert, activation_func).to(slots.dtype)
        slots.copy_(torch.where(chosen[..., None], result[:, None, :], slots))


def _part_of(given: torch.Tensor | None, numel: int, like: torch.Tensor, start: int = 0) -> torch.Tensor:
    """`numel` numbers of `like`'s dtype, from the given buffer behind its first `start` if there is room."""
    if given is None or given.numel() < start + numel:
        return like.new_empty(numel)
    return given.as_strided((numel,), (1,), given.storage_offset() + start)


def _partials(
    given: torch.Tensor | None, max_rows: int, like: torch.Tensor, used: int = 0, numbers: int | None = None
) -> torch.Tensor:
    """f32 scratch, by default for shared tiles, from the given buffer behind its first `used` numbers if it fits."""
    numbers = partials_numel(max_rows, like.device) if numbers is None else numbers
    return _part_of(given, 2 * numbers, like, start=-(-used // 128) * 128).view(torch.float32)
