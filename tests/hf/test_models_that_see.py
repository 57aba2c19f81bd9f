"""Models that see, whole and with images, or the language model in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import ConfigError
from moe_ep.launch.workers import verify
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.format_cases import CASES, make_experts
from tests.hf.hf_models import FAMILIES, GROUPED, MLA, SIZES
from tests.hf.test_families import check, in_slots
from tests.of_transformers import known, random_model

VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
IMAGE = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
# (the family's sizes, those of its eyes)
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VLMoe": ({"num_experts": 6, "mrope_section": [4, 6, 6]}, {"deepstack_visual_indexes": [0]}),
    "Glm4vMoe": ({**GROUPED, "mrope_section": [2, 3, 3]}, {}),
}


def make_seeing(family: str) -> Any:
    text, vision = SEEING[family]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": text["mrope_section"]}
    config = known(f"{family}Config")(
        text_config={**SIZES, **text, "rope_parameters": rope},
        vision_config={**VISION, **vision, "patch_size": 4, "temporal_patch_size": 1},
        **IMAGE,
    )
    return random_model(f"{family}ForConditionalGeneration", config)


@pytest.mark.parametrize("family", SEEING)
def test_a_model_that_sees(family: str, tmp_path: Path) -> None:
    """Whole, with its eyes: text, an image in it, and generation, in slots too."""
    alone = make_seeing(family)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    tokens = torch.randint(1, 80, (1, 12), generator=torch.Generator().manual_seed(1))
    tokens[0, 3:9] = torch.tensor([92, 90, 90, 90, 90, 93])
    seen = {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == 90).int(),
        "pixel_values": torch.randn(16, 48, generator=torch.Generator().manual_seed(2)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    greedy = {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        assert relative_error(parallel(**seen).logits, alone(**seen).logits) < 2 * tolerance(torch.float32)
        assert torch.equal(parallel.generate(**seen, **greedy), alone.generate(**seen, **greedy))
    in_slots(parallel, alone, (3,))
    # The config of some says the dtype of the language model alone.
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["dtype"] = "bfloat16"
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert moe_ep.parallelize(tmp_path).dtype == torch.bfloat16


def fill_with_fp8_numbers(model: torch.nn.Module) -> None:
    """Gives its linear layers and experts weights that fp8 holds without loss."""
    for name, param in model.named_parameters():
        if name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj")):
            param.copy_(torch.randn(param.shape).to(torch.float8_e4m3fn))


def test_kimi_that_sees(tmp_path: Path) -> None:
    """Its files have the language model whole, as a part; here attention is quantized too, without loss."""
    text = {**SIZES, **MLA, **GROUPED, "head_dim": 8, "model_type": "deepseek_v3"}
    vision = {key: VISION[key] for key in ("hidden_size", "intermediate_size")}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    config = known("Kimi_K25Config")(text_config=text, vision_config=vision)
    alone = random_model("Kimi_K25ForConditionalGeneration", config)
    fill_with_fp8_numbers(alone)
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        tensors: dict[str, torch.Tensor] = {}
        for saved in reader.names():
            # transformers 5.23 also undoes a renaming of the eyes' layers here.
            name, tensor = (
                saved.replace("language_model.model.blocks", "language_model.model.layers"),
                reader.read(saved),
            )
            quantized = name.startswith("language_model") and name.endswith("_proj.weight")
            tensors[name] = tensor.to(torch.float8_e4m3fn) if quantized else tensor
            if quantized:
                tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": fp8}, tensors.items())
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def make_llama() -> Any:
    text = {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 128, "patch_size": 4, "image_size": 16, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    config = transformers.Llama4Config(text_config={**text, "moe_layers": [1]}, vision_config=vision)
    return random_model("Llama4ForConditionalGeneration", config)


def check_llama(folder: Path, alone: Any) -> None:
    """The layer with experts of `moe-ep run`, against transformers'."""
    block = alone.language_model.model.layers[1].feed_forward
    with CheckpointReader(folder) as reader:
        spec = model_spec(reader.config)
        stack = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32)
        seen: list[torch.Tensor] = []
        with torch.inference_mode():
            stack(torch.randn(9, 64), lambda layer, x, y: seen.extend((x, y)))
            expected = block(seen[0])[0].view(9, 64)
            assert relative_error(seen[1], expected) < tolerance(torch.float32)
            reference = verify.reference_moe(reader, spec, 1, seen[0])
            assert relative_error(reference, expected) < tolerance(torch.float32)


def test_llama_runs_without_its_attention_and_is_refused_whole(tmp_path: Path) -> None:
    """Its weights multiply what experts read, and transformers computes all experts for every token."""
    alone = make_llama()
    alone.save_pretrained(tmp_path)
    check_llama(tmp_path, alone)
    alone.language_model.save_pretrained(tmp_path / "text")
    check_llama(tmp_path / "text", alone)
    for folder in (tmp_path, tmp_path / "text"):
        with pytest.raises(
            ConfigError, match="Llama4ForCausalLM of transformers .* computes all of them for every tok"
        ):
            moe_ep.parallelize(folder)


@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
def test_llama_as_model_optimizer_writes_it(tmp_path: Path, form: str) -> None:
    """All experts of a layer in one, transposed, with one number for all of them."""
    alone = make_llama()
    alone.save_pretrained(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        spec, config = model_spec(reader.config), reader.config
        prefix, sizes = spec.expert_prefix(1), (spec.hidden_size, spec.moe_intermediate_size)
        tensors = {name: reader.read(name) for name in reader.names() if not name.startswith(prefix)}
    case = replace(CASES[f"{form} modelopt fused columns"], sizes=sizes)
    quantized, values = make_experts(case, prefix, False, True, spec.num_experts)
    experts = alone.language_model.model.layers[1].feed_forward.experts
    experts.gate_up_proj.data.copy_(torch.stack([torch.cat([expert.gate, expert.up]).T for expert in values]))
    experts.down_proj.data.copy_(torch.stack([expert.down.T for expert in values]))
    of_experts = case.quantization | {"exclude_modules": ["*vision*", "*self_attn*", "*router", "*shared_expert*"]}
    write_checkpoint(tmp_path, config | {"quantization_config": of_experts}, (tensors | quantized).items())
    check_llama(tmp_path, alone)


def test_the_language_model_of_one_that_sees(tmp_path: Path) -> None:
    """Qwen3.5, whose files have it deeper than transformers' class; its attention is quantized, here without loss."""
    text = {key: value for key, value in {**SIZES, **FAMILIES["Qwen3Next"]}.items() if key != "intermediate_size"}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    text["rope_parameters"]["rope_theta"] = 1e4
    config = known("Qwen3_5MoeConfig")(text_config=text, vision_config=VISION)
    alone = random_model("Qwen3_5MoeForConditionalGeneration", config)
    fill_with_fp8_numbers(alone)
    alone.save_pretrained(tmp_path / "plain")
    with CheckpointReader(tmp_path / "plain") as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
        for name in reader.names("model.language_model.layers."):
            if name.endswith("self_attn.q_proj.weight"):
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["experts"]}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": fp8}, tensors.items())
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)
