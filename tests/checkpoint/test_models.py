"""Model families: what is read from configurations that transformers writes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
import transformers

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import model_spec
from moe_ep.checkpoint.families.models import FAMILIES
from moe_ep.checkpoint.spec import RoutingSpec
from moe_ep.errors import CheckpointError
from moe_ep.routing.topk import sparse_mixer
from tests.checkpoint.model_cases import EXPERTS, MODELS, config_of
from tests.of_transformers import known

SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe",
    "glm_moe_dsa": "glm4_moe",
    "dots1": "deepseek_v3",
    "solar_open": "deepseek_v3",
    "minimax": "mixtral",
    "minimax_text_01": "mixtral",
    "minimax_m1": "mixtral",
    "deepseek": "deepseek_v2",
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
    "kimi_linear": {"moe_layers": (1, 2), "routing": dataclasses.replace(GROUPED, routed_scaling_factor=2.446)},
    "mistral4": {
        "moe_layers": (0, 1, 2),
        "routing": dataclasses.replace(GROUPED, scoring_func="softmax", routed_scaling_factor=1.0),
    },
    "hy_v3": {"moe_layers": (1, 2), "routing": dataclasses.replace(BIASED, routed_scaling_factor=2.826)},
    "bailing_hybrid": {"moe_layers": (2,), "routing": GROUPED},
    "longcat_flash": {
        "moe_layers": (0, 1, 2),
        "num_router_columns": 12,
        "routing": RoutingSpec(
            renormalize=False,
            has_correction_bias=True,
            routed_scaling_factor=6.0,
            zero_expert_num=4,
            zero_expert_type="identity",
        ),
    },
    "beam": {"moe_layers": (1, 2), "routing": GROUPED, "output_norm": "post_feedforward_layernorm"},
    "axk1": {"moe_layers": (1, 2), "routing": GROUPED, "output_norm": "post_mlp_layernorm"},
    "dots3_note_text": {"moe_layers": (1, 2), "routing": dataclasses.replace(GROUPED, routed_scaling_factor=1.0)},
    "deepseek_v4": {
        "moe_layers": (0, 1, 2),
        "router_layers": (1, 2),
        "swiglu_limit": 0.5,
        "routing": RoutingSpec(
            renormalize=True, scoring_func="sqrtsoftplus", has_correction_bias=True, routed_scaling_factor=1.5
        ),
    },
    "qwen4_exp_text": {"moe_layers": (0, 1, 2), "norm": None, "routing": RoutingSpec(renormalize=True)},
    "mellum": {"moe_layers": (0, 1, 2), "moe_intermediate_size": 32, "routing": RoutingSpec(renormalize=True)},
    "flint": {"moe_layers": (1, 2), "routing": RoutingSpec(renormalize=True, scoring_func="sigmoid")},
    "laguna": {"moe_layers": (1, 2), "routing": dataclasses.replace(BIASED, routed_scaling_factor=2.5)},
    "aria_text": {"moe_intermediate_size": 48, "routing": RoutingSpec(renormalize=True)},
    "flex_olmo": {"norm": None, "output_norm": "post_feedforward_layernorm", "routing": RoutingSpec(renormalize=False)},
    "cohere2_moe": {
        "moe_layers": (1, 2),
        "moe_intermediate_size": 48,
        "has_layer_norm": True,
        "routing": RoutingSpec(renormalize=True, scoring_func="sigmoid", routed_scaling_factor=0.5),
    },
    "granitemoe_swa": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "gpt_oss": {
        "activation": MoEActivation.SWIGLUOAI,
        "has_bias": True,
        "interleaved": True,
        "routing": RoutingSpec(renormalize=True),
    },
}


# In a part of their config; in tests/hf, test_models_that_see.py and test_language_parts.py.
SEEING = {"qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "llama4", "kimi_k25"}
SEEING |= {"minimax_m3_vl", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen4_exp", "gemma4"}
SEEING |= {"llama4_text", "minimax_m3_vl_text", "aria", "deepseek_ocr2", "unlimited_ocr", "inkling_mm_model"}
SEEING |= {"mistral3", "mistral_large4", "mistral_large4_text", "dots3_note", "glm5_next"}


# In tests/hf: test_limited_gates.py, test_families.py.
SEEING |= {"deepseek_v41", "mimo_v2"}


# Whose routers moe_ep does not compute; in tests/hf/test_families.py.
EXPERTS_ALONE = {"gemma4_text", "inkling_text", "kolibri1", "zaya", "axk2"}
# Whose shared experts transformers saves under other names; in tests/hf/test_limited_gates.py.
RENAMED = {"hy_v4"}
# In tests/hf: test_step_and_ling.py, test_latent_experts.py, test_inkling2.py.
NEWER = {"step3p5", "step3p7", "bailing_moe", "bailing_moe_v2", "bailing_moe_linear", "kimi_k3"}
NEWER |= {"inkling2_text", "inkling2"}


def test_every_family_is_tested() -> None:
    elsewhere = SEEING | EXPERTS_ALONE | RENAMED | NEWER
    assert set(MODELS) == set(EXPECTED) == set(FAMILIES) - set(SAME_AS) - elsewhere


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
    """Those that transformers has run in tests/hf/test_families.py."""
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


def test_experts_of_aria_are_those_that_transformers_computes() -> None:
    """By the size that others call the dense layers', and with silu."""
    assert model_spec(config_of("aria_text", moe_intermediate_size=40)).moe_intermediate_size == 48
    with pytest.raises(CheckpointError, match="hidden_act: expected 'silu', found 'gelu'"):
        model_spec(config_of("aria_text", hidden_act="gelu"))


