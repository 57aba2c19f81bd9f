"""A slow and plain reference for a MoE layer, with which the results of a run are compared.

It shares with the layer the reader of bytes, the names of tensors and settings in the checkpoint (`MoEModelSpec`), and
the decoders of number formats, which have tests of their own. Routing, activations, shared experts and latent
projections are written here again, in f32, for one expert at a time. Where `--quantize` quantizes weights on load, the
reference takes the values that they were quantized to, or those on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear, pad

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import CheckpointReader, ExpertMatrices, MoEModelSpec, expert_tensors, read_expert, read_linear
from moe_ep.checkpoint.spec import Gate
from moe_ep.errors import ConfigError

# The max |difference| / max |reference| of a layer that rounding and the order of sums can cause, by the dtype of the
# activations.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_INPUT_TOLERANCES = {None: 0.0, torch.int8: 0.05, torch.float8_e4m3fn: 0.1}


def tolerance(dtype: torch.dtype, input_dtype: torch.dtype | None = None) -> float:
    """The largest `max_relative_error` that a correct layer computing in `dtype` can have, where experts may round rows
    to `input_dtype`."""
    return max(_TOLERANCES[dtype], _INPUT_TOLERANCES[input_dtype])


def max_relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """max |output - reference| / max |reference| in f32; 0 without elements, infinite if it is not a finite number."""
    if not reference.numel():
        return 0.0
    error = (output.float() - reference).abs().max() / reference.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float(error) if torch.isfinite(error) else float("inf")


def reference_moe(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    hidden_states: torch.Tensor,
    online: Callable[[torch.Tensor], torch.Tensor] | None = None,
    router_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the output f32 `[T, K]` of one MoE layer, including shared experts, from its inputs `[T, K]`.

    Only experts that a token uses are read, one at a time.

    Args:
        online: if plain experts were quantized on load, returns the f32 values that a plain matrix was quantized to.
        router_logits: f32 `[T, E]`, used instead of the router's.
    """
    x = hidden_states.float()
    weights, ids = _route(reader, spec, layer_index, x, router_logits)
    read = x if spec.latent is None else linear(x, _latent(reader, spec, layer_index, "down").to(x))
    output = torch.zeros_like(read)
    tensors, on_input = expert_tensors(reader, spec, layer_index), spec.routing.apply_router_weight_on_input
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        if expert >= spec.num_experts:  # identity
            output.index_add_(0, rows, read[rows] * weights[rows, slots, None])
            continue
        matrices = read_expert(reader, tensors, expert)
        if online is not None:
            up = None if matrices.up is None else online(matrices.up)
            matrices = matrices._replace(gate=online(matrices.gate), up=up, down=online(matrices.down))
        factor = weights[rows, slots, None]
        given = read[rows] * factor if on_input else read[rows]
        values = _mlp(spec.gate(layer_index), given, matrices)
        values = values if on_input else values * factor
        output.index_add_(0, rows, values)
    if spec.latent is not None:
        if (norm := spec.latent_norm_weight(layer_index)) is not None:
            squares = output.square().mean(-1, keepdim=True)
            output = output / (squares + spec.rms_norm_eps).sqrt() * reader.read(norm).to(x)
        output = linear(output, _latent(reader, spec, layer_index, "up").to(x))
    shared = _shared(reader, spec, layer_index, x)
    return output if shared is None else output + shared


def _latent(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, role: str) -> torch.Tensor:
    """The projection before ("down", `[L, K]`) or after ("up", `[K, L]`) experts of another width than the model."""
    K, L = spec.hidden_size, spec.expert_hidden_size
    name = f"{spec.moe_prefix(layer_index)}.{getattr(spec.latent, role)}"
    return read_linear(reader, name, (L, K) if role == "down" else (K, L))


def _shared(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, x: torch.Tensor) -> torch.Tensor | None:
    """The output of the shared experts; None without any."""
    prefix, shared, gate = spec.shared_experts_prefix(layer_index), spec.shared_experts, spec.shared_gate(layer_index)
    if prefix is None or shared is None or gate is None:
        return None
    K, N = spec.hidden_size, shared.intermediate_size
    up: torch.Tensor | None = None
    if shared.fused is not None:
        name, down_name = shared.fused
        first, up = read_linear(reader, f"{prefix}.{name}", (2 * N, K)).split(N)
    else:
        names = spec.shared_projections()
        first, down_name = read_linear(reader, f"{prefix}.{names.gate}", (N, K)), names.down
        if names.up:
            up = read_linear(reader, f"{prefix}.{names.up}", (N, K))
    down = read_linear(reader, f"{prefix}.{down_name}", (K, N))
    term = _mlp(gate, x, ExpertMatrices(first, up, down, None, None, None)) * shared.factor
    if not shared.has_gate:
        return term
    return term * linear(x, _gate_matrix(reader, f"{prefix}_gate.weight", (1, K)).to(x)).sigmoid()


