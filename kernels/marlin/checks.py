"""Checks of the arguments of the experts' functions, made before anything is launched."""

from __future__ import annotations

import torch

from moe_ep.activation import MoEActivation, gate_limit
from moe_ep.arguments import (
    INTEGER_NAMES,
    INTEGERS,
    check_expert_map,
    check_ids,
    check_same_device,
    check_tensors,
)
from moe_ep.errors import check_whole
from moe_ep.kernels import jit
from moe_ep.kernels.marlin.compute import partials_numel
from moe_ep.kernels.marlin.types import WeightType, check_input_dtype
from moe_ep.kernels.marlin.weights import WeightPair, Weights, check_activation_dtype, check_weights
from moe_ep.quantization.input_rows import INPUT_DTYPES

# Names of the tensors of one GEMM, with its number in place of the braces; all but the first two may be None.
PARTS = ("w{}", "w{}_scale", "w{}_zeros", "bias{}", "global_scale{}", "g_idx{}", "sort_indices{}")


def check_weight_pair(
    kind: WeightType,
    activation: MoEActivation,
    act_dtype: torch.dtype,
    is_k_full: bool,
    first: tuple,
    second: tuple,
    clamp_limit: float | None = None,
    input_dtype: torch.dtype | None = None,
) -> WeightPair:
    """Checks the weights of both GEMMs, and that they fit each other and the activations' dtype.

    `first` and `second` are the PARTS of w1 and w2; `clamp_limit` is as in gate_limit, `input_dtype` as in
    functional.fused_marlin_moe.

    Raises:
        ValueError: an argument that does not fit; the message names it.
    """
    check_activation_dtype(act_dtype)
    gate_limit(activation, clamp_limit)
    for which, parts in enumerate((first, second), start=1):
        for name, tensor in zip(PARTS, parts, strict=True):
            if tensor is not None or name in PARTS[:2]:
                named = {name.format(which): tensor}
                check_tensors(**named)
                check_same_device("w1", first[0].device, **named)
    kind = kind.packed_as(first[0])
    w13 = check_weights(1, kind, act_dtype, activation.is_gated, is_k_full, first)
    w2 = check_weights(2, kind, act_dtype, False, is_k_full, second)
    for which, weights in ((1, w13), (2, w2)):
        _check_act_order(which, weights)
    if w2.qweight.size(0) != w13.qweight.size(0) or w2.num_rows != w13.num_columns:
        raise ValueError(
            f"w2 holds {w2.qweight.size(0)} experts of {w2.num_rows} rows; "
            f"w1 asks for {w13.qweight.size(0)} of {w13.num_columns}"
        )
    hidden = w13.num_rows // 2 if activation.is_gated else w13.num_rows
    if w2.num_columns != hidden:
        raise ValueError(f"w2 has {w2.num_columns} columns; w1 with {activation} gives {hidden}")
    device = first[0].device
    capability = jit.capability(device.index or 0) if device.type == "cuda" and input_dtype is not None else None
    for part in (first, second):
        check_input_dtype(kind, part[1].dtype, act_dtype, input_dtype, capability)
    return WeightPair(kind, activation, act_dtype, w13, w2, clamp_limit, input_dtype)


def _check_act_order(which: int, weights: Weights) -> None:
    """Raises ValueError for indices on the host that are out of range for scales or columns, or whose groups contradict
    is_k_full; indices on a GPU are not checked."""
    g_idx, sort_indices, num_groups = weights.g_idx, weights.sort_indices, weights.scales.size(1)
    on_host = [part for part in (g_idx, sort_indices) if part is not None and part.is_cpu and part.numel()]
    if not on_host or torch.compiler.is_compiling():
        return
    if g_idx is not None:
        least, most = (int(bound) for bound in g_idx.aminmax())
        if least < 0 or most >= num_groups:
            raise ValueError(
                f"g_idx{which} holds {least} to {most}; groups must be at least 0 and below those of w{which}_scale "
                f"({num_groups})"
            )
        size = weights.num_columns // num_groups
        regular = torch.arange(weights.num_columns, dtype=torch.int32) // size
        if weights.has_regular_groups and not bool((g_idx == regular).all()):
            raise ValueError(
                f"g_idx{which} has groups that are not {size} packed columns each, in order, and is_k_full is True; "
                f"pass False for other groups, and g_idx as pack_marlin returns it"
            )
    if sort_indices is not None:
        columns = torch.arange(sort_indices.size(1), dtype=sort_indices.dtype)
        if not bool((sort_indices.sort(dim=1).values == columns).all()):
            raise ValueError(
                f"sort_indices{which} holds a row that is no permutation of the columns (0 to {len(columns) - 1}); "
                f"pass what pack_marlin returns"
            )


