"""What a rank reads of a layer's experts and where it goes, decided and checked before any data is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moe_ep.checkpoint.formats.layout import QuantizationConfig, TensorLayout, plain_tensors
from moe_ep.checkpoint.models import MoEModelSpec
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.errors import CheckpointError


@dataclass(frozen=True)
class Slot:
    """One call of `weight_loader`.

    Attributes:
        param_name: the layer's parameter.
        shard_id: w1, w2 or w3.
        expert_id: physical expert; fused shared ones follow the redundant ones.
        part: the part of the tensor on disk that this expert is; empty for all of it.
    """

    param_name: str
    shard_id: str
    expert_id: int
    part: tuple[slice, ...] = ()


@dataclass
class Source:
    """A tensor on disk, or what stands for it where it was left out, and the slots that take it.

    Without slots the layer has no parameter for the tensor, which is right only if it equals `layout.default`.
    """

    name: str
    layout: TensorLayout
    on_disk: bool
    slots: list[Slot] = field(default_factory=list)


def plan_layer(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: QuantizationConfig | None,
) -> list[Source]:
    """The sources of all experts that this rank holds, each once.

    Raises:
        CheckpointError: more or fewer experts on disk than in the config, a tensor that is missing, of another shape or
            dtype than the config says, or that the layer has no parameter for.
        ValueError: fused shared experts that cannot be loaded as experts.
    """
    _check_expert_count(reader, spec, layer_index)
    params = [name for name, _ in layer.named_parameters(recurse=False)]
    sources: dict[str, Source] = {}
    for linear in _linears(spec, layer_index, layer, quantization):
        whole, expert = _layouts(quantization, linear.size), _layouts(quantization, linear.expert_size)
        wanted = {name.removeprefix(linear.param_prefix) for name in params if name.startswith(linear.param_prefix)}
        found = {name.removeprefix(linear.stem) for name in reader.names(linear.stem)}
        for suffix in sorted(wanted | found | whole.keys()):
            name, layout = linear.stem + suffix, whole.get(suffix)
            if suffix in found:
                if layout is None:
                    raise _unknown_tensor(reader, name, whole)
                check_tensor(reader, name, layout)
            elif layout is None or layout.default is None:
                raise CheckpointError(f"{reader.index_file}: expected tensor {name}, found none of that name")
            elif suffix not in wanted:
                continue
            source = sources.setdefault(name, Source(name, layout, suffix in found))
            if suffix in wanted:
                part = _part(whole[suffix].shape, expert[suffix].shape, linear.index)
                source.slots.append(Slot(linear.param_prefix + suffix, linear.shard_id, linear.expert_id, part))
    return list(sources.values())


def check_tensor(reader: CheckpointReader, name: str, layout: TensorLayout) -> None:
    """CheckpointError unless the tensor is there in the layout's shape and one of its dtypes."""
    info = reader.info(name)
    if info.shape != layout.shape:
        raise CheckpointError(f"{info.file}: tensor {name}: expected shape {layout.shape}, found {info.shape}")
    if info.dtype not in layout.dtypes:
        expected = " or ".join(map(str, layout.dtypes))
        raise CheckpointError(f"{info.file}: tensor {name}: expected {expected}, found {info.dtype}")


