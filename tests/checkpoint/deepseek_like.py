"""Small models of families whose experts are much like DeepSeek-V3's, in the form of model_cases.py."""

from __future__ import annotations

from typing import Any

EXPERTS = 8
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"pad_token_id": None, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DEEPSEEK_LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": (
        "KimiLinear",
        {**_LATENT, **_GROUPS, **_HYBRID, "num_local_experts": EXPERTS, "linear_head_dim": 16, "linear_num_heads": 2},
    ),
    "mistral4": ("Mistral4", {**_LATENT, **_GROUPS, "n_routed_experts": EXPERTS, "q_lora_rank": 16}),
    "hy_v3": (
        "HYV3",
        {"num_experts": EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 2, "head_dim": 32},
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {**_LATENT, **_GROUPS, **_HYBRID, "num_local_experts": EXPERTS, "head_dim": 16},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            **_LATENT,
            "q_lora_rank": 16,
            "num_layers": 3,
            "num_hidden_layers": 6,  # attentions, two a layer
            "moe_topk": 2,
            "n_routed_experts": EXPERTS,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 48,
        },
    ),
    "beam": (
        "Beam",
        {
            "num_experts": EXPERTS,
            **_GROUPS,
            "head_dim": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "axk1": ("AXK1", {**_LATENT, **_GROUPS, "n_routed_experts": EXPERTS, "q_lora_rank": 16}),
    "dots3_note_text": (
        "Dots3NoteText",
        {
            **_LATENT,
            **_GROUPS,
            "n_routed_experts": EXPERTS,
            "q_lora_rank": 16,
            "shared_experts_intermediate_size": 24,
            "layer_types": ["indexed_attention"] * 3,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4",
        {
            "intermediate_size": 32,
            "n_routed_experts": EXPERTS,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "swiglu_limit": 0.5,
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "layer_types": ["sliding_attention", "heavily_compressed_attention", "sliding_attention"],
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}
