"""The model families: how each one's config.json becomes a `MoEModelSpec`.

A family is one `_Family` in `FAMILIES`: what it shares with the others stays at the defaults. The facts are those of
the families' code in transformers 5 (transformers/models/<model_type>), and the names those of the files on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ep.activation import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, MoEActivation
from moe_ep.checkpoint.spec import MoEModelSpec, Projections, RoutingSpec, SharedExpertsSpec
from moe_ep.errors import CheckpointError, one_of
from moe_ep.sparse_mixer import SparseMixer

__all__ = ["FAMILIES", "MoEModelSpec", "Projections", "RoutingSpec", "SharedExpertsSpec", "model_spec"]

Config = dict[str, Any]


def model_spec(config: Config) -> MoEModelSpec:
    """The description of a checkpoint, from its config.json.

    Raises:
        CheckpointError: an unknown model_type (the known ones are listed), a missing key, or values that can not be.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise CheckpointError(f"config.json: {one_of('model_type', config.get('model_type'), sorted(FAMILIES))}")
    model_type, config = config["model_type"], family.text_config(config)
    spec = MoEModelSpec(
        family=model_type,
        hidden_size=_positive(config, "hidden_size"),
        num_hidden_layers=_positive(config, "num_hidden_layers"),
        vocab_size=_positive(config, "vocab_size"),
        dtype=_dtype(config),
        rms_norm_eps=float(_required(config, "rms_norm_eps")),
        moe_layers=family.moe_layers(config),
        num_experts=_positive(config, *_NUM_EXPERTS),
        top_k=_positive(config, "num_experts_per_tok", "moe_k"),
        moe_intermediate_size=_positive(config, family.intermediate_size),
        activation=family.activation(config),
        routing=family.routing(config),
        shared_experts=family.shared_experts(config),
        moe_module=family.moe_module,
        projections=family.projections,
        **family.names,
    )
    _check(spec)
    return spec


# transformers writes the number of routed experts under any of these, whatever the family.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_ACTIVATIONS = {
    "silu": MoEActivation.SILU,
    "swish": MoEActivation.SILU,
    "gelu": MoEActivation.GELU,
    "gelu_new": MoEActivation.GELU_TANH,
    "gelu_pytorch_tanh": MoEActivation.GELU_TANH,
}

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _required(config: Config, *keys: str) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise CheckpointError(f"config.json: expected {' or '.join(keys)}, found no such key")


def _positive(config: Config, *keys: str) -> int:
    value = _required(config, *keys)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {' or '.join(keys)}: expected a whole number of at least 1, found {value!r}"
        )
    return value


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"config.json: {one_of('dtype', name, list(_DTYPES))}")
    return _DTYPES[name]


