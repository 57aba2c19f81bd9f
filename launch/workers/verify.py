"""A slow and plain reference for a MoE layer, with which the results of a run are compared.

It shares only the checkpoint reader with the layer: no expert parallelism, no kernels, no routing code. It reads one
expert at a time, dequantizes it to f32 and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, pad

from moe_ep.activation import apply_activation
from moe_ep.checkpoint import (
    CheckpointReader,
    ExpertMatrices,
    MoEModelSpec,
    expert_tensors,
    load_latent,
    load_router,
    load_shared_experts,
    read_expert,
)
from moe_ep.checkpoint.spec import Gate

# The max |difference| / max |reference| of a layer that rounding and the order of sums can cause, by the dtype of the
# activations.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_FP8_INPUT_TOLERANCE = 0.1


def tolerance(dtype: torch.dtype, input_dtype: torch.dtype | None = None) -> float:
    """The largest `max_relative_error` that a correct layer computing in `dtype` can have, where experts may round rows
    to `input_dtype`."""
    return _TOLERANCES[dtype] if input_dtype is None else max(_TOLERANCES[dtype], _FP8_INPUT_TOLERANCE)


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
    latent = load_latent(reader, spec, layer_index)
    read = x if latent is None else linear(x, latent.down.to(x))
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
    if latent is not None:
        if latent.norm is not None:
            squares = output.square().mean(-1, keepdim=True)
            output = output / (squares + spec.rms_norm_eps).sqrt() * latent.norm.to(x)
        output = linear(output, latent.up.to(x))
    shared = load_shared_experts(reader, spec, layer_index)
    if shared is not None and (gate := spec.shared_gate(layer_index)) is not None:
        matrices = ExpertMatrices(shared.gate, shared.up, shared.down, None, None, None)
        term = _mlp(gate, x, matrices)
        output += term if shared.expert_gate is None else term * linear(x, shared.expert_gate.to(x)).sigmoid()
    return output


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: logits.logaddexp(torch.zeros_like(logits)).sqrt(),
}


def _route(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, x: torch.Tensor, logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights, f32, and ids, both `[T, top_k]`."""
    router, routing = load_router(reader, spec, layer_index), spec.routing
    if logits is None:
        logits = linear(x, router.weight.to(x), None if router.bias is None else router.bias.to(x))
    else:
        logits = pad(logits, (0, routing.zero_expert_num), value=float("-inf"))
    if routing.custom_routing_function is not None:
        return routing.custom_routing_function(
            hidden_states=x, gating_output=logits, topk=spec.top_k, renormalize=routing.renormalize
        )
    scores = _SCORES[routing.scoring_func](logits)
    choice = logits.clone()
    if router.correction_bias is not None:
        choice = scores + router.correction_bias.to(x)
    if routing.use_grouped_topk and routing.num_expert_group and routing.topk_group:
        groups = choice.view(len(x), routing.num_expert_group, -1)
        best = 1 if router.correction_bias is None else 2
        group_scores = groups.topk(best, dim=-1).values.sum(-1)
        kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_group]
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.routed_scaling_factor, ids


def _mlp(activation: Gate, x: torch.Tensor, matrices: ExpertMatrices) -> torch.Tensor:
    gate, up, down, *biases = (None if tensor is None else tensor.to(x) for tensor in matrices)
    gate_up = linear(x, gate, biases[0])  # type: ignore[arg-type]
    if up is not None:
        gate_up = torch.cat([gate_up, linear(x, up, biases[1])], dim=-1)
    hidden = apply_activation(activation.activation, gate_up, clamp_limit=activation.swiglu_limit)
    return linear(hidden, down, biases[2])  # type: ignore[arg-type]
