"""The model families: what each one does its own way.

A family is one `Family` in `FAMILIES`: what it shares with the others stays at the defaults. The facts are those of
the families' code in transformers 5 (transformers/models/<model_type>), and the names those of the files on disk.
`model_spec` (described.py) turns a config.json into a `MoEModelSpec` by them.
"""

from __future__ import annotations

from dataclasses import replace

from moe_ep.checkpoint import family_configs as configs
from moe_ep.checkpoint import family_routing as routing
from moe_ep.checkpoint import family_rules as rules
from moe_ep.checkpoint.deepseek_families import DEEPSEEK_LIKE
from moe_ep.checkpoint.family import (
    FIRST_DENSE,
    GATE_DOWN_UP,
    GATE_W1,
    LANGUAGE_PART,
    WHOLE_LANGUAGE_MODEL,
    Family,
)
from moe_ep.checkpoint.spec import Projections

_RENORMALIZED = routing.fixed_routing(renormalize=True)
_GATED_SHARED_EXPERT = rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size", has_gate=True)
_MIXTRAL = Family(
    moe_module="block_sparse_moe",
    projections=GATE_W1,
    intermediate_size="intermediate_size",
    routing=_RENORMALIZED,
)
_QWEN3_NEXT = Family(
    moe_layers=rules.sparse_step_layers,
    routing=routing.softmax_routing(renormalize=True),
    shared_experts=_GATED_SHARED_EXPERT,
    names={"norm_offset": 1.0},
)
# All of its layers have experts, and weights sum up to one, whatever a config says that has the older names.
_QWEN3_5 = replace(_QWEN3_NEXT, moe_layers=rules.all_layers, routing=_RENORMALIZED)
_MINIMAX_M3_SILENT = {"routed_scaling_factor": 2.0, "shared_intermediate_size": 3072}
_MINIMAX_M3 = Family(
    intermediate_size="intermediate_size",
    moe_layers=rules.layers_after_dense,
    routing=routing.biased_sigmoid_times("routed_scaling_factor"),
    shared_experts=rules.limited(
        rules.one_mlp("mlp.shared_experts", "shared_intermediate_size", fused=("gate_up_proj", "down_proj"))
    ),
    activation=rules.swigluoai,
    fields=rules.limited_gate,
    limits=("swiglu_limit",),
    text_config=configs.renamed({}, _MINIMAX_M3_SILENT),
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
    text_config=configs.aria_config(),
    names={"router": "router", "fused": Projections("experts.fc1.weight", "experts.fc2.weight")},
)
_OLMOE = Family(intermediate_size="intermediate_size")
_GRANITE = replace(
    _MIXTRAL,
    projections=GATE_DOWN_UP,
    shared_experts=rules.one_mlp("shared_mlp", "shared_intermediate_size", fused=("input_linear", "output_linear")),
    names={"router": "router.layer", "fused": Projections("input_linear.weight", "output_linear.weight")},
)
_INKLING2_SILENT = {"hidden_act": "silu", "route_scale": 8.0, "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0}
_INKLING2 = Family(
    routing=routing.biased_sigmoid_times("route_scale"),
    activation=rules.inkling2_activation,
    text_config=configs.renamed({}, _INKLING2_SILENT),
    names={
        "layers_module": "model.llm.layers",
        "embedding": "model.llm.embed.weight",
        "norm": "mlp_norm",
        "correction_bias_tensor": "gate.bias",
        "fused": Projections("experts.w13_weight", "experts.w2_weight"),
        "interleaved": True,
    },
)
_STEP_LIMITS = ("swiglu_limits", "swiglu_limits_shared")  # of the routed and of the shared experts
_STEP = Family(
    moe_module="moe",
    moe_layers=rules.enumerated_layers,
    routing=routing.biased_sigmoid_times("moe_router_scaling_factor"),
    shared_experts=rules.stepped(_STEP_LIMITS[1], rules.one_mlp("share_expert", "share_expert_dim")),
    text_config=configs.step_config(),
    names={
        "correction_bias_tensor": "router_bias",
        "norm_offset": 1.0,
        "fused": Projections("gate_proj.weight", "down_proj.weight", "up_proj.weight"),
    },
    fields=rules.steps_at(_STEP_LIMITS[0]),
    limits=_STEP_LIMITS,
)
# Its experts lie in the layer itself, beside a dense MLP, and its router has a norm and scales of its own.
_GEMMA4_KEYS = {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"}
_GEMMA4 = Family(moe_module="", text_config=configs.renamed(_GEMMA4_KEYS), names=rules.EXPERTS_ALONE)
_INKLING = Family(
    moe_layers=rules.layers_after("dense_mlp_idx"), text_config=configs.inkling_config(), names=rules.EXPERTS_ALONE
)

FAMILIES = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    # What it was before transformers had it.
    "minimax_text_01": replace(_MIXTRAL, text_config=configs.only({"shared_intermediate_size": 0})),
    "minimax_m1": replace(_MIXTRAL, text_config=configs.only({"shared_intermediate_size": 0})),
    "minimax_m2": Family(
        moe_module="block_sparse_moe",
        projections=GATE_W1,
        intermediate_size="intermediate_size",
        routing=routing.biased_sigmoid,
        names={"correction_bias_tensor": "e_score_correction_bias"},
    ),
    "minimax_m3_vl_text": _MINIMAX_M3,
    "minimax_m3_vl": replace(
        _MINIMAX_M3,
        moe_module="block_sparse_moe",
        projections=GATE_W1,
        shared_experts=rules.limited(
            rules.one_mlp("block_sparse_moe.shared_experts", "shared_intermediate_size", projections=GATE_DOWN_UP)
        ),
        text_config=configs.renamed({}, _MINIMAX_M3_SILENT, part=configs.text_part),
        names={
            **_MINIMAX_M3.names,
            **WHOLE_LANGUAGE_MODEL,
            "correction_bias_tensor": "e_score_correction_bias",
        },
    ),
    "llama4_text": _LLAMA4,
    "llama4": replace(_LLAMA4, text_config=configs.text_part, names={**_LLAMA4.names, **WHOLE_LANGUAGE_MODEL}),
    "aria_text": _ARIA,
    "aria": replace(
        _ARIA, text_config=configs.aria_config(configs.text_part), names={**_ARIA.names, **WHOLE_LANGUAGE_MODEL}
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoe_swa": replace(_GRANITE, names={"router": "router"}),
    "phimoe": Family(
        moe_module="block_sparse_moe",
        projections=GATE_W1,
        intermediate_size="intermediate_size",
        routing=routing.phi_routing,
        names={"has_layer_norm": True, "has_norm_bias": True},
    ),
    "qwen2_moe": Family(moe_layers=rules.sparse_step_layers, shared_experts=_GATED_SHARED_EXPERT),
    "qwen3_moe": Family(moe_layers=rules.sparse_step_layers),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, text_config=configs.text_part, names={**_QWEN3_5.names, **LANGUAGE_PART}),
    "qwen3_vl_moe": Family(
        moe_layers=rules.sparse_step_layers,
        routing=_RENORMALIZED,
        text_config=configs.text_part,
        names=LANGUAGE_PART,
    ),
    "qwen3_omni_moe": Family(
        moe_layers=rules.sparse_step_layers,
        routing=routing.softmax_routing(renormalize=True),
        text_config=configs.thinker_part,
        names={"layers_module": "thinker.model.layers", "embedding": "thinker.model.embed_tokens.weight"},
    ),
    "qwen3_omni_moe_thinker": Family(
        moe_layers=rules.sparse_step_layers,
        routing=routing.softmax_routing(renormalize=True),
        text_config=configs.text_part,
    ),
    # Hyper-connections mix what the experts read.
    "qwen4_exp_text": replace(_QWEN3_NEXT, names={"norm": None}),
    "qwen4_exp": replace(_QWEN3_NEXT, text_config=configs.text_part, names={"norm": None, **LANGUAGE_PART}),
    "mellum": Family(routing=routing.softmax_routing(renormalize=True)),
    "flint": Family(
        moe_layers=rules.sparse_step_layers,
        routing=routing.sigmoid_routing,
        shared_experts=rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
        text_config=configs.renamed({}, {"mlp_only_layers": [0, 1]}),
    ),
    "laguna": Family(
        moe_layers=rules.layers_after_dense,
        routing=routing.laguna_routing,
        shared_experts=rules.one_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
        text_config=configs.renamed({}, FIRST_DENSE),
        names={"correction_bias_tensor": "experts.e_score_correction_bias"},
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(_OLMOE, names={"norm": None, "output_norm": "post_feedforward_layernorm"}),
    # Its experts are beside its attention, and read what that reads.
    "cohere2_moe": Family(
        moe_layers=rules.layers_after_dense,
        routing=routing.cohere_routing,
        shared_experts=rules.cohere_shared_experts,
        text_config=configs.cohere_config,
        names={"norm": "input_layernorm"},
        fields=rules.cohere_fields,
    ),
    # It adds its bias to logits.
    "kolibri1": Family(names=rules.EXPERTS_ALONE),
    # Its router is an MLP that hands what it has found on to the next layer's.
    "zaya": Family(names=rules.EXPERTS_ALONE),
    # Its router weighs the shared experts too.
    "inkling_text": _INKLING,
    "inkling_mm_model": replace(
        _INKLING,
        text_config=configs.inkling_config(configs.text_part),
        names={
            **_INKLING.names,
            "layers_module": "model.llm.layers",
            "embedding": "model.llm.embed.weight",
            "fused": Projections("experts.w13_weight", "experts.w2_weight"),
            "interleaved": True,
        },
    ),
    "inkling2_text": _INKLING2,
    "inkling2": replace(_INKLING2, text_config=configs.renamed({}, _INKLING2_SILENT, part=configs.text_part)),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(
        _GEMMA4,
        text_config=configs.renamed(_GEMMA4_KEYS, part=configs.text_part),
        names={**_GEMMA4.names, **LANGUAGE_PART},
    ),
    "ernie4_5_moe": Family(
        moe_layers=rules.layers_between,
        routing=routing.ernie_routing,
        shared_experts=rules.counted_shared_experts,
        names={"correction_bias_tensor": "moe_statics.e_score_correction_bias"},
    ),
    # Its files have the language model as Step 3.5's, whatever transformers has in front of it.
    "step3p5": _STEP,
    "step3p7": replace(_STEP, text_config=configs.step_config(configs.text_part)),
    "gpt_oss": Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        activation=rules.swigluoai,
        fields=rules.limited_gate,
        limits=("swiglu_limit",),
        names={"router": "router", "has_router_bias": True, "has_bias": True, "interleaved": True},
    ),
    "afmoe": Family(
        moe_layers=rules.layers_after("num_dense_layers"),
        routing=routing.biased_sigmoid_times("route_scale"),
        shared_experts=rules.counted_shared_experts,
        text_config=configs.afmoe_config,
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
        text_config=configs.lfm_config,
        names={"correction_bias_tensor": "expert_bias", "norm": "ffn_norm"},
    ),
    "nemotron_h": Family(
        moe_module="mixer",
        projections=Projections(gate="up_proj", down="down_proj"),
        routing=routing.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
        shared_experts=rules.one_mlp("mixer.shared_experts", "moe_shared_expert_intermediate_size"),
        activation=rules.relu2,
        text_config=configs.nemotron_config,
        names={"layers_module": "backbone.layers", "embedding": "backbone.embeddings.weight", "norm": "norm"},
        fields=rules.nemotron_fields,
    ),
    "hunyuan_v1_moe": Family(
        intermediate_size="intermediate_size",
        routing=_RENORMALIZED,
        shared_experts=rules.one_mlp("mlp.shared_mlp", "intermediate_size"),
        names={"router": "gate.wg"},
    ),
    **DEEPSEEK_LIKE,
}
