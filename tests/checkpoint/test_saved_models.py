"""Saved models of every family: their tensors' names, routers, norms and shared experts are those that we read."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers

from moe_ep.checkpoint import (
    CheckpointReader,
    expert_tensors,
    load_norm,
    load_norm_bias,
    load_router,
    load_shared_experts,
    model_spec,
    read_expert,
)
from moe_ep.checkpoint.plan import plan_layer
from moe_ep.checkpoint.spec import MoEModelSpec, SharedExpertsSpec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.layer.stack import MoEStack
from moe_ep.routing import select_experts
from tests.checkpoint.checkpoints import LoadingLayer, plain_shapes
from tests.checkpoint.model_cases import EXPERTS, MODELS, SIZES, block_of, router_of, save_model, shared_of


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family, the directory of a small model of it, and the model."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, save_model(request.param, directory)


class LastBlock(NamedTuple):
    """The last of a saved model's layers with experts: on disk by reader, spec and index, and the model's module."""

    family: str
    reader: CheckpointReader
    spec: MoEModelSpec
    index: int
    module: Any


@pytest.fixture
def last(saved: tuple[str, Path, Any]) -> LastBlock:
    family, directory, model = saved
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    index = spec.moe_layers[-1]
    return LastBlock(family, reader, spec, index, block_of(model.model.layers[index]))


def test_names_and_shapes_are_those_on_disk(saved: tuple[str, Path, Any]) -> None:
    family, directory, model = saved
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    assert spec.family == family
    for index in spec.moe_layers:
        layer = LoadingLayer(plain_shapes(), list(range(EXPERTS)), num_experts=EXPERTS)
        plan = plan_layer(reader, spec, index, layer)
        # A fused tensor is read by rows, name[0], name[1], ...
        names = {source.name.split("[")[0] for source in plan}
        stems = (
            spec.expert_prefix(index),
            *(f"{spec.moe_prefix(index)}.{name}" for name in spec.fused.by_role().values()),
        )
        identities = range(EXPERTS, spec.num_router_columns)
        unread = {name for i in identities for name in reader.names(f"{spec.expert_prefix(index)}.{i}.")}
        # Laguna's experts have the bias of their choice among them.
        unread.add(spec.correction_bias(index))
        assert names == {name for stem in stems for name in reader.names(stem)} - unread
        if index in spec.table_layers:
            continue
        block = block_of(model.model.layers[index])
        router = load_router(reader, spec, index)
        assert torch.equal(router.weight, next(router_of(block).parameters()))
        assert (router.bias is not None) == spec.has_router_bias
        assert (router.correction_bias is not None) == spec.routing.has_correction_bias
        of_layer = model.model.layers[index]
        has_norm = spec.norm is None or hasattr(of_layer, spec.norm.partition(".")[0])
        theirs = spec.norm if has_norm else "post_attention_layernorm"
        norm = torch.ones(64) if theirs is None else of_layer.get_submodule(theirs).weight
        assert torch.equal(load_norm(reader, spec, index), norm.float() + 1 if spec.norm_offset else norm)
        assert (load_norm_bias(reader, spec, index) is not None) == spec.has_norm_bias
    dense = set(range(3)) - set(spec.moe_layers)
    assert not any(reader.names(f"{spec.layers_module}.{index}.{spec.moe_module}.experts.") for index in dense)
    assert reader.info(spec.embedding).shape == (128, 64)


# How many experts the shared MLP stands for.
SHARED = {
    "qwen2_moe": 1,
    "qwen3_next": 1,
    "nemotron_h": 1,
    "deepseek_v2": 2,
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "ernie4_5_moe": 2,
    "exaone_moe": 2,
    "afmoe": 2,
    "hunyuan_v1_moe": 1,
    "granitemoeshared": 1,
    "kimi_linear": 1,
    "mistral4": 1,
    "hy_v3": 2,
    "bailing_hybrid": 1,
    "axk1": 1,
    "aria_text": 2,
    "dots3_note_text": 1,
    "deepseek_v4": 1,
    "qwen4_exp_text": 1,
    "flint": 1,
    "laguna": 1,
    "cohere2_moe": 2,
}


def test_shared_experts_are_those_of_the_model(saved: tuple[str, Path, Any], last: LastBlock) -> None:
    family, reader, spec, index, block = last
    shared = load_shared_experts(reader, spec, index)
    if family not in SHARED:
        assert shared is None and not hasattr(block, "shared_expert") and not hasattr(block, "shared_experts")
        return
    module = shared_of(saved[2].model.layers[index])
    if spec.shared_experts.fused:
        parts = {"gate": module.input_linear.weight[:40], "up": module.input_linear.weight[40:]}
        parts["down"] = module.output_linear.weight
    else:
        # DeepSeek-V4's files call them otherwise than transformers.
        named = {role: (name, f"{role}_proj") for role, name in spec.shared_projections().by_role().items()}
        parts = {
            role: next(getattr(module, n).weight for n in names if hasattr(module, n)) for role, names in named.items()
        }
    # Cohere's are averaged with the routed ones.
    parts["down"] = parts["down"] * (0.5 if family == "cohere2_moe" else 1)
    assert all(torch.equal(getattr(shared, part), weight) for part, weight in parts.items())
    assert spec.shared_experts.intermediate_size == shared.gate.shape[0]
    assert spec.shared_experts.num_experts == SHARED[family]
    if hasattr(block, "shared_expert_gate"):
        assert torch.equal(shared.expert_gate, block.shared_expert_gate.weight)
    else:
        assert shared.expert_gate is None


def test_a_shared_mlp_of_no_shared_experts(tmp_path: Path) -> None:
    """transformers gives that of HY V3 the size of dense layers."""
    model = save_model("hy_v3", tmp_path, num_shared_experts=0)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    assert spec.shared_experts == SharedExpertsSpec(module="mlp.shared_mlp", num_experts=1, intermediate_size=48)
    stack = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32)
    layer = model.model.layers[spec.moe_layers[0]].float()
    x = torch.randn(1, 9, 64)
    with torch.no_grad():
        expected = x + layer.mlp(layer.post_attention_layernorm(x))
        torch.testing.assert_close(stack.layers()[0](x[0]), expected[0], rtol=1e-4, atol=1e-4)


# What the block multiplies the experts' sum by, and the router not their weights.
OF_THE_SUM = {"laguna": 2.5, "beam": 2.5, "cohere2_moe": 0.5}


def test_routing_chooses_as_the_model_does(last: LastBlock) -> None:
    _, reader, spec, index, block = last
    gate = copy.deepcopy(router_of(block)).float()
    hidden_states = torch.randn(64, 64)
    # Some hand their router the bias, and AFMoE sequences.
    biases = [getattr(block, name, None) for name in ("e_score_correction_bias", "expert_bias")]
    shaped = hidden_states[None] if spec.family == "afmoe" else hidden_states
    found = gate(shaped, *(bias.float() for bias in biases if bias is not None))
    if isinstance(found, torch.Tensor):
        pytest.skip(f"transformers {transformers.__version__} has a router of logits alone here")
    weights, ids = (
        next(each for each in found if each.is_floating_point() == floats and each.shape[-1] == spec.top_k)
        for floats in (True, False)
    )
    is_identity = ids >= EXPERTS
    weights, ids = weights.masked_fill(is_identity, 0), ids.masked_fill(is_identity, -1)
    router = load_router(reader, spec, index)
    arguments = dataclasses.asdict(spec.routing)
    del arguments["has_correction_bias"], arguments["apply_router_weight_on_input"]
    our_weights, our_ids, _ = select_experts(
        hidden_states,
        F.linear(hidden_states, router.weight.float(), None if router.bias is None else router.bias.float()),
        spec.top_k,
        e_score_correction_bias=None if router.correction_bias is None else router.correction_bias.float(),
        **arguments,
    )
    weights = weights * OF_THE_SUM.get(spec.family, 1)
    assert torch.equal(our_ids.long().sort(dim=-1).values, ids.sort(dim=-1).values)
    torch.testing.assert_close(our_weights.gather(1, our_ids.long().argsort()), weights.gather(1, ids.argsort()))


@pytest.mark.parametrize("family", ["afmoe", "axk1", "beam", "flex_olmo", "cohere2_moe", "phimoe"])
def test_norms_before_and_behind_the_experts(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    stack = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32)
    index = spec.moe_layers[0]
    layer = model.model.layers[index].float()
    x = torch.randn(1, 9, 64)
    with torch.no_grad():
        read = F.rms_norm(x, (64,), eps=spec.rms_norm_eps) if spec.norm is None else getattr(layer, spec.norm)(x)
        output = block_of(layer)(read)
        # A.X K1 has the norm inside the block.
        behind = getattr(layer, spec.output_norm or "", lambda output: output)
        expected = x + behind(output)
        torch.testing.assert_close(stack.layers()[0](x[0]), expected[0], rtol=1e-4, atol=1e-4)


def test_fused_experts_of_a_model_that_sees(tmp_path: Path) -> None:
    """Qwen3-VL writes its experts fused and transposed; 2 N = K here, so one shape alone would not tell."""
    text = {"num_experts": EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, **SIZES}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}, dtype="bfloat16"
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).bfloat16()
    model.save_pretrained(tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    assert (spec.moe_layers, spec.moe_intermediate_size, spec.dtype) == ((0, 1, 2), 32, torch.bfloat16)
    assert reader.info(spec.embedding).shape == (128, 64)
    block = model.model.language_model.layers[1].mlp
    assert torch.equal(load_router(reader, spec, 1).weight, block.gate.weight)
    for expert in range(EXPERTS):
        found = read_expert(reader, expert_tensors(reader, spec, 1), expert)
        assert torch.equal(torch.cat([found.gate, found.up]), block.experts.gate_up_proj[expert].float())
        assert torch.equal(found.down, block.experts.down_proj[expert].float())
