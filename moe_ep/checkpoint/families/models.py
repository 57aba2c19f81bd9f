"""Registry of model families. A family states how it differs from the defaults of `Family`.

Values are from the families' code in transformers 5 (transformers/models/<model_type>), tensor names from published
files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint.config_values import Config, unexpected
from moe_ep.checkpoint.families import configs, routing, rules
from moe_ep.checkpoint.spec import GATE_DOWN_UP, GATE_W1, Projections, RoutingSpec, SharedExpertsSpec

# Names of tensors if the language model is a part of a multimodal model.
LANGUAGE_PART = {
    "layers_module": "model.language_model.layers",
    "embedding": "model.language_model.embed_tokens.weight",
}
WHOLE_LANGUAGE_MODEL = {
    "layers_module": "language_model.model.layers",
    "embedding": "language_model.model.embed_tokens.weight",
}
# For families with routers, or norms before router or experts, that only transformers computes.
EXPERTS_ALONE = {"router": None, "norm": None}
# Defaults of missing keys.
FIRST_DENSE = {"first_k_dense_replace": 1}
_SOFTMAX = routing.scored_routing("softmax", renormalize=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read one family's config.json, and where its tensors are.

    Attributes:
        intermediate_size: the config's key for N.
        part: extracts the language model's config.
        keys: common key -> the family's key; a config with both keeps the value of the common one.
        defaults: values of missing keys.
        fixed: the only values that these keys may have, where they are there.
        derived: keys that are computed from the others.
        names: fields of `MoEModelSpec` that locate and interpret tensors.
        fields: those that depend on the config.
        limit, shared_limit: keys for the clamp limits of the routed and the shared experts; any other such key is
            refused.
    """

    moe_module: str = "mlp"
    projections: Projections = GATE_DOWN_UP
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: Callable[[Config], tuple[int, ...]] = rules.all_layers
    routing: Callable[[Config], RoutingSpec] = _SOFTMAX
    shared_experts: Callable[[Config], SharedExpertsSpec | None] = rules.no_shared_experts
    activation: Callable[[Config], MoEActivation] = rules.named_activation
    part: Callable[[Config], Config] = configs.whole_config
    keys: dict[str, str] = field(default_factory=dict)
    defaults: Config = field(default_factory=dict)
    fixed: Config = field(default_factory=dict)
    derived: Callable[[Config], Config] = lambda config: {}
    names: dict[str, Any] = field(default_factory=dict)
    fields: Callable[[Config], dict[str, Any]] = lambda config: {}
    limit: str = ""
    shared_limit: str = ""

    def text_config(self, config: Config) -> Config:
        """The language model's config, under the keys that the other functions read."""
        config = self.part(config)
        known = {key: config[own] for key, own in self.keys.items() if config.get(own) is not None}
        missing = {key: value for key, value in (self.defaults | known).items() if config.get(key) is None}
        config = config | missing
        for key, value in self.fixed.items():
            if (found := config.get(key)) not in (None, value):
                raise unexpected(key, f"{value!r}", found, "; no other is computed here")
        return config | self.derived(config)


def _in_a_part(family: Family, names: dict[str, Any], part: Callable[[Config], Config] = configs.text_part) -> Family:
    """A multimodal model whose language model is of that family, under other tensor names."""
    return replace(family, part=part, names={**family.names, **names})