def _gate_matrix(reader: CheckpointReader, name: str, size: tuple[int, int], beside: str | None = None) -> torch.Tensor:
    """A router's matrix or a shared expert's gate, which some writers quantize like other linear layers."""
    if name in reader and reader.info(name).dtype.is_floating_point and reader.info(name).dtype.itemsize > 1:
        return reader.read(name).view(size)
    return read_linear(reader, name.removesuffix(".weight"), size, beside=beside)


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: logits.logaddexp(torch.zeros_like(logits)).sqrt(),
}


def _route(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, x: torch.Tensor, logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights, f32, and ids, both `[T, top_k]`."""
    routing, columns = spec.routing, spec.num_experts + spec.routing.zero_expert_num
    correction = spec.correction_bias(layer_index)
    if logits is None:
        weight = _gate_matrix(reader, spec.router_weight(layer_index), (columns, spec.hidden_size), beside=correction)
        bias = spec.router_bias(layer_index)
        logits = linear(x, weight.to(x), None if bias is None else reader.read(bias).to(x))
    else:
        logits = pad(logits, (0, routing.zero_expert_num), value=float("-inf"))
    if (function := routing.custom_routing_function) is not None:
        if not isinstance(function, partial) or "jitter_eps" not in function.keywords:
            raise ConfigError(f"there is no reference for the routing of {spec.family} models; leave --verify out")
        return _route_phimoe(logits, spec.top_k, function.keywords["jitter_eps"])
    scores = _SCORES[routing.scoring_func](logits)
    choice = logits.clone()
    if correction is not None:
        missing = spec.correction_bias_may_miss and correction not in reader
        choice = scores + (0.0 if missing else reader.read(correction).to(x).flatten())
    if routing.use_grouped_topk and routing.num_expert_group and routing.topk_group:
        groups = choice.view(len(x), routing.num_expert_group, -1)
        best = 1 if correction is None else 2
        group_scores = groups.topk(best, dim=-1).values.sum(-1)
        kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_group]
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.routed_scaling_factor, ids


def _route_phimoe(logits: torch.Tensor, top_k: int, jitter_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """PhiMoE's sparse mixer, token by token: each choice has its softmax among the logits close to it that are left."""
    weights, ids = torch.zeros(len(logits), top_k), torch.zeros(len(logits), top_k, dtype=torch.int64)
    for token, row in enumerate(logits.tolist()):
        left = dict(enumerate(row))
        for slot in range(top_k):
            chosen = max(left, key=lambda expert: (left[expert], -expert))
            largest = left[chosen]
            close = [v for v in left.values() if largest - v <= 2 * jitter_eps * max(abs(v), largest)]
            weights[token, slot] = 1 / sum(math.exp(value - largest) for value in close)
            ids[token, slot] = chosen
            del left[chosen]
    return weights.to(logits), ids.to(logits.device)


def _mlp(activation: Gate, x: torch.Tensor, matrices: ExpertMatrices) -> torch.Tensor:
    gate, up, down, *biases = (None if tensor is None else tensor.to(x) for tensor in matrices)
    first = linear(x, gate, biases[0])  # type: ignore[arg-type]
    second = None if up is None else linear(x, up, biases[1])
    return linear(activate(activation, first, second), down, biases[2])  # type: ignore[arg-type]


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


# act(gate) of gated activations, which is multiplied by up, and the whole of ungated ones.
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: _silu,
    MoEActivation.GELU: _gelu,
    MoEActivation.GELU_TANH: lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    MoEActivation.SWIGLUOAI: lambda x: x / (1 + torch.exp(-1.702 * x)),
    MoEActivation.SITU: lambda x: 4 * torch.tanh(x / 4) / (1 + torch.exp(-x)),
    MoEActivation.SILU_NO_MUL: _silu,
    MoEActivation.GELU_NO_MUL: _gelu,
    MoEActivation.RELU2_NO_MUL: lambda x: x.clamp(min=0) ** 2,
}


def activate(activation: Gate, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """The activation of gate and up, or of all there is of ungated experts, with the clamp limit where there is one."""
    kind, limit = activation
    if second is None:
        return _ACTIVATIONS[kind](first)
    if kind in (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP):
        limit = 7.0 if limit is None else limit
    if limit is not None:
        second = second.clamp(-limit, limit)
    if kind is MoEActivation.SWIGLUSTEP:  # which clamps after the activation
        return _silu(first).clamp(max=limit) * second
    if kind is MoEActivation.SWIGLUOAI:
        second = second + 1
    if kind is MoEActivation.SITU:
        second = 25 * torch.tanh(second / 25)
    return _ACTIVATIONS[kind](first if limit is None else first.clamp(max=limit)) * second
