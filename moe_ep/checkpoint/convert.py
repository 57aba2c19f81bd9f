"""Writes a checkpoint again with its experts quantized, in the form of compressed-tensors.

Integers are written pack-quantized with a scale a group of columns, 8-bit floats float-quantized with a scale a row:
the forms that transformers, vLLM and compressed-tensors read. These have a tensor for each linear layer of each expert,
so experts that are all in one tensor are taken apart. Everything else is copied as it is. The new checkpoint is built
beside its place and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_ep.checkpoint.formats import SETTINGS_BESIDE
from moe_ep.checkpoint.formats.compressed_tensors import pack_quantized
from moe_ep.checkpoint.model_spec import model_spec
from moe_ep.checkpoint.plan import ExpertTensors, StoredTensor
from moe_ep.checkpoint.reader import INDEX_NAME, SINGLE_NAME, CheckpointReader, names_in_index
from moe_ep.checkpoint.spec import MoEModelSpec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError, ConfigError, check_paths, one_of
from moe_ep.files import building
from moe_ep.layer.methods.canonical import ONLINE

_BITS = {"int4": 4, "int8": 8, "fp8": 8}
# No more than a shard is held in memory.
SHARD_BYTES = 2 << 30
# All that is in no expert, by any name: transformers has PhiMoE's block_sparse_moe.gate as mlp.router, and what is
# backbone.layers in the files of Nemotron as model.layers.
_OUTSIDE = r"re:(?!.*\.experts(\.|$))"
# Weights in any form, and code: what is copied is data.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl", ".pickle")
_ADAPTER = "adapter_model.safetensors"
_CODE = (".py", ".pyc", ".so", ".sh", ".ipynb")


class _Part(NamedTuple):
    """The weight or bias of an expert's linear layer: the module's name, the suffix, and where it lies."""

    module: str
    suffix: str
    stored: StoredTensor


# The parts of each tensor that is read of the experts: a whole one, or the row of one expert where they are fused.
_Parts = dict[str, list[_Part]]


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    quantize: str,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> bool:
    """Writes `source` to `target` with its experts quantized to int4, int8 or fp8: round to nearest, symmetric.

    Args:
        on_bytes: called with (bytes read, bytes to read) as it goes on.
        shard_bytes: size of the files written, and about the memory that this takes.

    Returns:
        Whether the experts were fused, and had to be taken apart.

    Raises:
        ValueError: another kind of quantization.
        TypeError: a source or target that is no path.
        ConfigError: a target that is there already or is a mount point, or a source that is quantized already.
        CheckpointError: a source that does not hold what it says, or whose experts do not fit.
    """
    if quantize not in list(ONLINE):  # it may be of any type
        raise ValueError(one_of("quantize", quantize, list(ONLINE)))
    check_paths(source=source, target=target)
    # A link stays one, and what it leads to is made.
    target = Path(target).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: it exists already and is not written over; name a new folder, or remove it")
    if target.is_mount():
        raise ConfigError(f"{target}: a file system is mounted there, which no folder replaces; name a new one in it")
    # Copied tensors may hold any value; the weights to quantize are checked one by one.
    with CheckpointReader(source, allow_nonfinite=True) as reader:
        spec = model_spec(reader.config, reader)
        if reader.quantization is not None:
            method = reader.quantization.quant_method
            raise ConfigError(f"{source}: expected a plain checkpoint, found it quantized already ({method})")
        if left_out := sorted(names_in_index(reader.directory) - set(reader.names())):
            raise CheckpointError(
                f"{source}: {INDEX_NAME} names {left_out[0]}, which {SINGLE_NAME} beside it does not hold; remove the "
                f"one of the two that is out of date"
            )
        parts, names = _expert_parts(reader, spec)
        group_size = _group_size(spec, quantize)
        config = reader.config | {"quantization_config": _settings(reader, parts, quantize, group_size)}
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with building(target) as folder:
                tensors = _tensors(reader, parts, names, quantize, group_size, on_bytes)
                write_checkpoint(folder, config, tensors, max_shard_bytes=shard_bytes)
                _copy_the_rest(reader.directory, folder)
        except BlockingIOError:
            raise ConfigError(f"{target}: another convert writes it; wait for that, or name another folder") from None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise ConfigError(f"{target}: it was made by something else meanwhile, and is not written over") from None
    return names != parts.keys()


def _expert_parts(reader: CheckpointReader, spec: MoEModelSpec) -> tuple[_Parts, set[str]]:
    """What the tensors of routed experts become, each found where it should be, and the names of whole tensors."""
    parts: _Parts = {}
    names: set[str] = set()
    for layer in spec.moe_layers:
        tensors = ExpertTensors(reader, spec, layer, None)
        for expert in range(spec.num_experts):
            for role, projection in spec.projections.by_role().items():
                module = f"{spec.expert_prefix(layer)}.{expert}.{projection}"
                for suffix, stored in tensors.find(expert, role).items():
                    parts.setdefault(stored.info.name, []).append(_Part(module, suffix, stored))
                    names.add(tensors.name(expert, role, suffix))
    return parts, names


def _group_size(spec: MoEModelSpec, quantize: str) -> int:
    """Input columns that share a scale; -1 for a whole row."""
    try:
        return ONLINE[quantize].group_size_for(spec.expert_hidden_size, spec.moe_intermediate_size)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _tensors(
    reader: CheckpointReader,
    parts: _Parts,
    expert_names: set[str],
    quantize: str,
    group_size: int,
    on_bytes: Callable[[int, int], None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in file order, each matrix of an expert as those that it becomes."""
    names = reader.names()
    total = sum(reader.info(name).nbytes for name in names)
    others = [name for name in names if name not in expert_names]
    for name, tensor in reader.read_many([*others, *(same[0].stored.info for same in parts.values())]):
        if name not in parts:
            yield name, tensor
        for module, suffix, stored in parts.get(name, ()):
            part = stored.tensor(tensor)
            made = _quantized(part, quantize, group_size) if suffix == "weight" else {suffix: part}
            # The scale of a group is finite where all its weights are.
            if not made.get("weight_scale", part).isfinite().all():
                raise CheckpointError(
                    f"{stored.info.file}: tensor {name}: expected finite weights, found NaN or infinity"
                )
            yield from ((f"{module}.{ending}", value) for ending, value in made.items())
        on_bytes(reader.bytes_read, total)


