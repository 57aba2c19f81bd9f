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
from moe_ep.checkpoint.plan import check_experts
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import MoEStack
from tests.hf.hf_models import EYES, GROUPED, MLA, SIZES, make_model
from tests.hf.test_families import INDEXER, OTHERS, check, in_slots
from tests.of_transformers import known, random_model

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
QWEN_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
QWEN4 = {key: value for key, value in {**SIZES, **OTHERS["Qwen4ExpText"]}.items() if key != "intermediate_size"}
MINIMAX = {
    **SIZES,
    "num_local_experts": 6,
    "rotary_dim": 16,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 64,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
OCR = {**SIZES, "n_routed_experts": 6, "mlp_layer_types": ["dense", "sparse"]}
SAM = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
SAM |= {"window_size": 2, "global_attn_indexes": [0], "downsample_channels": [8, 8], "mlp_dim": 16}
ENCODER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"num_key_value_heads": 2}
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
    "Gemma4": {
        "text_config": {**SIZES, **OTHERS["Gemma4Text"]},
        "vision_config": {**EYES, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "DeepseekOcr2": {"text_config": OCR, "vision_config": {"sam_config": SAM, "encoder_config": ENCODER}},
    "UnlimitedOcr": {
        "text_config": OCR,
        "vision_config": {"sam_config": SAM, "encoder_config": {**ENCODER, "image_size": 64}},
    },
    "Inkling": {
        "text_config": {**SIZES, **OTHERS["InklingText"]},
        "vision_config": {**EYES, "num_hidden_layers": 4},
        "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 8},
    },
    "Qwen4Exp": {"text_config": QWEN4, "vision_config": QWEN_EYES},
    "MiniMaxM3VL": {
        "text_config": MINIMAX,
        "vision_config": {**EYES, "image_size": 16},
        "projector_hidden_size": 32,
    },
}
# What models with a past that slots do not hold keep it in.
OWN_PAST = {"Qwen4Exp": "Dynamic(IndexedLayer|Cache with positions)", "MiniMaxM3VL": "MiniMaxM3VLSparseCacheLayer"}
OWN_PAST |= {"UnlimitedOcr": "UnlimitedOcrDynamicReferenceSlidingWindowLayer"}
OWN_PAST |= {"Inkling": "LinearAttentionAndSlidingWindowAttentionLayer"}


def make_whole(family: str) -> Any:
    """A model with all of its parts; all that is learned is drawn."""
    if family == "Mistral3":
        known("Mistral4Config")
    config = known(f"{family}Config")(**PARTS[family])
    return random_model(f"{family.replace('M3VL', 'M3Sparse')}ForConditionalGeneration", config)


@pytest.mark.parametrize("family", PARTS)
def test_text_through_a_whole_model(family: str, tmp_path: Path) -> None:
    alone = make_whole(family)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    if family not in OWN_PAST:
        in_slots(parallel, alone)
        return
    with pytest.raises(ConfigError, match=f"the model keeps its past in a {OWN_PAST[family]}; .* transformers' gener"):
        in_slots(parallel, alone)


def check_first_block(folder: Path, block: torch.nn.Module) -> None:
    """The first layer with experts of `moe-ep run`, against the model's."""
    with CheckpointReader(folder) as reader, torch.inference_mode():
        stack = MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig.make(), dtype=torch.float32)
        seen: list[torch.Tensor] = []
        stack(torch.randn(9, 64), lambda layer, x, y: seen.extend((x, y)))
        assert relative_error(seen[1], block(seen[0][None])[0]) < tolerance(torch.float32)


def test_the_language_model_of_minimax_alone(tmp_path: Path) -> None:
    """Its experts are fused, and so are gate and up of its shared ones."""
    alone = random_model("MiniMaxM3VLForCausalLM", known("MiniMaxM3VLTextConfig")(**MINIMAX))
    alone.save_pretrained(tmp_path)
    check_first_block(tmp_path, alone.model.layers[1].mlp)
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


@pytest.mark.parametrize("family", ["DeepseekOcr2", "UnlimitedOcr"])
def test_layers_of_models_that_read_pages(family: str, tmp_path: Path) -> None:
    alone = make_whole(family)
    alone.save_pretrained(tmp_path)
    check_first_block(tmp_path, alone.model.language_model.layers[1].mlp)


