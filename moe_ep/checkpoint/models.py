"""The model families: how each one's config.json becomes a `MoEModelSpec`.

A family is one `_Family` in `FAMILIES`: what it shares with the others stays at the defaults. The facts are those of
the families' code in transformers 5 (transformers/models/<model_type>), and the names those of the files on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import family_configs as configs
from moe_ep.checkpoint import family_rules as rules
from moe_ep.checkpoint.config_values import Config, number, one_known, positive
from moe_ep.checkpoint.spec import MoEModelSpec, Projections, RoutingSpec, SharedExpertsSpec
from moe_ep.errors import CheckpointError

__all__ = ["FAMILIES", "MoEModelSpec", "Projections", "RoutingSpec", "SharedExpertsSpec", "model_spec"]


def model_spec(config: Config) -> MoEModelSpec:
    """The description of a checkpoint, from its config.json.

    Raises:
        CheckpointError: an unknown model_type (the known ones are listed), a missing key, or values that can not be.
    """
    family = one_known("model_type", config.get("model_type"), dict(sorted(FAMILIES.items())))
    model_type, config = config["model_type"], family.text_config(config)
    listed = rules.listed_layers(config)
    spec = MoEModelSpec(
        family=model_type,
        hidden_size=positive(config, "hidden_size"),
        num_hidden_layers=positive(config, "num_hidden_layers"),
        vocab_size=positive(config, "vocab_size"),
        dtype=_dtype(config),
        rms_norm_eps=number(config, "rms_norm_eps"),
        moe_layers=family.moe_layers(config) if listed is None else listed,
        num_experts=positive(config, *_NUM_EXPERTS),
        top_k=rules.top_k(config),
        moe_intermediate_size=positive(config, family.intermediate_size),
        activation=family.activation(config),
        routing=family.routing(config),
        shared_experts=family.shared_experts(config),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        moe_module=family.moe_module,
        projections=family.projections,
        **family.names,
    )
    _check(spec)
    return spec


# transformers writes the number of routed experts under any of these, whatever the family.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return one_known("dtype", name, _DTYPES)


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


_GATE_DOWN_UP = Projections(gate="gate_proj", down="down_proj", up="up_proj")


_SOFTMAX = rules.softmax_routing(renormalize=False)


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
    moe_layers: Callable[[Config], tuple[int, ...]] = rules.all_layers
    routing: Callable[[Config], RoutingSpec] = _SOFTMAX
    shared_experts: Callable[[Config], SharedExpertsSpec | None] = rules.no_shared_experts
    activation: Callable[[Config], MoEActivation] = rules.named_activation
    text_config: Callable[[Config], Config] = configs.whole_config
    names: dict[str, Any] = field(default_factory=dict)


_RENORMALIZED = rules.fixed_routing(renormalize=True)
_GATED_SHARED_EXPERT = rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size", has_gate=True)
_GATE_W1 = Projections(gate="w1", down="w2", up="w3")
_MIXTRAL = _Family(
    moe_module="block_sparse_moe",
    projections=_GATE_W1,
    intermediate_size="intermediate_size",
    routing=_RENORMALIZED,
)
_QWEN3_NEXT = _Family(
    moe_layers=rules.sparse_step_layers,
    routing=rules.softmax_routing(renormalize=True),
    shared_experts=_GATED_SHARED_EXPERT,
    names={"norm_offset": 1.0},
)
# Models that see have the language model in a part of their own.
_LANGUAGE_PART = {
    "layers_module": "model.language_model.layers",
    "embedding": "model.language_model.embed_tokens.weight",
}
_WHOLE_LANGUAGE_MODEL = {
    "layers_module": "language_model.model.layers",
    "embedding": "language_model.model.embed_tokens.weight",
}
_GRANITE = replace(
    _MIXTRAL,
    projections=_GATE_DOWN_UP,
    shared_experts=rules.one_mlp("shared_mlp", "shared_intermediate_size", fused=("input_linear", "output_linear")),
    names={"router": "router.layer", "fused": ("input_linear.weight", "output_linear.weight")},
)
_DEEPSEEK_V3 = _Family(
    moe_layers=rules.layers_after_dense,
    routing=rules.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    shared_experts=rules.counted_shared_experts,
)

FAMILIES = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": _Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=rules.biased_sigmoid,
        names={"correction_bias_tensor": "e_score_correction_bias"},
    ),
    "llama4": _Family(
        moe_module="feed_forward",
        intermediate_size="intermediate_size",
        moe_layers=rules.llama_layers,
        routing=rules.fixed_routing(renormalize=False, scoring_func="sigmoid", apply_router_weight_on_input=True),
        shared_experts=rules.one_mlp("feed_forward.shared_expert", "intermediate_size"),
        text_config=configs.text_part,
        names={"router": "router", **_WHOLE_LANGUAGE_MODEL},
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "phimoe": _Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=rules.phi_routing,
        names={"has_norm_bias": True},
    ),
    "qwen2_moe": _Family(moe_layers=rules.sparse_step_layers, shared_experts=_GATED_SHARED_EXPERT),
    "qwen3_moe": _Family(moe_layers=rules.sparse_step_layers),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_moe": replace(_QWEN3_NEXT, text_config=configs.text_part, names={**_QWEN3_NEXT.names, **_LANGUAGE_PART}),
    "qwen3_vl_moe": _Family(
        moe_layers=rules.sparse_step_layers,
        routing=_RENORMALIZED,
        text_config=configs.text_part,
        names=_LANGUAGE_PART,
    ),
    "olmoe": _Family(intermediate_size="intermediate_size"),
    "ernie4_5_moe": _Family(
        moe_layers=rules.layers_between,
        routing=rules.fixed_routing(renormalize=True, has_correction_bias=True),
        shared_experts=rules.ernie_shared_experts,
        names={"correction_bias_tensor": "moe_statics.e_score_correction_bias"},
    ),
    "gpt_oss": _Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        activation=rules.swigluoai,
        names={"router": "router", "has_router_bias": True, "has_bias": True, "interleaved": True},
    ),
    "afmoe": _Family(
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=rules.afmoe_routing,
        shared_experts=rules.counted_shared_experts,
        names={"router": "router.gate", "correction_bias_tensor": "expert_bias", "norm": "pre_mlp_layernorm"},
    ),
    "jamba": _Family(
        moe_module="feed_forward",
        intermediate_size="intermediate_size",
        moe_layers=rules.jamba_layers,
        names={"router": "router", "norm": "pre_ff_layernorm"},
    ),
    "lfm2_moe": _Family(
        moe_module="feed_forward",
        projections=_GATE_W1,
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=rules.lfm_routing,
        text_config=configs.lfm_config,
        names={"correction_bias_tensor": "expert_bias", "norm": "ffn_norm"},
    ),
    "nemotron_h": _Family(
        moe_module="mixer",
        projections=Projections(gate="up_proj", down="down_proj"),
        routing=rules.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
        shared_experts=rules.one_mlp("mixer.shared_experts", "moe_shared_expert_intermediate_size"),
        activation=rules.relu2,
        text_config=configs.nemotron_config,
        names={"layers_module": "backbone.layers", "embedding": "backbone.embeddings.weight", "norm": "norm"},
    ),
    "exaone_moe": replace(_DEEPSEEK_V3, names={"correction_bias_tensor": "e_score_correction_bias"}),
    "mimo_v2_flash": replace(_DEEPSEEK_V3, text_config=configs.mimo_config),
    "hunyuan_v1_moe": _Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        shared_experts=rules.one_mlp("mlp.shared_mlp", "intermediate_size"),
        names={"router": "gate.wg"},
    ),
    "solar_open": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "glm4v_moe": replace(_DEEPSEEK_V3, text_config=configs.text_part, names=_LANGUAGE_PART),
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3,
    "dots1": _DEEPSEEK_V3,
    "deepseek_v2": _Family(
        moe_layers=rules.layers_after_dense,
        routing=rules.deepseek_routing("greedy", "softmax", renormalize=False),
        shared_experts=rules.counted_shared_experts,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": replace(_DEEPSEEK_V3, text_config=configs.text_part, names=_WHOLE_LANGUAGE_MODEL),
}
