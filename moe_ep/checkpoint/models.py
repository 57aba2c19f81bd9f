"""The model families: what each one does its own way.

A family is one `Family` in `FAMILIES`: what it shares with the others stays at the defaults. The facts are those of
the families' code in transformers 5 (transformers/models/<model_type>), and the names those of the files on disk.
`model_spec` (described.py) turns a config.json into a `MoEModelSpec` by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import family_configs as configs
from moe_ep.checkpoint import family_rules as rules
from moe_ep.checkpoint.config_values import Config
from moe_ep.checkpoint.spec import Projections, RoutingSpec, SharedExpertsSpec

_GATE_DOWN_UP = Projections(gate="gate_proj", down="down_proj", up="up_proj")
_SOFTMAX = rules.softmax_routing(renormalize=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family does its own way.

    Attributes:
        intermediate_size: the config's key for N.
        text_config: the part of the config that is about the language model.
        names: fields of `MoEModelSpec` that say where tensors are and what they mean.
        fields: more of them, which the config decides.
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
    fields: Callable[[Config], dict[str, Any]] = rules.no_fields


_RENORMALIZED = rules.fixed_routing(renormalize=True)
_GATED_SHARED_EXPERT = rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size", has_gate=True)
_GATE_W1 = Projections(gate="w1", down="w2", up="w3")
_MIXTRAL = Family(
    moe_module="block_sparse_moe",
    projections=_GATE_W1,
    intermediate_size="intermediate_size",
    routing=_RENORMALIZED,
)
_QWEN3_NEXT = Family(
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
_DEEPSEEK_V3 = Family(
    moe_layers=rules.layers_after_dense,
    routing=rules.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    shared_experts=rules.counted_shared_experts,
)
# What Kimi Linear and Ling call otherwise.
_KIMI_KEYS = {
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
# Where the config is silent.
_FIRST_DENSE = {"first_k_dense_replace": 1}
# Softmax scores without a correction bias, and groups by their two best all the same.
_MISTRAL = replace(
    _DEEPSEEK_V3,
    routing=rules.deepseek_routing("noaux_tc", "softmax", renormalize=True),
    names={"correction_bias_may_miss": True},
)
_MISTRAL_LARGE_SILENT = {**_FIRST_DENSE, "routed_scaling_factor": 1.0}
_MISTRAL_LARGE = replace(
    _MISTRAL,
    moe_module="",
    projections=_GATE_W1,
    shared_experts=rules.several_in_one_mlp("shared_experts"),
    text_config=configs.renamed({}, _MISTRAL_LARGE_SILENT),
    names={**_MISTRAL.names, "layers_module": "layers", "norm": "ffn_norm", "embedding": "embed_tokens.weight"},
)
_DOTS3 = replace(
    _DEEPSEEK_V3,
    shared_experts=rules.several_in_one_mlp("mlp.shared_experts", "shared_experts_intermediate_size"),
    text_config=configs.renamed(
        {"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
        {**_FIRST_DENSE, "shared_experts_intermediate_size": 1536},
        part=configs.text_part_or_whole,
    ),
)

FAMILIES = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=rules.biased_sigmoid,
        names={"correction_bias_tensor": "e_score_correction_bias"},
    ),
    "llama4": Family(
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
    "phimoe": Family(
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        intermediate_size="intermediate_size",
        routing=rules.phi_routing,
        names={"has_norm_bias": True},
    ),
    "qwen2_moe": Family(moe_layers=rules.sparse_step_layers, shared_experts=_GATED_SHARED_EXPERT),
    "qwen3_moe": Family(moe_layers=rules.sparse_step_layers),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_moe": replace(_QWEN3_NEXT, text_config=configs.text_part, names={**_QWEN3_NEXT.names, **_LANGUAGE_PART}),
    "qwen3_vl_moe": Family(
        moe_layers=rules.sparse_step_layers,
        routing=_RENORMALIZED,
        text_config=configs.text_part,
        names=_LANGUAGE_PART,
    ),
    "olmoe": Family(intermediate_size="intermediate_size"),
    "ernie4_5_moe": Family(
        moe_layers=rules.layers_between,
        routing=rules.fixed_routing(renormalize=True, has_correction_bias=True),
        shared_experts=rules.counted_shared_experts,
        names={"correction_bias_tensor": "moe_statics.e_score_correction_bias"},
    ),
    "gpt_oss": Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        activation=rules.swigluoai,
        fields=rules.limited_gate,
        names={"router": "router", "has_router_bias": True, "has_bias": True, "interleaved": True},
    ),
    "afmoe": Family(
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=rules.biased_sigmoid_times("route_scale"),
        shared_experts=rules.counted_shared_experts,
        names={
            "router": "router.gate",
            "correction_bias_tensor": "expert_bias",
            "norm": "pre_mlp_layernorm",
            "output_norm": "post_mlp_layernorm",
        },
    ),
    "jamba": Family(
        moe_module="feed_forward",
        intermediate_size="intermediate_size",
        moe_layers=rules.jamba_layers,
        names={"router": "router", "norm": "pre_ff_layernorm"},
    ),
    "lfm2_moe": Family(
        moe_module="feed_forward",
        projections=_GATE_W1,
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=rules.lfm_routing,
        text_config=configs.lfm_config,
        names={"correction_bias_tensor": "expert_bias", "norm": "ffn_norm"},
    ),
    "nemotron_h": Family(
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
    "hunyuan_v1_moe": Family(
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
    "glm5_next": replace(
        _DEEPSEEK_V3,
        shared_experts=rules.limited(rules.counted_shared_experts),
        text_config=configs.renamed({}, {"first_k_dense_replace": 3, "swiglu_limit": 10.0}, part=configs.text_part),
        names=_LANGUAGE_PART,
        fields=rules.limited_gate,
    ),
    "dots1": _DEEPSEEK_V3,
    "deepseek_v2": Family(
        moe_layers=rules.layers_after_dense,
        routing=rules.deepseek_routing("greedy", "softmax", renormalize=False),
        shared_experts=rules.counted_shared_experts,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": Family(
        moe_module="ffn",
        projections=_GATE_W1,
        routing=rules.deepseek_routing("noaux_tc", "sqrtsoftplus", renormalize=True),
        shared_experts=rules.limited(rules.several_in_one_mlp("ffn.shared_experts")),
        text_config=configs.deepseek_v4_config,
        names={"norm": "ffn_norm", "correction_bias_tensor": "gate.bias"},
        fields=rules.deepseek_v4_fields,
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": replace(_DEEPSEEK_V3, text_config=configs.text_part, names=_WHOLE_LANGUAGE_MODEL),
    "kimi_linear": replace(
        _DEEPSEEK_V3,
        moe_module="block_sparse_moe",
        projections=_GATE_W1,
        shared_experts=rules.several_in_one_mlp("block_sparse_moe.shared_experts", projections=_GATE_DOWN_UP),
        text_config=configs.renamed(_KIMI_KEYS | {"scoring_func": "moe_router_activation_func"}, _FIRST_DENSE),
    ),
    "mistral3": replace(
        _MISTRAL,
        text_config=configs.text_part_of("mistral4"),
        names={**_MISTRAL.names, **_WHOLE_LANGUAGE_MODEL},
    ),
    "mistral4": _MISTRAL,
    "mistral_large4": replace(
        _MISTRAL_LARGE,
        text_config=configs.renamed({}, _MISTRAL_LARGE_SILENT, part=configs.text_part),
        names={**_MISTRAL_LARGE.names, "embedding": "tok_embeddings.weight"},
    ),
    "mistral_large4_text": replace(
        _MISTRAL_LARGE, shared_experts=rules.several_in_one_mlp("shared_experts", projections=_GATE_DOWN_UP)
    ),
    "hy_v3": replace(
        _DEEPSEEK_V3,
        routing=rules.biased_sigmoid_times("router_scaling_factor"),
        shared_experts=rules.several_in_one_mlp("mlp.shared_mlp"),
        text_config=configs.renamed({}, _FIRST_DENSE),
        names={"router": "router.gate", "correction_bias_tensor": "expert_bias"},
    ),
    "bailing_hybrid": replace(
        _DEEPSEEK_V3,
        text_config=configs.renamed(_KIMI_KEYS, {"first_k_dense_replace": 2}),
        names={"embedding": "model.word_embeddings.weight", "correction_bias_tensor": "gate.expert_bias"},
    ),
    "axk1": replace(
        _DEEPSEEK_V3,
        text_config=configs.renamed({}, _FIRST_DENSE),
        names={"correction_bias_may_miss": True, "output_norm": "post_mlp_layernorm"},
    ),
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
}
