"""The input of one dispatch, its checks, and the lifetime of its memory on several streams."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch

from moe_ep.arguments import INTEGER_NAMES, INTEGERS, check_ids, check_same_device, check_tensors
from moe_ep.config import ACTIVATION_DTYPES, FusedMoEConfig
from moe_ep.errors import check_router_weight_on_input
from moe_ep.kernels.quantize import dequantize_rows, join_rows, quantize_rows, split_rows

MAX_TOPK = 32
_ALIGNMENT = 16  # bytes that kernels read at once


class Batch(NamedTuple):
    """The input of a dispatch: one rank's tokens.

    Attributes:
        rows: `[T, K]`, contiguous, in the activations' dtype, multiplied by their weights if that is requested; or
            codes of code_dtype, with any strides.
        scales: f32 `[T, 1]`, the scales of codes.
        topk_ids: int32 `[T, topk]`, `side_by_side` like the rows.
        topk_weights: f32 `[T, topk]`, contiguous.
        owners: int32 `[E]`.
        expert_map: int32 `[E]`: index of each id on this rank, -1 where it is on another.
        code_dtype: dtype in which rows are transferred, int8 or e4m3; None for their own.
        keeps_codes: whether the experts read rows as they were transferred, which are then returned with their scales.
        deferred, experts_combine: as in `Routing`, for backends that support them.
        most_tokens: as in `Routing`.
    """

    rows: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    owners: torch.Tensor
    expert_map: torch.Tensor
    code_dtype: torch.dtype | None = None
    keeps_codes: bool = False
    scales: torch.Tensor | None = None
    deferred: Any = None
    most_tokens: int | None = None
    experts_combine: bool = False

    def wire_rows(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns rows as they are transferred: `[T, K]`, or uint8 with codes and scales (`moe_ep.kernels.quantize`),
        with one scale per row if the experts read them that way.

        Args:
            out: as in `quantize_rows` and `join_rows`.
        """
        if self.scales is not None:
            return join_rows(self.rows, self.scales, out)
        return (
            self.rows if self.code_dtype is None else quantize_rows(self.rows, self.code_dtype, self.keeps_codes, out)
        )

    def received(self, wire_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Converts transferred rows to rows `[..., K]` and their scales, or to the batch's dtype without scales."""
        hidden_size = self.rows.size(1)
        if self.code_dtype is None:
            return wire_rows, None
        if self.keeps_codes:
            return split_rows(wire_rows, hidden_size, self.code_dtype, whole=True)
        return dequantize_rows(wire_rows, hidden_size, self.rows.dtype, self.code_dtype), None


def keep_for(stream: torch.cuda.Stream, value: object) -> None:
    """Keeps the memory of CUDA tensors in tuples, lists and dataclasses from being reused until `stream` is done with
    it."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, (tuple, list)):
        for part in value:
            keep_for(stream, part)
    elif is_dataclass(value):
        for field in fields(value):
            keep_for(stream, getattr(value, field.name))


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Returns two-dimensional rows as kernels read them: contiguous, and aligned to 16 bytes."""
    rows = rows.contiguous()
    # If there are no rows, or one column, torch calls any strides contiguous.
    if rows.stride(1) == 1 and rows.data_ptr() % _ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def check_arguments(
    a1: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
    known_ids: int,
    capacity: int | None = None,
) -> None:
    """Raises ValueError for a batch that cannot be dispatched; checks shapes and dtypes, never values on a GPU.

    Args:
        capacity: the most tokens; None for any number.
    """
    check_tensors(a1=a1, topk_weights=topk_weights, topk_ids=topk_ids)
    if a1.dim() != 2 or a1.dtype not in ACTIVATION_DTYPES:
        raise _unfit("a1", a1, "(T, K) of f32, f16 or bf16")
    if topk_ids.dim() != 2 or topk_ids.dtype not in INTEGERS:
        raise _unfit("topk_ids", topk_ids, f"(T, topk) of {INTEGER_NAMES}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype is not torch.float32:
        raise _unfit("topk_weights", topk_weights, f"f32 of topk_ids' shape {tuple(topk_ids.shape)}")
    check_same_device("a1", a1.device, topk_ids=topk_ids, topk_weights=topk_weights)
    num_tokens, topk = topk_ids.shape
    if a1.size(0) != num_tokens:
        raise ValueError(f"a1 has {a1.size(0)} tokens and topk_ids {num_tokens}; they must have the same")
    if topk < 1:
        raise ValueError("topk_ids has no columns; it must have at least 1")
    if apply_router_weight_on_input:
        check_router_weight_on_input(topk)
    check_ids(topk_ids, known_ids, "num_experts")
    if capacity is not None and num_tokens > capacity:
        raise ValueError(
            f"a1 has {num_tokens} tokens and the capacity is {capacity} per rank; send at most {capacity} at a time "
            f"(FusedMoE does), or make the backend with max_num_tokens={num_tokens}"
        )


def check_made_for(config: FusedMoEConfig, a1: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Raises ValueError for a batch whose hidden size, number of slots or dtype is not the layer's."""
    given = (a1.size(1), topk_ids.size(1), a1.dtype)
    made_for = (config.hidden_dim, config.experts_per_token + config.num_fused_shared_experts, config.in_dtype)
    if given != made_for:
        raise ValueError(
            f"a1 and topk_ids have (K, topk, dtype) {given} and the backend was made for {made_for}; give it the "
            f"configuration of the batches"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    contiguous: bool = False,
) -> None:
    """Raises ValueError for a tensor of another shape or dtype, or on another device.

    Args:
        contiguous: require a contiguous, 16-byte aligned tensor, because kernels read it 16 bytes at a time.
    """
    check_tensors(**{name: tensor})
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}; it must be {shape} of {dtype} on "
            f"{device}"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    if contiguous and tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{name} does not begin at a multiple of {_ALIGNMENT} bytes; pass a copy of it")


def wire_dtype(act_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of results on the wire. For f16 activations it is f32, because a rank's part of a token's sum
    may exceed 65504 although the sum does not."""
    return torch.float32 if act_dtype is torch.float16 else act_dtype


def check_results(results: torch.Tensor, shape: tuple[int, ...], output: torch.Tensor) -> None:
    """Raises ValueError unless expert outputs have the given shape, and the dtype of the output or of the wire."""
    check_tensors(fused_expert_output=results)
    wire = wire_dtype(output.dtype)
    check_tensor("fused_expert_output", results, shape, wire if results.dtype == wire else output.dtype, output.device)


def _unfit(name: str, tensor: torch.Tensor, rule: str) -> ValueError:
    return ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be {rule}")
