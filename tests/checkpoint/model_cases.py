"""Small models of each family, from transformers' own configurations; what tests of checkpoints share."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.deepseek_like import DEEPSEEK_LIKE, EXPERTS
from tests.checkpoint.ungrouped import UNGROUPED
from tests.of_transformers import known, language_model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 32, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            **MLA,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 0,
            **MLA,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "head_dim": 32,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "head_dim": 32,
            "num_dense_layers": 1,
            "route_scale": 2.5,
        },
    ),
    "jamba": ("Jamba", {"num_experts": EXPERTS, "mamba_d_state": 4, "attn_layer_period": 3, "attn_layer_offset": 1}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "num_dense_layers": 2,
            "layer_types": ["conv", "full_attention", "conv"],
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5,
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 32,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "v_head_dim": 16,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": EXPERTS, "moe_topk": [2, 2, 2], "head_dim": 32}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": EXPERTS, "head_dim": 32, "rotary_dim": 16}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            "num_local_experts": EXPERTS,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": EXPERTS, "router_jitter_noise": 0.2}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 32}),
    **DEEPSEEK_LIKE,
    **UNGROUPED,
}


def _sizes(extra: dict[str, Any]) -> dict[str, Any]:
    """What a family says is more than SIZES say, also by another name."""
    return {
        key: value for key, value in SIZES.items() if key != "num_experts_per_tok" or "moe_topk" not in extra
    } | extra


def transformers_config(family: str, **changes: Any) -> Any:
    name, extra = MODELS[family]
    return known(f"{name}Config")(**_sizes(extra) | changes, dtype="bfloat16")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return json.loads(_config_text(family)) | changes


@functools.cache
def _config_text(family: str) -> str:
    return str(transformers_config(family).to_json_string())


def save_model(family: str, directory: Path, **changes: Any) -> Any:
    """A small random model of the family, with changes of its configuration, saved by transformers."""
    torch.manual_seed(0)
    model = language_model(transformers_config(family, **changes), torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(directory, max_shard_size="100KB")
    return model.eval()


def router_of(block: Any) -> Any:
    """The router of one of their MoE blocks."""
    return block.router if hasattr(block, "router") else block.gate


def block_of(layer: Any) -> Any:
    """The MoE block of one of their layers."""
    return next(
        getattr(layer, name) for name in ("mlp", "feed_forward", "block_sparse_moe", "mixer") if hasattr(layer, name)
    )


def shared_of(layer: Any) -> Any:
    """The shared experts of one of their layers; Granite's are beside the block."""
    names = ("shared_experts", "shared_expert", "shared_mlp")
    return next(getattr(part, name) for part in (block_of(layer), layer) for name in names if hasattr(part, name))