def check_batch(
    pair: WeightPair, hidden_states: torch.Tensor, counts: torch.Tensor, row_ids: torch.Tensor | None
) -> None:
    """Raises ValueError unless the batched rows, their counts and their ids fit the weights and each other."""
    num_experts = pair.num_experts
    if counts.dtype != torch.int32 or counts.shape != (num_experts,) or not counts.is_contiguous():
        raise ValueError(
            f"expert_num_tokens is {counts.dtype} {tuple(counts.shape)}; it must be int32 ({num_experts},), contiguous"
        )
    dims = 3 if row_ids is None else 2
    if hidden_states.dim() != dims or (row_ids is None and hidden_states.size(0) != num_experts):
        raise ValueError(
            f"hidden_states has shape {tuple(hidden_states.shape)}; it must be "
            f"{f'({num_experts}, max_tokens, K)' if row_ids is None else '(num_rows, K) with expert_row_ids'}"
        )
    if row_ids is not None and (
        row_ids.dtype != torch.int32 or row_ids.dim() != 2 or row_ids.size(0) != num_experts
        or not row_ids.is_contiguous()
    ):  # fmt: skip
        raise ValueError(
            f"expert_row_ids is {row_ids.dtype} {tuple(row_ids.shape)}; it must be int32 ({num_experts}, max_tokens), "
            f"contiguous"
        )
    _check_rows(pair, hidden_states)
    check_same_device("hidden_states", hidden_states.device, expert_num_tokens=counts, expert_row_ids=row_ids)
    if hidden_states.is_cuda or torch.compiler.is_compiling() or not num_experts:
        return
    max_rows = hidden_states.size(1) if row_ids is None else row_ids.size(1)
    least, most = (int(bound) for bound in counts.aminmax())
    if least < 0 or most > max_rows:
        raise ValueError(
            f"expert_num_tokens holds {least} to {most}; it must be at least 0 and at most max_tokens ({max_rows})"
        )
    if row_ids is not None and most:
        named = row_ids[torch.arange(max_rows) < counts[:, None]]
        least, most = (int(bound) for bound in named.aminmax())
        if least < 0 or most >= hidden_states.size(0):
            raise ValueError(
                f"expert_row_ids holds {least} to {most}; row ids must be at least 0 and below the rows of "
                f"hidden_states ({hidden_states.size(0)})"
            )


def check_tokens(
    pair: WeightPair,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    global_num_experts: int = -1,
) -> None:
    """Raises ValueError unless tokens, ids, router weights and map fit the experts' weights and each other.

    On a GPU the ids themselves are not checked; ids that the map or w1 does not have count as no expert.
    """
    if hidden_states.dim() != 2:
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; it must be [T, K]")
    _check_rows(pair, hidden_states)
    num_tokens = hidden_states.size(0)
    if topk_ids.dtype not in INTEGERS or topk_ids.dim() != 2 or topk_ids.size(0) != num_tokens or not topk_ids.size(1):
        raise ValueError(
            f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}; it must be {INTEGER_NAMES}, at least one id for "
            f"each of the {num_tokens} tokens"
        )
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights is {topk_weights.dtype} {tuple(topk_weights.shape)}; it must be float32 "
            f"{tuple(topk_ids.shape)}"
        )
    check_same_device("hidden_states", hidden_states.device, topk_ids=topk_ids, topk_weights=topk_weights)
    check_map_length(expert_map, global_num_experts, pair.num_experts)
    check_same_device("hidden_states", hidden_states.device, expert_map=expert_map)
    if expert_map is None and global_num_experts not in (-1, pair.num_experts):
        raise ValueError(
            f"global_num_experts is {global_num_experts}, w1 has {pair.num_experts} experts and expert_map is None, "
            f"that is, all are local; pass the map of this rank's experts"
        )
    # While a graph is traced there are no values; its node runs this check again.
    if not torch.compiler.is_compiling():
        _check_values(topk_ids, expert_map, pair.num_experts)


def batched_shape(pair: WeightPair, hidden_states: torch.Tensor, row_ids: torch.Tensor | None) -> tuple[int, int, int]:
    """Returns the shape of the results of batched rows, in place or by reference: `[El, max_tokens, K]`."""
    max_rows = hidden_states.size(1) if row_ids is None else row_ids.size(1)
    return pair.num_experts, max_rows, pair.w13.num_columns


