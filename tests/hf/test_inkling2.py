"""Inkling 2, whose gate and up end softly: the language model alone, and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError
from tests.hf.hf_models import EYES, SIZES
from tests.hf.moe_layers import check_layers
from tests.hf.test_families import check
from tests.hf.ungrouped_models import UNGROUPED
from tests.of_transformers import known, random_model

# All of its layers have experts, unlike those of the first Inkling.
TEXT = {
    key: value
    for key, value in {
        **SIZES,
        **UNGROUPED["InklingText"],
        "n_layers_per_attn_res_block": 1,
        "route_scale": 2.0,
    }.items()
    if key not in ("intermediate_size", "mlp_layer_types")
}


def check_saved(folder: Path, alone: Any, layers: Any) -> None:
    alone.save_pretrained(folder)
    check(moe_ep.parallelize(folder, dtype=torch.float32), alone)
    check_layers(folder, [layer.mlp for layer in layers])


def test_the_language_model(tmp_path: Path) -> None:
    alone = random_model("Inkling2ForCausalLM", known("Inkling2TextConfig")(**TEXT))
    check_saved(tmp_path, alone, alone.model.layers)


def test_whole(tmp_path: Path) -> None:
    eyes = {**EYES, "text_hidden_size": TEXT["hidden_size"]}
    alone = random_model(
        "Inkling2ForConditionalGeneration", known("Inkling2Config")(text_config=TEXT, vision_config=eyes)
    )
    check_saved(tmp_path, alone, alone.model.language_model.layers)


@pytest.mark.parametrize("says_so", [False, True])
def test_as_published(tmp_path: Path, says_so: bool) -> None:
    """Experts in mxfp8, here without loss, of which the config says nothing."""
    config = known("Inkling2Config")(text_config=TEXT, vision_config={**EYES, "text_hidden_size": 64})
    alone = random_model("Inkling2ForConditionalGeneration", config)
    layers = alone.model.language_model.layers
    for layer in layers:
        for param in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            param.copy_(param.to(torch.float8_e4m3fn))
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        settings = {key: value for key, value in reader.config.items() if key != "transformers_version"}
        tensors = {name: reader.read(name) for name in reader.names()}
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        groups = (*tensors[name].shape[:-1], tensors[name].size(-1) // 32)
        tensors[f"{name}_scale"] = torch.full(groups, 127, dtype=torch.uint8)
    if says_so:
        settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [1, 32]}
        settings["quantization_config"]["modules_to_not_convert"] = ["lm_head", "attn", "vision_tower", "visual"]
    write_checkpoint(tmp_path / "published", settings, tensors.items())
    check(moe_ep.parallelize(tmp_path / "published", dtype=torch.float32), alone)
    check_layers(tmp_path / "published", [layer.mlp for layer in layers])


def test_other_ends_are_refused() -> None:
    config = known("Inkling2TextConfig")(**TEXT, dtype="float32").to_dict()
    with pytest.raises(CheckpointError, match="mlp_up_softcap: expected 25.0, found 30.0"):
        model_spec(config | {"mlp_up_softcap": 30.0})
