"""Small checkpoints for the tests of this wing, and a layer that only loads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.quantization.canonical_weights import CanonicalWeights, quantize_int

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
# What makes a DeepSeek-V3 of `qwen3_config`: grouped routing with a correction bias, and shared experts.
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_experts": None,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}


def write_raw(file: Path, header: Any, data: bytes) -> None:
    """A safetensors file with exactly this header (an object, or bytes as they are) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def unpacked(
    config: GPTQConfig,
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
) -> CanonicalWeights:
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    return config.unpack(tensors if g_idx is None else tensors | {"g_idx": g_idx})


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """Two layers of 4 experts, K=64, N=32."""
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        **changes,
    }


def expert_tensors(
    prefix: str, n: int, k: int, seed: int, quantized: Mapping[str, Any] | None
) -> dict[str, torch.Tensor]:
    """gate, up and down of one expert (or of shared experts), bf16 or GPTQ."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in (("gate_proj", (n, k)), ("up_proj", (n, k)), ("down_proj", (k, n))):
        weight = torch.randn(shape, generator=generator) * 0.1
        if quantized is None:
            tensors[f"{prefix}.{name}.weight"] = weight.bfloat16()
        else:
            config = GPTQConfig.from_dict(quantized)
            packed = pack_gptq(quantize_int(weight.half(), config.bits, config.group_size), config)
            tensors |= {f"{prefix}.{name}.{suffix}": tensor for suffix, tensor in packed._asdict().items()}
    return tensors


def model_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors that moe_ep reads of a qwen3_moe or deepseek model of this config."""
    n, k = config["moe_intermediate_size"], config["hidden_size"]
    num_experts = config.get("num_experts") or config["n_routed_experts"]
    quantized = config.get("quantization_config")
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], k).bfloat16()}
    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.rand(k).bfloat16()
        tensors[f"{mlp}.gate.weight"] = torch.randn(num_experts, k).bfloat16()
        if config["model_type"] == "deepseek_v3":
            tensors[f"{mlp}.gate.e_score_correction_bias"] = torch.rand(num_experts)
        for expert in range(num_experts):
            tensors |= expert_tensors(f"{mlp}.experts.{expert}", n, k, 100 * layer + expert, quantized)
        if shared := config.get("n_shared_experts"):
            tensors |= expert_tensors(f"{mlp}.shared_experts", shared * n, k, 7000 + layer, quantized)
    return tensors


def make_checkpoint(
    directory: Path, config: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of several shards; a changed tensor of None is left out. Returns what it holds."""
    config = config or qwen3_config()
    tensors = model_tensors(config) | changes.pop("tensors", {})
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_checkpoint(directory, config, tensors.items(), max_shard_bytes=changes.pop("max_shard_bytes", 40_000))
    return tensors


class LoadingLayer(nn.Module):
    """What the loader needs of a layer: whole experts in the parameters' shapes, each tensor copied where it belongs.

    `local` are the physical experts held, in the order of their slots; fused shared experts follow them.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], local: list[int], **counts: int
    ) -> None:
        super().__init__()
        self.activation, self.moe_config = MoEActivation.SILU, SimpleNamespace(swiglu_limit=None)
        self.local = local
        self.num_routed = counts.get("num_experts", 4)
        self.num_redundant_experts = counts.get("num_redundant_experts", 0)
        self.num_fused_shared_experts = counts.get("num_fused_shared_experts", 0)
        self.finished = False
        physical = self.num_routed + self.num_redundant_experts
        self.slots = [*local, *range(physical, physical + self.num_fused_shared_experts)]
        for name, (shape, dtype) in shapes.items():
            value = torch.zeros(len(self.slots), *shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def is_local_expert(self, expert_id: int) -> bool:
        return expert_id in self.slots

    def check_open(self, what: str) -> None:
        """Nothing is ever freed."""

    @staticmethod
    def make_expert_params_mapping(
        gate: str, down: str, up: str, num_experts: int, num_redundant_experts: int = 0
    ) -> list[tuple[str, str, int, str]]:
        return [
            (f"experts.{gemm}_", f"experts.{expert % num_experts}.{name}.", expert, shard)
            for expert in range(num_experts + num_redundant_experts)
            for gemm, name, shard in (("w13", gate, "w1"), ("w2", down, "w2"), ("w13", up, "w3"))
            if name
        ]

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        if expert_id not in self.slots:
            return False
        target = param.data[self.slots.index(expert_id)]
        if shard_id != "w2" and not weight_name.endswith("g_idx"):
            dim = 0 if weight_name.endswith(".weight") else 1
            target = target.chunk(2, dim)[("w1", "w3").index(shard_id)]
        assert target.shape == loaded_weight.shape, weight_name
        target.copy_(loaded_weight)
        return True

    def process_weights_after_loading(self) -> None:
        self.finished = True


def plain_shapes(n: int = 32, k: int = 64) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"w13_weight": ((2 * n, k), torch.bfloat16), "w2_weight": ((k, n), torch.bfloat16)}


def gptq_shapes(n: int = 32, k: int = 64, group: int = 32) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shapes = {}
    for gemm, out, inp in (("w13", 2 * n, k), ("w2", k, n)):
        shapes |= {
            f"{gemm}_qweight": ((inp // 8, out), torch.int32),
            f"{gemm}_qzeros": ((math.ceil(inp / group), out // 8), torch.int32),
            f"{gemm}_scales": ((math.ceil(inp / group), out), torch.float16),
            f"{gemm}_g_idx": ((inp,), torch.int32),
        }
    return shapes
