"""Makes a small Qwen3-MoE checkpoint in the real on-disk form, so that everything can be tried without a download.

The weights are random, but drawn so that the layers behave like a model's: the residual stream keeps its size, and
the routers prefer some experts over others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from moe_ep import env
from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq
from moe_ep.checkpoint.writer import write_checkpoint, write_json
from moe_ep.errors import ConfigError
from moe_ep.files import building, parse_json, write_text
from moe_ep.quantization.canonical_weights import quantize_int

DEMO_VERSION = 1
# The file of the other files' hashes, by which damage in the cache is noticed.
_DIGESTS = ".digests.json"

_LAYERS = 4
_HIDDEN = 256
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_EXPERTS = 32
_TOP_K = 4
_INTERMEDIATE = 128
_VOCAB = 4096
_END_OF_TEXT = "<|endoftext|>"
_SHARD_BYTES = 3 << 20
_GPTQ = GPTQConfig(bits=4, group_size=64)

# Modules of the standard library whose source, prose and code, the tokenizer is trained on.
TEXT_MODULES = (
    "argparse", "ast", "collections", "concurrent.futures.process", "configparser", "contextlib", "dataclasses",
    "datetime", "difflib", "doctest", "email.message", "enum", "fractions", "functools", "heapq", "http.client",
    "inspect", "json.decoder", "logging", "mailbox", "optparse", "os", "pathlib", "pickletools", "random", "shutil",
    "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "typing", "unittest.mock",
    "urllib.request", "zipfile",
)  # fmt: skip


def demo_checkpoint() -> Path:
    """The demo checkpoint in the cache folder (MOE_EP_CACHE_DIR), made on the first call and where it is damaged.

    Raises:
        ConfigError: nothing can be written there.
    """
    folder = env.CACHE_DIR.get() / f"demo-qwen3-moe-v{DEMO_VERSION}"
    try:
        return _make(folder, seed=0, progress=True, is_usable=_is_whole)
    except OSError as error:
        raise ConfigError(
            f"the demo checkpoint cannot be made as {folder} ({error.strerror}); set {env.CACHE_DIR.name} to a folder "
            f"that can be written to, or pass --model"
        ) from error
    except ValueError:
        raise ConfigError(
            f"the demo checkpoint cannot be made as {folder}, which holds something else; delete it, set "
            f"{env.CACHE_DIR.name} to another folder, or pass --model"
        ) from None


def make_demo_checkpoint(directory: str | Path, seed: int = 0, progress: bool = True) -> Path:
    """Makes a Qwen3-MoE checkpoint: 4 layers, hidden 256, 32 experts, top-4, GPTQ int4 group 64, the rest bf16.

    It is built beside the directory and renamed, so the directory is there whole or not at all. A checkpoint that is
    already there is left as it is.

    Args:
        seed: of the weights; the same seed gives the same bytes.
        progress: whether to show a progress bar, on a terminal only.

    Raises:
        ValueError: the directory exists and holds something else.
    """
    return _make(Path(directory).absolute(), seed, progress, is_usable=_is_made)


class _AlreadyMade(Exception):
    """Another process has made the checkpoint meanwhile."""


def _make(directory: Path, seed: int, progress: bool, is_usable: Callable[[Path], bool]) -> Path:
    if is_usable(directory):
        return directory
    if directory.exists() and not _is_made(directory) and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"directory is {directory}; it must not exist yet, be empty or be a checkpoint")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(_AlreadyMade), building(directory, wait=True) as folder:
        if is_usable(directory):
            raise _AlreadyMade
        if directory.exists():
            shutil.rmtree(directory)
        silent = not progress or not sys.stderr.isatty()
        with tqdm(total=_LAYERS + 2, desc="demo checkpoint", leave=False, disable=silent) as bar:
            _write_tokenizer(folder)
            bar.update()
            write_checkpoint(folder, demo_config(), _tensors(seed, bar), max_shard_bytes=_SHARD_BYTES)
        write_json(folder / _DIGESTS, _digests(folder))
    return directory


def demo_config() -> dict[str, Any]:
    """The config.json of the demo checkpoint."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": 4 * _HIDDEN,
        "moe_intermediate_size": _INTERMEDIATE,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.02,
        "quantization_config": {
            "quant_method": _GPTQ.quant_method,
            "bits": _GPTQ.bits,
            "group_size": _GPTQ.group_size,
            "desc_act": _GPTQ.desc_act,
            "sym": _GPTQ.sym,
            "checkpoint_format": _GPTQ.checkpoint_format,
            "lm_head": False,
            "modules_in_block_to_quantize": [["mlp.experts"]],
        },
    }


