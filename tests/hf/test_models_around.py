"""Models that moe_ep does not know, around a language model that it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.checkpoint import model_spec
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.errors import CheckpointError, ConfigError
from tests.hf.hf_models import EYES, FAMILIES, SIZES
from tests.hf.moe_layers import check_layers
from tests.hf.test_families import check, in_slots
from tests.of_transformers import known, random_model

SEEING = EYES | {"num_hidden_layers": 2, "image_size": 16}
MIXTRAL = {"model_type": "mixtral", **SIZES, **FAMILIES["Mixtral"]}
QWEN = {"model_type": "qwen3_moe", **SIZES, **FAMILIES["Qwen3Moe"]}
DEEPSEEK = {"model_type": "deepseek_v3", **SIZES, **FAMILIES["DeepseekV3"]}


def make_seeing(family: str, text: dict[str, Any], eyes: dict[str, Any]) -> Any:
    config = known(f"{family}Config")(text_config=text, vision_config=eyes)
    return random_model(f"{family}ForConditionalGeneration", config)


@pytest.mark.parametrize(
    ("family", "text", "eyes"),
    [
        ("Llava", MIXTRAL, SEEING | {"model_type": "clip_vision_model"}),
        ("LlavaNext", DEEPSEEK, SEEING | {"model_type": "clip_vision_model"}),
        ("InternVL", QWEN, SEEING),
    ],
)
def test_by_the_type_of_a_part(family: str, text: dict[str, Any], eyes: dict[str, Any], tmp_path: Path) -> None:
    alone = make_seeing(family, text, eyes)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    in_slots(parallel, alone)
    layers = (layer.mlp for layer in alone.model.language_model.layers)
    check_layers(tmp_path, [mlp for mlp in layers if hasattr(mlp, "experts")])


@pytest.mark.parametrize("part", ["llm_config", "language_config"])
def test_layers_of_models_that_transformers_does_not_have(part: str, tmp_path: Path) -> None:
    """InternVL as it came calls that part otherwise; there too stands how it is quantized."""
    alone = make_seeing("InternVL", QWEN, SEEING)
    alone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "internvl_chat", part: config.pop("text_config")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_layers(tmp_path, [layer.mlp for layer in alone.model.language_model.layers])
    config[part] |= {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    assert str(quantization_config(config)) == str(quantization_config(config[part])) != "None"
    with pytest.raises(ConfigError, match="no causal language model of model_type 'internvl_chat'"):
        moe_ep.parallelize(tmp_path)


@pytest.mark.parametrize("part", [{"model_type": "llama"}, {}, [], "mixtral"])
def test_a_part_of_an_unknown_type_is_refused_by_that_of_the_whole(part: object) -> None:
    with pytest.raises(CheckpointError, match="model_type is 'own_vl'"):
        model_spec({"model_type": "own_vl", "text_config": part})
