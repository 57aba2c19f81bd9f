"""Sizes of small models of newer families that choose experts without groups, beyond those of hf_models.py."""

from __future__ import annotations

from typing import Any

from tests.checkpoint.ungrouped import INDEXER, LINEAR_ATTENTION

_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
UNGROUPED: dict[str, dict[str, Any]] = {
    "Qwen4ExpText": {
        "num_experts": 6,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
        "hc_lowrank": 8,
        **LINEAR_ATTENTION,
        **INDEXER,
    },
    "Mellum": {"num_experts": 6, **_WINDOW},
    "Flint": {"num_experts": 6, "shared_expert_intermediate_size": 48, "mlp_only_layers": [], **_WINDOW},
    "Laguna": {
        "num_experts": 6,
        "shared_expert_intermediate_size": 48,
        "num_attention_heads_per_layer": [4, 2],
        "moe_routed_scaling_factor": 1.5,
        **_WINDOW,
    },
    "FlexOlmo": {"num_experts": 6},
    "Cohere2Moe": {"num_experts": 6, "num_shared_experts": 1, **_WINDOW},
    "GraniteMoeSWA": {"num_local_experts": 6, "shared_intermediate_size": 48, **_WINDOW},
    "Kolibri1": {"num_experts": 6, "shared_expert_intermediate_size": 48, **_WINDOW},
    "Zaya": {"num_experts": 6, "num_experts_per_tok": 1, "router_hidden_size": 16, "num_key_value_heads": 1},
    "InklingText": {
        "n_routed_experts": 6,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 16,
    },
    "Gemma4Text": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        **_WINDOW,
    },
}
