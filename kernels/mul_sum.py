"""The weighted sum over a token's slots: expert outputs `[T, topk, K]` and router weights to `[T, K]`."""

from __future__ import annotations

import torch

from moe_ep.arguments import check_expert_map, check_integers, check_same_device, check_tensors
from moe_ep.kernels.forms import form_for

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def moe_fused_mul_sum(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """outputs[t] = sum over slots j of topk_weights[t, j] * inputs[t, j].

    The sum is in f32 in the order of j, so the same input gives the same bits. A slot counts if its id is at least 0
    and, with an expert_map, local; other slots may contain anything, even NaN. On CUDA tensors this is one Triton
    kernel, which reads the slots that count once and writes the result once, with the same bits.

    Example: weights [[.5, 2]], inputs [[[2, 4], [1, nan]]], topk_ids [[3, -1]]: [[1, 2]].

    Args:
        inputs: `[T, topk, K]`, f32, f16 or bf16.
        topk_weights: `[T, topk]`, any real dtype, converted to f32.
        outputs: `[T, K]`, f32, f16 or bf16, written in place; None creates one of the inputs' dtype.
        topk_ids: integer `[T, topk]`, -1 for no expert; None means that every slot counts.
        expert_map: integer `[E]`, global -> local, -1 if not local; ids are below E; on a GPU, where that
            is not checked, others do not count.

    Returns:
        `outputs`, rounded once from f32.

    Raises:
        ValueError: shapes or devices that do not fit together, another dtype, or a map without ids.
    """
    _check(inputs, topk_weights, outputs, topk_ids, expert_map)
    if outputs is None:
        outputs = inputs.new_empty(inputs.size(0), inputs.size(2))
    return mul_sum(inputs, topk_weights, outputs, topk_ids, expert_map)


def mul_sum(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """The sum in the form for the device of `outputs`; arguments as above, not checked."""
    form = form_for(mul_sum_reference, "triton_mul_sum.triton_mul_sum", outputs)
    return form(inputs, topk_weights, outputs, topk_ids, expert_map)


def mul_sum_reference(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """The sum in plain torch, slot by slot, on any device; arguments as above, not checked."""
    total = torch.zeros(outputs.shape, dtype=torch.float32, device=inputs.device)
    counts = _counting_slots(topk_ids, expert_map)
    for slot in range(inputs.size(1)):
        row = inputs[:, slot].float() * topk_weights[:, slot, None].float()
        total += row if counts is None else torch.where(counts[:, slot, None], row, 0.0)
    return outputs.copy_(total)


def _counting_slots(topk_ids: torch.Tensor | None, expert_map: torch.Tensor | None) -> torch.Tensor | None:
    """Which slots count, bool `[T, topk]`; None if all do."""
    if topk_ids is None:
        return None
    counts = topk_ids >= 0
    if expert_map is not None:
        counts &= topk_ids < expert_map.numel()
        counts &= expert_map[torch.where(counts, topk_ids, 0).long()] >= 0
    return counts


def _check(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    optional = {"outputs": outputs, "topk_ids": topk_ids}
    given = {"topk_weights": topk_weights, **{name: t for name, t in optional.items() if t is not None}}
    check_tensors(inputs=inputs, **given)
    if inputs.dim() != 3:
        raise ValueError(f"inputs has shape {tuple(inputs.shape)}; it must be (T, topk, K)")
    for name, tensor in (("inputs", inputs), ("outputs", outputs)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    num_tokens, topk, hidden_size = inputs.shape
    for name, tensor in given.items():
        expected = (num_tokens, hidden_size if name == "outputs" else topk)
        if tensor.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with inputs {tuple(inputs.shape)} it must be {expected}"
            )
    if topk_weights.is_complex() or topk_weights.dtype is torch.bool:
        raise ValueError(f"topk_weights is {topk_weights.dtype}; it must be of a real dtype")
    check_integers(topk_ids=topk_ids)
    check_same_device("inputs", inputs.device, **given)
    if expert_map is None:
        return
    check_expert_map(expert_map)
    check_same_device("inputs", inputs.device, expert_map=expert_map)
    if topk_ids is None:
        raise ValueError("expert_map is given without topk_ids; pass the ids it is to be applied to")
    if not topk_ids.is_cuda and topk_ids.numel() and int(topk_ids.max()) >= expert_map.numel():
        raise ValueError(
            f"topk_ids goes up to {int(topk_ids.max())} and expert_map has {expert_map.numel()} experts; ids must be "
            f"below that"
        )