def _activation(config: Config) -> MoEActivation:
    name = _required(config, "hidden_act")
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {one_of('hidden_act', name, list(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _swigluoai(config: Config) -> MoEActivation:
    """GPT-OSS: its hidden_act says silu, and what it computes has two constants more."""
    constants = {"swiglu_alpha": SWIGLUOAI_ALPHA, "swiglu_limit": SWIGLUOAI_LIMIT}
    for key, known in constants.items():
        if config.get(key, known) != known:
            raise CheckpointError(f"config.json: {key}: expected {known}, found {config[key]!r}")
    return MoEActivation.SWIGLUOAI


def _check(spec: MoEModelSpec) -> None:
    groups, kept = spec.routing.num_expert_group, spec.routing.topk_group
    if not spec.moe_layers:
        raise CheckpointError(f"config.json: expected a layer with experts among {spec.num_hidden_layers}, found none")
    if spec.top_k > spec.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok: expected at most the number of experts ({spec.num_experts}), "
            f"found {spec.top_k}"
        )
    if groups is not None and (kept is None or spec.num_experts % groups or not 1 <= kept <= groups):
        raise CheckpointError(
            f"config.json: n_group and topk_group: expected a divisor of {spec.num_experts} experts and at most that "
            f"many groups to keep, found {groups} and {kept}"
        )


def _all_layers(config: Config) -> tuple[int, ...]:
    return tuple(range(_positive(config, "num_hidden_layers")))


def _sparse_step_layers(config: Config) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer, less those listed as dense."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    return tuple(i for i in _all_layers(config) if i not in dense and (i + 1) % step == 0)


def _layers_after_dense(config: Config) -> tuple[int, ...]:
    """DeepSeek: the first layers are dense, and of the rest every `moe_layer_freq`-th has experts."""
    first, step = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq", 1)
    return tuple(i for i in _all_layers(config) if i >= first and i % step == 0)


def _layers_between(config: Config) -> tuple[int, ...]:
    """Ernie: every `moe_layer_interval`-th layer from a first to a last one."""
    last, step = config.get("moe_layer_end_index", -1), config.get("moe_layer_interval", 1)
    layers = _all_layers(config)
    last = layers[-1] if last in (None, -1) else last
    return tuple(i for i in layers if config.get("moe_layer_start_index", 1) <= i <= last and (i + 1) % step == 0)


def _softmax_routing(config: Config) -> RoutingSpec:
    return RoutingSpec(renormalize=bool(config.get("norm_topk_prob", False)))


def _renormalized_unless_told(config: Config) -> RoutingSpec:
    return RoutingSpec(renormalize=bool(config.get("norm_topk_prob", True)))


def _biased_softmax(config: Config) -> RoutingSpec:
    return RoutingSpec(renormalize=True, has_correction_bias=True)


def _biased_sigmoid(config: Config) -> RoutingSpec:
    return RoutingSpec(renormalize=True, scoring_func="sigmoid", has_correction_bias=True)


def _sparse_mixer(config: Config) -> RoutingSpec:
    mixer = SparseMixer(float(config.get("router_jitter_noise", 0.01)))
    return RoutingSpec(renormalize=False, custom_routing_function=mixer)


def _always_renormalized(config: Config) -> RoutingSpec:
    return RoutingSpec(renormalize=True)


def _deepseek_routing(topk_method: str, scoring_func: str, renormalize: bool) -> Callable[[Config], RoutingSpec]:
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
        if scoring not in ("softmax", "sigmoid"):
            raise CheckpointError(f"config.json: {one_of('scoring_func', scoring, ('softmax', 'sigmoid'))}")
        grouped = method != "greedy" and config.get("n_group") is not None
        norm_topk_prob = config.get("norm_topk_prob")
        return RoutingSpec(
            renormalize=renormalize if norm_topk_prob is None else bool(norm_topk_prob),
            scoring_func=scoring,
            use_grouped_topk=grouped,
            num_expert_group=_positive(config, "n_group") if grouped else None,
            topk_group=_positive(config, "topk_group") if grouped else None,
            routed_scaling_factor=float(_required(config, "routed_scaling_factor")),
            has_correction_bias=method == "noaux_tc",
        )

    return routing


def _no_shared_experts(config: Config) -> None:
    return None


def _gated_shared_expert(config: Config) -> SharedExpertsSpec | None:
    size = config.get("shared_expert_intermediate_size") or 0
    if not size:
        return None
    return SharedExpertsSpec(module="shared_expert", num_experts=1, intermediate_size=size, has_gate=True)


def _deepseek_shared_experts(config: Config) -> SharedExpertsSpec | None:
    count = config.get("n_shared_experts") or 0
    if not count:
        return None
    size = count * _positive(config, "moe_intermediate_size")
    return SharedExpertsSpec(module="shared_experts", num_experts=count, intermediate_size=size)


def _ernie_shared_experts(config: Config) -> SharedExpertsSpec | None:
    if config.get("use_bias"):
        raise CheckpointError(
            "config.json: use_bias: expected false, found true; shared experts with biases do not load"
        )
    count = config.get("moe_num_shared_experts") or 0
    if not count:
        return None
    size = count * _positive(config, "moe_intermediate_size")
    return SharedExpertsSpec(module="shared_experts", num_experts=count, intermediate_size=size)


def _whole_config(config: Config) -> Config:
    return config


def _text_part(config: Config) -> Config:
    """The language model's part of a config that has others, under the names of the whole where it is silent."""
    part = _required(config, "text_config")
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json: text_config: expected an object, found {part!r}")
    return {"dtype": config.get("dtype") or config.get("torch_dtype")} | part


_GATE_DOWN_UP = Projections(gate="gate_proj", down="down_proj", up="up_proj")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a family does its own way.

    Attributes:
        intermediate_size: the config's key for N.
        text_config: the part of the config that is about the language model.
        names: fields of `MoEModelSpec` that say where tensors are and what they mean.
    """

    moe_module: str = "mlp"
    projections: Projections = _GATE_DOWN_UP
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: Callable[[Config], tuple[int, ...]] = _all_layers
    routing: Callable[[Config], RoutingSpec] = _softmax_routing
    shared_experts: Callable[[Config], SharedExpertsSpec | None] = _no_shared_experts
    activation: Callable[[Config], MoEActivation] = _activation
    text_config: Callable[[Config], Config] = _whole_config
    names: dict[str, Any] = field(default_factory=dict)


_GATE_W1 = Projections(gate="w1", down="w2", up="w3")
_DEEPSEEK_V3 = _Family(
    moe_layers=_layers_after_dense,
    routing=_deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    shared_experts=_deepseek_shared_experts,
)

FAMILIES = {
    "mixtral": _Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=_always_renormalized,
    ),
    "minimax_m2": _Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=_biased_sigmoid,
        names={"correction_bias_tensor": "e_score_correction_bias"},
    ),
    "phimoe": _Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=_sparse_mixer,
        names={"has_norm_bias": True},
    ),
    "qwen2_moe": _Family(moe_layers=_sparse_step_layers, shared_experts=_gated_shared_expert),
    "qwen3_moe": _Family(moe_layers=_sparse_step_layers),
    "qwen3_next": _Family(
        moe_layers=_sparse_step_layers,
        routing=_renormalized_unless_told,
        shared_experts=_gated_shared_expert,
        names={"norm_offset": 1.0},
    ),
    "qwen3_vl_moe": _Family(
        moe_layers=_sparse_step_layers,
        routing=_always_renormalized,
        text_config=_text_part,
        names={
            "layers_module": "model.language_model.layers",
            "embedding": "model.language_model.embed_tokens.weight",
        },
    ),
    "olmoe": _Family(intermediate_size="intermediate_size"),
    "ernie4_5_moe": _Family(
        moe_layers=_layers_between,
        routing=_biased_softmax,
        shared_experts=_ernie_shared_experts,
        names={"correction_bias_tensor": "moe_statics.e_score_correction_bias"},
    ),
    "gpt_oss": _Family(
        intermediate_size="intermediate_size",
        routing=_always_renormalized,
        activation=_swigluoai,
        names={"router": "router", "has_router_bias": True, "has_bias": True, "interleaved": True},
    ),
    "glm4_moe": _DEEPSEEK_V3,
    "deepseek_v2": _Family(
        moe_layers=_layers_after_dense,
        routing=_deepseek_routing("greedy", "softmax", renormalize=False),
        shared_experts=_deepseek_shared_experts,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}
