"""What a rank reads of a layer's experts and where it goes, decided and checked before any data is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ep.checkpoint.formats import LayerQuantization
from moe_ep.checkpoint.formats.layout import Role, TensorLayout
from moe_ep.checkpoint.reader import CheckpointReader, TensorInfo
from moe_ep.checkpoint.spec import MoEModelSpec
from moe_ep.checkpoint.stored import ExpertTensors, Stored, find_linear, linear_layouts, projection_size
from moe_ep.errors import CheckpointError


@dataclass(frozen=True)
class Slot:
    """One call of `weight_loader`, or a check that a tensor says nothing, where the layer has no parameter for it.

    Attributes:
        param_name: the layer's parameter; empty for a tensor that must equal its layout's default.
        shard_id: w1, w2 or w3.
        expert_id: physical expert; fused shared ones follow the redundant ones.
        layout: of the tensor.
        stored: how it is taken out of what is read; None for the default.
        part: the part of the tensor that this expert is; empty for all of it.
    """

    param_name: str
    shard_id: str
    expert_id: int
    layout: TensorLayout
    stored: Stored | None
    part: tuple[slice, ...] = ()

    def tensor(self, raw: torch.Tensor) -> torch.Tensor:
        """What the parameter takes."""
        tensor = raw if self.stored is None else self.stored.tensor(raw)
        return tensor[self.part] if self.part else tensor


@dataclass
class Source:
    """A range of bytes on disk, or what stands for a tensor that was left out, and the slots that take it.

    Attributes:
        name: of the tensor; `name[i]` for an index of its leading dimension.
        info: where it lies; None where it was left out.
    """

    name: str
    info: TensorInfo | None
    slots: list[Slot] = field(default_factory=list)

    def default(self) -> torch.Tensor:
        """What stands for a tensor that was left out; a plan has no other ones without a place on disk."""
        return self.slots[0].layout.default()  # type: ignore[misc]


def plan_layer(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: LayerQuantization | None,
) -> list[Source]:
    """The sources of all experts that this rank holds, each once.

    Args:
        quantization: of this layer's experts, as `layer_quantization` gives it.

    Raises:
        CheckpointError: more or fewer experts on disk than in the config, a tensor that is missing, of another shape or
            dtype than the config says, or that the layer has no parameter for.
        ValueError: fused shared experts that cannot be loaded as experts.
    """
    params = [name for name, _ in layer.named_parameters(recurse=False)]
    sources: dict[str, Source] = {}
    for linear in _linears(reader, spec, layer_index, layer, quantization):
        wanted = {name.removeprefix(linear.param_prefix) for name in params if name.startswith(linear.param_prefix)}
        for suffix in sorted(wanted | linear.found.keys() | linear.layouts.keys()):
            stored, layout = linear.found.get(suffix), linear.layouts.get(suffix)
            if layout is not None and layout.role is Role.UNUSED:
                continue
            name = linear.names[suffix] if suffix in linear.names else linear.stem + suffix
            if layout is None or (stored is None and layout.default is None):
                other = "; the layer is for other experts: use moe_ep.stack.layer_quant_config and spec.has_bias"
                raise CheckpointError(
                    f"{reader.index_file}: expected tensor {name}, found none of that name{'' if layout else other}"
                )
            if stored is None and suffix not in wanted:
                continue
            key = f"{linear.stem}{suffix}" if stored is None else stored.info.name
            source = sources.setdefault(key, Source(key, None if stored is None else stored.info))
            param_name = linear.param_prefix + suffix if suffix in wanted else ""
            part = _part(layout.shape, linear.expert_layouts[suffix].shape, linear.index)
            source.slots.append(Slot(param_name, linear.shard_id, linear.expert_id, layout, stored, part))
    return list(sources.values())


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """One linear layer of one physical expert.

    Attributes:
        found: its tensors on disk by suffix; stem + suffix is what one would be called, unless names says otherwise.
        layouts: of all tensors that it may have.
        expert_layouts: of the expert's part of them, smaller where several experts share the tensors.
        index: which of these this is.
    """

    stem: str
    names: dict[str, str]
    found: dict[str, Stored]
    param_prefix: str
    shard_id: str
    expert_id: int
    layouts: dict[str, TensorLayout]
    expert_layouts: dict[str, TensorLayout]
    index: int = 0


def _linears(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: LayerQuantization | None,
) -> Iterator[_Linear]:
    experts = ExpertTensors(reader, spec, layer_index, quantization)
    projections = spec.projections
    roles = {name: role for role, name in projections.by_role().items()}
    shards: dict[str, tuple[str, str]] = {}
    rows = layer.make_expert_params_mapping(
        projections.gate, projections.down, projections.up, spec.num_experts, layer.num_redundant_experts
    )
    for param_name, weight_name, expert_id, shard_id in rows:
        role = roles[weight_name.removesuffix(".").rsplit(".", 1)[-1]]
        param_prefix = param_name.removeprefix("experts.")
        shards[role] = (param_prefix, shard_id)
        if layer.is_local_expert(expert_id):
            expert, layouts = expert_id % spec.num_experts, experts.layouts(role)
            yield _Linear(
                stem=f"{spec.moe_prefix(layer_index)}.{weight_name}",
                names={suffix: experts.name(expert, role, suffix) for suffix in layouts},
                found=experts.find(expert, role),
                param_prefix=param_prefix,
                shard_id=shard_id,
                expert_id=expert_id,
                layouts=layouts,
                expert_layouts=layouts,
            )
    if layer.num_fused_shared_experts:
        yield from _fused_shared_linears(reader, spec, layer_index, layer, quantization, shards)


def _fused_shared_linears(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: LayerQuantization | None,
    shards: dict[str, tuple[str, str]],
) -> Iterator[_Linear]:
    """Shared experts that the layer computes as experts of its own, behind the routed ones."""
    shared, count = spec.shared_experts, layer.num_fused_shared_experts
    way_out = "make the layer without n_shared_experts and use load_shared_experts"
    found = "none"
    if shared is not None:
        forms = {
            " with a gate": shared.has_gate,
            " whose gate and up are one": shared.fused,
            f" times {shared.factor:g}": shared.factor != 1,
            " of another width": spec.latent is not None,
            " of another activation": spec.shared_gate(layer_index) != spec.gate(layer_index),
        }
        form = next((words for words, has in forms.items() if has), "")
        found = f"{shared.num_experts}{form}"
    if shared is None or found != str(count):
        raise ValueError(f"n_shared_experts is {count} and a {spec.family} layer has {found} to fuse; {way_out}")
    if quantization is not None and count > 1:
        raise ValueError(f"n_shared_experts is {count}; quantized shared experts on disk are not divided: {way_out}")
    for index in range(count):
        for role, name in spec.shared_projections().by_role().items():
            param_prefix, shard_id = shards[role]
            stem = f"{spec.shared_experts_prefix(layer_index)}.{name}."
            size = projection_size(role, spec.hidden_size, shared.intermediate_size)
            part = projection_size(role, spec.hidden_size, shared.intermediate_size // count)
            layouts = linear_layouts(quantization, role, size)
            yield _Linear(
                stem=stem,
                names={},
                found=find_linear(reader, stem, layouts),
                param_prefix=param_prefix,
                shard_id=shard_id,
                expert_id=spec.num_experts + layer.num_redundant_experts + index,
                layouts=layouts,
                expert_layouts=linear_layouts(quantization, role, part),
                index=index,
            )


def _part(whole: tuple[int, ...], expert: tuple[int, ...], index: int) -> tuple[slice, ...]:
    """The expert's part of a tensor that holds several side by side."""
    if whole == expert:
        return ()
    return tuple(
        slice(None) if total == size else slice(index * size, (index + 1) * size)
        for total, size in zip(whole, expert, strict=True)
    )
