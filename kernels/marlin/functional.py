"""The packed experts as functions: for batched rows, in place or by reference, and for tokens with their expert ids.

On GPUs from sm_80 on they run kernels (compute.py chooses which). On the CPU, and if the caller passes an
activation_func, the same functions dequantize the weights and multiply in f32 with torch. Arguments are checked before
anything is launched; a ValueError names the one that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_tensors
from moe_ep.errors import check_flags, check_router_weight_on_input
from moe_ep.kernels.marlin.checks import (
    PARTS,
    batched_shape,
    check_batch,
    check_batch_overlap,
    check_map_length,
    check_output,
    check_scratch,
    check_tokens,
    check_weight_pair,
)
from moe_ep.kernels.marlin.compute import compute_batch, compute_tokens
from moe_ep.kernels.marlin.plain import ActivationFunction
from moe_ep.kernels.marlin.types import weight_type

_SILU = MoEActivation.SILU
_SCRATCH = ("intermediate_cache13", "intermediate_cache2")


def batched_fused_marlin_moe(
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    quant_type_id: int,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    activation: MoEActivation | str = _SILU,
    expert_map: torch.Tensor | None = None,
    global_scale1: torch.Tensor | None = None,
    global_scale2: torch.Tensor | None = None,
    g_idx1: torch.Tensor | None = None,
    g_idx2: torch.Tensor | None = None,
    sort_indices1: torch.Tensor | None = None,
    sort_indices2: torch.Tensor | None = None,
    w1_zeros: torch.Tensor | None = None,
    w2_zeros: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    intermediate_cache13: torch.Tensor | None = None,
    intermediate_cache2: torch.Tensor | None = None,
    is_k_full: bool = True,
    output: torch.Tensor | None = None,
    inplace: bool = False,
    expert_row_ids: torch.Tensor | None = None,
    expected_m: float | None = None,
    clamp_limit: float | None = None,
    input_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes each local expert on its own rows: w13, activation, w2; the results are not weighted.

    Args:
        hidden_states: bf16 or f16 `[El, max_tokens, K]`; with expert_row_ids `[num_rows, K]`.
        expert_num_tokens: int32 `[El]`, on the device; rows from this number on are neither read nor written.
        w1, w2: packed weights (repack.pack_marlin), of 2N x K (gate, then up; N x K ungated) and K x N.
        bias1, bias2: `[El, 2N]`, gate then up, and `[El, K]`, or None.
        w1_scale, w2_scale, w1_zeros, w2_zeros: as packed.
        global_scale1, global_scale2: f32 `[El]`; `[El, 2]` for w1 if gate and up differ.
        global_num_experts, expert_map, workspace: not used; rows lie with their local experts already.
        intermediate_cache13, intermediate_cache2: scratch in the rows' dtype. `El * max_tokens` (or `T * topk`) rows of
            max(K, 2N) and of N values are enough. If one is missing or too small, memory is allocated, except that a
            buffer that is too small is refused under CUDA-graph capture.
        output: `[El, max_tokens, K]`, allocated if missing; with inplace results are written over hidden_states. Any
            other memory that it shares with them is refused.
        g_idx1, g_idx2, sort_indices1, sort_indices2: act-order, int32 `[El, K]` and `[El, N]`, as packed: the group of
            each packed column, and the input column that it multiplies. sort_indices alone if sorted columns have their
            groups in order; g_idx alone if the columns are in order already.
        is_k_full: True if all groups have the same number of columns, so that g_idx is not needed to find them (on the
            CPU it must agree). False if they do not, or if w1 and w2 hold only a part of the columns with the scales of
            all groups.
        expert_row_ids: int32 `[El, max_tokens]`, the input row of each of an expert's rows.
        expected_m: expected mean number of rows per expert, for the choice of kernels on a GPU; results are correct
            for any expert_num_tokens. None means unknown: the decode and the prefill kernel are both launched, as they
            always are under torch.compile.
        clamp_limit: clamp limit of gate and up before a gated activation (`moe_ep.activation.gate_limit`).
        input_dtype: as in fused_marlin_moe; no kernel rounds batched rows yet.

    Returns:
        `[El, max_tokens, K]`; rows from expert_num_tokens on are not changed.

    Raises:
        ValueError: a wrong dtype, shape, type id or group size, or something missing; nothing was launched.
        TypeError: a flag that is neither True nor False; nothing was launched.
    """
    check_flags(apply_router_weight_on_input=apply_router_weight_on_input, is_k_full=is_k_full, inplace=inplace)
    if apply_router_weight_on_input:
        raise ValueError(
            "apply_router_weight_on_input is True; batched rows come without weights, apply them before dispatch"
        )
    if inplace and expert_row_ids is not None:
        raise ValueError("inplace is True with expert_row_ids; results need an output of their own, pass inplace=False")
    is_number = isinstance(expected_m, int | float) and not isinstance(expected_m, bool)
    if expected_m is not None and not (is_number and 0 <= expected_m < math.inf):
        raise ValueError(
            f"expected_m is {expected_m!r}; it must be a finite number of at least 0, or None if it is unknown"
        )
    check_tensors(hidden_states=hidden_states, expert_num_tokens=expert_num_tokens)
    if expert_row_ids is not None:
        check_tensors(expert_row_ids=expert_row_ids)
    act = MoEActivation.parse(activation)
    first = (w1, w1_scale, w1_zeros, bias1, global_scale1, g_idx1, sort_indices1)
    second = (w2, w2_scale, w2_zeros, bias2, global_scale2, g_idx2, sort_indices2)
    kind = weight_type(quant_type_id)
    pair = check_weight_pair(kind, act, hidden_states.dtype, is_k_full, first, second, clamp_limit, input_dtype)
    check_batch(pair, hidden_states, expert_num_tokens, expert_row_ids)
    shape = batched_shape(pair, hidden_states, expert_row_ids)
    scratch = (intermediate_cache13, intermediate_cache2)
    check_scratch(pair, hidden_states, shape[0] * shape[1], shape[1], _SCRATCH, *scratch)
    check_map_length(expert_map, global_num_experts, pair.num_experts)
    if workspace is not None:
        check_tensors(workspace=workspace)
    output = _output(output, shape, hidden_states, inplace)
    check_batch_overlap(output, hidden_states, expert_row_ids)
    if torch.compiler.is_compiling() and output.numel():
        torch.ops.moe_ep.batched_marlin_experts(
            output, hidden_states, expert_num_tokens, first, second, quant_type_id, act.value, is_k_full,
            expert_row_ids, clamp_limit, input_dtype,
        )  # fmt: skip
        return output
    compute_batch(pair, output, hidden_states, expert_num_tokens, expert_row_ids, scratch, expected_m)
    return output


