"""The writer's form is Hugging Face's, and the demo checkpoint is one that real libraries load."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from moe_ep.checkpoint import CheckpointReader, embed_rows, load_moe_layer, load_norm, load_router, model_spec
from moe_ep.checkpoint.demo import demo_checkpoint, make_demo_checkpoint
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.quantization.canonical_weights import dequantize
from tests.checkpoint.checkpoints import LoadingLayer, gptq_shapes
from tests.full_disk import files_of_at_most


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model", progress=False)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.randn(4).bfloat16().expand(3, 4)}
    write_checkpoint(tmp_path / "new" / "folder", {"model_type": "x"}, tensors.items())
    assert sorted(contents(tmp_path / "new" / "folder")) == ["config.json", "model.safetensors"]
    reader = CheckpointReader(tmp_path / "new" / "folder")
    assert reader.config == {"model_type": "x"}
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())


def test_shards_hold_what_fits_and_the_index_says_which(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate([60, 40, 1, 100, 250, 10])}
    write_checkpoint(tmp_path, {}, tensors.items(), max_shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 461}
    shards = [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]
    assert [index["weight_map"][name] for name in tensors] == [shards[i] for i in (0, 0, 1, 2, 3, 4)]
    assert sorted(contents(tmp_path)) == ["config.json", *shards, "model.safetensors.index.json"]
    with safe_open(tmp_path / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert {file.stat().st_mode for file in tmp_path.iterdir()} == {(tmp_path / "config.json").stat().st_mode}


def test_writer_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        write_checkpoint(tmp_path, {}, [("a", torch.ones(1))], max_shard_bytes=0)
    with pytest.raises(ValueError, match="tensors hold a twice"):
        write_checkpoint(tmp_path, {}, [("a", torch.ones(1))] * 2)
    with pytest.raises(ValueError, match="tensors is empty"):
        write_checkpoint(tmp_path, {}, [])


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("moe_ep.checkpoint.writer.save_file", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_checkpoint(tmp_path, {}, [("a", torch.ones(1))])
    assert caught.value.errno == errno.ENOSPC


def test_demo_is_sharded_and_every_layer_loads(demo: Path) -> None:
    assert len(list(demo.glob("model-*-of-*.safetensors"))) >= 3
    reader = CheckpointReader(demo)
    spec = model_spec(reader.config)
    assert (spec.family, spec.moe_layers, spec.num_experts, spec.top_k) == ("qwen3_moe", (0, 1, 2, 3), 32, 4)
    for index in spec.moe_layers:
        shapes = gptq_shapes(spec.moe_intermediate_size, spec.hidden_size, group=64)
        layer = LoadingLayer(shapes, list(range(8, 16)), num_experts=32)
        load_moe_layer(reader, spec, index, layer)
        assert layer.finished


def test_demo_routing_is_skewed_but_reaches_every_expert(demo: Path) -> None:
    reader = CheckpointReader(demo)
    spec = model_spec(reader.config)
    token_ids = torch.randint(0, spec.vocab_size, (4096,), generator=torch.Generator().manual_seed(0))
    x = embed_rows(reader, spec, token_ids).float()
    for index in spec.moe_layers:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps) * load_norm(reader, spec, index)
        ids = (normed @ load_router(reader, spec, index).weight.float().T).topk(spec.top_k).indices
        load = torch.bincount(ids.flatten(), minlength=spec.num_experts).float()
        assert load.min() > 0
        assert 2 < load.max() / load.mean() < 6


def test_demo_tokenizer_loads_in_transformers_and_round_trips(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert len(tokenizer) == model_spec(CheckpointReader(demo).config).vocab_size
    assert tokenizer.eos_token_id == 0
    for text in ("def load(self, name): return self._load(name)", "Experts are numbered from zero. Äöü, 你好, 🙂\n\t!"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    english = "the same thread must release the lock that it holds before another one can take it"
    assert len(tokenizer(english)["input_ids"]) < len(english) / 3


def test_demo_dequantized_is_a_model_that_transformers_loads(demo: Path, tmp_path: Path) -> None:
    reader = CheckpointReader(demo)
    quantization = quantization_config(reader.config)
    tensors = {name: reader.read(name) for name in reader.names() if name.endswith(".weight")}
    for name in reader.names():
        if name.endswith(".qweight"):
            stem = name.removesuffix("qweight")
            parts = {part.removeprefix(stem): reader.read(part) for part in reader.names(stem)}
            tensors[stem + "weight"] = dequantize(quantization.unpack(parts)).bfloat16()
    plain = {key: value for key, value in reader.config.items() if key != "quantization_config"}
    write_checkpoint(tmp_path, plain, tensors.items())
    model, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        logits = model(torch.arange(16).view(1, 16)).logits
    assert logits.shape == (1, 16, 4096) and logits.isfinite().all()


def test_a_demo_that_a_disk_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("moe_ep.checkpoint.demo.TEXT_MODULES", ("keyword",))
    with (
        files_of_at_most(100),
        pytest.raises(ConfigError, match=r"cannot be made as .* \(File too large\)"),
    ):
        demo_checkpoint()
    assert not [*tmp_path.iterdir()]


def test_what_is_there_is_left_alone(demo: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in demo.iterdir()}
    assert make_demo_checkpoint(demo) == demo
    assert {file: file.stat().st_mtime_ns for file in demo.iterdir()} == before
    (tmp_path / "letters").write_text("mine")
    with pytest.raises(ValueError, match="it must not exist yet, be empty or be a checkpoint"):
        make_demo_checkpoint(tmp_path, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["letters"]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}-*"))


def test_makers_at_the_same_time_get_the_same_bytes(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "cache"))
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(demo_checkpoint) for _ in range(2)]}
    assert len(paths) == 1 and paths == {demo_checkpoint()}
    assert contents(paths.pop()) == contents(demo)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "no config", "no weights"])
def test_a_demo_that_is_damaged_in_the_cache_is_made_anew(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "demo-qwen3-moe-v1"
    shutil.copytree(demo, folder)
    weights = next(folder.glob("*.safetensors"))
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size // 2)
    elif damage == "overwritten":
        weights.write_bytes(weights.read_bytes()[:-100] + bytes(100))
    else:
        (folder / "config.json" if damage == "no config" else weights).unlink()
    assert contents(demo_checkpoint()) == contents(demo)
    assert len(list(tmp_path.iterdir())) == 1


def test_another_seed_and_no_progress_bar_without_a_terminal(
    demo: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_demo_checkpoint(tmp_path / "model", seed=1)
    assert capfd.readouterr() == ("", "")
    name = "model.layers.2.mlp.experts.7.up_proj.qweight"
    assert not torch.equal(CheckpointReader(tmp_path / "model").read(name), CheckpointReader(demo).read(name))