def _quantized(weight: torch.Tensor, quantize: str, group_size: int) -> dict[str, torch.Tensor]:
    made = ONLINE[quantize].quantize(weight, group_size)
    if quantize == "fp8":
        return {"weight": made.codes.view(torch.float8_e4m3fn), "weight_scale": made.scales}
    return pack_quantized(made, _BITS[quantize])


def _settings(reader: CheckpointReader, parts: _Parts, quantize: str, group_size: int) -> dict[str, Any]:
    """`quantization_config` of the new checkpoint; every linear layer that stays plain is named."""
    modules = {part.module for same in parts.values() for part in same}
    quantized_blocks = {module.rpartition(".experts.")[0] for module in modules}
    plain = set()
    for name in reader.names():
        block, is_expert, _ = name.rpartition(".experts.")
        if name.endswith(".weight") and len(reader.info(name).shape) == 2 and "embed" not in name:
            plain.add(name.removesuffix(".weight"))
        # Layers for drafts keep theirs, under whatever names the readers have for them.
        if is_expert and block not in quantized_blocks:
            plain |= {f"{block}.experts", rf"re:{re.escape(block)}\.experts\."}
    is_float = quantize == "fp8"
    form = "float-quantized" if is_float else "pack-quantized"
    weights = {
        "num_bits": _BITS[quantize],
        "type": "float" if is_float else "int",
        "symmetric": True,
        "strategy": "channel" if is_float else "group",
        "group_size": None if is_float else group_size,
        "dynamic": False,
        "actorder": None,
    }
    # Readers that multiply 8-bit floats quantize the activations as they come.
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": dynamic if is_float else None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": sorted((plain - modules) | {"lm_head", _OUTSIDE}),
        "kv_cache_scheme": None,
    }


def _copy_the_rest(source: Path, target: Path) -> None:
    """All that is neither the model's weights nor code, in subfolders too.

    An adapter, and a subfolder with a config of its own, are other models, whose weights stay.
    """
    written = {"config.json", INDEX_NAME, *SETTINGS_BESIDE}
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "__"))]
        inside = Path(folder).relative_to(source)
        is_model = inside != Path() and "config.json" in names
        for name in names:
            file = Path(folder, name)
            is_other = name == _ADAPTER or (is_model and file.suffix == ".safetensors")
            is_data = not name.startswith(".") and (is_other or file.suffix not in (*_WEIGHTS, *_CODE))
            if not is_data or not file.is_file() or str(inside / name) in written:
                continue
            (target / inside).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / inside / name)
