"""Filters a checkpoint's configs for transformers: nothing may name code, a repository or a file elsewhere.

A checkpoint is data. Some keys of its JSON files make transformers import code, ask a hub for something, or open files
outside of the folder. `CLOSED_KEYS` lists them by file; transformers sees none of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from moe_ep.checkpoint.reader import read_config, read_json
from moe_ep.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Keys that transformers does not see, at any depth of a file. Of a file with None transformers sees nothing at all.
CLOSED_KEYS: dict[str, frozenset[str] | None] = {
    "config.json": frozenset(
        {
            # Code of the checkpoint or of a repository.
            *("auto_map", "custom_pipelines", "custom_generate", "trust_remote_code", "code_revision"),
            # Kernels of a hub, and the quantizers of transformers, some of which fetch theirs.
            *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
            *("use_kernels", "kernel_config", "fusion_config", "allow_all_kernels", "_attn_implementation_internal"),
            *("quantization_config", "compression_config"),
            # Other models and files.
            *("_name_or_path", "name_or_path", "_commit_hash", "configuration_files", "transformers_weights"),
            *("base_model_name_or_path", "assistant_model", "_adapter_model_path", "gguf_file"),
            *("backbone", "backbone_kwargs", "use_pretrained_backbone", "pretrained_cfg", "pretrained_cfg_overlay"),
            *("checkpoint_path", "cache_dir", "compile_config", "distributed_config"),
            # Of classifiers; transformers makes as many names.
            "num_labels",
        }
    ),
    "generation_config.json": frozenset(
        {
            *("auto_map", "custom_generate", "trust_remote_code", "assistant_model", "assistant_tokenizer"),
            # Options of torch's compiler name the programs that it runs.
            "compile_config",
        }
    ),
    "tokenizer_config.json": frozenset(
        {
            *("trust_remote_code", "code_revision", "custom_generate", "name_or_path", "gguf_file", "init_inputs"),
            *("subfolder", "cache_dir", "local_files_only", "is_local", "token", "proxies", "revision"),
            *("mecab_kwargs", "sudachi_kwargs", "jumanpp_kwargs"),
        }
    ),
    # Only their chat_template is read, as text.
    "processor_config.json": None,
    "preprocessor_config.json": None,
    "video_preprocessor_config.json": None,
    "chat_template.json": None,
}
# Keys of config.json that are kept if transformers ships the implementation they name, and dropped otherwise.
ATTENTION_KEYS = frozenset({"attn_implementation", "_attn_implementation"})
# A key of config.json and tokenizer_config.json that must name a tokenizer of transformers.
TOKENIZER_CLASS = "tokenizer_class"
# Files of a folder that tokenizers have no use for.
_MAX_TOKENIZER_BYTES = 256 << 20
_READ_BY_TOKENIZERS = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
_NOT_FOR_TOKENIZERS = {".py", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def open_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that transformers is given."""
    return _without(config, CLOSED_KEYS["config.json"] or ())


