"""Configurations as models were published: they say some things otherwise than transformers does, or not at all."""

from __future__ import annotations

import pytest
import torch

from moe_ep.checkpoint import model_spec
from moe_ep.errors import CheckpointError
from tests.checkpoint.checkpoints import qwen3_config
from tests.checkpoint.model_cases import config_of


def test_mimo_as_the_models_came() -> None:
    came = {"moe_layer_freq": [0, 1, 1], "routed_scaling_factor": None, "layernorm_epsilon": 1e-5, "rms_norm_eps": None}
    came |= {"mlp_layer_types": None, "n_shared_experts": None}
    assert model_spec(config_of("mimo_v2_flash") | came) == model_spec(config_of("mimo_v2_flash"))


@pytest.mark.parametrize("family", ["exaone_moe", "mimo_v2_flash", "kimi_linear", "hy_v3", "axk1", "dots3_note_text"])
def test_a_first_layer_is_dense_where_the_config_is_silent(family: str) -> None:
    silent = config_of(family, mlp_layer_types=None)
    silent.pop("first_k_dense_replace", None)
    assert model_spec(silent).moe_layers == (1, 2)


def test_kimi_linear_as_the_models_came() -> None:
    came = config_of("kimi_linear", mlp_layer_types=None, first_k_dense_replace=2, moe_layer_freq=1)
    came |= {"moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
    assert model_spec(came).moe_layers == (2,)
    assert model_spec(came).routing == model_spec(config_of("kimi_linear")).routing
    with pytest.raises(CheckpointError, match="scoring_func is 'relu'"):
        model_spec(came | {"moe_router_activation_func": "relu"})


def test_embeddings_of_afmoe_that_are_scaled() -> None:
    assert model_spec(config_of("afmoe")).embedding_multiplier == 1
    assert model_spec(config_of("afmoe", mup_enabled=True)).embedding_multiplier == 8


def test_identity_experts_that_are_none() -> None:
    for changes, message in (
        ({"zero_expert_type": "copy"}, "zero_expert_type is 'copy'; it must be one of identity"),
        ({"router_bias": True}, "router_bias: expected false, found true"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_spec(config_of("longcat_flash", **changes))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_whole_where_a_part_says_null(key: str) -> None:
    """As files do that name every setting of every part."""
    text = qwen3_config(dtype=None, torch_dtype=None)
    config = {"model_type": "qwen3_vl_moe", "text_config": text}
    assert model_spec(config | {key: "bfloat16"}).dtype == torch.bfloat16
    text[key] = "float16"
    assert model_spec(config | {"dtype": "bfloat16"}).dtype == torch.float16