def check_output(
    output: torch.Tensor, shape: tuple[int, ...], hidden_states: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raises ValueError unless the results of these rows can be written to `output`, of `dtype` or the rows' own."""
    dtype = dtype or hidden_states.dtype
    if output.shape != shape or output.dtype != dtype or not output.is_contiguous():
        raise ValueError(
            f"output is {output.dtype} {tuple(output.shape)}; it must be {dtype} {tuple(shape)}, contiguous"
        )
    check_same_device("hidden_states", hidden_states.device, output=output)


def check_batch_overlap(output: torch.Tensor, hidden_states: torch.Tensor, row_ids: torch.Tensor | None) -> None:
    """Raises ValueError for an output that shares memory with rows that other experts may still read.

    Both are contiguous. Rows in place may be written over themselves.
    """
    if torch.compiler.is_compiling() or (row_ids is None and output.data_ptr() == hidden_states.data_ptr()):
        return
    (first, first_end), (second, second_end) = (
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in (output, hidden_states)
    )
    if max(first, second) < min(first_end, second_end):
        way_out = "" if row_ids is not None else ", or hidden_states itself for results in place"
        raise ValueError(
            f"output is in memory of hidden_states, whose rows other experts read; pass memory of its own{way_out}"
        )


def check_scratch(
    pair: WeightPair,
    hidden_states: torch.Tensor,
    num_rows: int,
    most_rows: int | None,
    names: tuple[str, str],
    *buffers: torch.Tensor | None,
) -> None:
    """Raises ValueError for scratch that these rows cannot use.

    It may be missing or too small: memory is allocated in its place, but not under CUDA-graph capture, where a buffer
    that was meant to be used is refused.

    Args:
        num_rows: rows of all experts together, at the full capacity of batched ones.
        most_rows: the most rows of one expert, if the first buffer holds no results; None if it does.
        names: the names of the buffer for both GEMMs' results and of that for the activation's output.
    """
    for name, buffer in zip(names, buffers, strict=True):
        if buffer is None:
            continue
        check_tensors(**{name: buffer})
        same = (buffer.dtype, buffer.device) == (pair.act_dtype, hidden_states.device)
        if not same or not buffer.is_contiguous():
            raise ValueError(
                f"{name} is {buffer.dtype} on {buffer.device}; it must be {pair.act_dtype} on {hidden_states.device}, "
                f"contiguous"
            )
    if not hidden_states.is_cuda or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return
    K, N = pair.w13.num_columns, pair.w2.num_columns
    for name, buffer, least in zip(names, buffers, (num_rows * K, num_rows * N), strict=True):
        if buffer is None or buffer.numel() >= least:
            continue
        if name == names[0] and most_rows is not None:
            # Holds only the partial sums of tiles that several CTAs share.
            least = min(num_rows * max(K, pair.w13.num_rows), 2 * partials_numel(most_rows, pair.device))
        if buffer.numel() < least:
            raise ValueError(
                f"{name} has {buffer.numel()} numbers under CUDA-graph capture and {least} are needed; pass a larger "
                f"one, or None to take the graph's own memory"
            )


def check_map_length(expert_map: torch.Tensor | None, global_num_experts: int, num_local_experts: int) -> None:
    """Raises ValueError unless the map, if any, has one entry for each global expert.

    Args:
        global_num_experts: -1 for the map's length.
    """
    check_whole(global_num_experts=global_num_experts)
    if global_num_experts != -1 and global_num_experts < num_local_experts:
        raise ValueError(
            f"global_num_experts is {global_num_experts}; it must be -1, or at least w1's experts ({num_local_experts})"
        )
    if expert_map is None:
        return
    check_expert_map(expert_map)
    length = expert_map.numel()
    if global_num_experts not in (-1, length):
        raise ValueError(
            f"expert_map has {length} entries; it must have one for each global expert (global_num_experts is "
            f"{global_num_experts})"
        )
    if length < num_local_experts:
        raise ValueError(
            f"expert_map has {length} entries; it must have one for each global expert, and w1 alone has "
            f"{num_local_experts}"
        )


def _check_values(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> None:
    """Raises ValueError for slots of experts that w1 does not have, for which nothing would be computed."""
    if expert_map is None:
        check_ids(topk_ids, num_experts, "w1's experts")
        return
    check_ids(topk_ids, expert_map.numel(), "expert_map's length")
    if expert_map.device.type == "cpu" and int(expert_map.max()) >= num_experts:
        raise ValueError(
            f"expert_map has local experts up to {int(expert_map.max())}; they must be below w1's experts "
            f"({num_experts})"
        )


def _check_rows(pair: WeightPair, hidden_states: torch.Tensor) -> None:
    if hidden_states.size(-1) != pair.w13.num_columns:
        raise ValueError(f"hidden_states has {hidden_states.size(-1)} columns; w1 takes {pair.w13.num_columns}")
    if hidden_states.device != pair.device:
        raise ValueError(f"hidden_states is on {hidden_states.device} and w1 on {pair.device}; move one")
    if not hidden_states.is_contiguous() and hidden_states.dtype not in INPUT_DTYPES:
        raise ValueError("hidden_states is not contiguous; pass hidden_states.contiguous()")
