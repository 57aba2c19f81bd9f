"""Loads one MoE layer from a checkpoint, reading only the byte ranges of this rank's experts.

A layer is planned first (plan.py), which checks every tensor against the files' headers. Then the data is read in file
order and handed to the layer's `weight_loader`, and the layer is finished when everything that it needs has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator
from typing import Any, NamedTuple

import torch

from moe_ep.activation import gate_limit
from moe_ep.arguments import check_tensors
from moe_ep.checkpoint.finite import MAY_BE_NONFINITE, CheckedCopy, check_finite
from moe_ep.checkpoint.formats import QuantizationConfig
from moe_ep.checkpoint.formats.layout import FLOATS, Role, TensorLayout
from moe_ep.checkpoint.plan import (
    ExpertTensors,
    Slot,
    Source,
    StoredTensor,
    check_source,
    check_tensor,
    expert_tensors,
    find_module,
    plan_layer,
    projection_size,
)
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.checkpoint.spec import Gate, MoEModelSpec
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import dequantize


class RouterWeights(NamedTuple):
    """The router of a layer: weight `[E, K]`, bias `[E]` of the logits, correction bias `[E]` of the choice.

    Identity experts have the last of its rows; they are in E here.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction_bias: torch.Tensor | None


class SharedExpertsWeights(NamedTuple):
    """The shared experts as one MLP: gate and up `[N, K]`, down `[K, N]`, and the `[1, K]` gate where there is one.

    up is None where they are ungated.
    """

    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    expert_gate: torch.Tensor | None


class LatentWeights(NamedTuple):
    """What is before and behind experts of another width: down `[L, K]`, up `[K, L]`, and the norm's `[L]` or None."""

    down: torch.Tensor
    up: torch.Tensor
    norm: torch.Tensor | None


