"""Which file of a checkpoint directory holds which tensor: the index, checked against the shards' own headers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moe_ep.checkpoint.safetensors_header import TensorInfo, parse_json_object, read_header
from moe_ep.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MODELOPT_NAME = "hf_quant_config.json"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError where the file is missing, cannot be read or holds something else."""
    if not os.path.isfile(file):
        raise CheckpointError(f"{file}: expected the checkpoint's {file.name}, found {_instead_of(file)}")
    try:
        return parse_json_object(file.read_bytes(), str(file))
    except OSError as error:
        raise CheckpointError(f"{file}: expected a readable file, found {error.strerror}") from error


def _instead_of(file: Path) -> str:
    """What there is where a plain file was expected."""
    if os.path.exists(file):
        return "no plain file"
    return "a link that leads nowhere" if os.path.islink(file) else "no such file"


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, with a quantization that stands elsewhere under quantization_config: where NVIDIA's tool leaves it,
    in a file beside it, or under the name that compressed-tensors had for it first.

    Raises:
        CheckpointError: a file that is missing or holds no JSON object.
    """
    config, beside = read_json(directory / "config.json"), directory / MODELOPT_NAME
    if config.get("quantization_config") is None and "compression_config" in config:
        config["quantization_config"] = config.pop("compression_config")
    if config.get("quantization_config") is None and beside.is_file():
        found = read_json(beside).get("quantization")
        if not isinstance(found, dict):
            raise CheckpointError(f"{beside}: expected an object named quantization, found {found!r}")
        config["quantization_config"] = {"quant_method": "modelopt", **found}
    return config


def find_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory by name.

    Raises:
        CheckpointError: no safetensors, an index that names files or tensors that are not there, a tensor in two files.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    # In transformers' order, which leaves the index of shards that a single file has replaced.
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _tensors_of_index(index)
    for file in (single, index):
        if os.path.lexists(file):
            raise CheckpointError(f"{file}: expected a file, found {_instead_of(file)}; fetch it again")
    ways_out = {
        "*.safetensors": f"; one file must be called {single.name}, and several need the index",
        "*.bin": "; pickled weights are never loaded, convert them to safetensors",
        "*.pt": "; pickled weights are never loaded, convert them to safetensors",
        "*.pth": "; pickled weights are never loaded, convert them to safetensors",
        "*.gguf": "; GGUF is not read, take the model in safetensors",
    }
    found = next(
        ((file.name, way_out) for kind, way_out in ways_out.items() for file in sorted(directory.glob(kind))),
        ("neither", ""),
    )
    raise CheckpointError(f"{directory}: expected {single.name} or {index.name}, found {''.join(found)}")


def _tensors_of_index(index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names, found {weight_map!r}")
    headers: dict[str, dict[str, TensorInfo]] = {}
    owners: dict[str, str] = {}
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: tensor {tensor}: expected the name of a file beside it, found {file_name!r}"
            )
        if file_name in headers:
            continue
        file = index.parent / file_name
        if not os.path.isfile(file):
            raise CheckpointError(
                f"{index}: tensor {tensor}: expected in {file_name}, found {_instead_of(file)}; fetch it again"
            )
        headers[file_name] = read_header(file)
        for name in headers[file_name]:
            if name in owners:
                raise CheckpointError(f"{file}: tensor {name}: expected in one shard, found in {owners[name]} too")
            owners[name] = file_name
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            found = f"in {owners[name]}" if name in owners else "in no shard"
            raise CheckpointError(
                f"{index.parent / file_name}: tensor {name}: expected here by the index, found {found}"
            )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}
