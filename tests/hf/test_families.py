"""Families that moe_ep takes from a checkpoint beside those of test_transformers.py, each against the model whole."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.checkpoint import CheckpointReader, load_router, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.generation.engine import Generation, Request
from moe_ep.hf.experts import find_experts
from moe_ep.layer.methods import relative_error, tolerance
from tests.checkpoint.format_encoders import e2m1
from tests.hf.hf_models import GROUPED, MLA, SIZES, make_model
from tests.hf.moe_layers import check_layers
from tests.hf.ungrouped_models import UNGROUPED
from tests.of_transformers import random_model

# Of few heads an indexer's scores are often zero, and which of them are taken then is nobody's promise.
INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 4, "head_dim": 8}
HYBRID = {**MLA, **GROUPED, "num_local_experts": 8, "layer_types": ["linear_attention", "full_attention"]}
del HYBRID["n_routed_experts"], HYBRID["q_lora_rank"]
LONGCAT = {
    "head_dim": 8,
    "num_layers": 2,
    "num_hidden_layers": 4,
    "moe_topk": 2,
    "n_routed_experts": 6,
    "zero_expert_num": 4,
}
LONGCAT |= {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 48}
DOTS = {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 8}
DOTS |= {f"swa_{key}": value for key, value in MLA.items()} | {"swa_head_dim": 16, "swa_num_attention_heads": 2}
DOTS |= {"swa_num_key_value_heads": 2}
V4 = {"num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "sliding_window": 8}
V4 |= {"layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]}
V4 |= {"compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}, "index_n_heads": 8}
V4 |= {"index_head_dim": 16, "index_topk": 4, "num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"]}
OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV32": {**MLA, **GROUPED, **INDEXER},
    "GlmMoeDsa": {**MLA, **GROUPED, **INDEXER},
    "Glm4MoeLite": {**MLA, **GROUPED, "head_dim": 8},
    "Dots1": {**GROUPED, "norm_topk_prob": True},
    "SolarOpen": {**GROUPED, "first_k_dense_replace": 0},
    "Afmoe": {"num_experts": 6, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 8},
    "Jamba": {"num_experts": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "Lfm2Moe": {"num_experts": 6, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "ExaoneMoe": {**GROUPED, "num_experts": 8, "num_shared_experts": 1, "sliding_window": 8},
    "MiMoV2Flash": {**GROUPED, "n_shared_experts": None, "num_key_value_heads": 1, "v_head_dim": 16},
    "HunYuanMoEV1": {"num_experts": 6, "num_experts_per_tok": [2, 2]},
    "MiniMax": {"num_local_experts": 6, "layer_types": ["linear_attention", "full_attention"]},
    "MiniMaxM2": {"num_local_experts": 6, "rotary_dim": 16},
    "Phimoe": {"num_local_experts": 6},
    "GraniteMoe": {"num_local_experts": 6, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "GraniteMoeHybrid": {
        "num_local_experts": 6,
        "shared_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
    "Ernie4_5_Moe": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "KimiLinear": {**HYBRID, "linear_head_dim": 16, "linear_num_heads": 2},
    "Mistral4": {**MLA, **GROUPED, "head_dim": 16},
    "HYV3": {"num_experts": 6, "num_shared_experts": 2},
    "BailingHybrid": {**HYBRID, "head_dim": 16},
    "LongcatFlash": {**MLA, **LONGCAT},
    "Beam": {**GROUPED, "num_experts": 8, "sliding_window": 8, "mlp_layer_types": ["dense", "sparse"]},
    "AXK1": {**MLA, **GROUPED, "head_dim": 8},
    "AXK2": {**MLA, **GROUPED, **INDEXER, "gated_norm_rank": 4},
    "HYV4": {**MLA, **GROUPED, **INDEXER, "hc_mult": 2, "swiglu_limit": 0.5},
    "DeepseekV4": {**V4, "n_routed_experts": 6, "swiglu_limit": 0.5},
    "Dots3NoteText": {**MLA, **GROUPED, **INDEXER, "shared_experts_intermediate_size": 24, **DOTS},
    **UNGROUPED,
}


def check(parallel: Any, alone: Any) -> None:
    """Prefill of two prompts, and a token more of each."""
    torch.manual_seed(0)
    tokens = torch.randint(1, SIZES["vocab_size"], (2, 9))
    caches: list[Any] = [None, None]
    with torch.inference_mode():
        for _ in range(2):
            logits = []
            for index, model in enumerate((parallel, alone)):
                output = model(tokens, past_key_values=caches[index], use_cache=True)
                caches[index] = output.past_key_values
                logits.append(output.logits)
            assert relative_error(*logits) < 2 * tolerance(torch.float32)
            tokens = logits[1][:, -1:].argmax(-1)


@pytest.mark.parametrize("family", OTHERS)
def test_from_a_checkpoint(family: str, tmp_path: Path) -> None:
    alone = make_model(family, **OTHERS[family])
    alone.save_pretrained(tmp_path)
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def in_slots(parallel: Any, alone: Any, lengths: tuple[int, ...] = (3, 11)) -> None:
    """Sequences that share a batch of two slots continue as each does alone."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(1, 80, (length,), generator=generator) for length in lengths]
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts)]
    done = Generation(parallel, requests, max_new_tokens=4, num_slots=2, stop_ids=[]).run()
    for prompt, completion in zip(prompts, done, strict=True):
        whole = alone.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=4, do_sample=False
        )
        assert completion.token_ids == whole[0, prompt.numel() :].tolist()