def layer_options(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The keyword arguments of `FusedMoE` for one layer: sizes, activation, routing, quantization, correction bias.

    Args:
        dtype: of activations and plain weights; None for the config's.

    Raises:
        CheckpointError: experts that are quantized in ways that one layer cannot combine, more or fewer of them in the
            files than in the config, or a correction bias that is missing.
        ValueError: a layer without experts.
        TypeError: no reader, or no specification.
    """
    check_source(reader, spec)
    # Before a layer of those sizes is allocated.
    tensors = expert_tensors(reader, spec, layer_index)
    for role in tensors.roles:
        tensors.find(0, role)
    correction = _read_correction_bias(reader, spec, layer_index)
    return {
        "num_experts": spec.num_experts,
        "hidden_size": spec.expert_hidden_size,
        "intermediate_size": spec.moe_intermediate_size,
        "params_dtype": dtype or spec.dtype,
        "quant_config": tensors.quantization,
        "has_bias": spec.has_bias,
        "prefix": spec.moe_prefix(layer_index),
        "apply_router_weight_on_input": spec.routing.apply_router_weight_on_input,
        "e_score_correction_bias": None if correction is None else correction.float().to(torch.get_default_device()),
        **spec.gate(layer_index)._asdict(),
        **spec.select_experts_options(),
    }


def load_moe_layer(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, layer: Any, experts: Collection[int] | None = None
) -> None:
    """Loads this rank's experts of one layer into a `FusedMoE`, and finishes it for use.

    Args:
        layer: a `FusedMoE`; its parameters are named `w13_` or `w2_` and the last part of the tensors' names.
        experts: after `begin_reload`, the logical experts to load; None for all.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or dtype than the config says, or that the layer
            has no parameter for; more or fewer experts on disk than in the config. The layer is not finished then.
        ValueError: a layer without experts, or with another activation or limit than those of the checkpoint, fused
            shared experts that cannot be loaded as experts, or experts that do not exist.
        TypeError: experts that are no collection of whole numbers, no reader, no specification, or no layer.
        RuntimeError: quantized experts were loaded before, and `begin_reload` was not called; or only some experts are
            to be loaded, and none were before.
    """
    check_source(reader, spec)
    if not hasattr(layer, "make_expert_params_mapping"):
        kind = "None" if layer is None else f"a {type(layer).__name__}"
        raise TypeError(
            f"layer is {kind}; it must be a FusedMoE, as FusedMoE(**layer_options(reader, spec, {layer_index}))"
        )
    layer.check_open(spec.expert_prefix(layer_index))
    _check_gate(layer, spec, layer_index)
    plan = plan_layer(reader, spec, layer_index, layer, experts)
    loader = getattr(layer, "loader", None)
    if experts is not None and loader is not None and not loader.has_begun and loader.slots_loaded_again is None:
        raise RuntimeError(
            f"experts is {experts!r} and no weights of {layer.layer_name} were loaded before, so that the other "
            f"experts would have none; load all of them, without experts"
        )
    load_plan(reader, plan, layer, spec.expert_prefix(layer_index))


def load_plan(reader: CheckpointReader, plan: list[Source], layer: Any, what: str) -> None:
    """Loads what was planned for a layer, and finishes it for use.

    Args:
        what: the experts' name, for messages.

    Raises:
        CheckpointError: values that the layer cannot hold. The layer is not finished then.
    """
    params = dict(layer.named_parameters(recurse=False))
    copy = CheckedCopy(sum(source.info.nbytes for source in plan if source.info is not None))
    # A layer of another class copies in its own way, which looks at nothing.
    loader = getattr(layer, "loader", None)
    copied = {source.name for source in plan if loader and copy.is_fast and _is_copied(source, params)}
    with _copying(copy, loader, one_thread=not reader.in_memory):
        for source, raw in _read(reader, plan, copied):
            copy.looks = source.name in copied and not reader.allow_nonfinite
            for slot in source.slots:
                tensor = slot.layout.as_held(slot.tensor(raw))
                _check_values(reader, source, slot, tensor)
                if slot.param_name:
                    _hand_over(reader, source, slot, tensor, layer, params[slot.param_name])
            if copy.found and source.info is not None:
                check_finite(source.info.file, source.name, raw)
    try:
        layer.process_weights_after_loading()
    except CheckpointError as error:
        raise CheckpointError(f"{reader.index_file}: {what}: {error}") from None


def _check_gate(layer: Any, spec: MoEModelSpec, layer_index: int) -> None:
    made, gate = Gate(layer.activation, layer.moe_config.swiglu_limit), spec.gate(layer_index)
    if made.activation != gate.activation or gate_limit(*made) != gate_limit(*gate):
        raise ValueError(
            f"{spec.expert_prefix(layer_index)}: the layer's activation is {made.activation} with swiglu_limit "
            f"{made.swiglu_limit}, and that of the checkpoint is {gate.activation} with {gate.swiglu_limit}; make the "
            f"layer with **spec.gate({layer_index})._asdict()"
        )


def load_router(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> RouterWeights:
    """The router of one layer, in the dtypes on disk.

    Raises:
        CheckpointError: a missing tensor, or one of another shape.
        ConfigError: a router that is of another form.
    """
    E, correction_bias = spec.num_router_columns, spec.correction_bias(layer_index)
    router = _read_gate(reader, spec.router_weight(layer_index), (E, spec.hidden_size), beside=correction_bias)
    bias = _read_vector(reader, spec.router_bias(layer_index), E)
    return RouterWeights(router, bias, _read_correction_bias(reader, spec, layer_index))


def load_norm(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> torch.Tensor:
    """The weight `[K]` of the norm before the experts; CheckpointError where it is missing or misshapen.

    Weights that a family writes less one (`spec.norm_offset`) come whole, in f32; ones stand for a norm without any.
    """
    weight = _read_vector(reader, spec.norm_weight(layer_index), spec.hidden_size)
    if weight is None:
        return torch.ones(spec.hidden_size, dtype=torch.float32, device="cpu")
    return weight.float() + spec.norm_offset if spec.norm_offset else weight


def load_norm_bias(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> torch.Tensor | None:
    """The bias `[K]` of that norm; None where it has none."""
    return _read_vector(reader, spec.norm_bias(layer_index), spec.hidden_size)


def load_output_norm(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> torch.Tensor | None:
    """The weight `[K]` of the norm behind the experts; None where the family has none."""
    return _read_vector(reader, spec.output_norm_weight(layer_index), spec.hidden_size)


def load_shared_experts(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> SharedExpertsWeights | None:
    """The shared experts of one layer in f32, dequantized where they are quantized; None without any.

    The factor of their output is multiplied into the weights of down.

    Raises:
        CheckpointError: a tensor that is missing or has another shape.
    """
    prefix, shared = spec.shared_experts_prefix(layer_index), spec.shared_experts
    if prefix is None or shared is None:
        return None
    linears = _shared_linears(spec, layer_index)
    read = {role: read_linear(reader, *linear) for role, linear in linears.items()}
    gate, up = (read["gate"], read.get("up")) if shared.fused is None else read["gate"].chunk(2)
    expert_gate = _read_gate(reader, f"{prefix}_gate.weight", (1, spec.hidden_size)) if shared.has_gate else None
    return SharedExpertsWeights(gate, up, read["down"] * shared.factor, expert_gate)


def load_latent(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> LatentWeights | None:
    """The projections around routed experts of another width than the model, in f32; None where they have its width.

    Raises:
        CheckpointError: a tensor that is missing or has another shape.
    """
    if spec.latent is None:
        return None
    down, up = (read_linear(reader, *linear) for linear in _latent_linears(spec, layer_index).values())
    norm = _read_vector(reader, spec.latent_norm_weight(layer_index), spec.latent.size)
    return LatentWeights(down, up, norm)


def _latent_linears(spec: MoEModelSpec, layer_index: int) -> dict[str, tuple[str, tuple[int, int]]]:
    if spec.latent is None:
        return {}
    prefix, K, size = spec.moe_prefix(layer_index), spec.hidden_size, spec.latent.size
    return {"down": (f"{prefix}.{spec.latent.down}", (size, K)), "up": (f"{prefix}.{spec.latent.up}", (K, size))}


def check_beside_experts(reader: CheckpointReader, spec: MoEModelSpec) -> list[str]:
    """Finds what `load_router`, `load_norm` and the others read of all layers in the files' headers; no data is read.

    Returns:
        The tensors' names.

    Raises:
        CheckpointError: a tensor that is missing, or of another shape or dtype than the config says.
        ConfigError: a router that is of another form.
    """
    K, E = spec.hidden_size, spec.num_router_columns
    names: list[str] = []
    for layer in spec.router_layers:
        gates = {spec.router_weight(layer): (E, K)}
        if spec.shared_experts is not None and spec.shared_experts.has_gate:
            gates[f"{spec.shared_experts_prefix(layer)}_gate.weight"] = (1, K)
        vectors: dict[str | None, int] = dict.fromkeys((spec.norm_weight(layer), spec.norm_bias(layer)), K)
        vectors |= {spec.output_norm_weight(layer): K, spec.router_bias(layer): E}
        vectors[spec.latent_norm_weight(layer)] = spec.expert_hidden_size
        if (correction := spec.correction_bias(layer)) and (correction in reader or not spec.correction_bias_may_miss):
            vectors[correction] = E
        plain: dict[str, tuple[int, ...]] = {name: (size,) for name, size in vectors.items() if name is not None}
        plain |= {name: size for name, size in gates.items() if _is_plain(reader, name)}
        for name, shape in plain.items():
            check_tensor(reader.info(name), TensorLayout(FLOATS, shape))
        names += plain
        linears = {name.removesuffix(".weight"): size for name, size in gates.items() if name not in plain}
        modules = (*_shared_linears(spec, layer).values(), *_latent_linears(spec, layer).values())
        for module, size in {**linears, **dict(modules)}.items():
            _, found = find_module(reader, module, size, beside=spec.correction_bias(layer))
            names += [stored.info.name for stored in found.values()]
    return names


def _shared_linears(spec: MoEModelSpec, layer_index: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """The modules of the shared experts and their sizes; gate is both gate and up where these are one."""
    prefix, shared = spec.shared_experts_prefix(layer_index), spec.shared_experts
    if prefix is None or shared is None:
        return {}
    K, N = spec.hidden_size, shared.intermediate_size
    if shared.fused is not None:
        gate_up, down = shared.fused
        return {"gate": (f"{prefix}.{gate_up}", (2 * N, K)), "down": (f"{prefix}.{down}", (K, N))}
    return {
        role: (f"{prefix}.{name}", projection_size(role, K, N))
        for role, name in spec.shared_projections().by_role().items()
    }


def embed_rows(reader: CheckpointReader, spec: MoEModelSpec, token_ids: torch.Tensor) -> torch.Tensor:
    """The embeddings `[..., K]` of token ids `[...]`; only their rows are read.

    Raises:
        ValueError: token ids that are no integer tensor, or an id outside the vocabulary.
        CheckpointError: an embedding table that is missing or has another shape than the config says.
    """
    check_tensors(token_ids=token_ids)
    check_tensor(reader.info(spec.embedding), TensorLayout(FLOATS, (spec.vocab_size, spec.hidden_size)))
    rows = reader.read_rows(spec.embedding, token_ids.flatten())
    return rows.view(*token_ids.shape, spec.hidden_size) * spec.embedding_multiplier


def _is_copied(source: Source, params: dict[str, torch.nn.Parameter]) -> bool:
    """Whether a tensor goes byte by byte into parameters in host memory, so that it can be checked as it is copied."""
    return source.info is not None and all(
        slot.param_name
        and not (slot.part or (slot.stored is not None and (slot.stored.part or slot.stored.transposed)))
        and params[slot.param_name].is_cpu
        and params[slot.param_name].dtype == source.info.dtype
        for slot in source.slots
    )


@contextlib.contextmanager
def _copying(copy: CheckedCopy, loader: Any, one_thread: bool) -> Iterator[None]:
    """The layer's loader copies by `copy`, on one thread.

    One thread keeps up with any disk; more would spin while they wait, on cores that the reading threads need.
    """
    own_copy, num_threads = getattr(loader, "copy", None), torch.get_num_threads()
    if loader is not None:
        loader.copy = copy
    if one_thread:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        if loader is not None:
            loader.copy = own_copy


def _read(
    reader: CheckpointReader, plan: list[Source], unchecked: Container[str]
) -> Iterator[tuple[Source, torch.Tensor]]:
    """The tensors of a plan in file order, then the stand-ins for those that were left out."""
    by_name = {source.name: source for source in plan}
    infos = [source.info for source in plan if source.info is not None]
    for name, tensor in reader.read_many(infos, reuse_buffers=True, unchecked=unchecked):
        yield by_name[name], tensor
    for source in plan:
        if source.info is None:
            yield source, source.default()


def _check_values(reader: CheckpointReader, source: Source, slot: Slot, tensor: torch.Tensor) -> None:
    """CheckpointError for scales that are no numbers, and for what the layer cannot hold unless it says nothing."""
    where = f"{reader.index_file if source.info is None else source.info.file}: tensor {source.name}"
    default = slot.layout.default
    if not slot.param_name and (default is None or not torch.equal(tensor, default().to(tensor))):
        if slot.layout.role is Role.CHECKED and default is not None:
            raise CheckpointError(f"{where}: expected {default().tolist()}, found {tensor.flatten()[:4].tolist()}")
        raise CheckpointError(
            f"{where}: expected a parameter of the layer for it, found none, and it cannot be left out"
        )
    # Exponents that are stored as bytes are numbers only now, and a scale may be too large for another dtype.
    if tensor.dtype == torch.uint8 and slot.layout.role is Role.GROUPS:
        tensor = tensor.view(torch.float8_e8m0fnu)
    is_checked = source.info is not None and source.info.dtype == tensor.dtype in MAY_BE_NONFINITE
    if slot.layout.role is Role.GROUPS and not (is_checked or reader.allow_nonfinite):
        check_finite(reader.index_file if source.info is None else source.info.file, source.name, tensor)


def _hand_over(
    reader: CheckpointReader, source: Source, slot: Slot, tensor: torch.Tensor, layer: Any, param: torch.Tensor
) -> None:
    if tensor.dtype in (torch.float8_e8m0fnu, torch.int8) and param.dtype == torch.uint8:
        tensor = tensor.view(torch.uint8)  # the bits of such scales, and of two codes
    try:
        taken = layer.weight_loader(param, tensor, source.name, slot.shard_id, slot.expert_id, return_success=True)
    except ValueError as error:
        if slot.layout.role is not Role.INDEX:
            raise
        # Gate and up have one index, and a file may hold two that differ.
        raise CheckpointError(f"{reader.index_file}: {error}") from None
    if not taken:
        raise CheckpointError(
            f"{reader.index_file}: tensor {source.name}: expected the layer to take it as {slot.shard_id} of "
            f"{slot.param_name} for its local expert {slot.expert_id}, found that it did not"
        )


def _read_plain(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """There may be more or fewer dimensions of 1: Ernie writes a correction bias `[1, E]`."""
    check_tensor(reader.info(name), TensorLayout(FLOATS, shape))
    return reader.read(name).view(shape)


def _read_vector(reader: CheckpointReader, name: str | None, size: int) -> torch.Tensor | None:
    return None if name is None else _read_plain(reader, name, (size,))


def _read_correction_bias(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> torch.Tensor | None:
    name = spec.correction_bias(layer_index)
    if name is not None and spec.correction_bias_may_miss and name not in reader:
        return torch.zeros(spec.num_router_columns, dtype=torch.float32, device="cpu")
    return _read_vector(reader, name, spec.num_router_columns)


def _read_gate(reader: CheckpointReader, name: str, size: tuple[int, int], beside: str | None = None) -> torch.Tensor:
    """A router or a shared expert's gate; some writers quantize them as any other linear layer."""
    if _is_plain(reader, name):
        return _read_plain(reader, name, size)
    return read_linear(reader, name.removesuffix(".weight"), size, beside=beside)


def _is_plain(reader: CheckpointReader, name: str) -> bool:
    return name in reader and reader.info(name).dtype in FLOATS


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
        matrices[role], biases[role] = _read_matrix(reader, tensors.scheme(role), tensors.find(expert, role))
    return ExpertMatrices(
        matrices["gate"], matrices.get("up"), matrices["down"], biases["gate"], biases.get("up"), biases["down"]
    )


def _read_matrix(
    reader: CheckpointReader,
    scheme: QuantizationConfig | None,
    found: dict[str, StoredTensor],
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
        beside: a tensor of the module that is no part of the linear layer.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or dtype than its format says.
    """
    scheme, found = find_module(reader, module, size, beside)
    return _read_matrix(reader, scheme, found, device)[0]
