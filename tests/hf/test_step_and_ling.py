"""Step's models and Ling's. Gates of Step and of Ling 3 end at a limit behind silu, which each layer has of its own or
not at all; transformers does not have Ling 1 and 2."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

pytest.importorskip("transformers")

import moe_ep
from moe_ep import FusedMoE
from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import CheckpointReader, load_moe_layer, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.layer.methods import relative_error, tolerance
from tests.hf.hf_models import EYES, SIZES, make_model
from tests.hf.moe_layers import check_layers
from tests.hf.test_families import HYBRID, check, in_slots
from tests.of_transformers import known, random_model

STEP = {
    **SIZES,
    "num_hidden_layers": 4,
    "n_routed_experts": 6,
    "share_expert_dim": 48,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0, 0, 0.3, 0.2],
    "swiglu_limits_shared": [0.1, None, 0.2, 0.0],
}
# What the models came with: (key, its name in configurations that transformers writes, its value)
AS_PUBLISHED = (
    ("moe_num_experts", "n_routed_experts", 6),
    ("moe_top_k", "num_experts_per_tok", 2),
    ("moe_layers_enum", "mlp_layer_types", "1,2,3,4"),
)
LING = {**HYBRID, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
# What transformers calls otherwise.
SAVED = {
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
LISTS = {
    "expert_swiglu_limit_list": [0, 0, 0.03, 0.02],
    "share_expert_swiglu_limit_list": [0, 0.02, 0, 0.01],
}


@pytest.fixture
def step(tmp_path: Path) -> tuple[Path, Any]:
    """The folder of a model with eyes, and the model whole."""
    config = known("Step3p7Config")(text_config=STEP, vision_config=EYES | {"image_size": 16})
    alone = random_model("Step3p7ForConditionalGeneration", config)
    alone.save_pretrained(tmp_path)
    return tmp_path, alone


def test_step(step: tuple[Path, Any]) -> None:
    """Its files have gate and up of all experts apart."""
    folder, alone = step
    layers = alone.model.language_model.layers
    check_layers(folder, [layer.mlp for layer in layers[1:]])
    parallel = moe_ep.parallelize(folder, dtype=torch.float32)
    check(parallel, alone)
    in_slots(parallel, alone)
    experts = [each.moe_config for each in parallel.modules() if isinstance(each, RoutedExperts)]
    made = [(each.activation, each.swiglu_limit) for each in experts]
    swiglustep = MoEActivation.SWIGLUSTEP
    assert made == [(MoEActivation.SILU, None), (swiglustep, 0.3), (swiglustep, 0.2)]


def test_step_as_published(step: tuple[Path, Any], tmp_path: Path) -> None:
    """Its configuration calls things otherwise; experts of fp8, here without loss; and the model that reads text alone,
    whose configuration is flat."""
    folder, alone = step
    blocks = [layer.mlp for layer in alone.model.language_model.layers[1:]]
    for block in blocks:
        for param in (block.experts.gate_up_proj, block.experts.down_proj):
            param.copy_(param.to(torch.float8_e4m3fn))
    with CheckpointReader(folder) as reader:
        config = reader.config
        tensors: dict[str, torch.Tensor] = {}
        for name in reader.names():
            tensors[name] = reader.read(name)
            if ".moe." in name and name.endswith("_proj.weight"):
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.ones(6, 1, 1)
    text = config["text_config"]
    for key, name, value in AS_PUBLISHED:
        text = {other: held for other, held in text.items() if other != name} | {key: value}
    spec, expected = model_spec(text), model_spec(config)
    assert (spec.moe_layers, spec.top_k, spec.num_experts) == (expected.moe_layers, 2, 6)
    assert spec.routing == expected.routing and spec.shared_experts == expected.shared_experts
    assert spec.step_limits == expected.step_limits == (None, None, 0.3, 0.2)
    plain_too = ["*share_expert*", "*moe.gate", "*self_attn*", "*mlp*", "*vision*", "*projector*", "lm_head"]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": plain_too}
    whole = config | {"text_config": text, "quantization_config": fp8}
    write_checkpoint(tmp_path / "whole", whole, tensors.items())
    check(moe_ep.parallelize(tmp_path / "whole", dtype=torch.float32), alone)
    of_text = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    write_checkpoint(tmp_path / "text", text | {"quantization_config": fp8}, of_text.items())
    check_layers(tmp_path / "text", blocks)


def ling(folder: Path) -> Any:
    """A model of Ling 3 without limits, saved with them."""
    alone = make_model("BailingHybrid", **LING)
    alone.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | LISTS))
    return alone


class Limited(torch.nn.Module):
    """A block of transformers' Ling with the limits that it leaves out, told once more."""

    def __init__(self, block: Any, limits: tuple[float, float]) -> None:
        super().__init__()
        self.block, self.limits = block, [limit or float("inf") for limit in limits]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, hidden_states.size(-1))
        experts, shared = self.block.experts, self.block.shared_experts
        _, weights, ids = self.block.gate(x[None])
        output = self.mlp(x, torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), shared.down_proj.weight, 1)
        for slot in range(ids.size(1)):
            for row, expert in enumerate(ids[:, slot].tolist()):
                down = experts.down_proj[expert]
                output[row] += weights[row, slot] * self.mlp(x[row], experts.gate_up_proj[expert], down, 0)
        return output.view(hidden_states.shape)

    def mlp(self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, which: int) -> torch.Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        limit = self.limits[which]
        return linear(silu(gate).clamp(max=limit) * up.clamp(-limit, limit), down)


