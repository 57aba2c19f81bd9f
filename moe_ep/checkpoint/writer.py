"""Writes a checkpoint in the form that Hugging Face libraries write: config, safetensors shards, index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes `config.json` and the tensors: `model.safetensors`, or `model-0000i-of-0000n.safetensors` with an index.

    A shard is written as soon as the next tensor would not fit, so no more than one is held in memory. The directory
    is made where it does not exist; it should not hold another checkpoint.

    Raises:
        ValueError: max_shard_bytes below 1, no tensors, or a name given twice.
        OSError: a file cannot be written, as where the disk is full.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    mode = (directory / "config.json").stat().st_mode
    shards: list[list[str]] = []
    names: set[str] = set()
    pending: dict[str, torch.Tensor] = {}
    total = shard_bytes = 0

    def flush() -> None:
        file = directory / f"shard-{len(shards)}.tmp"
        try:
            save_file(pending, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _as_os_error(error, file) from error
        # safetensors makes files that only their owner can read; a checkpoint is as open as the files beside it.
        file.chmod(mode)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensors hold {name} twice; every name must occur once")
        names.add(name)
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and shard_bytes + num_bytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        shard_bytes += num_bytes
        total += num_bytes
    if not names:
        raise ValueError("tensors is empty; a checkpoint holds at least one")
    flush()

    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / "model.safetensors.index.json", index)
    for number, file in enumerate(files):
        (directory / f"shard-{number}.tmp").rename(directory / file)


def _as_os_error(error: SafetensorError, file: Path) -> Exception:
    """safetensors wraps what the system said, as in "I/O error: No space left on device (os error 28)"."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(file)) if found else error


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """One JSON object, indented by two as Hugging Face libraries do."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
