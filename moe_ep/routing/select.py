"""Routing as one function: `select_experts`.

The steps, in order: scores -> choice -> grouped mask -> top-k -> weights -> identity (zero) experts -> physical ids and
load record (EPLB) -> slots of fused shared experts. The steps up to the weights are in `moe_ep.routing.topk`; on CUDA
tensors they are one Triton kernel.
"""

from __future__ import annotations

import torch

from moe_ep.arguments import check_id_range, check_same_device, check_tensors
from moe_ep.config import RoutingConfig, RoutingFunction
from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.errors import check_at_least, check_whole, one_of
from moe_ep.routing.router import append_shared_experts, apply_identity_experts, choose

INDICES_TYPES = (torch.int16, torch.int32, torch.int64)


def select_experts(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    use_grouped_topk: bool,
    renormalize: bool,
    topk_group: int | None = None,
    num_expert_group: int | None = None,
    custom_routing_function: RoutingFunction | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
    indices_type: torch.dtype | None = None,
    enable_eplb: bool = False,
    expert_map: torch.Tensor | None = None,
    expert_load_view: torch.Tensor | None = None,
    logical_to_physical_map: torch.Tensor | None = None,
    logical_replica_count: torch.Tensor | None = None,
    global_num_experts: int | None = None,
    zero_expert_num: int = 0,
    zero_expert_type: str | None = None,
    num_fused_shared_experts: int = 0,
    *,
    ep_rank: int = 0,
    ep_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Chooses the experts of every token.

    Args:
        hidden_states: `[T, K]`; only identity experts and custom routing read it.
        router_logits: `[T, E + zero_expert_num]`, f32, f16 or bf16; the arithmetic is f32.
        use_grouped_topk: keep the best `topk_group` of `num_expert_group` groups and choose inside them. A group's
            score is its best choice, or with a bias the sum of its two best.
        renormalize: divide a token's weights by their sum, in which identity experts count too.
        custom_routing_function: called with the keywords hidden_states, gating_output, topk and renormalize; returns
            (weights `[T, top_k]`, ids `[T, top_k]`), where an id that is no column of the logits means no expert. It
            replaces all steps up to the weights.
        routed_scaling_factor: factor of all weights, including custom ones, applied last; shared experts keep weight 1.
        e_score_correction_bias: `[E + zero_expert_num]`, added to the scores for the choice, never to the weights.
        indices_type: dtype of the ids, one of `INDICES_TYPES`; None means int32.
        enable_eplb: map logical ids to physical ones and count them in `expert_load_view` (int32 `[num_physical]`),
            with the layer's `logical_to_physical_map` `[E, max_replicas]` and `logical_replica_count` `[E]`.
        expert_map: ignored: ids are global on every rank, and the experts apply the map.
        global_num_experts: number of physical routed experts; None takes it from the load view, or E without EPLB.
        zero_expert_num: number of identity experts, which are the last columns of the logits.
        zero_expert_type: must be "identity" if there are any.
        num_fused_shared_experts: number of slots to append, with ids global_num_experts + 0..n-1 and weight 1.
        ep_rank, ep_size: the rank whose tokens these are, and the number of ranks that hold the physical experts. With
            EPLB, replicas are chosen so that the loads of these ranks even out; if ep_size is None, those of experts.

    Returns:
        (topk_weights, topk_ids, zero_expert_result). The first two are f32 and integer
        `[T, top_k + num_fused_shared_experts]`: a token's experts from the best choice down, ties by lowest id. Ids are
        physical with EPLB and logical without, -1 for no expert (whose weight is 0). zero_expert_result is `[T, K]`,
        what identity experts add to the layer's output, or None if there are none. NaN logits are chosen last: ids are
        valid and distinct whatever the logits are.

    Raises:
        ValueError: shapes, dtypes, counts or names that do not fit together.
        TypeError: a count that is not a whole number.
    """
    num_columns = _check_logits(hidden_states, router_logits)
    config = RoutingConfig(
        top_k=top_k,
        renormalize=renormalize,
        use_grouped_topk=use_grouped_topk,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        custom_routing_function=custom_routing_function,
        scoring_func=scoring_func,
        routed_scaling_factor=routed_scaling_factor,
        zero_expert_num=zero_expert_num,
        zero_expert_type=zero_expert_type,
    )
    config.check(num_columns, e_score_correction_bias)
    check_same_device("router_logits", router_logits.device, e_score_correction_bias=e_score_correction_bias)
    num_experts = num_columns - zero_expert_num
    num_physical = _check_num_physical(global_num_experts, num_experts, expert_load_view if enable_eplb else None)
    check_at_least(0, num_fused_shared_experts=num_fused_shared_experts)
    if indices_type is not None and indices_type not in INDICES_TYPES:
        raise ValueError(one_of("indices_type", str(indices_type), [str(dtype) for dtype in INDICES_TYPES]))
    check_id_range(num_physical + num_fused_shared_experts, indices_type or torch.int32)
    eplb_state = None
    if enable_eplb:
        maps = logical_to_physical_map, logical_replica_count
        eplb_state = _check_eplb_state(num_experts, expert_load_view, *maps)

    topk_weights, topk_ids = choose(config, hidden_states, router_logits, e_score_correction_bias)
    zero_expert_result = None
    if zero_expert_num:
        chosen = apply_identity_experts(hidden_states, topk_weights, topk_ids, num_experts)
        topk_weights, topk_ids, zero_expert_result = chosen
    if eplb_state is not None:
        topk_ids = eplb_map_to_physical_and_record(topk_ids, *eplb_state, ep_rank=ep_rank, ep_size=ep_size)
    if num_fused_shared_experts:
        topk_weights, topk_ids = append_shared_experts(topk_weights, topk_ids, num_physical, num_fused_shared_experts)
    return topk_weights, topk_ids.to(indices_type or torch.int32), zero_expert_result


def _check_logits(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> int:
    """Returns the number of columns of the logits."""
    check_tensors(hidden_states=hidden_states, router_logits=router_logits)
    if router_logits.dim() != 2 or hidden_states.dim() != 2 or router_logits.size(0) != hidden_states.size(0):
        raise ValueError(
            f"router_logits has shape {tuple(router_logits.shape)} and hidden_states {tuple(hidden_states.shape)}; "
            f"they must be (T, E) and (T, K) with one T"
        )
    if not router_logits.is_floating_point():
        raise ValueError(f"router_logits is {router_logits.dtype}; it must be f32, f16 or bf16")
    if router_logits.device != hidden_states.device:
        raise ValueError(
            f"router_logits is on {router_logits.device} and hidden_states on {hidden_states.device}; move one"
        )
    return router_logits.size(1)


def _check_num_physical(global_num_experts: int | None, num_experts: int, load_view: torch.Tensor | None) -> int:
    """The number of physical routed experts, which is the id of the first shared expert."""
    least, of = num_experts, "routed experts of router_logits"
    if load_view is not None:
        check_tensors(expert_load_view=load_view)
        least, of = load_view.numel(), "physical experts of expert_load_view"
    if global_num_experts is None:
        return least
    check_whole(global_num_experts=global_num_experts)
    if global_num_experts < least:
        raise ValueError(f"global_num_experts is {global_num_experts}; it must be at least the {of} ({least})")
    return global_num_experts


def _check_eplb_state(
    num_experts: int, load_view: torch.Tensor | None, table: torch.Tensor | None, replica_count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if load_view is None or table is None or replica_count is None:
        raise ValueError(
            "enable_eplb needs expert_load_view, logical_to_physical_map and logical_replica_count, and one of them is "
            "None; pass the layer's rows of the EPLB state"
        )
    check_tensors(logical_replica_count=replica_count)
    if replica_count.numel() != num_experts:
        raise ValueError(
            f"logical_replica_count is of {replica_count.numel()} experts and router_logits of {num_experts} routed "
            f"ones; pass this layer's rows of the EPLB state"
        )
    return load_view, table, replica_count