def test_minimax_as_the_models_came(tmp_path: Path) -> None:
    """Its activation has the name of what it computes, and its layers are listed by numbers."""
    alone = make_whole("MiniMaxM3VL")
    alone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    del text["mlp_layer_types"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"text_config": text | {"hidden_act": "swigluoai", "moe_layer_freq": [0, 1]}})
    )
    check_first_block(tmp_path, alone.model.language_model.layers[1].mlp)
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def test_the_thinker_of_a_model_that_speaks(tmp_path: Path) -> None:
    """From the folder of the whole, or its own; the whole makes no passes itself."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    ears = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    thinker = {
        "text_config": {**SIZES, "num_experts": 6, "rope_parameters": rope},
        "vision_config": {**QWEN_EYES, "patch_size": 4, "deepstack_visual_indexes": [0]},
        "audio_config": {**ears, "num_mel_bins": 16, "output_dim": 64, "downsample_hidden_size": 8},
        **{f"{name}_token_id": 90 + number for number, name in enumerate(("image", "video", "audio"))},
        "vision_start_token_id": 93,
    }
    config = known("Qwen3OmniMoeConfig")(thinker_config=thinker, enable_audio_output=False)
    whole = random_model("Qwen3OmniMoeForConditionalGeneration", config)
    whole.save_pretrained(tmp_path / "whole")
    whole.thinker.save_pretrained(tmp_path / "thinker")
    with pytest.raises(ConfigError, match="a Qwen3OmniMoeForConditionalGeneration, which makes no passes itself"):
        moe_ep.parallelize(whole)
    language = getattr(whole.thinker.model, "language_model", whole.thinker.model)
    for folder in ("whole", "thinker"):
        parallel = moe_ep.parallelize(tmp_path / folder, dtype=torch.float32)
        check(parallel, whole.thinker)
        in_slots(parallel, whole.thinker, (3, 3))
        check_first_block(tmp_path / folder, language.layers[0].mlp)


def test_routers_that_only_transformers_computes(tmp_path: Path) -> None:
    make_model("Gemma4Text", **OTHERS["Gemma4Text"]).save_pretrained(tmp_path)
    message = "the routers of gemma4_text models, or what is before them or the experts, have a form that moe_ep does"
    with CheckpointReader(tmp_path) as reader, pytest.raises(ConfigError, match=message):
        MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig.make(), dtype=torch.float32)


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


@pytest.mark.parametrize("family", ["MiniMaxM3VL", "Inkling"])
def test_quantized_layers_that_files_divide_otherwise(family: str, tmp_path: Path) -> None:
    """Gate and up in fp8, without loss here: one matrix in the model and two in the files, or the other way round."""
    alone, scale = make_whole(family), 0.5
    for name, param in alone.model.language_model.named_parameters():
        if ".experts." not in name and param.dim() == 2 and re.search(r"\.(gate|up|gate_up)_proj\.weight", name):
            param.copy_(torch.randn(param.shape).to(torch.float8_e4m3fn).float() * scale)
    alone.save_pretrained(tmp_path / "saved")
    quantized = re.compile(r".*\.mlp\.w13_dn\.weight|language_model.*\.(mlp|shared_experts)\.(gate|up)_proj\.weight")
    with CheckpointReader(tmp_path / "saved") as reader:
        tensors: dict[str, torch.Tensor] = {name: reader.read(name) for name in reader.names()}
        chosen = [name for name in tensors if quantized.fullmatch(name)]
        assert len(chosen) == (1 if family == "Inkling" else 4)
        for name in chosen:
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full((1, 1), scale)
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["experts"]}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": fp8}, tensors.items())
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def test_packed_layers_that_files_divide_otherwise(tmp_path: Path) -> None:
    """Gate and up of MiniMax-M3's shared experts in int4 of compressed-tensors, without loss here."""
    alone, scale = make_whole("MiniMaxM3VL"), 0.0625
    for name, param in alone.model.language_model.named_parameters():
        if name.endswith("shared_experts.gate_up_proj.weight"):
            param.copy_(torch.randint(-8, 8, param.shape) * scale)
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        tensors: dict[str, torch.Tensor] = {name: reader.read(name) for name in reader.names()}
        chosen = [name for name in tensors if re.search(r"shared_experts\.(gate|up)_proj\.weight$", name)]
        assert len(chosen) == 2
        for name in chosen:
            weight = tensors.pop(name)
            codes = ((weight / scale).round() + 8).to(torch.int64).view(len(weight), -1, 8)
            words = (codes << torch.arange(0, 32, 4)).sum(-1)
            tensors[f"{name}_packed"] = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
            tensors[f"{name}_scale"] = torch.full((len(weight), 1), scale)
            tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": [r"re:.*shared_experts\.(gate|up)_proj"], "weights": weights}}
        int4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": int4}, tensors.items())
    model = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(model, alone)
    moe_ep.update_weights(model, tensors)
    check(model, alone)


def test_mistral_small_as_it_came(tmp_path: Path) -> None:
    """fp8 with a number for each matrix, gate and up together, and numbers of activations, which are not read."""
    alone = make_whole("Mistral3")
    for name, param in alone.model.language_model.named_parameters():
        if ".layers." in f".{name}" and param.dim() > 1 and not name.endswith("gate.weight"):
            param.copy_(torch.randn(param.shape).to(torch.float8_e4m3fn).float() * 0.25)
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        tensors: dict[str, torch.Tensor] = {}
        for name in reader.names():
            tensors[name] = reader.read(name)
            if re.search(r"language_model.*(proj|with_mqa)(\.weight)?$", name):
                shape = (8, 1, 1) if ".experts." in name else ()
                tensors[name] = (tensors[name] * 4).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.full(shape, 0.25)
                ending = "_activation_scale" if shape else "activation_scale"
                tensors[name.removesuffix("weight") + ending] = torch.ones(shape[:1])
        fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
        fp8["modules_to_not_convert"] = ["vision_tower", "multi_modal_projector", "lm_head", "gate"]
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
    with pytest.raises(CheckpointError, match="text_config.model_type is 'ministral3'"):
        model_spec({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}})