@pytest.mark.parametrize("family", ["DeepseekV32", "Jamba", "Lfm2Moe", "NemotronH", "KimiLinear"])
def test_in_slots(family: str) -> None:
    """The kinds of caches that test_generate.py does not have."""
    alone = make_model(family, **OTHERS.get(family, {}))
    in_slots(moe_ep.parallelize(copy.deepcopy(alone)), alone)


def test_a_correction_bias_that_files_may_lack(tmp_path: Path) -> None:
    alone = make_model("AXK1", **OTHERS["AXK1"])
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        names = [name for name in reader.names() if "e_score_correction_bias" not in name]
        write_checkpoint(tmp_path, reader.config, ((name, reader.read(name)) for name in names))
        router = load_router(reader, model_spec(reader.config), 1)
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(load_router(reader, model_spec(reader.config), 1).correction_bias, router.correction_bias)
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def test_layers_of_mimo_as_published(tmp_path: Path) -> None:
    """MiMo-V2.5, which transformers 5.23 does not have: MiMo-V2-Flash with experts of mxfp4 among weights of fp8."""
    alone = make_model("MiMoV2Flash", **OTHERS["MiMoV2Flash"])
    numbers = torch.tensor([e2m1(code) for code in range(16)])
    generator = torch.Generator().manual_seed(3)
    for name, param in alone.named_parameters():
        if ".experts." in name:
            param.copy_(numbers[torch.randint(0, 16, param.shape, generator=generator)] / 8)
    alone.save_pretrained(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        tensors = {name: reader.read(name) for name in reader.names()}
        for name in [name for name in tensors if ".experts." in name]:
            codes = (tensors[name][..., None] - numbers / 8).abs().argmin(dim=-1)
            tensors[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
            tensors[f"{name}_scale"] = torch.full((len(codes), codes.size(1) // 32), 124, dtype=torch.uint8)
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        fp8 |= {"store_dtype": "mxfp4", "mxfp4_block_size": 32}
        settings = {"model_type": "mimo_v2", "quantization_config": fp8}
        write_checkpoint(tmp_path / "published", reader.config | settings, tensors.items())
    check_layers(tmp_path / "published", [layer.mlp for layer in alone.model.layers[1:]])


# What models with a past that slots do not hold keep it in.
OWN_PAST = {
    "DeepseekV4": "DeepseekV4HCACache",
    "Qwen4ExpText": "Dynamic(IndexedLayer|Cache with positions)",
    "Zaya": "LinearAttentionAndFullAttentionLayer",
    "InklingText": "LinearAttentionAndSlidingWindowAttentionLayer",
}


@pytest.mark.parametrize("family", OWN_PAST)
def test_a_past_that_slots_do_not_hold_is_refused(family: str) -> None:
    model = moe_ep.parallelize(make_model(family, **OTHERS[family]))
    with pytest.raises(ConfigError, match=f"the model keeps its past in a {OWN_PAST[family]}; .* transformers' gener"):
        in_slots(model, None)


@pytest.mark.parametrize("family", ["DeepseekV3", "MiniMaxM2"])
@pytest.mark.parametrize("damage", ["missing", "of another shape"])
def test_a_damaged_correction_bias_or_norm_is_refused(family: str, damage: str, tmp_path: Path) -> None:
    make_model(family, **OTHERS.get(family, {})).save_pretrained(tmp_path / "whole")
    for tensor in ("e_score_correction_bias", "input_layernorm.weight"):
        with CheckpointReader(tmp_path / "whole") as reader:
            tensors = {name: reader.read(name) for name in reader.names()}
            damaged = next(name for name in tensors if name.endswith(tensor))
            tensors[damaged] = tensors[damaged].repeat(2)
            if damage == "missing":
                del tensors[damaged]
            write_checkpoint(tmp_path / tensor, reader.config, tensors.items())
        with pytest.raises(CheckpointError, match=rf"layers\.\d.*{tensor}, as .* of shape .*, found none that fits"):
            moe_ep.parallelize(tmp_path / tensor)


@pytest.mark.parametrize("whole", [False, True])
def test_a_configuration_that_calls_top_k_otherwise(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aria, alone or with eyes: in a model and from its files."""
    text = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    text |= {"moe_num_experts": 6, "moe_topk": 2}
    eyes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    eyes |= {"patch_size": 4, "image_size": 16}
    alone = random_model("AriaTextForCausalLM", transformers.AriaTextConfig(**text))
    if not list(find_experts(alone)):
        pytest.skip(f"transformers {transformers.__version__} has Aria's experts in a form of their own")
    if whole:
        config = transformers.AriaConfig(text_config=text, vision_config=eyes)
        alone = random_model("AriaForConditionalGeneration", config)
    alone.save_pretrained(tmp_path)
    parallel = moe_ep.parallelize(tmp_path, dtype=torch.float32)
    check(parallel, alone)
    in_slots(parallel, alone)
    check(moe_ep.parallelize(copy.deepcopy(alone)), alone)
    monkeypatch.setattr("moe_ep.hf.parallelize.TOP_K_NAMES", ("num_experts_per_tok",))
    with pytest.raises(
        ConfigError, match="the AriaTextConfig of the model has one number in none of num_experts_per_tok"
    ):
        moe_ep.parallelize(alone)


def test_kimi_is_deepseek_by_another_name(tmp_path: Path) -> None:
    alone = make_model("DeepseekV3")
    alone.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own_code = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config | own_code))
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)