def _without(value: Any, closed: Collection[str]) -> Any:
    # How transformers writes what JSON has no number for.
    if isinstance(value, dict) and value.get("__float__") in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    if isinstance(value, list):
        return [_without(each, closed) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, each in value.items():
        # transformers makes attributes of all keys, and would lose methods of that name.
        if key in closed or callable(getattr(PreTrainedConfig, str(key), None)):
            continue
        if key in ATTENTION_KEYS:
            each = _shipped(each)
        # timm takes names of repositories and folders for an architecture, with the kind before a colon.
        elif key == "architecture" and isinstance(each, str) and re.search("[/:]", each):
            continue
        kept[key] = _without(each, closed)
    return kept


def _shipped(name: Any) -> Any:
    """An attention implementation that transformers ships, or of each part of a model; None for any other."""
    if isinstance(name, dict):
        return {part: _shipped(each) for part, each in name.items()}
    if name in ("eager", "sdpa", "flex_attention"):
        return name
    flash = re.fullmatch(r"flash_attention_(\d)", name) if isinstance(name, str) else None
    # Without the package, transformers would ask a hub for the kernel.
    if flash and getattr(transformers.utils, f"is_flash_attn_{flash[1]}_available", bool)():
        return name
    if name is not None:
        logger.warning("config.json asks for the attention %r, which transformers does not ship; its own runs", name)
    return None


def attention_without_hub(kind: Any, config: Any) -> None:
    """Leaves the attention to a model class where that would replace the one of its config by a hub's kernel."""
    possible = getattr(kind, "_compatible_flash_implementations", None)
    name = config._attn_implementation
    if possible is not None and name is not None and name.startswith("flash") and name not in possible:
        config._attn_implementation = None


def open_generation_config(folder: Path) -> dict[str, Any] | None:
    """The part of a generation_config.json that transformers is given; None if there is no such file."""
    file = folder / "generation_config.json"
    return _without(read_json(file), CLOSED_KEYS[file.name] or ()) if file.is_file() else None


def check_no_adapter(folder: Path) -> None:
    """ConfigError for a folder with an adapter of peft, which transformers would load where peft is installed: its
    config names base models and Python modules."""
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder}: expected a model, found an adapter too (adapter_config.json); merge it (merge_and_unload of "
            f"peft), or move its files out of the folder"
        )


def check_tokenizer_class(folder: Path, config: dict[str, Any]) -> None:
    """ConfigError where a tokenizer is to be of a class that is none; transformers makes an object of anything that it
    has by that name."""
    name = config.get(TOKENIZER_CLASS)
    if name is None:
        return
    found = name
    with contextlib.suppress(ImportError, RuntimeError):
        found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else name
    # A class whose packages are missing says so itself.
    is_known = isinstance(found, type) and (issubclass(found, PreTrainedTokenizerBase) or hasattr(found, "_backends"))
    if found is not None and not is_known:
        raise ConfigError(
            f"{folder}: expected {TOKENIZER_CLASS} to be a tokenizer of transformers, found {str(name)[:80]!r}; "
            f"correct its JSON files"
        )


@contextmanager
def tokenizer_folder(folder: Path) -> Iterator[Path]:
    """A folder with what tokenizers need of a checkpoint, its configs without what is closed.

    Raises:
        CheckpointError: a config that is no JSON object, or a file that is larger than any tokenizer's.
        ConfigError: a tokenizer of a class that is none.
    """
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        size = file.stat().st_size if file.suffix in _READ_BY_TOKENIZERS and file.is_file() else 0
        if size > _MAX_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{file}: it has {size} bytes and at most {_MAX_TOKENIZER_BYTES} of a tokenizer's file are read; fetch "
                f"it again"
            )
    with tempfile.TemporaryDirectory(prefix="moe_ep_tokenizer_") as name:
        copy = Path(name)
        configs = {"config.json": open_config(read_config(folder))}
        if (folder / "tokenizer_config.json").is_file():
            configs["tokenizer_config.json"] = _open_tokenizer_config(read_json(folder / "tokenizer_config.json"))
        for file in folder.iterdir():
            if file.suffix not in _NOT_FOR_TOKENIZERS and file.name not in configs:
                os.symlink(file.absolute(), copy / file.name)
        for file_name, config in configs.items():
            check_tokenizer_class(folder, config)
            (copy / file_name).write_text(json.dumps(config), encoding="utf-8")
        yield copy


def _open_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in config.items()
        # transformers itself knows what the files in the folder are called.
        if key not in (CLOSED_KEYS["tokenizer_config.json"] or ()) and not key.endswith("_file")
    }
    versions = kept.get("fast_tokenizer_files", [])
    if not (isinstance(versions, list) and all(isinstance(name, str) and Path(name).name == name for name in versions)):
        del kept["fast_tokenizer_files"]
    return kept
