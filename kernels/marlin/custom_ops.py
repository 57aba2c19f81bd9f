"""The two functions as torch operators, so that torch.compile sees one node for each.

They write nothing but `output`. The functions call them while a graph is being traced.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("moe_ep::batched_marlin_experts", mutates_args=("output",))
def batched_marlin_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    quant_type_id: int,
    activation: str,
    global_scale1: torch.Tensor | None,
    global_scale2: torch.Tensor | None,
    g_idx1: torch.Tensor | None,
    g_idx2: torch.Tensor | None,
    sort_indices1: torch.Tensor | None,
    sort_indices2: torch.Tensor | None,
    w1_zeros: torch.Tensor | None,
    w2_zeros: torch.Tensor | None,
    is_k_full: bool,
    expert_row_ids: torch.Tensor | None,
    clamp_limit: float | None,
) -> None:
    """batched_fused_marlin_moe into `output` `[El, max_tokens, K]`."""
    from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe

    batched_fused_marlin_moe(
        hidden_states, expert_num_tokens, w1, w2, bias1, bias2, w1_scale, w2_scale, quant_type_id,
        activation=activation, global_scale1=global_scale1, global_scale2=global_scale2, g_idx1=g_idx1, g_idx2=g_idx2,
        sort_indices1=sort_indices1, sort_indices2=sort_indices2, w1_zeros=w1_zeros, w2_zeros=w2_zeros,
        is_k_full=is_k_full, output=output, expert_row_ids=expert_row_ids, clamp_limit=clamp_limit,
    )  # fmt: skip


@torch.library.custom_op("moe_ep::marlin_experts", mutates_args=("output",))
def marlin_experts(
    output: torch.Tensor,
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
    apply_router_weight_on_input: bool,
    activation: str,
    expert_map: torch.Tensor | None,
    global_scale1: torch.Tensor | None,
    global_scale2: torch.Tensor | None,
    g_idx1: torch.Tensor | None,
    g_idx2: torch.Tensor | None,
    sort_indices1: torch.Tensor | None,
    sort_indices2: torch.Tensor | None,
    w1_zeros: torch.Tensor | None,
    w2_zeros: torch.Tensor | None,
    is_k_full: bool,
    clamp_limit: float | None,
    input_dtype: torch.dtype | None,
) -> None:
    """fused_marlin_moe into `output` `[T, K]`, with the built-in activation and sum."""
    from moe_ep.kernels.marlin.functional import fused_marlin_moe

    fused_marlin_moe(
        hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids, quant_type_id,
        apply_router_weight_on_input=apply_router_weight_on_input, activation=activation, expert_map=expert_map,
        global_scale1=global_scale1, global_scale2=global_scale2, g_idx1=g_idx1, g_idx2=g_idx2,
        sort_indices1=sort_indices1, sort_indices2=sort_indices2, w1_zeros=w1_zeros, w2_zeros=w2_zeros,
        is_k_full=is_k_full, output=output, clamp_limit=clamp_limit, input_dtype=input_dtype,
    )  # fmt: skip


@batched_marlin_experts.register_fake
def _(output: torch.Tensor, *args: object) -> None:
    return None


@marlin_experts.register_fake
def _(output: torch.Tensor, *args: object) -> None:
    return None
