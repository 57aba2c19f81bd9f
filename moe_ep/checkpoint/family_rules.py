"""What model families do in their own ways: layers with experts, routing, shared experts, activations.

Each function reads it from a config.json; which family has which is said in models.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moe_ep.activation import SWIGLUOAI_ALPHA, MoEActivation
from moe_ep.checkpoint.config_values import Config, number, one_known, positive, required, whole
from moe_ep.checkpoint.spec import RoutingSpec, SharedExpertsSpec
from moe_ep.errors import CheckpointError, one_of
from moe_ep.sparse_mixer import sparse_mixer
from moe_ep.topk import SCORING_FUNCS

_ACTIVATIONS = {
    "silu": MoEActivation.SILU,
    "swish": MoEActivation.SILU,
    "gelu": MoEActivation.GELU,
    "gelu_new": MoEActivation.GELU_TANH,
    "gelu_pytorch_tanh": MoEActivation.GELU_TANH,
}


def named_activation(config: Config) -> MoEActivation:
    return one_known("hidden_act", required(config, "hidden_act"), _ACTIVATIONS)


def swigluoai(config: Config) -> MoEActivation:
    """GPT-OSS: its hidden_act says silu, and what it computes has a constant more, and a limit."""
    if (found := config.get("swiglu_alpha", SWIGLUOAI_ALPHA)) != SWIGLUOAI_ALPHA:
        raise CheckpointError(f"config.json: swiglu_alpha: expected {SWIGLUOAI_ALPHA}, found {found!r}")
    return MoEActivation.SWIGLUOAI


def relu2(config: Config) -> MoEActivation:
    """Nemotron: its experts are ungated."""
    return one_known("mlp_hidden_act", required(config, "mlp_hidden_act"), {"relu2": MoEActivation.RELU2_NO_MUL})


def listed_layers(config: Config) -> tuple[int, ...] | None:
    """The layers that transformers lists as sparse, for families of any kind; None without such a list."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return None
    layers = all_layers(config)
    if not isinstance(kinds, list) or len(kinds) < len(layers) or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types: expected dense or sparse for each of {len(layers)} layers, found {kinds!r}"
        )
    return tuple(i for i in layers if kinds[i] == "sparse")


def top_k(config: Config) -> int:
    """Experts of a token; Hunyuan lists them by layer, and they are the same in all."""
    listed = config.get("moe_topk")
    if isinstance(listed, list) and listed and all(value == listed[0] for value in listed):
        config = config | {"moe_topk": listed[0]}
    return positive(config, "num_experts_per_tok", "moe_k", "moe_topk")


def all_layers(config: Config) -> tuple[int, ...]:
    return tuple(range(positive(config, "num_hidden_layers")))


