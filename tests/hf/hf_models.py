"""Small random models of every family that transformers and moe_ep share."""

from __future__ import annotations

from typing import Any

import torch

from tests.of_transformers import draw_experts, known, language_model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
# A small model of pictures before one of text.
EYES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "sliding_window": 8},
    "Qwen2Moe": {"num_experts": 6, "shared_expert_intermediate_size": 48},
    "Qwen3Moe": {"num_experts": 7, "norm_topk_prob": True},
    "Qwen3Next": {
        "num_experts": 6,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "Olmoe": {"num_experts": 6, "tie_word_embeddings": True},
    "DeepseekV2": {
        **MLA,
        **GROUPED,
        "head_dim": 8,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
    },
    "DeepseekV3": {**MLA, **GROUPED, "head_dim": 8, "routed_scaling_factor": 2.5},
    "Glm4Moe": {**GROUPED, "routed_scaling_factor": 1.5},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "GptOss": {
        "num_local_experts": 6,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The same model wherever it is made; of families beyond FAMILIES, `changes` say the sizes."""
    torch.manual_seed(7)
    config = known(f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **changes}, dtype=dtype)
    return draw_experts(language_model(config, dtype))