def fused_marlin_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    quant_type_id: int,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    activation: MoEActivation | str = _SILU,
    activation_func: ActivationFunction | None = None,
    moe_sum: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    expert_map: torch.Tensor | None = None,
    input_global_scale1: torch.Tensor | None = None,
    input_global_scale2: torch.Tensor | None = None,
    global_scale1: torch.Tensor | None = None,
    global_scale2: torch.Tensor | None = None,
    g_idx1: torch.Tensor | None = None,
    g_idx2: torch.Tensor | None = None,
    sort_indices1: torch.Tensor | None = None,
    sort_indices2: torch.Tensor | None = None,
    w1_zeros: torch.Tensor | None = None,
    w2_zeros: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    intermediate_cache13: torch.Tensor | None = None,
    intermediate_cache2: torch.Tensor | None = None,
    is_k_full: bool = True,
    output: torch.Tensor | None = None,
    input_dtype: torch.dtype | None = None,
    inplace: bool = False,
    clamp_limit: float | None = None,
) -> torch.Tensor:
    """Computes the experts of every token, and sums the results weighted in slot order.

    Args: as for batched_fused_marlin_moe, and
        hidden_states: bf16 or f16 `[T, K]`.
        topk_weights: f32 `[T, topk]`.
        topk_ids: integer `[T, topk]`, global ids, -1 for no expert; only on the CPU are unknown ids detected.
        global_num_experts: number of entries of expert_map; -1 for its length.
        expert_map: integer `[global_num_experts]`, global -> local ids; None if ids are local.
        apply_router_weight_on_input: multiply the rows instead of the results by the weights (topk must be 1).
        input_dtype: torch.int8 or torch.float8_e4m3fn lets rows and the activation's output be rounded to it
            (`quantize.round_rows`): int8 with integer weights; e4m3 with e4m3, 4-bit integers and mxfp4. The CPU always
            rounds them; a GPU rounds them where that is faster: on Hopper at large M per expert (with a gated
            activation, K and N multiples of 64, mxfp4 packed with the same input_dtype). Results then differ by about
            1.8 % with int8, and 4.4 % with e4m3. None, or the activations' dtype: rows are not rounded.
        activation_func: `f(activation, output, input)`, used instead of the built-in activation.
        moe_sum: `f(rows [T, topk, K], output)`, used instead of the built-in sum; rows are weighted, skipped ones zero.

    Returns:
        `[T, K]`.

    Raises:
        ValueError: a wrong dtype, shape, type id or group size, or something missing; nothing was launched.
        TypeError: a flag that is neither True nor False; nothing was launched.
    """
    check_flags(apply_router_weight_on_input=apply_router_weight_on_input, is_k_full=is_k_full, inplace=inplace)
    check_tensors(hidden_states=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids)
    act = MoEActivation.parse(activation)
    for which, scale in enumerate((input_global_scale1, input_global_scale2), start=1):
        if scale is not None:
            raise ValueError(f"input_global_scale{which} is given; rows get scales of their own, pass None")
    first = (w1, w1_scale, w1_zeros, bias1, global_scale1, g_idx1, sort_indices1)
    second = (w2, w2_scale, w2_zeros, bias2, global_scale2, g_idx2, sort_indices2)
    kind = weight_type(quant_type_id)
    pair = check_weight_pair(kind, act, hidden_states.dtype, is_k_full, first, second, clamp_limit, input_dtype)
    check_tokens(pair, hidden_states, topk_weights, topk_ids, expert_map, global_num_experts)
    scratch = (intermediate_cache13, intermediate_cache2)
    check_scratch(pair, hidden_states, topk_ids.numel(), None, _SCRATCH, *scratch)
    if workspace is not None:
        check_tensors(workspace=workspace)
    for name, function in (("activation_func", activation_func), ("moe_sum", moe_sum)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} is {function!r}; it must be a function, or None for the built-in one")
    if apply_router_weight_on_input:
        check_router_weight_on_input(topk_ids.size(1))
    output = _output(output, tuple(hidden_states.shape), hidden_states, inplace)
    own_steps = activation_func is not None or moe_sum is not None
    if torch.compiler.is_compiling() and output.numel() and not own_steps:
        torch.ops.moe_ep.marlin_experts(
            output, hidden_states, first, second, topk_weights, topk_ids, quant_type_id,
            apply_router_weight_on_input, act.value, expert_map, is_k_full, clamp_limit, input_dtype,
        )  # fmt: skip
        return output
    if apply_router_weight_on_input:
        hidden_states = (hidden_states.float() * topk_weights).to(hidden_states.dtype)
        topk_weights = torch.ones_like(topk_weights)
    compute_tokens(pair, output, hidden_states, topk_weights, topk_ids, expert_map, scratch, activation_func, moe_sum)
    return output