def sparse_step_layers(config: Config) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer, less those listed as dense."""
    dense, step = config.get("mlp_only_layers") or [], whole(config, "decoder_sparse_step", 1, least=1)
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers: expected a list of layers, found {dense!r}")
    return tuple(i for i in all_layers(config) if i not in dense and (i + 1) % step == 0)


def layers_after_dense(config: Config) -> tuple[int, ...]:
    """DeepSeek: the first layers are dense, and of the rest every `moe_layer_freq`-th has experts, or those listed."""
    layers, first, listed = all_layers(config), whole(config, "first_k_dense_replace", 0), config.get("moe_layer_freq")
    if isinstance(listed, list):
        if len(listed) < len(layers):
            raise CheckpointError(
                f"config.json: moe_layer_freq: expected 0 or 1 for each of {len(layers)} layers, found {listed!r}"
            )
        return tuple(i for i in layers if i >= first and listed[i])
    step = whole(config, "moe_layer_freq", 1, least=1)
    return tuple(i for i in layers if i >= first and i % step == 0)


def layers_after(key: str) -> Callable[[Config], tuple[int, ...]]:
    """All but the first, whose number stands under that key."""

    def layers(config: Config) -> tuple[int, ...]:
        return tuple(i for i in all_layers(config) if i >= whole(config, key, 0))

    return layers


def llama_layers(config: Config) -> tuple[int, ...]:
    """Those listed, or every `interleave_moe_layer_step`-th."""
    layers, listed = all_layers(config), config.get("moe_layers")
    if listed is None:
        step = whole(config, "interleave_moe_layer_step", 1, least=1)
        return tuple(i for i in layers if (i + 1) % step == 0)
    if not isinstance(listed, list):
        raise CheckpointError(f"config.json: moe_layers: expected a list of layers, found {listed!r}")
    return tuple(i for i in layers if i in listed)


def jamba_layers(config: Config) -> tuple[int, ...]:
    """Every `expert_layer_period`-th from `expert_layer_offset` on."""
    step, first = whole(config, "expert_layer_period", 2, least=1), whole(config, "expert_layer_offset", 1)
    return tuple(i for i in all_layers(config) if i % step == first)


def layers_between(config: Config) -> tuple[int, ...]:
    """Ernie: every `moe_layer_interval`-th layer from a first to a last one."""
    first, step = whole(config, "moe_layer_start_index", 1), whole(config, "moe_layer_interval", 1, least=1)
    layers, last = all_layers(config), whole(config, "moe_layer_end_index", -1, least=-1)
    last = layers[-1] if last == -1 else last
    return tuple(i for i in layers if first <= i <= last and (i + 1) % step == 0)


def fixed_routing(**routing: Any) -> Callable[[Config], RoutingSpec]:
    """The same for every model of a family."""
    spec = RoutingSpec(**routing)
    return lambda config: spec


def softmax_routing(renormalize: bool) -> Callable[[Config], RoutingSpec]:
    """Renormalized as `norm_topk_prob` says, or as given where the config is silent."""
    return lambda config: RoutingSpec(renormalize=bool(config.get("norm_topk_prob", renormalize)))


biased_sigmoid = fixed_routing(renormalize=True, scoring_func="sigmoid", has_correction_bias=True)


def biased_sigmoid_times(factor: str) -> Callable[[Config], RoutingSpec]:
    """The same, with the factor of weights that stands under that key."""
    return lambda config: replace(biased_sigmoid(config), routed_scaling_factor=number(config, factor, 1.0))


def lfm_routing(config: Config) -> RoutingSpec:
    """Its sum, that it divides by, has 1e-6 more: below what a sum of sigmoids of chosen experts shows."""
    bias, renormalize = config.get("use_expert_bias"), config.get("norm_topk_prob")
    return RoutingSpec(
        renormalize=renormalize is None or bool(renormalize),
        scoring_func="sigmoid",
        has_correction_bias=bias is None or bool(bias),
        routed_scaling_factor=number(config, "routed_scaling_factor", 1.0),
    )


def sigmoid_routing(config: Config) -> RoutingSpec:
    """Without a bias; renormalized unless `norm_topk_prob` says otherwise."""
    return replace(softmax_routing(renormalize=True)(config), scoring_func="sigmoid")


def laguna_routing(config: Config) -> RoutingSpec:
    for key in ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input"):
        if config.get(key):
            raise CheckpointError(f"config.json: {key}: expected none, found {config[key]!r}; such routers do not load")
    return biased_sigmoid_times("moe_routed_scaling_factor")(config)


def cohere_routing(config: Config) -> RoutingSpec:
    """A softmax over the chosen experts, which is a renormalized one over all, or sigmoid scores."""
    kinds = {"softmax": fixed_routing(renormalize=True), "sigmoid": sigmoid_routing}
    routing = one_known("expert_selection_fn", config.get("expert_selection_fn") or "softmax", kinds)(config)
    return replace(routing, routed_scaling_factor=_cohere_factor(config))


def cohere_shared_experts(config: Config) -> SharedExpertsSpec | None:
    shared = counted_shared_experts(config)
    return None if shared is None else replace(shared, factor=_cohere_factor(config))


def _cohere_factor(config: Config) -> float:
    """Of both the routed and the shared experts, which are added or averaged."""
    strategy = config.get("shared_expert_combination_strategy") or "average"
    factor = one_known("shared_expert_combination_strategy", strategy, {"average": 0.5, "sum": 1.0})
    return factor if config.get("num_shared_experts") else 1.0


def longcat_routing(config: Config) -> RoutingSpec:
    """Among the experts are some that return what they read."""
    kind = config.get("zero_expert_type") or "identity"
    if kind != "identity":
        raise CheckpointError(f"config.json: {one_of('zero_expert_type', kind, ['identity'])}")
    if config.get("router_bias"):
        raise CheckpointError("config.json: router_bias: expected false, found true; transformers does not add it")
    return RoutingSpec(
        renormalize=False,
        has_correction_bias=True,
        routed_scaling_factor=number(config, "routed_scaling_factor"),
        zero_expert_num=whole(config, "zero_expert_num", 0),
        zero_expert_type=kind,
    )


def phi_routing(config: Config) -> RoutingSpec:
    """Of two experts: transformers chooses as many whatever the config says."""
    if (found := top_k(config)) != 2:
        raise CheckpointError(f"config.json: num_experts_per_tok: expected 2 for a PhiMoE model, found {found}")
    mixer = partial(sparse_mixer, jitter_eps=number(config, "router_jitter_noise", 0.01))
    return RoutingSpec(renormalize=False, custom_routing_function=mixer)


def deepseek_routing(topk_method: str, scoring_func: str, renormalize: bool) -> Callable[[Config], RoutingSpec]:
    """The routing of a DeepSeek generation, given what its configs mean where they are silent.

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
        norm_topk_prob = config.get("norm_topk_prob")
        return RoutingSpec(
            renormalize=renormalize if norm_topk_prob is None else bool(norm_topk_prob),
            scoring_func=scoring,
            use_grouped_topk=grouped,
            num_expert_group=positive(config, "n_group") if grouped else None,
            topk_group=positive(config, "topk_group") if grouped else None,
            routed_scaling_factor=number(config, "routed_scaling_factor"),
            has_correction_bias=method == "noaux_tc",
        )

    return routing


