"""Experts of another width than the model: Nemotron 3 Super and Ultra, and Kimi-K3, which transformers 5.23 does not
have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("transformers")

import moe_ep
from moe_ep import FusedMoE
from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import CheckpointReader, load_moe_layer, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from tests.checkpoint.format_encoders import e2m1
from tests.hf.hf_models import make_model
from tests.hf.moe_layers import check_layers
from tests.hf.test_families import check, in_slots

NUMBERS = torch.tensor([e2m1(code) for code in range(16)])
K, LATENT, N, EXPERTS, TOP_K = 64, 32, 96, 6, 2
# As the model came, but for its sizes.
KIMI_TEXT = {
    "model_type": "kimi_linear",
    "vocab_size": 96,
    "num_hidden_layers": 3,
    "hidden_size": K,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": TOP_K,
    "num_shared_experts": 2,
    "moe_intermediate_size": N,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"},
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*routed_expert.*", "re:.*gate", "lm_head"],
    },
}


def test_nemotron(tmp_path: Path) -> None:
    """A whole model, and its layers with experts alone."""
    alone = make_model("NemotronH", moe_latent_size=32)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    in_slots(parallel, alone)
    check_layers(tmp_path, [layer.mixer for layer in alone.model.layers if hasattr(layer.mixer, "experts")])


def test_shared_experts_are_not_loaded_as_experts_of_another_width(tmp_path: Path) -> None:
    make_model("NemotronH", moe_latent_size=64, moe_shared_expert_intermediate_size=32).save_pretrained(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        layer = FusedMoE(
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden_size=spec.expert_hidden_size,
            intermediate_size=spec.moe_intermediate_size,
            params_dtype=torch.float32,
            n_shared_experts=1,
            **spec.gate(spec.moe_layers[0])._asdict(),
        )
        with pytest.raises(ValueError, match="n_shared_experts is 1 and a nemotron_h layer has 1 of another width to"):
            load_moe_layer(reader, spec, spec.moe_layers[0], layer)


class KimiBlock:
    """What Kimi-K3 computes between a layer's norm and the next one, from the tensors of the files."""

    def __init__(self, tensors: dict[str, torch.Tensor], experts: list[dict[str, torch.Tensor]], prefix: str) -> None:
        self.tensors = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self.experts = experts

    def mlp(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        g, u = linear(x, gate), linear(x, up)
        return linear(4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh(), down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, of = x[0], self.tensors
        scores = linear(x, of["gate.weight"]).sigmoid()
        ids = (scores + of["gate.e_score_correction_bias"]).topk(TOP_K).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True) * 1.5
        rows = linear(x, of["routed_expert_down_proj.weight"])
        routed = torch.zeros_like(rows)
        for row in range(len(rows)):
            for slot in range(TOP_K):
                expert = self.experts[ids[row, slot]]
                routed[row] += weights[row, slot] * self.mlp(rows[row], expert["w1"], expert["w3"], expert["w2"])
        routed = routed * (routed.square().mean(1, keepdim=True) + 1e-5).rsqrt() * of["routed_expert_norm.weight"]
        shared = [of[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
        return (linear(routed, of["routed_expert_up_proj.weight"]) + self.mlp(x, *shared))[None]


def publish(folder: Path) -> list[Any]:
    """Writes a model as Kimi-K3 came, its experts in mxfp4, and returns its blocks."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    blocks = []

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    language = "language_model.model."
    tensors[f"{language}embed_tokens.weight"] = draw(96, K)
    for layer in range(3):
        tensors[f"{language}layers.{layer}.post_attention_layernorm.weight"] = 1 + draw(K)
    for layer in (1, 2):
        prefix = f"{language}layers.{layer}.block_sparse_moe."
        tensors[f"{prefix}gate.weight"] = draw(EXPERTS, K)
        tensors[f"{prefix}gate.e_score_correction_bias"] = draw(EXPERTS)
        tensors[f"{prefix}routed_expert_down_proj.weight"] = draw(LATENT, K)
        tensors[f"{prefix}routed_expert_up_proj.weight"] = draw(K, LATENT)
        tensors[f"{prefix}routed_expert_norm.weight"] = 1 + draw(LATENT)
        for name, shape in (("gate", (2 * N, K)), ("up", (2 * N, K)), ("down", (K, 2 * N))):
            tensors[f"{prefix}shared_experts.{name}_proj.weight"] = draw(*shape)
        experts: list[dict[str, torch.Tensor]] = []
        for expert in range(EXPERTS):
            experts.append({})
            for name, (rows, columns) in (("w1", (N, LATENT)), ("w3", (N, LATENT)), ("w2", (LATENT, N))):
                codes = torch.randint(0, 16, (rows, columns), generator=generator)
                exponents = torch.randint(124, 128, (rows, columns // 32), generator=generator)
                module = f"{prefix}experts.{expert}.{name}"
                tensors[f"{module}.weight_packed"] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
                tensors[f"{module}.weight_scale"] = exponents.to(torch.uint8)
                experts[-1][name] = NUMBERS[codes] * 2.0 ** (exponents - 127).repeat_interleave(32, dim=1)
        blocks.append(KimiBlock(tensors, experts, prefix))
    write_checkpoint(folder, {"model_type": "kimi_k3", "text_config": KIMI_TEXT}, tensors.items())
    return blocks


def test_kimi_k3(tmp_path: Path) -> None:
    blocks = publish(tmp_path)
    check_layers(tmp_path, blocks)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config)
    assert (spec.activation, spec.hidden_size, spec.expert_hidden_size) == (MoEActivation.SITU, K, LATENT)
    with pytest.raises(ConfigError, match="no causal language model of model_type 'kimi_k3'"):
        moe_ep.parallelize(tmp_path)


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_other_ends_of_its_activation_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key}: expected .*, found 5.0"):
        model_spec(KIMI_TEXT | {key: 5.0})