def _output(
    output: torch.Tensor | None, shape: tuple[int, ...], hidden_states: torch.Tensor, inplace: bool
) -> torch.Tensor:
    if output is None:
        return hidden_states if inplace else hidden_states.new_empty(shape)
    if inplace:
        raise ValueError("inplace is True and output is given; pass one of the two")
    check_tensors(output=output)
    check_output(output, shape, hidden_states)
    return output


Parts = Sequence[torch.Tensor | None]


def _named(first: Parts, second: Parts) -> dict[str, Any]:
    """Returns the PARTS of both GEMMs as keyword arguments."""
    named = zip(PARTS, first, second, strict=True)
    return {name.format(which): part for name, *parts in named for which, part in enumerate(parts, start=1)}


@torch.library.custom_op("moe_ep::batched_marlin_experts", mutates_args=("output",))
def batched_marlin_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    first: Parts,
    second: Parts,
    quant_type_id: int,
    activation: str,
    is_k_full: bool,
    expert_row_ids: torch.Tensor | None,
    clamp_limit: float | None,
    input_dtype: torch.dtype | None,
) -> None:
    """Runs batched_fused_marlin_moe into `output` `[El, max_tokens, K]`; `first`, `second`: the PARTS of w1 and w2."""
    batched_fused_marlin_moe(
        hidden_states, expert_num_tokens, quant_type_id=quant_type_id, activation=activation, is_k_full=is_k_full,
        output=output, expert_row_ids=expert_row_ids, clamp_limit=clamp_limit, input_dtype=input_dtype,
        **_named(first, second),
    )  # fmt: skip


@torch.library.custom_op("moe_ep::marlin_experts", mutates_args=("output",))
def marlin_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    first: Parts,
    second: Parts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    quant_type_id: int,
    apply_router_weight_on_input: bool,
    activation: str,
    expert_map: torch.Tensor | None,
    is_k_full: bool,
    clamp_limit: float | None,
    input_dtype: torch.dtype | None,
) -> None:
    """Runs fused_marlin_moe into `output` `[T, K]`, with the built-in activation and sum."""
    fused_marlin_moe(
        hidden_states, topk_weights=topk_weights, topk_ids=topk_ids, quant_type_id=quant_type_id,
        apply_router_weight_on_input=apply_router_weight_on_input, activation=activation, expert_map=expert_map,
        is_k_full=is_k_full, output=output, clamp_limit=clamp_limit, input_dtype=input_dtype,
        **_named(first, second),
    )  # fmt: skip


@batched_marlin_experts.register_fake
@marlin_experts.register_fake
def _(output: torch.Tensor, *args: object) -> None:
    return None