def no_fields(config: Config) -> dict[str, Any]:
    return {}


def limited_gate(config: Config) -> dict[str, Any]:
    """Where gate and up end, in families that limit them."""
    found = config.get("swiglu_limit")
    limit = None if found is None else number(config, "swiglu_limit")
    if limit is not None and limit <= 0:
        raise CheckpointError(f"config.json: swiglu_limit: expected a positive number, found {found!r}")
    return {"swiglu_limit": limit}


def cohere_fields(config: Config) -> dict[str, Any]:
    return {"has_layer_norm": config["has_layer_norm"]}


def deepseek_v4_fields(config: Config) -> dict[str, Any]:
    """Named as by the model's authors or, where the attention's settings are those of transformers, as by that."""
    fields = {"table_layers": config["table_layers"], **limited_gate(config)}
    if "compress_ratios" in config:
        fields |= {"layers_module": "layers", "embedding": "embed.weight"}
    return fields


def no_shared_experts(config: Config) -> None:
    return None


def limited(
    shared_experts: Callable[[Config], SharedExpertsSpec | None],
) -> Callable[[Config], SharedExpertsSpec | None]:
    """The same with the routed experts' limit."""

    def shared(config: Config) -> SharedExpertsSpec | None:
        spec = shared_experts(config)
        return None if spec is None else replace(spec, **limited_gate(config))

    return shared


def one_mlp(module: str, size: str, **form: Any) -> Callable[[Config], SharedExpertsSpec | None]:
    """A shared expert whose size stands under a key of its own; none where that is missing or 0."""

    def shared(config: Config) -> SharedExpertsSpec | None:
        found = whole(config, size, 0)
        return SharedExpertsSpec(module=module, num_experts=1, intermediate_size=found, **form) if found else None

    return shared


def several_in_one_mlp(
    module: str, size: str = "moe_intermediate_size", **form: Any
) -> Callable[[Config], SharedExpertsSpec | None]:
    """One MLP for all shared experts, each of the size under that key; EXAONE and Ernie call their number otherwise."""

    def shared(config: Config) -> SharedExpertsSpec | None:
        keys = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        count = max(whole(config, key, 0) for key in keys)
        if not count:
            return None
        for key in ("use_bias", "mlp_bias"):
            if config.get(key):
                raise CheckpointError(
                    f"config.json: {key}: expected false, found {config[key]!r}; shared experts with biases do not load"
                )
        each = positive(config, size)
        as_routed = each == positive(config, "moe_intermediate_size")
        return SharedExpertsSpec(
            module=module, num_experts=count if as_routed else 1, intermediate_size=count * each, **form
        )

    return shared


counted_shared_experts = several_in_one_mlp("mlp.shared_experts")
