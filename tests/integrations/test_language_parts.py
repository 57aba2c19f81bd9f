"""Language models that files hold beside eyes and ears, run as they are with text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.checkpoint import CheckpointReader, load_router, load_shared_experts, model_spec
from moe_ep.checkpoint.matrices import check_experts
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from tests.integrations.hf_models import GROUPED, MLA, SIZES, make_model
from tests.integrations.test_families import INDEXER, OTHERS, check, in_slots
from tests.of_transformers import known

EYES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}
PIXTRAL = {**EYES, "model_type": "pixtral", "image_size": 16, "head_dim": 16}
LARGE = {
    **{key: value for key, value in {**SIZES, **MLA, **GROUPED, **INDEXER}.items() if key != "q_lora_rank"},
    # The third layer reads the first's keys through an indexer of its own, the fourth through the third's.
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 1],
    "kv_source_layers": [0, 1, 0, 0],
    "indexer_types": ["full", "full", "full", "shared"],
}
DOTS_EYES = {**EYES, "adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]}
DOTS_EARS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DOTS_EARS |= {"adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 8, "feature_size": 16}
PARTS: dict[str, dict[str, Any]] = {
    "Mistral3": {
        "text_config": {**SIZES, **OTHERS["Mistral4"], "model_type": "mistral4"},
        "vision_config": PIXTRAL,
        "image_token_index": 90,
    },
    "MistralLarge4": {"text_config": LARGE, "vision_config": PIXTRAL, "image_token_index": 90},
    "Dots3Note": {
        "text_config": {**SIZES, **OTHERS["Dots3NoteText"]},
        "vision_config": DOTS_EYES,
        "audio_config": DOTS_EARS,
    },
}


def make_whole(family: str) -> Any:
    """A model with all of its parts; all that is learned is drawn."""
    if family == "Mistral3":
        known("Mistral4Config")
    config = known(f"{family}Config")(**PARTS[family])
    torch.manual_seed(0)
    model = known(f"{family}ForConditionalGeneration")(config).eval().requires_grad_(False)
    for name, param in model.named_parameters():
        if "experts." in name or name.endswith("mlp.gate.weight") or "softmax_scaling" in name:
            torch.nn.init.normal_(param, std=0.3)
    return model


@pytest.mark.parametrize("family", PARTS)
def test_text_through_a_whole_model(family: str, tmp_path: Path) -> None:
    alone = make_whole(family)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    in_slots(parallel, alone)


def test_dots_as_the_models_came(tmp_path: Path) -> None:
    """The language model's sizes beside its eyes and ears, not in a part."""
    alone = make_whole("Dots3Note")
    alone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["moe_shared_expert_intermediate_size"] = text.pop("shared_experts_intermediate_size")
    came = text | config | {"first_k_dense_replace": 1, "moe_layer_freq": [1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(came))
    del came["mlp_layer_types"]
    assert model_spec(came).moe_layers == (1,)
    assert model_spec(came | {"moe_layer_freq": [1, 0, 1], "num_hidden_layers": 3}).moe_layers == (2,)
    with pytest.raises(CheckpointError, match=r"moe_layer_freq: expected 0 or 1 for each of 2 layers, found \[1\]"):
        model_spec(came | {"moe_layer_freq": [1]})
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


@pytest.mark.parametrize("family", ["KimiLinear", "BailingHybrid", "MistralLarge4"])
def test_quantized_layers_that_files_call_otherwise(family: str, tmp_path: Path) -> None:
    """Attention and shared experts in fp8, without loss here; transformers has other names for most of them."""
    alone = make_whole(family) if family in PARTS else make_model(family, **OTHERS[family])
    language = alone.model.language_model if family in PARTS else alone.model
    for name, param in language.named_parameters():
        if name.endswith("_proj.weight"):
            param.copy_(torch.randn(param.shape).to(torch.float8_e4m3fn))
    alone.save_pretrained(tmp_path / "saved")
    quantized = re.compile(
        r"layers\.\d+\.(self_attn\.q_proj|attention\.dense|attention\.w[oq]|.*shared_experts\.\w+)\.weight"
    )
    with CheckpointReader(tmp_path / "saved") as reader:
        tensors: dict[str, torch.Tensor] = {}
        for name in reader.names():
            tensors[name] = reader.read(name)
            if quantized.fullmatch(name.removeprefix("model.")):
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        assert sum(name.endswith("_scale_inv") for name in tensors) >= 5
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["experts"]}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": fp8}, tensors.items())
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def test_the_text_part_of_mistral_large_has_no_head(tmp_path: Path) -> None:
    model = known("MistralLarge4TextModel")(known("MistralLarge4TextConfig")(**LARGE))
    model.save_pretrained(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config)
        check_experts(reader, spec)
        block = model.layers[2].mlp
        assert torch.equal(load_router(reader, spec, 2).weight, block.gate.weight)
        assert torch.equal(load_shared_experts(reader, spec, 2).down, block.shared_experts.down_proj.weight)
        assert reader.info(spec.embedding).shape == (96, 64)
    with pytest.raises(ConfigError, match="has no causal language model of model_type 'mistral_large4_text'"):
        moe_ep.parallelize(tmp_path)


def test_a_mistral_without_experts_is_refused() -> None:
    with pytest.raises(CheckpointError, match="text_config.model_type is 'ministral3'; it must be one of mistral4"):
        model_spec({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}})
