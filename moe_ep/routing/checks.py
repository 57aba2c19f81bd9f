"""The settings of routing, checked without tokens: when a layer is made, and by `moe_ep.routing` again."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch

from moe_ep.arguments import check_tensors
from moe_ep.errors import check_whole, one_of
from moe_ep.routing.topk import SCORING_FUNCS

ZERO_EXPERT_TYPES: tuple[str, ...] = ("identity",)

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def check_routing(
    num_columns: int,
    top_k: int,
    *,
    use_grouped_topk: bool,
    num_expert_group: int | None,
    topk_group: int | None,
    custom_routing_function: TopK | None,
    scoring_func: str,
    routed_scaling_factor: float,
    e_score_correction_bias: torch.Tensor | None,
    zero_expert_num: int,
    zero_expert_type: str | None,
) -> tuple[int, int]:
    """Checks the settings of `moe_ep.routing.select_experts`.

    Args:
        num_columns: number of columns of the router logits, including identity experts.

    Returns:
        (number of groups, groups to keep); (1, 1) if experts are not grouped.

    Raises:
        ValueError: counts, names or a bias that do not fit together.
        TypeError: a count that is not a whole number, or a routing function that is none.
    """
    check_whole(top_k=top_k, zero_expert_num=zero_expert_num)
    if not 1 <= top_k <= num_columns:
        raise ValueError(
            f"top_k is {top_k}; it must be at least 1 and at most the columns of router_logits ({num_columns})"
        )
    if scoring_func not in list(SCORING_FUNCS):  # it may be of any type
        raise ValueError(one_of("scoring_func", scoring_func, list(SCORING_FUNCS)))
    # int and float are asked for first: an abstract class takes long, and layers ask in every pass.
    if not isinstance(routed_scaling_factor, (int, float, Real)) or not math.isfinite(routed_scaling_factor):
        raise ValueError(f"routed_scaling_factor is {routed_scaling_factor!r}; it must be a finite number")
    bias = e_score_correction_bias
    if bias is not None:
        check_tensors(e_score_correction_bias=bias)
        if bias.shape != (num_columns,) or not bias.is_floating_point():
            raise ValueError(
                f"e_score_correction_bias has shape {tuple(bias.shape)} of {bias.dtype}; it must have one value of a "
                f"float dtype for each column of router_logits, ({num_columns},)"
            )
    if custom_routing_function is not None and not callable(custom_routing_function):
        raise TypeError(f"custom_routing_function is {custom_routing_function!r}; it must be a function")
    if custom_routing_function is not None and (use_grouped_topk or bias is not None):
        raise ValueError(
            "custom_routing_function is given together with use_grouped_topk or e_score_correction_bias; it replaces "
            "both, so leave them out"
        )
    _check_zero_experts(num_columns, zero_expert_num, zero_expert_type)
    return _check_groups(use_grouped_topk, num_expert_group, topk_group, num_columns, top_k)


def _check_zero_experts(num_columns: int, zero_expert_num: int, zero_expert_type: str | None) -> None:
    if not 0 <= zero_expert_num < num_columns:
        raise ValueError(
            f"zero_expert_num is {zero_expert_num}; it must be at least 0 and below the columns of router_logits "
            f"({num_columns})"
        )
    if zero_expert_num and zero_expert_type not in ZERO_EXPERT_TYPES:
        raise ValueError(one_of("zero_expert_type", zero_expert_type, ZERO_EXPERT_TYPES))


def _check_groups(
    use_grouped_topk: bool, num_expert_group: int | None, topk_group: int | None, num_columns: int, top_k: int
) -> tuple[int, int]:
    """Returns (number of groups, groups to keep); (1, 1) if experts are not grouped."""
    if not use_grouped_topk:
        return 1, 1
    if num_expert_group is None or topk_group is None:
        raise ValueError(
            f"use_grouped_topk needs num_expert_group and topk_group, which are {num_expert_group} and {topk_group}; "
            f"pass both"
        )
    check_whole(num_expert_group=num_expert_group, topk_group=topk_group)
    if num_expert_group < 1 or num_columns % num_expert_group:
        raise ValueError(
            f"num_expert_group is {num_expert_group}; it must divide the columns of router_logits ({num_columns})"
        )
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(
            f"topk_group is {topk_group}; it must be at least 1 and at most num_expert_group ({num_expert_group})"
        )
    available = topk_group * (num_columns // num_expert_group)
    if top_k > available:
        raise ValueError(
            f"top_k is {top_k}; it must be at most the {available} experts of topk_group ({topk_group}) groups"
        )
    return num_expert_group, topk_group
