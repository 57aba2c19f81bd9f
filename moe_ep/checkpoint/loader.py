"""Feeds one MoE layer from a checkpoint: the experts this rank holds, and of the others not a byte.

The plan (plan.py) is checked against the files' headers first; then data is read in file order and handed to the
layer's `weight_loader`; and the layer is finished only when everything it needs has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from moe_ep.checkpoint.formats import QuantizationConfig, dequantize, quantization_config
from moe_ep.checkpoint.formats.layout import FLOATS, TensorLayout, plain_tensors
from moe_ep.checkpoint.models import MoEModelSpec
from moe_ep.checkpoint.plan import Source, check_tensor, plan_layer, projection_size
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.errors import CheckpointError


class RouterWeights(NamedTuple):
    """The router of a layer: weight `[E, K]`, bias `[E]` of the logits, correction bias `[E]` of the choice."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction_bias: torch.Tensor | None


class SharedExpertsWeights(NamedTuple):
    """The shared experts as one MLP: gate and up `[N, K]`, down `[K, N]`, and the `[1, K]` gate where there is one."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    expert_gate: torch.Tensor | None


def load_moe_layer(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, layer: Any) -> None:
    """Loads this rank's experts of one layer into a `FusedMoE`, and finishes it for use.

    Args:
        layer: a `FusedMoE`; its parameters are named `w13_` or `w2_` and the last part of the tensors' names.

    Raises:
        CheckpointError: a tensor that is missing, of another shape or dtype than the config says, or that the layer
            has no parameter for; more or fewer experts on disk than in the config. The layer is not finished then.
        ValueError: a layer without experts, or fused shared experts that cannot be loaded as experts.
    """
    plan = plan_layer(reader, spec, layer_index, layer, quantization_config(reader.config))
    params = dict(layer.named_parameters(recurse=False))
    with _one_copying_thread():
        for source, tensor in _read(reader, plan):
            if not source.slots:
                _check_says_nothing(reader, source, tensor)
            for slot in source.slots:
                part = tensor[slot.part] if slot.part else tensor
                param = params[slot.param_name]
                if not layer.weight_loader(
                    param, part, source.name, slot.shard_id, slot.expert_id, return_success=True
                ):
                    raise CheckpointError(
                        f"{reader.index_file}: tensor {source.name}: expected the layer to take it as {slot.shard_id} "
                        f"of {slot.param_name} for its local expert {slot.expert_id}, found that it did not"
                    )
    try:
        layer.process_weights_after_loading()
    except CheckpointError as error:
        raise CheckpointError(f"{reader.index_file}: {spec.expert_prefix(layer_index)}: {error}") from None


def load_router(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> RouterWeights:
    """The router of one layer, in the dtypes on disk; CheckpointError for a missing tensor or another shape."""
    bias, correction_bias = spec.router_bias(layer_index), spec.correction_bias(layer_index)
    per_expert = (spec.num_experts,)
    return RouterWeights(
        weight=_read_plain(reader, spec.router_weight(layer_index), (spec.num_experts, spec.hidden_size)),
        bias=None if bias is None else _read_plain(reader, bias, per_expert),
        correction_bias=None if correction_bias is None else _read_plain(reader, correction_bias, per_expert),
    )


def load_norm(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> torch.Tensor:
    """The weight `[K]` of the RMS norm before the experts; CheckpointError where it is missing or misshapen."""
    return _read_plain(reader, spec.norm_weight(layer_index), (spec.hidden_size,))


def load_shared_experts(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> SharedExpertsWeights | None:
    """The shared experts of one layer as plain weights, dequantized where they are quantized; None without any.

    Raises:
        CheckpointError: a tensor that is missing or has another shape.
    """
    prefix, shared = spec.shared_experts_prefix(layer_index), spec.shared_experts
    if prefix is None or shared is None:
        return None
    quantization = quantization_config(reader.config)
    gate, down, up = (
        _read_linear(
            reader,
            f"{prefix}.{name}.",
            projection_size(role, spec.hidden_size, shared.intermediate_size),
            quantization,
            spec.dtype,
        )
        for role, name in spec.projections._asdict().items()
    )
    expert_gate = _read_plain(reader, f"{prefix}_gate.weight", (1, spec.hidden_size)) if shared.has_gate else None
    return SharedExpertsWeights(gate, up, down, expert_gate)


def embed_rows(reader: CheckpointReader, spec: MoEModelSpec, token_ids: torch.Tensor) -> torch.Tensor:
    """The embeddings `[..., K]` of token ids `[...]`; only their rows are read.

    Raises:
        ValueError: an id outside the vocabulary.
        CheckpointError: an embedding table that is missing or has another shape than the config says.
    """
    check_tensor(reader, spec.embedding, TensorLayout(FLOATS, (spec.vocab_size, spec.hidden_size)))
    rows = reader.read_rows(spec.embedding, token_ids.flatten())
    return rows.view(*token_ids.shape, spec.hidden_size)


def _read(reader: CheckpointReader, plan: list[Source]) -> Iterator[tuple[Source, torch.Tensor]]:
    """The tensors of a plan in file order, then the stand-ins for those that were left out."""
    by_name = {source.name: source for source in plan if source.on_disk}
    for name, tensor in reader.read_many(by_name, reuse_buffers=True):
        yield by_name[name], tensor
    for source in plan:
        if not source.on_disk and source.layout.default is not None:
            yield source, source.layout.default()


@contextlib.contextmanager
def _one_copying_thread() -> Iterator[None]:
    """One thread keeps up with any disk; more would spin while they wait, on cores that the reading threads need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_says_nothing(reader: CheckpointReader, source: Source, tensor: torch.Tensor) -> None:
    default = source.layout.default
    if default is None or not torch.equal(tensor, default().to(tensor.dtype)):
        raise CheckpointError(
            f"{reader.info(source.name).file}: tensor {source.name}: expected a parameter of the layer for it, found "
            f"none, and it cannot be left out"
        )


def _read_plain(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    check_tensor(reader, name, TensorLayout(FLOATS, shape))
    return reader.read(name)


def _read_linear(
    reader: CheckpointReader,
    stem: str,
    size: tuple[int, int],
    quantization: QuantizationConfig | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A linear layer as a plain weight, whichever way it is on disk: parts of a quantized model may be plain."""
    if quantization is None or stem + "weight" in reader:
        return _read_plain(reader, stem + "weight", plain_tensors(*size)["weight"].shape)
    tensors = {}
    for suffix, layout in quantization.tensors(*size).items():
        if stem + suffix in reader or layout.default is None:
            check_tensor(reader, stem + suffix, layout)
            tensors[suffix] = reader.read(stem + suffix)
    return dequantize(quantization.unpack(tensors)).to(dtype)
