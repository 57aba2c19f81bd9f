"""Single linear layers and experts as plain matrices in f32, whichever way they are on disk."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_ep.checkpoint.formats import QuantizationConfig
from moe_ep.checkpoint.formats.layout import FLOATS, Role, TensorLayout
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.checkpoint.spec import MoEModelSpec
from moe_ep.checkpoint.stored import ExpertTensors, Stored, find_linear, layer_quantization, linear_layouts
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import dequantize


class ExpertMatrices(NamedTuple):
    """One expert in f32, whatever it is on disk: gate and up `[N, K]`, down `[K, N]`, biases or None.

    up is None where the expert is ungated.
    """

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def read_expert(reader: CheckpointReader, tensors: ExpertTensors, expert: int) -> ExpertMatrices:
    """One expert of a layer, dequantized: `read_expert(reader, expert_tensors(reader, spec, layer), 3)`.

    Raises:
        CheckpointError: a tensor that is missing.
    """
    matrices: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor | None] = {}
    for role in tensors.roles:
        found = tensors.find(expert, role)
        for suffix in _missing(tensors.layouts(role), found):
            raise _none_of_that_name(reader, tensors.name(expert, role, suffix))
        matrices[role], biases[role] = _read_matrix(reader, tensors.scheme(role), found)
    return ExpertMatrices(
        matrices["gate"], matrices.get("up"), matrices["down"], biases["gate"], biases.get("up"), biases["down"]
    )


def expert_tensors(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> ExpertTensors:
    """Where the experts of one layer lie, in the format that config.json says; CheckpointError where they do not."""
    quantization = layer_quantization(reader.quantization, spec, layer_index)
    return ExpertTensors(reader, spec, layer_index, quantization)


def _missing(layouts: dict[str, TensorLayout], found: dict[str, Stored]) -> list[str]:
    return [suffix for suffix, layout in layouts.items() if suffix not in found and layout.default is None]


def _none_of_that_name(reader: CheckpointReader, name: str) -> CheckpointError:
    return CheckpointError(f"{reader.index_file}: expected tensor {name}, found none of that name")


def _read_matrix(
    reader: CheckpointReader,
    scheme: QuantizationConfig | None,
    found: dict[str, Stored],
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values in f32 and the bias of a linear layer, from its tensors on disk; unpacked on the device."""
    used = {suffix: stored for suffix, stored in found.items() if stored.layout.role not in (Role.CHECKED, Role.UNUSED)}
    by_info = {stored.info.name: stored.info for stored in used.values()}
    raw = {name: tensor.clone() for name, tensor in reader.read_many(by_info.values())}
    tensors = {suffix: stored.tensor(raw[stored.info.name]) for suffix, stored in used.items()}
    bias = tensors.pop("bias", None)
    if scheme is None:
        return tensors["weight"].to(device).float(), bias
    held = {suffix: used[suffix].layout.as_held(tensor).to(device) for suffix, tensor in tensors.items()}
    return dequantize(scheme.unpack(held)), bias


def check_experts(reader: CheckpointReader, spec: MoEModelSpec) -> None:
    """Finds every tensor of every expert of a checkpoint in the files' headers; no data is read.

    Raises:
        CheckpointError: a tensor that is missing, or of another shape or dtype than the config says; a quantization or
            a form of experts that is not read.
    """
    for layer in spec.moe_layers:
        tensors = expert_tensors(reader, spec, layer)
        for role in tensors.roles:
            layouts = tensors.layouts(role)
            found = [tensors.find(expert, role) for expert in range(spec.num_experts)]
            # The groups of columns may be left out, but then of all experts.
            groups = {suffix for each in found for suffix in each if layouts[suffix].role is Role.INDEX}
            for expert, of_expert in enumerate(found):
                for suffix in _missing(layouts, of_expert) + sorted(groups - of_expert.keys()):
                    raise _none_of_that_name(reader, tensors.name(expert, role, suffix))


def read_linear(
    reader: CheckpointReader,
    module: str,
    size: tuple[int, int],
    device: torch.device | str = "cpu",
    beside: str | None = None,
) -> torch.Tensor:
    """The weight of a linear layer in f32, by the module's name; parts of a quantized model may be plain.

    Args:
        size: (out_features, in_features).
        device: where it is unpacked and stays.
        beside: a tensor of the module that is no part of the linear layer.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or dtype than its format says.
    """
    scheme, found = find_module(reader, module, size, beside)
    return _read_matrix(reader, scheme, found, device)[0]


def find_module(
    reader: CheckpointReader, module: str, size: tuple[int, int], beside: str | None = None
) -> tuple[QuantizationConfig | None, dict[str, Stored]]:
    """How the linear layer of that name is quantized, and its tensors by the last part of their names; no data is read.

    Raises:
        CheckpointError: as `read_linear`.
    """
    stem, quantization = module + ".", reader.quantization
    is_plain = stem + "weight" in reader and reader.info(stem + "weight").dtype in FLOATS
    scheme = None if quantization is None or is_plain else quantization.of_module(module)
    layouts = linear_layouts(scheme, "gate", size)
    found = find_linear(reader, stem, layouts, beside)
    for suffix in _missing(layouts, found):
        raise _none_of_that_name(reader, stem + suffix)
    return scheme, found