def _is_made(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", _DIGESTS))


def _is_whole(directory: Path) -> bool:
    """Whether all files of the folder are there as they were made."""
    try:
        return parse_json((directory / _DIGESTS).read_bytes()) == _digests(directory)
    except (OSError, ValueError):
        return False


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.iterdir() if file.name != _DIGESTS)
    return {file.name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in files}


def _tensors(seed: int, bar: tqdm) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    # Every embedding has this direction in common; a router that leans on it prefers some experts for every token.
    common = normal(_HIDDEN, std=1.0)
    common /= common.norm()
    yield "model.embed_tokens.weight", (normal(_VOCAB, _HIDDEN, std=1.0) + 4.0 * common).bfloat16()
    bar.update()
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for norm, size in (("input_layernorm", _HIDDEN), ("post_attention_layernorm", _HIDDEN)):
            yield f"{prefix}.{norm}.weight", torch.ones(size, dtype=torch.bfloat16)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{norm}.weight", torch.ones(_HEAD_DIM, dtype=torch.bfloat16)
        for projection, heads in (("q_proj", _HEADS), ("k_proj", _KV_HEADS), ("v_proj", _KV_HEADS)):
            weight = normal(heads * _HEAD_DIM, _HIDDEN, std=_HIDDEN**-0.5)
            yield f"{prefix}.self_attn.{projection}.weight", weight.bfloat16()
        output = normal(_HIDDEN, _HEADS * _HEAD_DIM, std=0.5 * (_HEADS * _HEAD_DIM) ** -0.5)
        yield f"{prefix}.self_attn.o_proj.weight", output.bfloat16()
        yield f"{prefix}.mlp.gate.weight", _router(generator, common).bfloat16()
        yield from _experts(f"{prefix}.mlp.experts", generator)
        bar.update()
    yield "model.norm.weight", torch.ones(_HIDDEN, dtype=torch.bfloat16)


def _router(generator: torch.Generator, common: torch.Tensor) -> torch.Tensor:
    """Rows `[E, K]`: random, plus a preference that falls off with an expert's place in a random order."""
    rows = torch.randn(_EXPERTS, _HIDDEN, generator=generator) * _HIDDEN**-0.5
    order = torch.randperm(_EXPERTS, generator=generator)
    preference = torch.empty(_EXPERTS)
    preference[order] = torch.tensor([-math.log(place) for place in range(1, _EXPERTS + 1)])
    return rows + 0.1 * preference.unsqueeze(-1) * common


def _experts(prefix: str, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    # Gate and up keep unit size; down makes the layer's output about a third of the residual stream.
    shapes = {
        "gate_proj": (_INTERMEDIATE, _HIDDEN),
        "up_proj": (_INTERMEDIATE, _HIDDEN),
        "down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    packed = {}
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(_EXPERTS, rows, columns, generator=generator) * columns**-0.5
        packed[name] = pack_gptq(quantize_int(weight.half(), _GPTQ.bits, _GPTQ.group_size), _GPTQ)
    for expert in range(_EXPERTS):
        for name, tensors in packed.items():
            for suffix, tensor in tensors._asdict().items():
                yield f"{prefix}.{expert}.{name}.{suffix}", tensor[expert]


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    # Its own `save` raises no OSError where the disk is full.
    write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), _END_OF_TEXT)
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special},
    )
    write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})


def _texts() -> Iterator[str]:
    """Source of the modules, as far as this Python ships it."""
    for name in TEXT_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and isinstance(spec.loader, InspectLoader) and (source := spec.loader.get_source(name)):
            yield source
