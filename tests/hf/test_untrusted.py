"""Checkpoints whose configs name code, repositories and files elsewhere: transformers sees none of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")


from safetensors.torch import load_file, save_file
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import moe_ep
from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.generation.tokenizer import ModelTokenizer
from moe_ep.hf.untrusted import ATTENTION_KEYS, CLOSED_KEYS, open_config

# A `kernels` package that tells what it is asked for.
KERNELS = """
import os
def get_kernel(*args, **kwargs):
    open(os.environ["TRACE"], "a").write(f"kernel {args} {kwargs}\\n")
    raise OSError("no kernel here")
def _decorator(*args, **kwargs):
    return lambda of: of
use_kernel_forward_from_hub = use_kernelized_func = _decorator
def __getattr__(name):
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})
"""
# Loads checkpoints, and writes down who is called, what is imported from them, and which files elsewhere are opened.
PROGRAM = """
import json, os, sys
def watch(event, args):
    if event in ("socket.getaddrinfo", "socket.connect", "subprocess.Popen", "os.system"):
        told = f"{event} {args[:2]}"
    elif event == "import" and args[0].startswith("evil"):
        told = f"import {args[0]}"
    elif event == "open" and "elsewhere" in str(args[0]):
        told = f"open {args[0]}"
    else:
        return
    open(os.environ["TRACE"], "a").write(told + "\\n")
import torch, transformers, moe_ep
assert transformers.utils.is_kernels_available()
from moe_ep.checkpoint.finite import CheckedCopy
from moe_ep.generation.tokenizer import ModelTokenizer
CheckedCopy(1 << 30)  # compiled now, so that no compiler runs later
sys.addaudithook(watch)
for folder in sys.argv[1:]:
    model = moe_ep.parallelize(folder)
    tokenizer = ModelTokenizer(__import__("pathlib").Path(folder))
    ids = tokenizer.token_ids("import")[None]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    print(json.dumps([out.tolist(), model.config._attn_implementation, tokenizer.tokenizer.name_or_path]))
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model", progress=False)


def copied(demo: Path, folder: Path) -> Path:
    """The checkpoint with files of its own but for weights."""
    folder.mkdir()
    for file in demo.iterdir():
        if file.suffix == ".safetensors":
            os.symlink(file, folder / file.name)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(found | values))


