"""convert: what it declares, by the matcher of compressed-tensors itself, and what it keeps."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.convert import convert_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from tests.checkpoint.checkpoints import make_checkpoint
from tests.checkpoint.model_cases import MODELS, save_model

# Layers for drafts, as families have them: an expert each behind the last layer, and all in one beside the model.
DRAFTS = {
    "model.layers.77.mlp.experts.0.gate_proj.weight": (32, 64),
    "model.layers.77.mlp.experts.1.down_proj.weight": (64, 32),
    "model.layers.77.mlp.gate.weight": (8, 64),
    "model.layers.77.eh_proj.weight": (64, 128),
    "mtp.layers.0.mlp.experts.gate_up_proj": (8, 64, 64),
    "mtp.layers.0.mlp.experts.down_proj": (8, 64, 32),
    "mtp.fc.weight": (64, 128),
}


def add_shard(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Adds a shard, to a checkpoint of a single file too."""
    save_file(tensors, folder / name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        with safe_open(folder / "model-1.safetensors", "pt") as file:
            weight_map = dict.fromkeys(file.keys(), "model-1.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map | dict.fromkeys(tensors, name)}))


@pytest.mark.parametrize("family", MODELS)
def test_the_matcher_of_compressed_tensors_agrees_with_the_files(tmp_path: Path, family: str) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    save_model(family, tmp_path / "in")
    add_shard(tmp_path / "in", "drafts.safetensors", {name: torch.ones(shape) for name, shape in DRAFTS.items()})
    try:
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "fp8")
    except CheckpointError as error:
        pytest.skip(f"not taken: {error}")
    with CheckpointReader(tmp_path / "out") as reader:
        settings = reader.config["quantization_config"]
        (group,) = settings["config_groups"].values()
        linear = torch.nn.Linear(1, 1)
        quantized = {name.removesuffix(".weight_scale") for name in reader.names() if name.endswith(".weight_scale")}
        blocks = {module.rpartition(".experts.")[0] + ".experts" for module in quantized}
        assert set(DRAFTS) <= set(reader.names())
        for name in reader.names():
            module, _, suffix = name.rpartition(".")
            modules = {module} if suffix.startswith("weight") or len(reader.info(name).shape) < 2 else {module, name}
            for each in modules - blocks:
                is_quantized = module in quantized
                assert match.is_match(each, linear, group["targets"], settings["ignore"]) == is_quantized, each
    assert quantized


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_everything_but_weights_and_code_is_there_afterwards(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "in")
    kept = (
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/deep/er.jinja",
        "spiece.model",
        "vocab.bpe",
        "tekken.json",
        "LICENSE",
        "speaker_embeddings/voice.npy",
        "assets/a picture.png",
        "processor/preprocessor_config.json",
        "adapter_model.safetensors",
        "audio_tokenizer/config.json",
        "audio_tokenizer/model.safetensors",
    )
    left = (
        *("modeling.py", "sub/run.sh", "sub/x.pt", "sub/model.safetensors", "audio_tokenizer/x.bin"),
        *(".cache/huggingface/a.json", "consolidated.safetensors", "a.gguf"),
    )
    for name in (*kept, *left):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", kind)
    for name in kept:
        assert (tmp_path / "out" / name).read_text() == name
    assert not any((tmp_path / "out" / name).exists() for name in left)


def test_nothing_that_the_index_names_is_dropped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")
    extra = {"mtp.fc.weight": torch.full((2, 2), 3.0)}
    save_file(extra | {"model.layers.0.mlp.gate.weight": torch.zeros(4, 64)}, tmp_path / "in/mtp.safetensors")
    index = tmp_path / "in/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    index.write_text(json.dumps(content))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "int4")
    with CheckpointReader(tmp_path / "out") as reader:
        assert torch.equal(reader.read("mtp.fc.weight"), extra["mtp.fc.weight"])
        assert reader.read("model.layers.0.mlp.gate.weight").any()
    # A single file comes first, and an index beside it that names more is out of date, or the file is.
    make_checkpoint(tmp_path / "single", max_shard_bytes=1 << 30)
    (tmp_path / "single" / index.name).write_bytes(index.read_bytes())
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        convert_checkpoint(tmp_path / "single", tmp_path / "other", "int4")
    assert not (tmp_path / "other").exists()


def test_a_convert_that_was_killed_leaves_nothing_for_long(tmp_path: Path) -> None:
    """A real process, killed while it writes; the next one takes its folder over."""
    make_checkpoint(tmp_path / "in")
    program = (
        "import sys, time, pathlib\n"
        "from moe_ep.checkpoint.convert import convert_checkpoint\n"
        "def stop(done, total):\n"
        "    print('writing', flush=True); time.sleep(60)\n"
        f"convert_checkpoint({str(tmp_path / 'in')!r}, {str(tmp_path / 'out')!r}, 'int4', stop, shard_bytes=5000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        with pytest.raises(ConfigError, match=r"out: another convert writes it"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", "int4")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".out"))
    (left / "of the killed one").write_text("x")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "int4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not (tmp_path / "out" / "of the killed one").exists()


def test_a_folder_that_is_made_meanwhile_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in")

    def make(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/letters").write_text("mine")

    with pytest.raises(ConfigError, match="out"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "int4", make)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letters"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
