"""Small models of newer families that choose experts without groups, in the form of model_cases.py."""

from __future__ import annotations

from typing import Any

from tests.checkpoint.deepseek_like import EXPERTS

LINEAR_ATTENTION = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
UNGROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen4_exp_text": (
        "Qwen4ExpText",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "hc_lowrank": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **LINEAR_ATTENTION,
            **INDEXER,
        },
    ),
    "mellum": ("Mellum", {"num_experts": EXPERTS, "moe_intermediate_size": 32, "head_dim": 32}),
    "flint": (
        "Flint",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "mlp_only_layers": [0],
        },
    ),
    "laguna": (
        "Laguna",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "moe_routed_scaling_factor": 2.5,
        },
    ),
    "aria_text": (
        "AriaText",
        {"moe_num_experts": EXPERTS, "moe_topk": 2, "moe_num_shared_experts": 2, "head_dim": 32, "pad_token_id": None},
    ),
    "flex_olmo": ("FlexOlmo", {"num_experts": EXPERTS, "pad_token_id": None}),
    "cohere2_moe": (
        "Cohere2Moe",
        {
            "num_experts": EXPERTS,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "head_dim": 32,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 40,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {"num_local_experts": EXPERTS, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    ),
}