_DEEPSEEK_V3 = Family(
    moe_layers=rules.layers_after_dense,
    routing=routing.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    shared_experts=rules.counted_shared_experts,
)
_DEEPSEEK_V2 = Family(
    moe_layers=rules.layers_after_dense,
    routing=routing.deepseek_routing("greedy", "softmax", renormalize=False),
    shared_experts=rules.counted_shared_experts,
    fixed={"norm_topk_prob": False},
)
# The models' original config has these names; transformers writes its own.
_MIMO = replace(
    _DEEPSEEK_V3, keys={"rms_norm_eps": "layernorm_epsilon"}, defaults={**FIRST_DENSE, "routed_scaling_factor": 1.0}
)
_V4_FIXED = {"norm_topk_prob": True, "n_shared_experts": 1}
_DEEPSEEK_V4 = Family(
    moe_module="ffn",
    projections=GATE_W1,
    routing=routing.deepseek_routing("noaux_tc", "sqrtsoftplus", renormalize=True),
    shared_experts=rules.several_in_one_mlp("ffn.shared_experts"),
    fixed=_V4_FIXED,
    derived=configs.deepseek_v4_keys,
    names={"norm": "ffn_norm", "correction_bias_tensor": "gate.bias"},
    fields=rules.deepseek_v4_fields,
    limit="swiglu_limit",
    shared_limit="swiglu_limit",
)
# Keys that Kimi Linear and Ling rename.
_KIMI_KEYS = {
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
_KIMI_LINEAR = replace(
    _DEEPSEEK_V3,
    moe_module="block_sparse_moe",
    projections=GATE_W1,
    shared_experts=rules.several_in_one_mlp("block_sparse_moe.shared_experts", projections=GATE_DOWN_UP),
    activation=rules.kimi_activation,
    keys=_KIMI_KEYS | {"scoring_func": "moe_router_activation_func"},
    defaults=FIRST_DENSE,
    fields=rules.latent_experts(
        "routed_expert_hidden_size",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        norm="routed_expert_norm",
        has_norm="latent_moe_use_norm",
    ),  # Kimi-K3
)
_LING = replace(
    _DEEPSEEK_V3,
    routing=routing.ling_routing,
    names={"embedding": "model.word_embeddings.weight", "correction_bias_tensor": "gate.expert_bias"},
)
# Softmax scores without a correction bias; groups are still ranked by their two best experts.
_MISTRAL = replace(
    _DEEPSEEK_V3,
    routing=routing.deepseek_routing("noaux_tc", "softmax", renormalize=True),
    names={"correction_bias_may_miss": True},
)
_MISTRAL_LARGE = replace(
    _MISTRAL,
    moe_module="",
    projections=GATE_W1,
    shared_experts=rules.several_in_one_mlp("shared_experts"),
    defaults={**FIRST_DENSE, "routed_scaling_factor": 1.0},
    names={**_MISTRAL.names, "layers_module": "layers", "norm": "ffn_norm", "embedding": "embed_tokens.weight"},
)
_OCR = replace(_DEEPSEEK_V2, part=configs.text_part)
_DOTS3 = replace(
    _DEEPSEEK_V3,
    shared_experts=rules.several_in_one_mlp("mlp.shared_experts", "shared_experts_intermediate_size"),
    part=configs.text_part_or_whole,
    keys={"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
    defaults={**FIRST_DENSE, "shared_experts_intermediate_size": 1536},
)


_RENORMALIZED = routing.fixed_routing(renormalize=True)
_GATED_SHARED_EXPERT = rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size", has_gate=True)
_MIXTRAL = Family(
    moe_module="block_sparse_moe", projections=GATE_W1, intermediate_size="intermediate_size", routing=_RENORMALIZED
)
_QWEN3_MOE = Family(moe_layers=rules.sparse_step_layers)
_QWEN3_OMNI = replace(_QWEN3_MOE, routing=routing.scored_routing("softmax", renormalize=True), part=configs.text_part)
_QWEN3_NEXT = replace(
    _QWEN3_MOE,
    routing=routing.scored_routing("softmax", renormalize=True),
    shared_experts=_GATED_SHARED_EXPERT,
    names={"norm_offset": 1.0},
)
# All layers have experts and weights sum to one, even if a config with the older keys says otherwise.
_QWEN3_5 = replace(_QWEN3_NEXT, moe_layers=rules.all_layers, routing=_RENORMALIZED)
_MINIMAX_M3 = Family(
    intermediate_size="intermediate_size",
    moe_layers=rules.layers_after_dense,
    routing=routing.biased_sigmoid_times("routed_scaling_factor"),
    shared_experts=rules.one_mlp("mlp.shared_experts", "shared_intermediate_size", fused=("gate_up_proj", "down_proj")),
    activation=rules.swigluoai,
    defaults={"routed_scaling_factor": 2.0, "shared_intermediate_size": 3072},
    limit="swiglu_limit",
    shared_limit="swiglu_limit",
    names={"norm_offset": 1.0},
)
_LLAMA4 = Family(
    moe_module="feed_forward",
    intermediate_size="intermediate_size",
    moe_layers=rules.llama_layers,
    routing=routing.fixed_routing(renormalize=False, scoring_func="sigmoid", apply_router_weight_on_input=True),
    shared_experts=rules.one_mlp("feed_forward.shared_expert", "intermediate_size"),
    names={"router": "router"},
)
_ARIA = Family(
    routing=_RENORMALIZED,
    shared_experts=rules.counted_shared_experts,
    fixed={"hidden_act": "silu"},  # of the experts, whatever the shared ones use
    derived=configs.aria_keys,
    names={"router": "router", "fused": Projections("experts.fc1.weight", "experts.fc2.weight")},
)
_OLMOE = Family(intermediate_size="intermediate_size")
_GRANITE = replace(
    _MIXTRAL,
    projections=GATE_DOWN_UP,
    shared_experts=rules.one_mlp("shared_mlp", "shared_intermediate_size", fused=("input_linear", "output_linear")),
    names={"router": "router.layer", "fused": Projections("input_linear.weight", "output_linear.weight")},
)
_INKLING_MODEL = {
    "layers_module": "model.llm.layers",
    "embedding": "model.llm.embed.weight",
    "fused": Projections("experts.w13_weight", "experts.w2_weight"),
    "interleaved": True,
}
_INKLING2 = Family(
    routing=routing.biased_sigmoid_times("route_scale"),
    activation=rules.situ("mlp_gate_softcap", "mlp_up_softcap"),
    defaults={"hidden_act": "silu", "route_scale": 8.0, "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0},
    names={**_INKLING_MODEL, "norm": "mlp_norm", "correction_bias_tensor": "gate.bias"},
)
_STEP = Family(
    moe_module="moe",
    moe_layers=rules.enumerated_layers,
    routing=routing.biased_sigmoid_times("moe_router_scaling_factor"),
    shared_experts=rules.one_mlp("share_expert", "share_expert_dim"),
    keys={"num_experts_per_tok": "moe_top_k"},
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "moe_router_scaling_factor": 1.0},
    fixed={
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "mlp_bias": False,
    },
    names={
        "correction_bias_tensor": "router_bias",
        "norm_offset": 1.0,
        "fused": Projections("gate_proj.weight", "down_proj.weight", "up_proj.weight"),
    },
    limit="swiglu_limits",
    shared_limit="swiglu_limits_shared",
)
# The experts are in the layer itself, beside a dense MLP; the router has its own norm and scales.
_GEMMA4 = Family(
    moe_module="", keys={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"}, names=EXPERTS_ALONE
)
_INKLING = Family(moe_layers=rules.layers_after("dense_mlp_idx"), derived=configs.inkling_keys, names=EXPERTS_ALONE)

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    # The same models before transformers had them.
    "minimax_text_01": replace(_MIXTRAL, fixed={"shared_intermediate_size": 0}),
    "minimax_m1": replace(_MIXTRAL, fixed={"shared_intermediate_size": 0}),
    "minimax_m2": replace(
        _MIXTRAL, routing=routing.biased_sigmoid, names={"correction_bias_tensor": "e_score_correction_bias"}
    ),
    "minimax_m3_vl_text": _MINIMAX_M3,
    "minimax_m3_vl": replace(
        _MINIMAX_M3,
        moe_module="block_sparse_moe",
        projections=GATE_W1,
        shared_experts=rules.one_mlp(
            "block_sparse_moe.shared_experts", "shared_intermediate_size", projections=GATE_DOWN_UP
        ),
        part=configs.text_part,
        names={**_MINIMAX_M3.names, **WHOLE_LANGUAGE_MODEL, "correction_bias_tensor": "e_score_correction_bias"},
    ),
    "llama4_text": _LLAMA4,
    "llama4": _in_a_part(_LLAMA4, WHOLE_LANGUAGE_MODEL),
    "aria_text": _ARIA,
    "aria": _in_a_part(_ARIA, WHOLE_LANGUAGE_MODEL),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoe_swa": replace(_GRANITE, names={"router": "router"}),
    "phimoe": replace(_MIXTRAL, routing=routing.phi_routing, names={"has_layer_norm": True, "has_norm_bias": True}),
    "qwen2_moe": replace(_QWEN3_MOE, shared_experts=_GATED_SHARED_EXPERT),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_moe": _in_a_part(_QWEN3_5, LANGUAGE_PART),
    "qwen3_vl_moe": _in_a_part(replace(_QWEN3_MOE, routing=_RENORMALIZED), LANGUAGE_PART),
    "qwen3_omni_moe": replace(
        _QWEN3_OMNI,
        part=configs.thinker_part,
        names={"layers_module": "thinker.model.layers", "embedding": "thinker.model.embed_tokens.weight"},
    ),
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    # Hyper-connections mix the experts' inputs.
    "qwen4_exp_text": replace(_QWEN3_NEXT, names={"norm": None}),
    "qwen4_exp": replace(_QWEN3_NEXT, part=configs.text_part, names={"norm": None, **LANGUAGE_PART}),
    "mellum": Family(routing=routing.scored_routing("softmax", renormalize=True)),
    "flint": replace(
        _QWEN3_MOE,
        routing=routing.scored_routing("sigmoid", renormalize=True),
        shared_experts=rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
        defaults={"mlp_only_layers": [0, 1]},
    ),
    "laguna": Family(
        moe_layers=rules.layers_after_dense,
        routing=routing.laguna_routing,
        shared_experts=rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
        defaults=FIRST_DENSE,
        names={"correction_bias_tensor": "experts.e_score_correction_bias"},
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(_OLMOE, names={"norm": None, "output_norm": "post_feedforward_layernorm"}),
    # Experts and attention run in parallel on the same input.
    "cohere2_moe": Family(
        moe_layers=rules.layers_after_dense,
        routing=routing.cohere_routing,
        shared_experts=rules.cohere_shared_experts,
        derived=configs.cohere_keys,
        names={"norm": "input_layernorm"},
        fields=lambda config: {"has_layer_norm": config["has_layer_norm"]},
    ),
    # The bias is added to the logits.
    "kolibri1": Family(names=EXPERTS_ALONE),
    # The router is an MLP that passes a state to the next layer's router.
    "zaya": Family(names=EXPERTS_ALONE),
    # The router weights the shared experts too.
    "inkling_text": _INKLING,
    "inkling_mm_model": _in_a_part(_INKLING, _INKLING_MODEL),
    "inkling2_text": _INKLING2,
    "inkling2": replace(_INKLING2, part=configs.text_part),
    "gemma4_text": _GEMMA4,
    "gemma4": _in_a_part(_GEMMA4, LANGUAGE_PART),
    "ernie4_5_moe": Family(
        moe_layers=rules.layers_between,
        routing=routing.ernie_routing,
        shared_experts=rules.counted_shared_experts,
        names={"correction_bias_tensor": "moe_statics.e_score_correction_bias"},
    ),
    # Files name the language model as Step 3.5 does, whatever prefix transformers has.
    "step3p5": _STEP,
    "step3p7": replace(_STEP, part=configs.text_part),
    "gpt_oss": Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        activation=rules.swigluoai,
        limit="swiglu_limit",
        names={"router": "router", "has_router_bias": True, "has_bias": True, "interleaved": True},
    ),
    "afmoe": Family(
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=routing.biased_sigmoid_times("route_scale"),
        shared_experts=rules.counted_shared_experts,
        derived=configs.afmoe_keys,
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
        projections=GATE_W1,
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=routing.lfm_routing,
        keys={"rms_norm_eps": "norm_eps"},
        defaults={"hidden_act": "silu"},
        names={"correction_bias_tensor": "expert_bias", "norm": "ffn_norm"},
    ),
    "nemotron_h": Family(
        moe_module="mixer",
        projections=Projections(gate="up_proj", down="down_proj"),
        routing=routing.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
        shared_experts=rules.one_mlp("mixer.shared_experts", "moe_shared_expert_intermediate_size"),
        activation=rules.relu2,
        fixed={"mlp_bias": False},
        derived=configs.nemotron_keys,
        names={"layers_module": "backbone.layers", "embedding": "backbone.embeddings.weight", "norm": "norm"},
        fields=rules.latent_experts("moe_latent_size", "fc1_latent_proj", "fc2_latent_proj"),  # Nemotron 3 Super
    ),
    "hunyuan_v1_moe": Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        shared_experts=rules.one_mlp("mlp.shared_mlp", "intermediate_size"),
        names={"router": "gate.wg"},
    ),
    # Like DeepSeek-V3: grouped or biased top-k, shared experts in one MLP.
    "exaone_moe": replace(
        _DEEPSEEK_V3, defaults=FIRST_DENSE, names={"correction_bias_tensor": "e_score_correction_bias"}
    ),
    "mimo_v2_flash": _MIMO,
    "mimo_v2": _MIMO,
    "solar_open": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "glm4v_moe": _in_a_part(_DEEPSEEK_V3, LANGUAGE_PART),
    "glm4_moe_lite": replace(_DEEPSEEK_V3, defaults=FIRST_DENSE),
    "glm_moe_dsa": _DEEPSEEK_V3,
    "glm5_next": replace(
        _DEEPSEEK_V3,
        part=configs.text_part,
        defaults={"first_k_dense_replace": 3, "swiglu_limit": 10.0},
        names=LANGUAGE_PART,
        limit="swiglu_limit",
        shared_limit="swiglu_limit",
    ),
    "dots1": _DEEPSEEK_V3,
    "beam": replace(
        _DEEPSEEK_V3,
        shared_experts=rules.no_shared_experts,
        defaults={"first_k_dense_replace": 3},
        names={"norm": "pre_feedforward_layernorm", "output_norm": "post_feedforward_layernorm"},
    ),
    "deepseek": replace(_DEEPSEEK_V2, fixed={}, defaults={"topk_method": "greedy", "routed_scaling_factor": 1.0}),
    "deepseek_v2": _DEEPSEEK_V2,
    # Files name the language model as DeepSeek-V2 does, whatever prefix transformers has.
    "deepseek_ocr2": _OCR,
    "unlimited_ocr": _OCR,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": _DEEPSEEK_V4,
    # Image tokens have another correction bias.
    "deepseek_v41": replace(
        _DEEPSEEK_V4, part=configs.text_part, fixed=_V4_FIXED | {"gate_temp": 1.0}, derived=configs.deepseek_v41_keys
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": _in_a_part(_DEEPSEEK_V3, WHOLE_LANGUAGE_MODEL),
    "kimi_linear": _KIMI_LINEAR,
    "kimi_k3": _in_a_part(_KIMI_LINEAR, WHOLE_LANGUAGE_MODEL),
    "mistral3": _in_a_part(_MISTRAL, WHOLE_LANGUAGE_MODEL, configs.mistral4_part),
    "mistral4": _MISTRAL,
    "mistral_large4": replace(
        _MISTRAL_LARGE, part=configs.text_part, names={**_MISTRAL_LARGE.names, "embedding": "tok_embeddings.weight"}
    ),
    "mistral_large4_text": replace(
        _MISTRAL_LARGE, shared_experts=rules.several_in_one_mlp("shared_experts", projections=GATE_DOWN_UP)
    ),
    "hy_v3": replace(
        _DEEPSEEK_V3,
        routing=routing.biased_sigmoid_times("router_scaling_factor"),
        # transformers reads a size of 0 as that of dense layers.
        shared_experts=rules.several_in_one_mlp("mlp.shared_mlp", size_of_none="intermediate_size"),
        defaults=FIRST_DENSE,
        names={"router": "router.gate", "correction_bias_tensor": "expert_bias"},
    ),
    # Ling 1, Ling 2, and Ling 2 with linear attention.
    "bailing_moe": _LING,
    "bailing_moe_v2": replace(_LING, defaults={"score_function": "sigmoid"}),
    "bailing_moe_linear": _LING,
    "bailing_hybrid": replace(
        _LING,
        routing=_DEEPSEEK_V3.routing,
        keys=_KIMI_KEYS,
        defaults={"first_k_dense_replace": 2},
        fixed={"use_nGPT": False, "scale_router_input": False, "up_proj_norm": False},
        # transformers ignores the limits; vLLM and SGLang apply them.
        limit="expert_swiglu_limit_list",
        shared_limit="share_expert_swiglu_limit_list",
    ),
    "axk1": replace(
        _DEEPSEEK_V3,
        defaults=FIRST_DENSE,
        names={"correction_bias_may_miss": True, "output_norm": "post_mlp_layernorm"},
    ),
    # The norm before the experts is gated.
    "axk2": Family(moe_layers=rules.layers_after_dense, defaults=FIRST_DENSE, names=EXPERTS_ALONE),
    "hy_v4": replace(_DEEPSEEK_V3, defaults={**FIRST_DENSE, "swiglu_limit": 10.0}, limit="swiglu_limit"),
    "longcat_flash": Family(
        routing=routing.longcat_routing,
        intermediate_size="expert_ffn_hidden_size",
        defaults={"hidden_act": "silu"},
        derived=configs.longcat_keys,
        names={
            "router": "router.classifier",
            "correction_bias_tensor": "router.e_score_correction_bias",
            "norm": "post_attention_layernorm.0",
        },
    ),
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
}