def loaded(tmp_path: Path, *folders: Path) -> list[Any]:
    """What the program says of each, where `kernels` is installed; it must have done nothing that it should not."""
    packages, trace = tmp_path / "packages", tmp_path / "trace"
    (packages / "kernels").mkdir(parents=True)
    (packages / "kernels" / "__init__.py").write_text(KERNELS)
    about = packages / "kernels-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        env=os.environ | {"TRACE": str(trace), "PYTHONPATH": path, "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not trace.exists(), trace.read_text()
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_that_a_checkpoint_names_is_run_or_fetched(demo: Path, tmp_path: Path) -> None:
    """Every key of the list at once, with values for each kind of use; and each attention that is not shipped."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folders = [copied(demo, tmp_path / "clean")]
    for number, value in enumerate(("evil/repository", str(elsewhere / "evil"), "../elsewhere/evil.safetensors")):
        folder = copied(demo, tmp_path / f"planted{number}")
        (folder / "evil.py").write_text("import evil_code\n")
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text("import evil_code\n")
        for name, keys in CLOSED_KEYS.items():
            planted: dict[str, Any] = dict.fromkeys(keys or (), value)
            if keys is None:
                planted = {"auto_map": {"AutoProcessor": "evil.Evil"}, "processor_class": "Evil"}
            for key in planted.keys() & {"trust_remote_code", "use_kernels", "allow_all_kernels", "is_local"}:
                planted[key] = True
            for key in planted.keys() & {"auto_map"}:
                planted[key] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
            for key in planted.keys() & {"compile_config", "kernel_config", "quantization_config", "backbone_kwargs"}:
                planted[key] = {"options": {"cpp.cxx": value}, "quant_method": "quanto"}
            if name == "config.json":
                # The experts of the demo are quantized.
                planted.pop("quantization_config")
                planted |= dict.fromkeys(("get_text_config", "to_dict"), value)
                planted["vision_config"] = dict(planted)
            if name == "tokenizer_config.json":
                planted |= dict.fromkeys(("tokenizer_file", "vocab_file", "merges_file"), value)
                planted |= {"fast_tokenizer_files": ["tokenizer.0.1/../../elsewhere/evil.json"]}
                planted |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
            change(folder / name, **planted)
        folders.append(folder)
    names = ["kernels-community/flash-attn3", "evil/kernel@main:f", ["evil"], {"": "evil/k"}, "flash_attention_3"]
    names += ["eager", "sdpa"]
    for number, attention in enumerate(names):
        folder = copied(demo, tmp_path / f"attention{number}")
        change(folder / "config.json", **{sorted(ATTENTION_KEYS)[number % len(ATTENTION_KEYS)]: attention})
        folders.append(folder)
    clean, *others = loaded(tmp_path, *folders)
    for folder, (tokens, attention, path) in zip(folders[1:], others, strict=True):
        assert (tokens, path) == (clean[0], str(folder))
        assert attention in ("eager", "sdpa")
    # The last but one asks for another attention than transformers' choice, and gets it.
    assert others[-2][1] == "eager" and clean[1] == "sdpa"


def test_numbers_that_would_take_all_memory_or_time(demo: Path, tmp_path: Path) -> None:
    """Layers without experts, of which the files have none, and names that no language model has."""
    folder = copied(demo, tmp_path / "model")
    change(folder / "config.json", num_labels=10**10)
    moe_ep.parallelize(folder)
    for number in (4096, 10**6):
        change(folder / "config.json", num_hidden_layers=number, mlp_only_layers=list(range(4, number)))
        with pytest.raises(CheckpointError, match="layers"):
            moe_ep.parallelize(folder)


def test_replacements_of_a_tokenizer_that_fill_memory(demo: Path, tmp_path: Path) -> None:
    folder = copied(demo, tmp_path / "model")
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 40}
    for name, kind in (("normalizer", "normalizers"), ("decoder", "decoders")):
        whole = json.loads((demo / "tokenizer.json").read_text())
        change(folder / "tokenizer.json", **whole | {name: {"type": "Sequence", kind: [longer]}})
        ModelTokenizer(folder).close()
        change(folder / "tokenizer.json", **{name: {"type": "Sequence", kind: [longer, longer]}})
        with pytest.raises(ConfigError, match=name):
            ModelTokenizer(folder)


def test_an_expression_of_a_tokenizer_that_takes_all_time(demo: Path, tmp_path: Path) -> None:
    folder = copied(demo, tmp_path / "model")
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    change(folder / "tokenizer.json", pre_tokenizer=split)
    tokenizer = ModelTokenizer(folder)
    with pytest.raises(ConfigError, match="limit"):
        tokenizer.token_ids("a" * 40 + "c")
    tokenizer.close()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("name", ["pipeline", "AutoModelForCausalLM", "models", "Qwen3MoeConfig", 3, ["x"]])
def test_a_tokenizer_of_another_class(demo: Path, tmp_path: Path, file: str, name: Any) -> None:
    folder = copied(demo, tmp_path / "model")
    change(folder / file, tokenizer_class=name)
    with pytest.raises(ConfigError, match="tokenizer_class"):
        ModelTokenizer(folder)


@pytest.mark.parametrize(
    "file",
    [
        "tokenizer.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.json",
        "processor_config.json",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_a_file_of_a_tokenizer_that_is_too_large(demo: Path, tmp_path: Path, file: str) -> None:
    folder = copied(demo, tmp_path / "model")
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("wb") as opened:
        opened.truncate(3 << 30)
    with pytest.raises(CheckpointError, match=f"{file}.*{3 << 30}"):
        ModelTokenizer(folder)


def test_a_config_that_nests_too_deep_to_be_copied(demo: Path, tmp_path: Path) -> None:
    import moe_ep

    folder = copied(demo, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"a":' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(CheckpointError, match="generation_config.json"):
        moe_ep.parallelize(folder)


def test_a_weight_of_transformers_that_is_not_finite(demo: Path, tmp_path: Path) -> None:
    """The message names the shard that holds it."""
    import moe_ep

    folder, name = copied(demo, tmp_path / "model"), "model.embed_tokens.weight"
    with CheckpointReader(folder) as reader:
        file = reader.info(name).file
    tensors = load_file(file)
    tensors[name][5, 0] = math.nan
    file.unlink()  # the original may be a link
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{file.name}: tensor {name}: .*1 of"):
        moe_ep.parallelize(folder)


def test_an_adapter_beside_a_model(demo: Path, tmp_path: Path) -> None:
    import moe_ep

    folder = copied(demo, tmp_path / "model")
    change(folder / "adapter_config.json", base_model_name_or_path="evil/model", peft_type="LORA")
    with pytest.raises(ConfigError, match="adapter"):
        moe_ep.parallelize(folder)


def test_what_stays_of_a_config() -> None:
    config = {
        "model_type": "gemma3n",
        "vision_config": {
            "architecture": "mobilenetv5",
            "model_args": {"pretrained_cfg": {"url": "x"}, "n": 1},
        },
        "layers": [{"backbone": "evil/x", "size": 3}],
    }
    assert open_config(config) == {
        "model_type": "gemma3n",
        "vision_config": {"architecture": "mobilenetv5", "model_args": {"n": 1}},
        "layers": [{"size": 3}],
    }
    assert open_config({"vision_config": {"architecture": "hf-hub:evil/x"}}) == {"vision_config": {}}
    # As transformers writes infinity.
    assert open_config({"time_step_limit": [0.0, {"__float__": "Infinity"}]}) == {
        "time_step_limit": [0.0, float("inf")]
    }
