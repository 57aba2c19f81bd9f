"""Routing rules of model families: functions from config.json to a `RoutingSpec`, assigned to families in models.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moe_ep.checkpoint.config_values import Config, flag, number, one_known, positive, unexpected, whole
from moe_ep.checkpoint.spec import RoutingSpec
from moe_ep.errors import CheckpointError, one_of
from moe_ep.routing.topk import SCORING_FUNCS, sparse_mixer


def top_k(config: Config) -> int:
    """Experts per token; Hunyuan lists the number by layer, the same for all."""
    listed = config.get("moe_topk")
    if isinstance(listed, list) and listed and all(value == listed[0] for value in listed):
        config = config | {"moe_topk": listed[0]}
    return positive(config, "num_experts_per_tok", "moe_k", "moe_topk")


def fixed_routing(**routing: Any) -> Callable[[Config], RoutingSpec]:
    """The same for every model of a family."""
    spec = RoutingSpec(**routing)
    return lambda config: spec


def scored_routing(scoring_func: str, renormalize: bool) -> Callable[[Config], RoutingSpec]:
    """Top-k of such scores; `norm_topk_prob` decides on renormalization, `renormalize` is its default."""

    def routing(config: Config) -> RoutingSpec:
        return RoutingSpec(renormalize=flag(config, "norm_topk_prob", renormalize), scoring_func=scoring_func)

    return routing


biased_sigmoid = fixed_routing(renormalize=True, scoring_func="sigmoid", has_correction_bias=True)


def biased_sigmoid_times(factor: str) -> Callable[[Config], RoutingSpec]:
    """The same with a factor of the weights, under that key."""
    return lambda config: replace(biased_sigmoid(config), routed_scaling_factor=number(config, factor, 1.0))


def ernie_routing(config: Config) -> RoutingSpec:
    """Weights are divided by the larger of their sum, which is at least top_k / num_experts, and `moe_norm_min`."""
    least, sum_is = number(config, "moe_norm_min", 1e-12), top_k(config) / positive(config, "moe_num_experts")
    if least > sum_is:
        raise CheckpointError(
            f"config.json: moe_norm_min: expected at most {sum_is:g}, which no sum of weights is below, found {least:g}"
        )
    return RoutingSpec(renormalize=True, has_correction_bias=True)


def lfm_routing(config: Config) -> RoutingSpec:
    """The family adds 1e-6 to the sum it divides by, which is negligible for a sum of chosen sigmoids."""
    given = {key: value for key, value in config.items() if value is not None}  # null is the default in this family
    return RoutingSpec(
        renormalize=flag(given, "norm_topk_prob", True),
        scoring_func="sigmoid",
        has_correction_bias=flag(given, "use_expert_bias", True),
        routed_scaling_factor=number(config, "routed_scaling_factor", 1.0),
    )


def laguna_routing(config: Config) -> RoutingSpec:
    for key in ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input"):
        if config.get(key):
            raise unexpected(key, "none", config[key], "; such routers do not load")
    return biased_sigmoid_times("moe_routed_scaling_factor")(config)


def cohere_routing(config: Config) -> RoutingSpec:
    """Softmax over the chosen experts, which equals a renormalized softmax over all, or sigmoid scores."""
    kinds = {"softmax": fixed_routing(renormalize=True), "sigmoid": scored_routing("sigmoid", renormalize=True)}
    routing = one_known("expert_selection_fn", config.get("expert_selection_fn") or "softmax", kinds)(config)
    return replace(routing, routed_scaling_factor=cohere_factor(config))


def cohere_factor(config: Config) -> float:
    """Factor of the routed and the shared experts, whose outputs are added or averaged."""
    strategy = config.get("shared_expert_combination_strategy") or "average"
    factor = one_known("shared_expert_combination_strategy", strategy, {"average": 0.5, "sum": 1.0})
    return factor if config.get("num_shared_experts") else 1.0


def longcat_routing(config: Config) -> RoutingSpec:
    """The last experts may be identity experts."""
    kind = config.get("zero_expert_type") or "identity"
    if kind != "identity":
        raise CheckpointError(f"config.json: {one_of('zero_expert_type', kind, ['identity'])}")
    if flag(config, "router_bias", False):
        raise CheckpointError("config.json: router_bias: expected false, found true; transformers does not add it")
    return RoutingSpec(
        renormalize=False,
        has_correction_bias=True,
        routed_scaling_factor=number(config, "routed_scaling_factor"),
        zero_expert_num=whole(config, "zero_expert_num", 0),
        zero_expert_type=kind,
    )


def ling_routing(config: Config) -> RoutingSpec:
    """Grouped sigmoid scores with a bias from Ling 2 on; a softmax before."""
    kinds = {
        "softmax": scored_routing("softmax", renormalize=True),
        "sigmoid": deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    }
    return one_known("score_function", config.get("score_function") or "softmax", kinds)(config)


def phi_routing(config: Config) -> RoutingSpec:
    """Two experts; transformers ignores other values in the config."""
    if (found := top_k(config)) != 2:
        raise CheckpointError(f"config.json: num_experts_per_tok: expected 2 for a PhiMoE model, found {found}")
    mixer = partial(sparse_mixer, jitter_eps=number(config, "router_jitter_noise", 0.01))
    return RoutingSpec(renormalize=False, custom_routing_function=mixer)


def deepseek_routing(topk_method: str, scoring_func: str, renormalize: bool) -> Callable[[Config], RoutingSpec]:
    """The routing of a DeepSeek generation; the arguments are the defaults of missing keys.

    `greedy` ignores groups; `group_limited_greedy` ranks groups by their best score; `noaux_tc` by their two best
    scores plus correction bias. All of them multiply the weights by `routed_scaling_factor`, renormalized or not.
    The 1e-20 that V3 adds to the sum it divides by is below the last bit of any sum of sigmoids that f32 can hold.
    """

    def routing(config: Config) -> RoutingSpec:
        method = config.get("topk_method") or topk_method
        methods = ("greedy", "group_limited_greedy", "noaux_tc")
        if method not in methods:
            raise CheckpointError(f"config.json: {one_of('topk_method', method, methods)}")
        scoring = config.get("scoring_func") or scoring_func
        if scoring not in list(SCORING_FUNCS):  # it may be of any type
            raise CheckpointError(f"config.json: {one_of('scoring_func', scoring, list(SCORING_FUNCS))}")
        grouped = method != "greedy" and config.get("n_group") is not None
        return RoutingSpec(
            renormalize=flag(config, "norm_topk_prob", renormalize),
            scoring_func=scoring,
            use_grouped_topk=grouped,
            num_expert_group=positive(config, "n_group") if grouped else None,
            topk_group=positive(config, "topk_group") if grouped else None,
            routed_scaling_factor=number(config, "routed_scaling_factor"),
            has_correction_bias=method == "noaux_tc",
        )

    return routing
