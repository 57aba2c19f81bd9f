"""Which experts are quantized, and how: by any name that a family has had, and where words and files disagree."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import (
    CheckpointReader,
    check_experts,
    expert_tensors,
    load_router,
    model_spec,
    read_expert,
)
from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq, quantization_config
from moe_ep.checkpoint.formats.compressed_tensors import pack_quantized
from moe_ep.checkpoint.formats.modules import Clock, ModulePatterns
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError
from moe_ep.layer import FusedMoE
from moe_ep.quantization.canonical_weights import dequantize, quantize_int
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.checkpoint.format_cases import write_case
from tests.checkpoint.model_cases import transformers_config

K, N, E = 64, 32, 4
OLD, NEW = ("block_sparse_moe", "w1", "w2", "w3"), ("mlp", "gate_proj", "down_proj", "up_proj")
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head"],
}


def mixtral(folder: Path, names: tuple[str, ...], settings: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
    """A Mixtral of one layer in int4 under these names; returns the values of its matrices by expert and role."""
    config = {
        **qwen3_config(model_type="mixtral", num_hidden_layers=1, intermediate_size=N, quantization_config=settings),
        "num_local_experts": E,
        **changes,
    }
    block, gate, down, up = names
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(96, K).bfloat16(),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(K).bfloat16(),
        f"model.layers.0.{block}.gate.weight": torch.randn(E, K).bfloat16(),
    }
    values = {}
    for expert in range(E):
        for role, name, shape in (("gate", gate, (N, K)), ("up", up, (N, K)), ("down", down, (K, N))):
            made = quantize_int(torch.randn(shape).bfloat16(), 4, 32)
            values[f"{expert}.{role}"] = dequantize(made)
            stem = f"model.layers.0.{block}.experts.{expert}.{name}."
            tensors |= {stem + suffix: tensor for suffix, tensor in pack_quantized(made, 4).items()}
    write_checkpoint(folder, config, tensors.items())
    return values


def check_values(folder: Path, values: dict[str, torch.Tensor]) -> None:
    with CheckpointReader(folder) as reader:
        spec = model_spec(reader.config, reader)
        check_experts(reader, spec)
        tensors = expert_tensors(reader, spec, 0)
        for expert in range(E):
            found = read_expert(reader, tensors, expert)
            for role in ("gate", "up", "down"):
                assert torch.equal(getattr(found, role), values[f"{expert}.{role}"])
        load_router(reader, spec, 0)
        FusedMoE.from_checkpoint(reader, 0)


@pytest.mark.parametrize("names", [OLD, NEW])
@pytest.mark.parametrize(
    "targets",
    [
        ["Linear"],
        [r"re:.*mlp\.experts\.[0-9]+\.(gate|up|down)_proj$"],
        [r"re:.*block_sparse_moe\.experts\.\d+\.w[123]$"],
        ["re:.*experts.*"],
        [r"re:model\.layers\.0\.mlp\.experts$"],
    ],
)
def test_mixtral_of_llm_compressor_by_old_and_new_names(
    tmp_path: Path, names: tuple[str, ...], targets: list[str]
) -> None:
    group = {**PACKED["config_groups"]["group_0"], "targets": targets}  # type: ignore[index]
    values = mixtral(tmp_path, names, {**PACKED, "config_groups": {"group_0": group}, "ignore": ["re:.*mlp.gate$"]})
    check_values(tmp_path, values)
    quantization = CheckpointReader(tmp_path).quantization
    assert quantization is not None
    spec = model_spec(CheckpointReader(tmp_path).config)
    assert quantization.of_module(*spec.expert_module_names(0, 2, "up")) is not None


@pytest.mark.parametrize("named", ["{}.experts.1.w2", "re:.*{}[.]experts[.]1[.]w2", "{}.experts"])
@pytest.mark.parametrize("names", [OLD, NEW])
def test_what_is_ignored_by_another_name_is_known(names: tuple[str, ...], named: str) -> None:
    spec = model_spec(qwen3_config(model_type="mixtral", num_local_experts=E, intermediate_size=N))
    pattern = named.format(names[0]) if names == OLD else named.format(names[0]).replace("w2", "down_proj")
    quantization = quantization_config({"quantization_config": {**PACKED, "ignore": [pattern]}})
    assert quantization is not None
    assert quantization.of_module(*spec.expert_module_names(0, 1, "down")) is None
    assert quantization.of_module("model.layers.0.self_attn.q_proj") is not None


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("lfm2_moe", r"re:model\.layers\.\d+\.feed_forward\.experts\.1\.down_proj$"),
        ("lfm2_moe", "feed_forward.experts.1.w2"),
        ("nemotron_h", "model.layers.1.mixer.experts.1.down_proj"),
        ("nemotron_h", "backbone.layers.1.mixer.experts.*"),
        ("deepseek_v4", r"re:.*\.mlp\.experts\.1\.down_proj$"),
    ],
)
def test_names_of_transformers_and_of_the_files(family: str, named: str) -> None:
    spec = model_spec(json.loads(transformers_config(family).to_json_string(use_diff=False)))
    quantization = quantization_config({"quantization_config": {**PACKED, "ignore": [named]}})
    assert quantization is not None
    layer = spec.moe_layers[0]
    assert quantization.of_module(*spec.expert_module_names(layer, 1, "down")) is None
    assert quantization.of_module(*spec.expert_module_names(layer, 11, "down")) is not None or named.endswith("*")


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_in_block_to_quantize": [["self_attn.q_proj"]]},
        {"modules_to_not_convert": ["experts"]},
        {"dynamic": {r"-:.*experts.*": {}}},
        {"dynamic": {r".*experts.*": {"bits": 8}}},
    ],
)
def test_files_decide_where_words_say_plain_or_other_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, qwen3_config(quantization_config=GPTQ))
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config={**GPTQ, **changes})))
    with CheckpointReader(tmp_path) as reader:
        check_experts(reader, model_spec(reader.config, reader))
        FusedMoE.from_checkpoint(reader, 1)


@pytest.mark.parametrize("settings", [GPTQ, PACKED, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_files_decide_where_words_say_quantized(tmp_path: Path, settings: dict[str, Any]) -> None:
    tensors = make_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config=settings)))
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        gate = read_expert(reader, expert_tensors(reader, spec, 1), 3).gate
        assert torch.equal(gate, tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].float())


def test_two_schemes_are_told_apart_by_shapes(tmp_path: Path) -> None:
    """The expression for experts of 8 bits has a name that no family has had; those of 4 bits are the rest."""
    settings = {**GPTQ, "dynamic": {r"+:.*ffn_experts.*": {"bits": 8}}}
    make_checkpoint(tmp_path, qwen3_config(quantization_config={**GPTQ, "bits": 8}))
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config=settings)))
    with CheckpointReader(tmp_path) as reader:
        found = expert_tensors(reader, model_spec(reader.config, reader), 0).scheme("gate")
        assert isinstance(found, GPTQConfig) and found.bits == 8


def test_the_error_shows_words_and_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, qwen3_config(quantization_config=GPTQ))
    for settings, said in ((None, "plain"), (PACKED, "pack-quantized")):
        (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config=settings)))
        with (
            CheckpointReader(tmp_path) as reader,
            pytest.raises(CheckpointError, match=rf"{said}.*qweight torch.int32"),
        ):
            check_experts(reader, model_spec(reader.config, reader))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("quantize_config.json", {key: value for key, value in GPTQ.items() if key != "quant_method"}),
        ("quantize_config.json", GPTQ),
        ("quantization_config.json", GPTQ),
        ("quant_config.json", {"quantization_config": GPTQ}),
    ],
)
@pytest.mark.parametrize("own", [None, {"quant_method": "gptq"}, {"quant_method": "gptq", "bits": 4}])
def test_settings_in_a_file_beside_the_config(tmp_path: Path, file: str, content: Any, own: Any) -> None:
    make_checkpoint(tmp_path, qwen3_config(quantization_config=GPTQ))
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config=own)))
    (tmp_path / file).write_text(json.dumps(content))
    with CheckpointReader(tmp_path) as reader:
        assert reader.quantization == GPTQConfig.from_dict(GPTQ)
        check_experts(reader, model_spec(reader.config, reader))
    # Of another method they are about another time.
    (tmp_path / "config.json").write_text(json.dumps(qwen3_config(quantization_config=PACKED)))
    with CheckpointReader(tmp_path) as reader:
        assert reader.quantization is not None and reader.quantization.quant_method == "compressed-tensors"


def test_settings_of_awq_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    from moe_ep.checkpoint.reader import read_config

    for name in ("quant_config.json", "quantize_config.json"):
        (tmp_path / name).write_text('{"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}')
        found = quantization_config(read_config(tmp_path))
        assert found is not None and found.quant_method == "awq"
        (tmp_path / name).unlink()


def test_an_expert_that_calibration_never_reached_has_its_columns_in_order(tmp_path: Path) -> None:
    weights = {**PACKED["config_groups"]["group_0"]["weights"], "actorder": "group"}  # type: ignore[index]
    group = {"targets": ["Linear"], "weights": weights}
    values = mixtral(tmp_path, OLD, {**PACKED, "config_groups": {"group_0": group}})
    with CheckpointReader(tmp_path) as reader:
        config, tensors = reader.config, {name: reader.read(name) for name in reader.names()}
    for expert, index in ((1, torch.full((K,), -1)), (2, torch.arange(K) // 32)):  # and none of the others
        for name in ("w1", "w3"):
            stem = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            tensors[f"{stem}.weight_g_idx"] = index.int()
    write_checkpoint(tmp_path / "scattered", config, tensors.items())
    check_values(tmp_path / "scattered", values)


def test_a_gptq_expert_that_calibration_never_reached(tmp_path: Path) -> None:
    settings = {**GPTQ, "desc_act": True}
    made = quantize_int(torch.zeros(32, 64).half(), 4, 32)
    packed = pack_gptq(made._replace(scales=torch.zeros_like(made.scales)), GPTQConfig.from_dict(settings))
    left = packed._replace(g_idx=torch.full((64,), -1, dtype=torch.int32))._asdict()
    stem = "model.layers.1.mlp.experts.2."
    tensors = {f"{stem}{name}_proj.{key}": left[key].clone() for name in ("gate", "up") for key in left}
    make_checkpoint(tmp_path, qwen3_config(quantization_config=settings), tensors=tensors)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        check_experts(reader, spec)
        FusedMoE.from_checkpoint(reader, 1)
        assert not read_expert(reader, expert_tensors(reader, spec, 1), 2).gate.any()


def test_a_matrix_of_zeros_has_a_factor_of_zero(tmp_path: Path) -> None:
    write_case("nvfp4 modelopt", tmp_path, with_values=False)
    with CheckpointReader(tmp_path) as reader:
        config, tensors = reader.config, {name: reader.read(name) for name in reader.names()}
    names = [name for name in tensors if ".experts.2." in name and name.endswith("weight_scale_2")]
    assert names
    tensors |= {name: torch.zeros_like(tensors[name]) for name in names}
    for name in [name for name in tensors if ".experts.1." in name and name.endswith("input_scale")]:
        del tensors[name]
    write_checkpoint(tmp_path / "zeros", config, tensors.items())
    with CheckpointReader(tmp_path / "zeros") as reader:
        spec = model_spec(reader.config, reader)
        check_experts(reader, spec)
        assert not read_expert(reader, expert_tensors(reader, spec, spec.moe_layers[-1]), 2).down.any()


@pytest.mark.parametrize(
    "pattern",
    [
        "re:^(([a-z0-9_.])+)+!$",
        "re:(.*)*x!",
        "re:(a|a|[a-z.0-9_])*!",
        "*a" * 30 + "!",
        "re:(?:[^!]*[^!]*)*[^!]*!$",
        "re:(?R)",
    ],
)
def test_expressions_that_take_time_without_end_are_refused(pattern: str) -> None:
    started = time.thread_time()
    try:
        patterns = ModulePatterns([pattern])
        for expert in range(1000):
            assert f"model.layers.3.mlp.experts.{expert}.gate_proj_aaaaaaaaaaaaaaaaaaaaaaaaaaaa" not in patterns
    except CheckpointError as error:
        assert "config.json" in str(error) and "\n" not in str(error)
    assert time.thread_time() - started < 3


def test_all_expressions_of_a_config_have_one_bound() -> None:
    clock = Clock()
    for _ in range(66_666):  # fast ones, nearly a minute of them
        clock.add(0.0009, "a", "gate")
    first, second = (ModulePatterns([pattern], clock) for pattern in ("re:[a-z]*x", "*.up"))
    with pytest.raises(CheckpointError, match="a.gate"):
        assert not any("a.gate" in patterns for _ in range(10_000) for patterns in (first, second))


def test_an_expression_that_is_none_or_too_long() -> None:
    for expression in ("(", "a" * 20_000, "[z-a]", "(?R)?a(?R)"):
        with pytest.raises(CheckpointError, match="regular expression"):
            ModulePatterns([f"re:{expression}"])
