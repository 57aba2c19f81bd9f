"""moe-ep convert: compressed-tensors, transformers and we read the same values; and nothing is written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from moe_ep.checkpoint import CheckpointReader, check_experts, expert_tensors, model_spec, read_expert
from moe_ep.checkpoint.convert import convert_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.launch.cli.main import main
from moe_ep.quantization.canonical_weights import dequantize, quantize_fp8, quantize_int
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.checkpoint.format_cases import write_case
from tests.checkpoint.model_cases import block_of, router_of, save_model
from tests.full_disk import files_of_at_most

KINDS = ("int4", "int8", "fp8")
# Half a step of the largest weight of a group, over the mean of a normal distribution's magnitudes.
LARGEST_ERROR = {"int4": 0.15, "int8": 0.01, "fp8": 0.03}


def as_quantized(weight: torch.Tensor, kind: str, group_size: int | None) -> torch.Tensor:
    return dequantize(quantize_fp8(weight) if group_size is None else quantize_int(weight, int(kind[-1]), group_size))


FUSED = ("bf16 fused rows", "bf16 fused columns", "bf16 gpt-oss")


@pytest.mark.parametrize(
    ("kind", "written"), [*((kind, "an expert each") for kind in KINDS), *(("int4", name) for name in FUSED)]
)
def test_compressed_tensors_reads_what_was_written(tmp_path: Path, kind: str, written: str) -> None:
    # The test extra brings it; GPU machines that only run GPU tests may lack it.
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    if written in FUSED:
        write_case(written, tmp_path / "in", with_values=False)
    else:
        make_checkpoint(tmp_path / "in")
    fused = convert_checkpoint(tmp_path / "in", tmp_path / "out", kind, shard_bytes=20_000)
    assert fused == (written in FUSED)
    source, reader = CheckpointReader(tmp_path / "in"), CheckpointReader(tmp_path / "out")
    settings = quantization.QuantizationConfig.model_validate(reader.config["quantization_config"])
    scheme = settings.config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    spec = model_spec(reader.config)
    check_experts(reader, spec)
    for layer in spec.moe_layers:
        plain, ours = expert_tensors(source, spec, layer), expert_tensors(reader, spec, layer)
        for expert in range(spec.num_experts):
            before, after = read_expert(source, plain, expert), read_expert(reader, ours, expert)
            for role in ("gate", "up", "down"):
                stem = f"{spec.expert_prefix(layer)}.{expert}.{role}_proj."
                stored = {name.removeprefix(stem): reader.read(name) for name in reader.names(stem)}
                bias, theirs = stored.pop("bias", None), compressor.decompress(stored, scheme)["weight"].float()
                weight, mine = getattr(before, role), getattr(after, role)
                assert torch.equal(mine, as_quantized(weight.bfloat16(), kind, scheme.weights.group_size))
                # They round to the dtype of the scales.
                torch.testing.assert_close(theirs, mine, rtol=2**-8, atol=0)
                assert (mine - weight).abs().mean() / weight.abs().mean() < LARGEST_ERROR[kind]
                expected = getattr(before, f"{role}_bias")
                assert (bias is None) == (expected is None) == (written != "bf16 gpt-oss")
                assert bias is None or torch.equal(bias, expected)


def test_all_else_is_copied(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text("{}")
    (tmp_path / "in/modeling_evil.py").write_text("raise SystemExit")
    (tmp_path / "in/old.bin").write_bytes(b"pickle")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "int4", shard_bytes=20_000)
    reader = CheckpointReader(tmp_path / "out")
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert rest.keys() == {name for name in reader.names() if ".experts." not in name}
    for name, tensor in rest.items():
        assert torch.equal(reader.read(name), tensor)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert files - shards == {"config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert len(shards) > 1
    config = json.loads((tmp_path / "out/config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == qwen3_config()
    routers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert settings["ignore"] == ["lm_head", *routers, r"re:(?!.*\.experts(\.|$))"]
    assert not any(path.name.startswith(".out") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "kind"), [*(("qwen3_moe", kind) for kind in KINDS), ("phimoe", "fp8"), ("nemotron_h", "int4")]
)
def test_transformers_reads_the_whole_model(tmp_path: Path, family: str, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = save_model(family, tmp_path / "in")
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "out", kind)
    found, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    reader = CheckpointReader(tmp_path / "out")
    spec = model_spec(reader.config)
    for layer in spec.moe_layers:
        tensors, experts = expert_tensors(reader, spec, layer), block_of(found.model.layers[layer]).experts
        for index in range(spec.num_experts):
            gate, up, down, *_ = read_expert(reader, tensors, index)
            first = {"up_proj": gate} if up is None else {"gate_up_proj": torch.cat([gate, up])}
            expected = first | {"down_proj": down}
            for name, values in expected.items():
                torch.testing.assert_close(getattr(experts, name)[index].float(), values, rtol=2**-8, atol=0)
        routers = [router_of(block_of(whole.model.layers[layer])).weight for whole in (found, model)]
        assert torch.equal(*routers)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "in")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--quantize", "int4"]
    assert main(arguments) == 0
    assert "experts in int4" in (said := capsys.readouterr().out) and "fused" not in said
    write_case("bf16 gpt-oss", tmp_path / "fused", with_values=False)
    assert main(["convert", str(tmp_path / "fused"), str(tmp_path / "apart"), "--quantize", "fp8"]) == 0
    assert "fused experts were split" in capsys.readouterr().out
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert main(arguments) == 2
    assert "out: it exists already and is not written over" in capsys.readouterr().err
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for wrong, sentence in (
        (["convert", "nowhere", "out", "--quantize", "int4"], "IN is 'nowhere'; it must be a folder with a Hugging"),
        ([*arguments[:2], str(tmp_path / "no/out"), "--quantize", "int4"], "OUT is "),
        ([*arguments[:3], "--quantize", "int3"], "--quantize is 'int3'; it must be one of int4, int8, fp8"),
    ):
        assert main(wrong) == 2
        assert sentence in capsys.readouterr().err


def test_into_what_a_link_leads_to_and_not_onto_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "in")
    (tmp_path / "folder").mkdir()
    for name, leads_to in (("link", "folder"), ("to a new one", "new")):
        (tmp_path / name).symlink_to(tmp_path / leads_to)
        convert_checkpoint(tmp_path / "in", tmp_path / name, "fp8")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / leads_to / "config.json").is_file()
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    with pytest.raises(ConfigError, match="mounted: a file system is mounted there, which no folder replaces"):
        convert_checkpoint(tmp_path / "in", tmp_path / "mounted", "fp8")


def test_what_cannot_be_converted_is_refused_and_nothing_left(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "quantized", qwen3_config(quantization_config=GPTQ))
    of_others = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["experts"]}
    make_checkpoint(tmp_path / "other layers")
    (tmp_path / "other layers/config.json").write_text(json.dumps(qwen3_config(quantization_config=of_others)))
    make_checkpoint(tmp_path / "odd", qwen3_config(moe_intermediate_size=40))
    for source, error, sentence in (
        ("quantized", ConfigError, r"expected a plain checkpoint, found it quantized already \(gptq\)"),
        ("other layers", ConfigError, r"expected a plain checkpoint, found it quantized already \(fp8\)"),
        ("odd", CheckpointError, "64 and 40 input columns; quantizing to integers needs multiples of a group size"),
    ):
        with pytest.raises(error, match=sentence):
            convert_checkpoint(tmp_path / source, tmp_path / "out", "int4")
    assert {path.name for path in tmp_path.iterdir()} == {"quantized", "other layers", "odd"}
    with pytest.raises(ValueError, match="quantize is 'int2'"):
        convert_checkpoint(tmp_path / "odd", tmp_path / "out", "int2")


def test_a_full_disk_is_said_of_the_folder_to_write(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    with files_of_at_most(100), pytest.raises(OSError) as caught:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "fp8")
    assert caught.value.filename == str(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_weight_that_is_no_number_is_found(kind: str, value: float, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    weight[3, 40] = value
    make_checkpoint(tmp_path / "plain", tensors={name: weight})
    with pytest.raises(CheckpointError, match=f"{name}: expected finite weights, found NaN or infinity"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "out", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("argument", ["source", "target"])
def test_what_is_no_path_is_refused(tmp_path: Path, argument: str) -> None:
    paths = {"source": tmp_path, "target": tmp_path / "out", argument: None}
    with pytest.raises(TypeError, match=f"{argument} is None; it must be a path"):
        convert_checkpoint(**paths, quantize="int4")