def test_ling_as_it_was_trained(tmp_path: Path) -> None:
    """transformers leaves the limits out; the layers of a checkpoint, and a whole model from one, have them."""
    alone = ling(tmp_path)
    limits = list(zip(*LISTS.values(), strict=True))
    with torch.inference_mode():
        plain = moe_ep.parallelize(copy.deepcopy(alone))  # a model that is there already stays as it is
        tokens = torch.randint(1, 90, (1, 9))
        unlimited = alone(tokens).logits
        assert relative_error(plain(tokens).logits, unlimited) < 2 * tolerance(torch.float32)
        for index, layer in enumerate(alone.model.layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp = Limited(layer.mlp, limits[index])
        assert relative_error(alone(tokens).logits, unlimited) > 0.02
    check_layers(tmp_path, [layer.mlp for layer in alone.model.layers[1:]])
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


@pytest.mark.parametrize("model_type", ["bailing_moe", "bailing_moe_v2", "bailing_moe_linear"])
def test_second_ling(tmp_path: Path, model_type: str) -> None:
    """Its layers with experts are those of Ling 3 without limits."""
    alone = make_model("BailingHybrid", **LING)
    alone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {published: config.pop(saved) for published, saved in SAVED.items()}
    config |= {"model_type": model_type} | ({} if model_type.endswith("v2") else {"score_function": "sigmoid"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_layers(tmp_path, [layer.mlp for layer in alone.model.layers[1:]])
    with pytest.raises(ConfigError, match=f"no causal language model of model_type '{model_type}'"):
        moe_ep.parallelize(tmp_path)


def test_first_ling(tmp_path: Path) -> None:
    """Its routers are Qwen's, and it has two shared experts."""
    alone = make_model("DeepseekV2", norm_topk_prob=False, n_shared_experts=2, n_group=None, topk_method="greedy")
    alone.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    same = ("hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "num_experts_per_tok", "hidden_act")
    config = {key: saved[key] for key in (*same, "moe_intermediate_size", "first_k_dense_replace", "dtype")}
    config |= {"model_type": "bailing_moe", "num_experts": 8, "num_shared_experts": 2, "norm_topk_prob": False}
    with CheckpointReader(tmp_path) as reader:
        tensors = {name.replace("embed_tokens", "word_embeddings"): reader.read(name) for name in reader.names()}
    write_checkpoint(tmp_path / "ling", config, tensors.items())
    blocks = [layer.mlp for layer in alone.model.layers[1:]]
    for block in blocks:
        block.gate.routed_scaling_factor = 1.0
    check_layers(tmp_path / "ling", blocks)
    del config["norm_topk_prob"]
    assert model_spec(config).routing.renormalize


@pytest.mark.parametrize("wrong", [[0, 4.0], [0, 0, 0, -1], [0, 0, 0, "4"], 4.0, [0, 0, 0, True]])
def test_limits_that_cannot_be(tmp_path: Path, wrong: object) -> None:
    ling(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"expert_swiglu_limit_list": wrong}
    with pytest.raises(CheckpointError, match="expert_swiglu_limit_list: expected null or a number from 0 on for each"):
        model_spec(config)


def test_a_layer_made_without_its_limit_is_not_loaded(tmp_path: Path) -> None:
    ling(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        sizes = {"hidden_size": spec.expert_hidden_size, "intermediate_size": spec.moe_intermediate_size}
        sizes |= {"num_experts": spec.num_experts, "top_k": spec.top_k}
        right = FusedMoE(**sizes, **spec.gate(3)._asdict(), params_dtype=torch.float32)
        load_moe_layer(reader, spec, 3, right)
        with pytest.raises(ValueError, match=r"is silu with .* None, and .* swiglustep with 0.02"):
            load_moe_layer(reader, spec, 3, FusedMoE(**sizes, params_dtype=torch.float32))


def test_biases_of_step_are_refused() -> None:
    text = known("Step3p7TextConfig")(**STEP, mlp_bias=True, dtype="float32").to_dict()
    with pytest.raises(CheckpointError, match="mlp_bias: expected False, found True"):
        model_spec(text)


def test_limits_that_are_not_known_of_a_family() -> None:
    config = make_model("Qwen3Moe").config.to_dict()
    for limit in (7.0, [0, 7.0]):
        with pytest.raises(CheckpointError, match="swiglu_limit: expected none, found .*qwen"):
            model_spec(config | {"swiglu_limit": limit})
    for none in (None, 0, [0, None], (0, 0.0)):
        model_spec(config | {"swiglu_limit": none})
