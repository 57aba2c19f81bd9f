"""quantization_config as published checkpoints have it: which modules are quantized, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moe_ep.checkpoint.formats import GPTQConfig, quantization_config
from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.compressed_tensors import PackQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, MXFP4Config
from moe_ep.checkpoint.formats.fp8 import Float8Config
from moe_ep.checkpoint.formats.layout import QuantizationConfig, ScaleShape
from moe_ep.errors import CheckpointError
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

BLOCKS = Float8Config(
    scale=ScaleShape(Kind.BLOCK, rows=128, columns=128),
    scale_name="weight_scale_inv",
    input_dtype=torch.float8_e4m3fn,
)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
KIMI_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"actorder": None, "block_structure": None, "dynamic": False, **KIMI_WEIGHTS},
        }
    },
}


@dataclass(frozen=True)
class Published:
    """Settings, the scheme of the routed experts, and other modules that are quantized or plain by name."""

    settings: dict[str, Any]
    scheme: QuantizationConfig
    expert: str = "model.layers.5.mlp.experts.7.down_proj"
    quantized: tuple[str, ...] = ()
    plain: tuple[str, ...] = ("model.layers.5.mlp.gate", "lm_head")


ATTENTION = "model.layers.5.self_attn.q_proj"
PUBLISHED = {
    "Qwen3-30B-A3B-GPTQ-Int4": Published(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "pack_dtype": "int32"}
        | {"checkpoint_format": "gptq", "lm_head": False},
        GPTQConfig(bits=4, group_size=128),
        quantized=(ATTENTION,),
        plain=(),
    ),
    "Qwen3-30B-A3B-FP8": Published(
        FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.5.input_layernorm", "model.layers.5.mlp.gate"]},
        BLOCKS,
        quantized=(ATTENTION,),
    ),
    "DeepSeek-V3": Published(
        FP8,
        BLOCKS,
        quantized=("model.layers.5.self_attn.kv_b_proj", "model.layers.5.mlp.shared_experts.up_proj"),
        plain=(),
    ),
    "MiniMax-M2": Published(
        FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        BLOCKS,
        expert="model.layers.5.block_sparse_moe.experts.7.w2",
        quantized=(ATTENTION,),
        plain=("model.layers.5.block_sparse_moe.gate", "lm_head"),
    ),
    "MiniMax-M2.5-AWQ": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["self_attn", "block_sparse_moe.gate", "model.layers.0."]},
        AWQConfig(group_size=128),
        expert="model.layers.5.block_sparse_moe.experts.7.w2",
        plain=(ATTENTION, "model.layers.5.block_sparse_moe.gate", "model.layers.0.block_sparse_moe.experts.7.w2"),
    ),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"modules_to_not_convert": ["gate"]},
        AWQConfig(group_size=128),
        expert="model.layers.5.block_sparse_moe.experts.7.w2",
        quantized=(ATTENTION,),
        plain=("model.layers.5.block_sparse_moe.gate",),
    ),
    "DeepSeek-V4-Flash-NVFP4": Published(
        FP8
        | {"scale_fmt": "ue8m0", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
        | {"quantized_layers": {"layers.5.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}}
        | {"ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"], "expert_dtype": "fp4"},
        MODELOPT_NVFP4,
        expert="layers.5.ffn.experts.7.w2",
        plain=(),
    ),
    "Kimi-K2.5": Published(
        KIMI,
        PackQuantizedConfig(bits=4, scale=ScaleShape(Kind.GROUP, columns=32), symmetric=True, scattered=False),
        expert="language_model.model.layers.5.mlp.experts.7.down_proj",
        plain=(
            "language_model.model.layers.5.self_attn.o_proj",
            "language_model.model.layers.0.mlp.down_proj",
            "language_model.model.layers.5.mlp.shared_experts.up_proj",
            "vision_tower.encoder.blocks.0.mlp.fc0",
        ),
    ),
    "gpt-oss-20b": Published(
        {"quant_method": "mxfp4"}
        | {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
        MXFP4Config(),
        plain=(ATTENTION, "model.layers.5.mlp.router"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_modules(name: str) -> None:
    published = PUBLISHED[name]
    # Kimi's stands beside the language model's sizes.
    config = {"quantization_config": published.settings}
    found = quantization_config({"text_config": config} if name == "Kimi-K2.5" else config)
    assert found.of_module(published.expert) == published.scheme
    for module in published.quantized:
        assert found.of_module(module) == published.scheme
    for module in published.plain:
        assert found.of_module(module) is None


def test_what_is_beside_experts_of_another_algorithm() -> None:
    """What nvfp4 ignores in DeepSeek-V4 is fp8, as the settings around it say."""
    settings = PUBLISHED["DeepSeek-V4-Flash-NVFP4"].settings
    found = quantization_config({"quantization_config": settings})
    for module in ("ffn.shared_experts.w1", "attn.wo_a"):
        assert found.of_module(f"layers.5.{module}") == BLOCKS
    with pytest.raises(CheckpointError, match="moe_quant_algo is 'IQ3_WIRE'"):
        quantization_config({"quantization_config": settings | {"moe_quant_algo": "IQ3_WIRE"}})