def projection_size(role: str, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
    """`(out_features, in_features)` of gate, up or down."""
    return (hidden_size, intermediate_size) if role == "down" else (intermediate_size, hidden_size)


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """One linear layer of one physical expert: its tensors on disk are `stem` + suffix.

    Attributes:
        size: `(out_features, in_features)` on disk.
        expert_size: the same of the expert, smaller where several experts share the tensors.
        index: which of them this is.
    """

    stem: str
    param_prefix: str
    shard_id: str
    expert_id: int
    size: tuple[int, int]
    expert_size: tuple[int, int]
    index: int = 0


def _linears(
    spec: MoEModelSpec, layer_index: int, layer: Any, quantization: QuantizationConfig | None
) -> Iterator[_Linear]:
    projections = spec.projections
    roles = {name: role for role, name in projections._asdict().items()}
    shards: dict[str, tuple[str, str]] = {}
    rows = layer.make_expert_params_mapping(
        projections.gate, projections.down, projections.up, spec.num_experts, layer.num_redundant_experts
    )
    for param_name, weight_name, expert_id, shard_id in rows:
        role = roles[weight_name.removesuffix(".").rsplit(".", 1)[-1]]
        param_prefix = param_name.removeprefix("experts.")
        shards[role] = (param_prefix, shard_id)
        if layer.is_local_expert(expert_id):
            size = projection_size(role, spec.hidden_size, spec.moe_intermediate_size)
            yield _Linear(
                stem=f"{spec.moe_prefix(layer_index)}.{weight_name}",
                param_prefix=param_prefix,
                shard_id=shard_id,
                expert_id=expert_id,
                size=size,
                expert_size=size,
            )
    if layer.num_fused_shared_experts:
        yield from _fused_shared_linears(spec, layer_index, layer, quantization, shards)


def _fused_shared_linears(
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: QuantizationConfig | None,
    shards: dict[str, tuple[str, str]],
) -> Iterator[_Linear]:
    """Shared experts that the layer computes as experts of its own, behind the routed ones."""
    shared, count = spec.shared_experts, layer.num_fused_shared_experts
    way_out = "make the layer without n_shared_experts and use load_shared_experts"
    if shared is None or shared.num_experts != count or shared.has_gate:
        found = "none" if shared is None else f"{shared.num_experts}{' with a gate' if shared.has_gate else ''}"
        raise ValueError(f"n_shared_experts is {count} and a {spec.family} layer has {found} to fuse; {way_out}")
    if quantization is not None and count > 1:
        raise ValueError(f"n_shared_experts is {count}; quantized shared experts on disk are not divided: {way_out}")
    for index in range(count):
        for role, name in spec.projections._asdict().items():
            param_prefix, shard_id = shards[role]
            yield _Linear(
                stem=f"{spec.shared_experts_prefix(layer_index)}.{name}.",
                param_prefix=param_prefix,
                shard_id=shard_id,
                expert_id=spec.num_experts + layer.num_redundant_experts + index,
                size=projection_size(role, spec.hidden_size, shared.intermediate_size),
                expert_size=projection_size(role, spec.hidden_size, shared.intermediate_size // count),
                index=index,
            )


def _layouts(quantization: QuantizationConfig | None, size: tuple[int, int]) -> dict[str, TensorLayout]:
    return plain_tensors(*size) if quantization is None else quantization.tensors(*size)


def _part(whole: tuple[int, ...], expert: tuple[int, ...], index: int) -> tuple[slice, ...]:
    """The expert's part of a tensor that holds several side by side."""
    if whole == expert:
        return ()
    return tuple(
        slice(None) if total == size else slice(index * size, (index + 1) * size)
        for total, size in zip(whole, expert, strict=True)
    )


def _unknown_tensor(reader: CheckpointReader, name: str, layouts: dict[str, TensorLayout]) -> CheckpointError:
    return CheckpointError(
        f"{reader.info(name).file}: tensor {name}: expected only {', '.join(layouts)} of an expert's projection, as "
        f"quantization_config in config.json says"
    )


def _check_expert_count(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> None:
    prefix = spec.expert_prefix(layer_index) + "."
    parts = {name[len(prefix) :].split(".", 1)[0] for name in reader.names(prefix)}
    found = {int(part) for part in parts if part.isdecimal()}
    expected = set(range(spec.num_experts))
    if found != expected:
        first = min(found ^ expected)
        kind = "not in the config" if first in found else "missing"
        raise CheckpointError(
            f"{reader.index_file}: {prefix}*: expected {spec.num_experts} experts as config.json says, "
            f"found {len(found)}; expert {first} is {kind}"
        )
