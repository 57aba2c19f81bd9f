"""Families whose experts are much like DeepSeek-V3's: chosen in groups or by a bias, with shared ones in one MLP.

They are part of `FAMILIES` (models.py), in its form.
"""

from __future__ import annotations

from dataclasses import replace

from moe_ep.checkpoint import family_configs as configs
from moe_ep.checkpoint import family_routing as routing
from moe_ep.checkpoint import family_rules as rules
from moe_ep.checkpoint.family import (
    FIRST_DENSE,
    GATE_DOWN_UP,
    GATE_W1,
    LANGUAGE_PART,
    WHOLE_LANGUAGE_MODEL,
    Family,
)

_DEEPSEEK_V3 = Family(
    moe_layers=rules.layers_after_dense,
    routing=routing.deepseek_routing("noaux_tc", "sigmoid", renormalize=True),
    shared_experts=rules.counted_shared_experts,
)
_DEEPSEEK_V2 = Family(
    moe_layers=rules.layers_after_dense,
    routing=routing.deepseek_routing("greedy", "softmax", renormalize=False),
    shared_experts=rules.counted_shared_experts,
    text_config=configs.only({"norm_topk_prob": False}),
)
_MIMO = replace(_DEEPSEEK_V3, text_config=configs.mimo_config)
_V4_FIXED = {"norm_topk_prob": True, "n_shared_experts": 1}
_DEEPSEEK_V4 = Family(
    moe_module="ffn",
    projections=GATE_W1,
    routing=routing.deepseek_routing("noaux_tc", "sqrtsoftplus", renormalize=True),
    shared_experts=rules.limited(rules.several_in_one_mlp("ffn.shared_experts")),
    text_config=configs.only(_V4_FIXED, configs.deepseek_v4_config),
    names={"norm": "ffn_norm", "correction_bias_tensor": "gate.bias"},
    fields=rules.deepseek_v4_fields,
    limits=("swiglu_limit",),
)
# What Kimi Linear and Ling call otherwise.
_KIMI_KEYS = {
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
_KIMI_LINEAR_KEYS = _KIMI_KEYS | {"scoring_func": "moe_router_activation_func"}
_KIMI_LINEAR = replace(
    _DEEPSEEK_V3,
    moe_module="block_sparse_moe",
    projections=GATE_W1,
    shared_experts=rules.several_in_one_mlp("block_sparse_moe.shared_experts", projections=GATE_DOWN_UP),
    activation=rules.kimi_activation,
    text_config=configs.renamed(_KIMI_LINEAR_KEYS, FIRST_DENSE),
    fields=rules.kimi_fields,
)
_LING = replace(
    _DEEPSEEK_V3,
    routing=routing.ling_routing,
    names={"embedding": "model.word_embeddings.weight", "correction_bias_tensor": "gate.expert_bias"},
)
_LING_FIXED = {"use_nGPT": False, "scale_router_input": False, "up_proj_norm": False}
# Of the routed and of the shared experts. transformers leaves them out; vLLM and SGLang do not.
_LING_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
# Softmax scores without a correction bias, and groups by their two best all the same.
_MISTRAL = replace(
    _DEEPSEEK_V3,
    routing=routing.deepseek_routing("noaux_tc", "softmax", renormalize=True),
    names={"correction_bias_may_miss": True},
)
_MISTRAL_LARGE_SILENT = {**FIRST_DENSE, "routed_scaling_factor": 1.0}
_MISTRAL_LARGE = replace(
    _MISTRAL,
    moe_module="",
    projections=GATE_W1,
    shared_experts=rules.several_in_one_mlp("shared_experts"),
    text_config=configs.renamed({}, _MISTRAL_LARGE_SILENT),
    names={**_MISTRAL.names, "layers_module": "layers", "norm": "ffn_norm", "embedding": "embed_tokens.weight"},
)
_OCR = replace(_DEEPSEEK_V2, text_config=configs.only({"norm_topk_prob": False}, configs.text_part))
_DOTS3 = replace(
    _DEEPSEEK_V3,
    shared_experts=rules.several_in_one_mlp("mlp.shared_experts", "shared_experts_intermediate_size"),
    text_config=configs.renamed(
        {"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
        {**FIRST_DENSE, "shared_experts_intermediate_size": 1536},
        part=configs.text_part_or_whole,
    ),
)

DEEPSEEK_LIKE = {
    "exaone_moe": replace(
        _DEEPSEEK_V3,
        text_config=configs.renamed({}, FIRST_DENSE),
        names={"correction_bias_tensor": "e_score_correction_bias"},
    ),
    "mimo_v2_flash": _MIMO,
    "mimo_v2": _MIMO,
    "solar_open": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "glm4v_moe": replace(_DEEPSEEK_V3, text_config=configs.text_part, names=LANGUAGE_PART),
    "glm4_moe_lite": replace(_DEEPSEEK_V3, text_config=configs.renamed({}, FIRST_DENSE)),
    "glm_moe_dsa": _DEEPSEEK_V3,
    "glm5_next": replace(
        _DEEPSEEK_V3,
        shared_experts=rules.limited(rules.counted_shared_experts),
        text_config=configs.renamed({}, {"first_k_dense_replace": 3, "swiglu_limit": 10.0}, part=configs.text_part),
        names=LANGUAGE_PART,
        fields=rules.limited_gate,
        limits=("swiglu_limit",),
    ),
    "dots1": _DEEPSEEK_V3,
    "beam": replace(
        _DEEPSEEK_V3,
        shared_experts=rules.no_shared_experts,
        text_config=configs.renamed({}, {"first_k_dense_replace": 3}),
        names={"norm": "pre_feedforward_layernorm", "output_norm": "post_feedforward_layernorm"},
    ),
    "deepseek": replace(
        _DEEPSEEK_V2, text_config=configs.renamed({}, {"topk_method": "greedy", "routed_scaling_factor": 1.0})
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    # Its files have the language model as DeepSeek-V2's, whatever transformers has in front of it.
    "deepseek_ocr2": _OCR,
    "unlimited_ocr": _OCR,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": _DEEPSEEK_V4,
    # Of images another bias chooses the experts.
    "deepseek_v41": replace(
        _DEEPSEEK_V4, text_config=configs.only(_V4_FIXED | {"gate_temp": 1.0}, configs.deepseek_v41_config)
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_k25": replace(_DEEPSEEK_V3, text_config=configs.text_part, names=WHOLE_LANGUAGE_MODEL),
    "kimi_linear": _KIMI_LINEAR,
    "kimi_k3": replace(
        _KIMI_LINEAR,
        text_config=configs.renamed(_KIMI_LINEAR_KEYS, FIRST_DENSE, part=configs.text_part),
        names=WHOLE_LANGUAGE_MODEL,
    ),
    "mistral3": replace(
        _MISTRAL,
        text_config=configs.text_part_of("mistral4"),
        names={**_MISTRAL.names, **WHOLE_LANGUAGE_MODEL},
    ),
    "mistral4": _MISTRAL,
    "mistral_large4": replace(
        _MISTRAL_LARGE,
        text_config=configs.renamed({}, _MISTRAL_LARGE_SILENT, part=configs.text_part),
        names={**_MISTRAL_LARGE.names, "embedding": "tok_embeddings.weight"},
    ),
    "mistral_large4_text": replace(
        _MISTRAL_LARGE, shared_experts=rules.several_in_one_mlp("shared_experts", projections=GATE_DOWN_UP)
    ),
    "hy_v3": replace(
        _DEEPSEEK_V3,
        routing=routing.biased_sigmoid_times("router_scaling_factor"),
        shared_experts=rules.several_in_one_mlp("mlp.shared_mlp"),
        text_config=configs.renamed({}, FIRST_DENSE),
        names={"router": "router.gate", "correction_bias_tensor": "expert_bias"},
    ),
    # Ling 1 and 2, and Ling 2 with linear attention.
    "bailing_moe": _LING,
    "bailing_moe_v2": replace(_LING, text_config=configs.renamed({}, {"score_function": "sigmoid"})),
    "bailing_moe_linear": _LING,
    "bailing_hybrid": replace(
        _LING,
        routing=_DEEPSEEK_V3.routing,
        shared_experts=rules.stepped(_LING_LIMITS[1], rules.counted_shared_experts),
        text_config=configs.only(_LING_FIXED, configs.renamed(_KIMI_KEYS, {"first_k_dense_replace": 2})),
        fields=rules.steps_at(_LING_LIMITS[0]),
        limits=_LING_LIMITS,
    ),
    "axk1": replace(
        _DEEPSEEK_V3,
        text_config=configs.renamed({}, FIRST_DENSE),
        names={"correction_bias_may_miss": True, "output_norm": "post_mlp_layernorm"},
    ),
    # The norm before its experts has a gate.
    "axk2": Family(
        moe_layers=rules.layers_after_dense, text_config=configs.renamed({}, FIRST_DENSE), names=rules.EXPERTS_ALONE
    ),
    "hy_v4": replace(
        _DEEPSEEK_V3,
        text_config=configs.renamed({}, {**FIRST_DENSE, "swiglu_limit": 10.0}),
        fields=rules.limited_gate,
        limits=("swiglu_limit",),
    ),
    "longcat_flash": Family(
        routing=routing.longcat_routing,
        intermediate_size="expert_ffn_hidden_size",
        text_config=configs.longcat_config,
        names={
            "router": "router.classifier",
            "correction_bias_tensor": "router.e_score_correction_bias",
            "norm": "post_attention_layernorm.0",
        },
    ),
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
}