def test_inkling_as_the_models_came() -> None:
    """Where dense layers have a size of their own, the other is the experts'; and they are the first so many."""
    config = json.loads(known("InklingTextConfig")(num_hidden_layers=3).to_json_string())
    came = config | {
        "mlp_layer_types": None,
        "dense_mlp_idx": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": None,
    }
    spec = model_spec(came | {"dense_intermediate_size": 64})
    assert (spec.moe_layers, spec.moe_intermediate_size) == ((2,), 48)


def test_cohere_as_the_models_came() -> None:
    """With a number of dense layers in place of a list; its experts may be added, and its norms those of others."""
    came = config_of("cohere2_moe", mlp_layer_types=None, first_k_dense_replace=1)
    assert model_spec(came) == model_spec(config_of("cohere2_moe"))
    of_others = {"shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-6, "expert_selection_fn": "softmax"}
    spec = model_spec(came | of_others)
    assert (spec.routing, spec.shared_experts.factor) == (RoutingSpec(renormalize=True), 1.0)
    assert (spec.has_layer_norm, spec.rms_norm_eps) == (False, 1e-6)
    assert model_spec(came | {"num_shared_experts": 0}).routing.routed_scaling_factor == 1.0
    with pytest.raises(CheckpointError, match="shared_expert_combination_strategy is 'max'"):
        model_spec(came | {"shared_expert_combination_strategy": "max"})


@pytest.mark.parametrize("key", ["moe_router_logit_softcapping", "moe_apply_router_weight_on_input"])
def test_laguna_has_plain_routers(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key}: expected none, found 1; such routers do not load"):
        model_spec(config_of("laguna", **{key: 1}))


def test_where_newer_configs_are_silent() -> None:
    silent = {"mlp_layer_types": None, "mlp_only_layers": None}
    assert model_spec(config_of("laguna") | silent).moe_layers == (1, 2)
    assert model_spec(config_of("flint") | silent).moe_layers == (2,)
    assert model_spec(config_of("mellum") | silent).moe_layers == (0, 1, 2)


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


def test_deepseek_greedy_ignores_groups_and_keeps_its_factor() -> None:
    spec = model_spec(config_of("deepseek_v2", topk_method="greedy", n_group=1, topk_group=1))
    assert spec.routing == RoutingSpec(renormalize=False, routed_scaling_factor=16.0)


def test_the_first_deepseek_is_silent_of_what_came_later() -> None:
    config = {key: value for key, value in config_of("deepseek_v2").items() if key not in ("topk_method", "n_group")}
    del config["routed_scaling_factor"]
    spec = model_spec(config | {"model_type": "deepseek", "norm_topk_prob": True})
    assert spec.routing == RoutingSpec(renormalize=True)


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
            "model_type is 'llama'; it must be one of afmoe, .*, deepseek_v2, .*, mixtral, nemotron_h, olmoe",
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
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid, sqrtsoftplus"),
        ({"first_k_dense_replace": 3}, "expected a layer with experts and a router among 3, found none"),
    ],
)
def test_configs_that_can_not_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        model_spec(config_of("deepseek_v3", **changes))


def test_spec_of_a_layer_without_experts() -> None:
    spec = model_spec(config_of("qwen3_moe"))
    with pytest.raises(ValueError, match=r"layer is 1"):
        spec.expert_prefix(1)


@pytest.mark.parametrize("value", ["false", "true", 0, 1, []])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3_moe", "norm_topk_prob"),
        ("deepseek_v3", "norm_topk_prob"),
        ("lfm2_moe", "norm_topk_prob"),
        ("lfm2_moe", "use_expert_bias"),
        ("longcat_flash", "router_bias"),
    ],
)
def test_flags_of_a_router_are_true_or_false(family: str, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{key}: expected true or false, found {re.escape(repr(value))}"):
        model_spec(config_of(family, **{key: value}))


@pytest.mark.parametrize(
    ("family", "of_null", "of_none"),
    [("qwen3_moe", False, False), ("mellum", False, True), ("lfm2_moe", True, True), ("deepseek_v3", False, True)],
)
def test_what_a_missing_flag_of_a_router_means(family: str, of_null: bool, of_none: bool) -> None:
    config = config_of(family)
    assert model_spec(config | {"norm_topk_prob": None}).routing.renormalize is of_null
    config.pop("norm_topk_prob", None)
    assert model_spec(config).routing.renormalize is of_none
