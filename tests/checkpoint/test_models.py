"""Model families: specs against transformers' own configurations, tensor names against what it saves."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from moe_ep.activation import MoEActivation
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
from moe_ep.checkpoint.models import FAMILIES, RoutingSpec
from moe_ep.checkpoint.plan import plan_layer
from moe_ep.errors import CheckpointError
from moe_ep.routing import select_experts
from moe_ep.sparse_mixer import sparse_mixer
from tests.checkpoint.checkpoints import LoadingLayer, plain_shapes
from tests.checkpoint.model_cases import EXPERTS, MODELS, SIZES, block_of, config_of, router_of, save_model

SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe",
    "glm_moe_dsa": "glm4_moe",
    "dots1": "deepseek_v3",
    "solar_open": "deepseek_v3",
    "minimax": "mixtral",
    "granitemoe": "granitemoeshared",
    "granitemoehybrid": "granitemoeshared",
    "qwen3_5_moe_text": "qwen3_next",
}
BIASED = RoutingSpec(renormalize=True, scoring_func="sigmoid", has_correction_bias=True)
GROUPED = dataclasses.replace(
    BIASED, use_grouped_topk=True, num_expert_group=4, topk_group=2, routed_scaling_factor=2.5
)
EXPECTED = {
    "mixtral": {"moe_layers": (0, 1, 2), "moe_intermediate_size": 48, "routing": RoutingSpec(renormalize=True)},
    "qwen2_moe": {"moe_layers": (1,), "moe_intermediate_size": 32, "routing": RoutingSpec(renormalize=False)},
    "qwen3_moe": {"moe_layers": (0, 2), "moe_intermediate_size": 32, "routing": RoutingSpec(renormalize=True)},
    "olmoe": {"moe_layers": (0, 1, 2), "moe_intermediate_size": 48, "routing": RoutingSpec(renormalize=False)},
    "deepseek_v2": {
        "moe_layers": (1, 2),
        "moe_intermediate_size": 32,
        "routing": RoutingSpec(
            renormalize=False,
            use_grouped_topk=True,
            num_expert_group=4,
            topk_group=2,
            routed_scaling_factor=16.0,
        ),
    },
    "deepseek_v3": {
        "moe_layers": (2,),
        "moe_intermediate_size": 32,
        "routing": GROUPED,
    },
    "glm4_moe": {
        "moe_layers": (1, 2),
        "moe_intermediate_size": 32,
        "routing": dataclasses.replace(GROUPED, num_expert_group=2, topk_group=1, routed_scaling_factor=1.5),
    },
    "afmoe": {
        "moe_layers": (1, 2),
        "routing": dataclasses.replace(BIASED, routed_scaling_factor=2.5),
    },
    "jamba": {"moe_layers": (1,), "routing": RoutingSpec(renormalize=False)},
    "lfm2_moe": {
        "moe_layers": (2,),
        "routing": dataclasses.replace(BIASED, routed_scaling_factor=1.5),
    },
    "nemotron_h": {
        "moe_layers": (1,),
        "activation": MoEActivation.RELU2_NO_MUL,
        "routing": dataclasses.replace(
            BIASED, use_grouped_topk=True, num_expert_group=1, topk_group=1, routed_scaling_factor=2.5
        ),
    },
    "exaone_moe": {
        "moe_layers": (1, 2),
        "routing": GROUPED,
    },
    "mimo_v2_flash": {"moe_layers": (1, 2), "shared_experts": None},
    "hunyuan_v1_moe": {"moe_intermediate_size": 48, "routing": RoutingSpec(renormalize=True)},
    "minimax_m2": {
        "moe_intermediate_size": 48,
        "routing": BIASED,
    },
    "granitemoeshared": {
        "moe_intermediate_size": 48,
        "routing": RoutingSpec(renormalize=True),
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
    },
    "phimoe": {
        "moe_intermediate_size": 48,
        "has_norm_bias": True,
    },
    "qwen3_next": {"moe_layers": (0, 1, 2), "norm_offset": 1.0, "routing": RoutingSpec(renormalize=True)},
    "ernie4_5_moe": {"moe_layers": (1, 2), "routing": RoutingSpec(renormalize=True, has_correction_bias=True)},
    "gpt_oss": {
        "activation": MoEActivation.SWIGLUOAI,
        "has_bias": True,
        "interleaved": True,
        "routing": RoutingSpec(renormalize=True),
    },
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family, the directory of a small model of it, and the model."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, save_model(request.param, directory)


# In a part of their config; in test_fused_experts_of_a_model_that_sees and tests/integrations/test_families.py.
SEEING = {"qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "llama4", "kimi_k25"}


def test_every_family_is_tested() -> None:
    assert set(MODELS) == set(EXPECTED) == set(FAMILIES) - set(SAME_AS) - SEEING


@pytest.mark.parametrize("family", MODELS)
def test_spec_of_a_config_that_transformers_writes(family: str) -> None:
    spec = model_spec(config_of(family))
    for field, value in EXPECTED[family].items():
        assert getattr(spec, field) == value, field
    assert (spec.family, spec.hidden_size, spec.num_hidden_layers, spec.vocab_size) == (family, 64, 3, 128)
    assert (spec.num_experts, spec.top_k, spec.dtype) == (EXPERTS, 2, torch.bfloat16)
    assert spec.activation is EXPECTED[family].get("activation", MoEActivation.SILU)


@pytest.mark.parametrize("family", SAME_AS)
def test_families_that_are_others_by_another_name(family: str) -> None:
    """Their models run in tests/integrations/test_families.py."""
    other = SAME_AS[family]
    spec = model_spec(config_of(other) | {"model_type": family})
    assert dataclasses.replace(spec, family=other) == model_spec(config_of(other))


def test_layers_that_transformers_lists() -> None:
    listed = config_of("qwen3_moe", mlp_layer_types=["dense", "sparse", "sparse"])
    assert model_spec(listed).moe_layers == (1, 2)
    for wrong in (["dense"], ["dense", "moe", "sparse"], "sparse"):
        with pytest.raises(CheckpointError, match="mlp_layer_types: expected dense or sparse for each of 3 layers"):
            model_spec(listed | {"mlp_layer_types": wrong})


def test_layers_of_llama_by_their_step() -> None:
    text = transformers.Llama4TextConfig(num_hidden_layers=7, dtype="bfloat16").to_dict()
    config = {"model_type": "llama4", "text_config": text | {"interleave_moe_layer_step": 3, "moe_layers": None}}
    assert model_spec(config).moe_layers == (2, 5)
    config["text_config"] |= {"moe_layers": [0, 6, 9]}
    assert model_spec(config).moe_layers == (0, 6)


def test_mimo_as_the_models_came() -> None:
    came = {"moe_layer_freq": [0, 1, 1], "routed_scaling_factor": None, "layernorm_epsilon": 1e-5, "rms_norm_eps": None}
    came |= {"mlp_layer_types": None, "n_shared_experts": None}
    assert model_spec(config_of("mimo_v2_flash") | came) == model_spec(config_of("mimo_v2_flash"))


def test_hunyuan_has_one_number_of_experts_a_token() -> None:
    with pytest.raises(CheckpointError, match=r"moe_topk: expected a whole number of at least 1, found \[2, 1, 2\]"):
        model_spec(config_of("hunyuan_v1_moe", moe_topk=[2, 1, 2]))


def test_phi_mixes_with_the_jitter_of_its_config() -> None:
    routing = model_spec(config_of("phimoe")).routing
    assert routing.custom_routing_function.keywords == {"jitter_eps": 0.2}
    logits = torch.tensor([[2.0, 1.99, 0.0]])
    weights, ids = sparse_mixer(torch.zeros(1, 4), logits, 2, False, jitter_eps=0.01)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[torch.sigmoid(torch.tensor(0.01)), 1.0]]))


def test_names_and_shapes_are_those_on_disk(saved: tuple[str, Path, Any]) -> None:
    family, directory, model = saved
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    assert spec.family == family
    for index in spec.moe_layers:
        layer = LoadingLayer(plain_shapes(), list(range(EXPERTS)), num_experts=EXPERTS)
        plan = plan_layer(reader, spec, index, layer, None)
        # A fused tensor is read by rows, name[0], name[1], ...
        names = {source.name.split("[")[0] for source in plan}
        stems = (spec.expert_prefix(index), *(f"{spec.moe_prefix(index)}.{name}" for name in spec.fused))
        assert names == {name for stem in stems for name in reader.names(stem)}
        block = block_of(model.model.layers[index])
        router = load_router(reader, spec, index)
        assert torch.equal(router.weight, next(router_of(block).parameters()))
        assert (router.bias is not None) == spec.has_router_bias
        assert (router.correction_bias is not None) == spec.routing.has_correction_bias
        norm = getattr(model.model.layers[index], spec.norm)
        assert torch.equal(load_norm(reader, spec, index), norm.weight.float() + 1 if spec.norm_offset else norm.weight)
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
}


def test_shared_experts_are_those_of_the_model(saved: tuple[str, Path, Any]) -> None:
    family, directory, model = saved
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    index = spec.moe_layers[-1]
    block = block_of(model.model.layers[index])
    shared = load_shared_experts(reader, spec, index)
    if family not in SHARED:
        assert shared is None and not hasattr(block, "shared_expert") and not hasattr(block, "shared_experts")
        return
    module = model.model.layers[index].get_submodule(spec.shared_experts.module)
    if spec.shared_experts.fused:
        parts = {"gate": module.input_linear.weight[:40], "up": module.input_linear.weight[40:]}
        parts["down"] = module.output_linear.weight
    else:
        parts = {role: getattr(module, name).weight for role, name in spec.projections.by_role().items()}
    assert all(torch.equal(getattr(shared, part), weight) for part, weight in parts.items())
    assert spec.shared_experts.intermediate_size == shared.gate.shape[0]
    assert spec.shared_experts.num_experts == SHARED[family]
    if hasattr(block, "shared_expert_gate"):
        assert torch.equal(shared.expert_gate, block.shared_expert_gate.weight)
    else:
        assert shared.expert_gate is None


def test_routing_chooses_as_the_model_does(saved: tuple[str, Path, Any]) -> None:
    _, directory, model = saved
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    index = spec.moe_layers[-1]
    block = block_of(model.model.layers[index])
    gate = copy.deepcopy(router_of(block)).float()
    hidden_states = torch.randn(64, 64)
    # Some hand their router the bias, and AFMoE sequences.
    biases = [getattr(block, name, None) for name in ("e_score_correction_bias", "expert_bias")]
    shaped = hidden_states[None] if spec.family == "afmoe" else hidden_states
    _, weights, ids = gate(shaped, *(bias.float() for bias in biases if bias is not None))
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
    assert torch.equal(our_ids.long().sort(dim=-1).values, ids.sort(dim=-1).values)
    torch.testing.assert_close(our_weights.gather(1, our_ids.long().argsort()), weights.gather(1, ids.argsort()))


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


def test_deepseek_greedy_ignores_groups_and_keeps_its_factor() -> None:
    spec = model_spec(config_of("deepseek_v2", topk_method="greedy", n_group=1, topk_group=1))
    assert spec.routing == RoutingSpec(renormalize=False, routed_scaling_factor=16.0)


def test_deepseek_correction_bias_without_groups() -> None:
    spec = model_spec(config_of("deepseek_v3", n_group=None, topk_group=None))
    assert spec.routing.has_correction_bias and not spec.routing.use_grouped_topk


def test_deepseek_layer_frequency() -> None:
    assert model_spec(config_of("deepseek_v3", first_k_dense_replace=0, moe_layer_freq=2)).moe_layers == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            "model_type is 'llama'; it must be one of afmoe, deepseek_v2, .*, mixtral, nemotron_h, olmoe",
        ),
        ({"model_type": None}, "model_type is None; it must be one of"),
        ({"hidden_size": None}, "expected hidden_size, found no such key"),
        ({"hidden_size": "64"}, "hidden_size: expected a whole number of at least 1, found '64'"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok: expected at most the number of experts \(8\), found 9"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of silu"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of bfloat16"),
        ({"n_group": 3}, "expected a divisor of 8 experts .*found 3 and 2"),
        ({"topk_group": 5}, "expected a divisor of 8 experts .*found 4 and 5"),
        ({"topk_method": "best"}, "topk_method is 'best'; it must be one of greedy, group_limited_greedy, noaux_tc"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid"),
        ({"first_k_dense_replace": 3}, "expected a layer with experts among 3, found none"),
    ],
)
def test_configs_that_can_not_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        model_spec(config_of("deepseek_v3", **changes))


def test_spec_of_a_layer_without_experts() -> None:
    spec = model_spec(config_of("qwen3_moe"))
    with pytest.raises(ValueError, match=r"layer is 1; it must be one of the layers with experts, \[0, 2\]"):
        spec.expert_prefix(1)
